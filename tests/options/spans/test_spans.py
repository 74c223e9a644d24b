"""Test `relax_only_inside`: a lossy verifier decides in spans, and a lossless one elsewhere."""

import pytest
import torch

import hf_speculate
from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.options.spans.spans import Span, Spans, SpanVerifier, make_spans
from hf_speculate.rows.token_buffer import TokenBuffer
from hf_speculate.types import DraftOut, NoiseKeys, Status
from hf_speculate.verify import (
    GreedyVerifier,
    RejectionVerifier,
    TypicalVerifier,
    register_verifier,
)
from hf_speculate.verify.base import check_verifier, traits_of
from tests.cases import DRAFTERS, KeepsAll, Unchanged, each_value
from tests.generation.test_distribution import (
    SIGNIFICANCE,
    draw,
    joint_distribution,
    p_value,
    with_eos,
)
from tests.support.fake_cuda import FakeCuda
from tests.support.tiny import make_small_model, ragged_prompts
from tests.verify.test_verifiers import make_keys, make_round

VOCAB_SIZE = 8
OPEN, CLOSE = 1, 2
EOS = 6
NUM_NEW = 24
# lax, so typical acceptance keeps tokens that greedy verification would reject
EPSILON, DELTA = 0.02, 0.1
LAX = {"verifier": "typical", "posterior_threshold": EPSILON, "posterior_alpha": DELTA}
INSIDE = {**LAX, "relax_only_inside": (OPEN, CLOSE)}
NUM_DRAWS = 40_000


def small_pair(dtype: torch.dtype):
    target = hf_speculate.enable(make_small_model(VOCAB_SIZE, seed=3, dtype=dtype))
    return target, make_small_model(VOCAB_SIZE, seed=1, sharpness=1.5, dtype=dtype)


@pytest.fixture(scope="module")
def models():
    return small_pair(torch.float64)


@pytest.fixture
def prompts():
    """Return rows of several lengths; some end inside a span."""
    return ragged_prompts(12, seed=2, vocab_size=VOCAB_SIZE)


class Counts:
    """Numbers of emitted tokens by kind."""

    def __init__(self):
        self.wrong = self.outside = self.inside = self.relaxed = self.untypical = 0


@torch.no_grad()
def compare(target, inputs, sequences) -> Counts:
    """Compare every new token with the target's forward over the preceding text, row by row."""
    counts, prompt_len = Counts(), inputs["input_ids"].shape[1]
    for row, mask in zip(sequences, inputs["attention_mask"], strict=True):
        num_prompt = int(mask.sum())
        ids = row[prompt_len - num_prompt :]
        logprobs = target(ids[None]).logits[0].log_softmax(-1)
        is_open = False
        for at, token_id in enumerate(ids.tolist()):
            if at > num_prompt and ids[at - 1] == EOS:
                break
            if at >= num_prompt:
                here = logprobs[at - 1]
                is_best = token_id == int(here.argmax())
                bound = min(EPSILON, DELTA * float(torch.exp((here.exp() * here).sum())))
                counts.inside += is_open
                counts.outside += not is_open
                counts.wrong += not is_open and not is_best
                counts.relaxed += is_open and not is_best
                counts.untypical += is_open and not is_best and float(here[token_id].exp()) <= bound
            is_open = {OPEN: True, CLOSE: False}.get(token_id, is_open)
    return counts


@pytest.mark.fallback("lock step")
@each_value(drafter=DRAFTERS, is_lock_step=[False, True], num_drafted=[1, 5, 3])
def test_greedy_tokens_outside_spans_are_the_argmax(
    models, prompts, num_drafted, is_lock_step, drafter
):
    """Include rows that go on after others have left."""
    target, draft = models
    options = {
        "assistant_model": draft,
        "num_assistant_tokens": num_drafted,
        "max_new_tokens": NUM_NEW,
    }
    options |= {
        **DRAFTERS[drafter],
        "eos_token_id": EOS,
        "logits_processor": [Unchanged()] * is_lock_step,
    }
    counts = compare(target, prompts, target.generate(**prompts, **options, **INSIDE))
    assert counts.wrong == counts.untypical == 0
    assert min(counts.outside, counts.inside) > 10
    assert counts.relaxed > 0
    # Without the restriction, outside tokens are wrong.
    assert compare(target, prompts, target.generate(**prompts, **options, **LAX)).wrong > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
