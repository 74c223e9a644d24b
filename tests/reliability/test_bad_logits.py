"""Test that logits without a distribution end sampling in the target, but not in the draft."""

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import hf_speculate
from hf_speculate.errors import BadLogitsError
from hf_speculate.types import Status
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.support.tiny import ragged_prompts

K = 3
NAN, INF = torch.nan, torch.inf
CELLS = [
    (NAN, 1, "dynamic"),
    (NAN, 3, "preallocated"),
    (INF, 3, "dynamic"),
    (-INF, 3, "preallocated"),
]


def spoiled(model, value, *, after=lambda ids: ids % 3 == 0):
    """Set the logits to `value` after tokens that `after` selects, which depends on text alone."""

    def spoil(module, args, kwargs, output):
        ids = kwargs["input_ids"][:, -output.logits.shape[1] :]
        output.logits = torch.where(
            after(ids)[..., None], torch.full_like(output.logits, value), output.logits
        )
        return output

    # The handle is a context manager that removes the hook on exit.
    return model.register_forward_hook(spoil, with_kwargs=True)


def options_of(draft, **options):
    return {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": 12, **options}


@pytest.mark.parametrize(("value", "batch_size", "cache_kind"), CELLS)
def test_greedy_decoding_continues_as_plain_and_reports_it(value, batch_size, cache_kind):
    target, draft = pair("llama")
    options = {"max_new_tokens": 12, "num_assistant_tokens": K, "speculation_cache": cache_kind}
    with spoiled(target, value):
        stats = assert_decodes_as_plain(
            target, draft, ragged_prompts(batch_size, seed=4), **options
        )
    flag = {NAN: Status.NAN, INF: Status.POSITIVE_INF, -INF: Status.ALL_MASKED}[value]
    assert Status(stats.status) == flag
    assert stats.num_rescored > 0  # scoring again gave the same result


@each_value(value=[NAN, INF, -INF], verifier=["rejection", "block", "coupled", "typical", None])
def test_sampling_without_a_distribution_raises(verifier, value):
    word = {NAN: "NaN", INF: "+inf", -INF: "-inf for every token"}[value]
    target, draft = pair("llama")
    options = {"do_sample": True, "max_new_tokens": 12, **ragged_prompts(3, seed=4)}
    own = options_of(draft, verifier=verifier) if verifier else {"verifier": "coupled"}
    with spoiled(target, value):
        with pytest.raises(RuntimeError):
            target.generate(**options)
        with pytest.raises(BadLogitsError) as caught:
            target.generate(**own | options, seed=3)
    assert f"got {word} in row" in str(caught.value)
    assert len(caught.value.__notes__) == 1


@hf_speculate.register_row_wise
class ChoosesLastForNan(LogitsProcessor):
    """Processor that turns NaN into a distribution."""

    def __call__(self, input_ids, scores):
        ramp = torch.arange(scores.shape[-1], dtype=scores.dtype)
        return torch.where(scores.isnan(), ramp, scores)


def test_processors_get_the_nan_of_the_target_itself():
    target, draft = pair("llama")
    options = {"max_new_tokens": 12, "num_assistant_tokens": K}
    with spoiled(target, NAN):
        stats = assert_decodes_as_plain(
            target,
            draft,
            ragged_prompts(3, seed=4),
            **options,
            logits_processor=[ChoosesLastForNan()],
        )
    assert stats.num_rescored > 0


def test_logits_of_an_ended_row_are_not_checked():
    target, draft = pair("llama")
    text = target.generate(torch.tensor([[5, 9]]), max_new_tokens=4)[0].tolist()
    options = options_of(draft, eos_token_id=text[3], do_sample=True, top_k=1)
    # Tokens after the end have no distribution.
    with spoiled(target, NAN, after=lambda ids: ids == text[3]):
        assert target.generate(torch.tensor([[5, 9]]), **options)[0].tolist() == text[:4]


@hf_speculate.register_row_wise
class ForbidsFrom(LogitsProcessor):
    """Processor that forbids all tokens from length `num` on."""

    def __init__(self, num):
        self.num = num

    def __call__(self, input_ids, scores):
        return scores if input_ids.shape[1] < self.num else torch.full_like(scores, -INF)


class StopsAtSevenths(StoppingCriteria):
    """Custom criterion; rows move in lock step because of it."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 1


EndsAtSevenths = hf_speculate.register_row_wise(type("EndsAtSevenths", (StopsAtSevenths,), {}))


def test_logits_past_the_common_end_are_not_checked():
    """Let stopped rows run, without EOS, until all have stopped, when one may be ahead."""
    target, draft = pair("llama")
    inputs = ragged_prompts(3, seed=2)
    options = {
        "stopping_criteria": [EndsAtSevenths()],
        "do_sample": True,
        "verifier": "coupled",
        "seed": 2,
    }
    plain = target.generate(**inputs, **options, max_new_tokens=40)
    assert plain.shape[1] < inputs["input_ids"].shape[1] + 40
    drafted = options_of(draft, **options, max_new_tokens=40)
    assert_equal_ids(
        plain, target.generate(**inputs, **drafted, logits_processor=[ForbidsFrom(plain.shape[1])])
    )
    with pytest.raises(BadLogitsError, match="-inf for every token"):
        target.generate(**inputs, **drafted, logits_processor=[ForbidsFrom(plain.shape[1] - 1)])


@pytest.mark.fallback("lock step")
def test_stopped_lock_step_rows_are_checked_without_eos():
    """Let stopped rows run, without EOS, until all have stopped.

    Plain `generate` fails if such a row has no distribution.
    """
    target, draft = pair("llama")
    inputs, options = (
        ragged_prompts(3, seed=2),
        {"stopping_criteria": [StopsAtSevenths()], "max_new_tokens": 40},
    )
    own = inputs | options_of(draft, **options, do_sample=True, seed=2)

    def spoil(input_ids, scores):
        has_stopped = (input_ids[:, inputs["input_ids"].shape[1] :] % 7 == 1).any(1)
        return torch.where(has_stopped[:, None], torch.full_like(scores, NAN), scores)

    # With EOS, stopped rows only get padding.
    ended = target.generate(**own, eos_token_id=63)
    assert_equal_ids(ended, target.generate(**own, eos_token_id=63, logits_processor=[spoil]))
    with pytest.raises(BadLogitsError, match="got NaN in row"):
        target.generate(**own, logits_processor=[spoil])


@each_value(
    cell=CELLS,
    options=[
        {},
        {"assistant_confidence_threshold": 0.3},
        {"prompt_lookup_num_tokens": 3},
        {
            "do_sample": True,
            "verifier": "coupled",
            "seed": 3,
            "top_k": 5,
            "assistant_confidence_threshold": 0.3,
        },
    ],
)
def test_draft_without_a_distribution_leaves_the_text(options, cell):
    value, batch_size, cache_kind = cell
    target, draft = pair("llama")
    options = {
        "max_new_tokens": 12,
        "num_assistant_tokens": K,
        "speculation_cache": cache_kind,
        **options,
    }
    with spoiled(draft, value):
        assert_decodes_as_plain(target, draft, ragged_prompts(batch_size, seed=4), **options)