def test_draws_outside_spans_follow_the_target_distribution(draft_sampling):
    """End texts where a span opens, so that all tokens are outside."""
    target, draft = small_pair(torch.float32)
    options = {
        "num_assistant_tokens": 3,
        "draft_sampling": draft_sampling,
        "eos_token_id": OPEN,
        "pad_token_id": OPEN,
    }
    expected = with_eos(joint_distribution(target), OPEN)
    assert p_value(draw(target, draft, NUM_DRAWS, **options, **INSIDE), expected) > SIGNIFICANCE
    assert p_value(draw(target, draft, NUM_DRAWS, **options, **LAX), expected) < SIGNIFICANCE


def test_registered_verifier_is_restricted_to_spans(models, prompts, registry):
    hf_speculate.register_verifier(
        "all", lambda config: KeepsAll(), lossless=False, reads_draft_logits=False
    )
    target, draft = models
    draft_options = {
        "assistant_model": draft,
        "num_assistant_tokens": 4,
        "verifier": "all",
        "relax_only_inside": [OPEN, CLOSE],
    }
    counts = compare(
        target, prompts, target.generate(**prompts, **draft_options, max_new_tokens=NUM_NEW)
    )
    assert counts.wrong == 0
    assert min(counts.relaxed, counts.untypical) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "must come with a lossy verifier"),
        (
            {"verifier": "rejection", "do_sample": True, "assistant_model": None},
            "must come with a lossy verifier",
        ),
        (
            {"verifier": "typical", "relax_only_inside": (2, VOCAB_SIZE)},
            r"must be ids below 8, .* got \(2, 8\)",
        ),
    ],
)
def test_exact_verifiers_and_unknown_ids_are_refused(models, prompts, options, message):
    target, draft = models
    draft_options = {"assistant_model": draft, "relax_only_inside": (OPEN, CLOSE), **options}
    with pytest.raises(hf_speculate.ConfigError, match=f"^relax_only_inside {message}"):
        target.generate(**prompts, **draft_options, max_new_tokens=3)


SPAN = Span(1, 4)
LOSSY = {
    "argmax": TypicalVerifier(),
    "sample": TypicalVerifier(correction="sample", posterior_threshold=0.3),
}
EXACT = {"greedy": GreedyVerifier(), "rejection": RejectionVerifier()}
PAIRS = [
    pytest.param(lossy, exact, id=f"{lossy_name} {exact_name}")
    for lossy_name, lossy in LOSSY.items()
    for exact_name, exact in EXACT.items()
]


def is_open_after(ids, was_open):
    """Return whether a text ends inside a span."""
    for token_id in ids:
        was_open = {SPAN.open_id: True, SPAN.close_id: False}.get(token_id, was_open)
    return was_open


def one_after_the_other(lossy, exact, target, draft, keys, was_open):
    """Verify one row [1, K+1, V] by definition; return ids, accepted count and status."""
    ids, is_open = [], was_open
    for at in range(int(draft.lens) + 1):
        counts = at < int(draft.lens)
        part = DraftOut(
            draft.token_ids[:, at : at + 1],
            torch.tensor([1], dtype=torch.int32),
            None if draft.token_logits is None else draft.token_logits[:, at : at + 1],
            None if draft.logsumexp is None else draft.logsumexp[:, at : at + 1],
        )
        if not counts:
            part = DraftOut(
                draft.token_ids[:, :0], torch.tensor([0], dtype=torch.int32), None, None
            )
        logits = target[:, [at, at]] if counts else target[:, [at]]
        here = keys._replace(positions=keys.positions + at)
        verdict = (lossy if is_open else exact).verify(logits, part, here)
        ids.append(int(verdict.token_ids[0, 0]))
        if not counts or not int(verdict.num_accepted):
            return ids, at, int(verdict.status)
        is_open = is_open_after(ids, was_open)
    raise AssertionError("a round ends at its last position")


@pytest.mark.parametrize("has_logits", [True, False])
@pytest.mark.parametrize(("lossy", "exact"), PAIRS)
def test_round_across_span_borders_is_verified_by_position(lossy, exact, has_logits):
    num_rows = 150
    target, draft = make_round(
        num_rows, 4, has_logits=has_logits, lens=[4 - row % 2 for row in range(num_rows)]
    )
    keys, is_open = make_keys(num_rows), torch.arange(num_rows) % 2 == 0
    draft.token_ids[::9, 1] = 11  # refused and named
    inside = SPAN.open_after_each(draft.token_ids, is_open)
    verdict = SpanVerifier(lossy, exact, SPAN, is_open).verify(target, draft, keys)
    crossed = 0
    for row in range(num_rows):
        only = slice(row, row + 1)
        row_draft = DraftOut(*(None if field is None else field[only] for field in draft))
        alone = NoiseKeys(*(key[only] for key in keys))
        ids, num, status = one_after_the_other(
            lossy, exact, target[only], row_draft, alone, bool(is_open[row])
        )
        assert verdict.token_ids[row].tolist() == ids + [-1] * (4 - num)
        assert (int(verdict.num_accepted[row]), int(verdict.status[row])) == (num, status)
        crossed += len(inside[row, : num + 1].unique()) > 1
    assert crossed > 10
    assert verdict.status.unique().tolist() == [0, int(Status.BAD_DRAFT_ID)]


def test_spans_on_a_gpu_need_no_sync():
    (target, draft), keys, is_open = (
        make_round(8, 4, has_logits=True),
        make_keys(8),
        torch.arange(8) % 2 == 0,
    )
    verifiers = TypicalVerifier(backend="torch"), RejectionVerifier(backend="torch")
    expected = SpanVerifier(*verifiers, SPAN, is_open).verify(target, draft, keys)
    with FakeCuda() as gpu:
        draft = DraftOut(*(field.to("cuda:0") for field in draft[:4]))
        keys = NoiseKeys(*(field.to("cuda:0") for field in keys))
        verifier = SpanVerifier(*verifiers, SPAN, is_open.to("cuda:0"))
        target = target.to("cuda:0")
        gpu.log.clear()
        verdict = verifier.verify(target, draft, keys)
        assert not gpu.log.waits
        assert torch.equal(verdict.token_ids.cpu(), expected.token_ids)


def test_text_is_read_once_while_rows_leave():
    tokens = TokenBuffer(torch.tensor([[1, 1, 9], [1, 4, 9], [1, 1, 9]]))
    reader = Spans(SPAN, GreedyVerifier(), num_pads=[0, 0, 2])
    none = torch.zeros(3, 0, dtype=torch.int64)
    assert reader.around(TypicalVerifier(), tokens, none).is_open.tolist() == [True, False, False]
    tokens.append(torch.tensor([[4, 9], [9, 1], [9, 9]]), [1, 2, 0])
    drafted = torch.tensor([[1], [9], [1]])
    assert reader.around(TypicalVerifier(), tokens, none).is_open.tolist() == [False, True, False]
    assert reader.around(TypicalVerifier(), tokens, drafted).is_open.tolist() == [True, True, True]
    tokens.rows([1, 2])
    reader.rows([1, 2])
    tokens.append(torch.tensor([[4, 9], [1, 9]]), [1, 1])
    assert reader.around(TypicalVerifier(), tokens, none[:2]).is_open.tolist() == [False, True]


@pytest.mark.parametrize(
    ("do_sample", "exact"), [(False, GreedyVerifier), (True, RejectionVerifier)]
)
def test_exact_verifier_follows_the_sampling_mode(do_sample, exact):
    config = SpeculationConfig(verifier="typical", relax_only_inside=[5, 6]).resolve(do_sample)
    assert isinstance(make_spans(config, do_sample, [0]).exact, exact)
    typical = traits_of(SpeculationConfig(verifier="typical"))
    assert traits_of(config).reads_draft_logits != typical.reads_draft_logits


def test_spans_need_a_lossy_verifier(registry):
    register_verifier("mine", lambda config: TypicalVerifier(), lossless=False)
    with pytest.raises(
        ConfigError, match="relax_only_inside must come with a lossy verifier, one of mine, typical"
    ):
        check_verifier(SpeculationConfig(verifier="block", relax_only_inside=(5, 6)))
    check_verifier(SpeculationConfig(verifier="mine", relax_only_inside=(5, 6)))
