"""Test errors in drafts, which end the drafts but not the call, and errors in user code."""

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

import hf_speculate
from hf_speculate.cache.preallocated import PreallocatedKVCache
from hf_speculate.draft.base import Drafter
from hf_speculate.engine.draft_faults import is_of_device
from hf_speculate.models import attention_names
from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.schedule import MemoryStore, adaptive
from hf_speculate.types import DraftOut
from tests.cases import (
    Unchanged,
    assert_decodes_as_plain,
    assert_equal_ids,
    each_value,
    new_pair,
    pair,
)
from tests.options.heads.designs import VOCAB_SIZE
from tests.options.heads.kinds import KINDS as HEADS
from tests.options.heads.rounds import target_of
from tests.reliability.bad_drafts import with_fault
from tests.reliability.faults import ERRORS, Fault, Halt, Mistake, hook
from tests.support.compiled_calls import compile_config
from tests.support.tiny import make_model, noisy_copy, ragged_prompts

K, NUM_NEW = 3, 16
RAISED = "plain decoding, because the drafter"
pytestmark = pytest.mark.filterwarnings("ignore:plain decoding")

# Options passed along with the draft model, by case.
SOURCES: dict[str, dict[str, Any]] = {
    "model": {},
    "dynamic": {"speculation_cache": "dynamic"},
    "sampled": {"do_sample": True, "verifier": "coupled", "seed": 3, "top_k": 20},
    "lookup too": {"prompt_lookup_num_tokens": 4},
    "lock step": {"logits_processor": [Unchanged()]},
    "adaptive": {"num_assistant_tokens": None, "num_assistant_tokens_schedule": "adaptive"},
    "state": {"draft_state": hf_speculate.DraftState()},
    "compiled": {"compile_config": compile_config()},
    "kept cache": {"return_dict_in_generate": True, "output_scores": True},
}


def hooks_of(*models):
    return [
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for one in models
        for module in one.modules()
    ]


@pytest.mark.fallback(RAISED, "lock step", "eager forwards")
@each_value(
    source=SOURCES,
    family=["llama", "mistral_window", "bloom", "gpt2", "llama"],
    batch_size=[1, 3],
    at=[1, 2, 5, 7],
)
def test_draft_model_that_raises_leaves_the_text(source, family, batch_size, at, monkeypatch):
    # Otherwise, timings of tiny models would decide whether a draft is called again.
    monkeypatch.setattr(adaptive, "MAX_LOSS", 1e6)
    target, draft = new_pair(family)
    # The adaptive schedule never calls a draft of the target's size. It may call this smaller one
    # once.
    if source == "adaptive":
        draft, at = make_model(family, num_hidden_layers=1), 1
    layer = list(draft.modules())[-2]
    draft_options = {"num_assistant_tokens": K, **SOURCES[source]}
    before = copy.deepcopy(draft.config.to_dict()), hooks_of(target, draft)
    inputs, stats = ragged_prompts(batch_size, seed=5), None
    with hook(draft if at % 2 else layer, Fault(at, Mistake("on purpose\nand more"))):
        stats = assert_decodes_as_plain(
            target, draft, inputs, max_new_tokens=NUM_NEW, **draft_options
        )
    reason = (
        f"{RAISED} (model {type(draft).__name__}{' and prompt lookup' * (source == 'lookup too')}) "
        "raised Mistake: "
    )
    assert [reason for reason in stats.fallbacks if RAISED in reason] == [reason + "on purpose"]
    assert stats.draft_lens[-1] == 0
    assert (draft.config.to_dict(), hooks_of(target, draft)) == before
    assert attention_names._HOLDERS == {}
    if source == "state":
        assert draft_options["draft_state"].num_tokens == 0
    again = assert_decodes_as_plain(target, draft, inputs, max_new_tokens=NUM_NEW, **draft_options)
    assert not any(RAISED in reason for reason in again.fallbacks)
    assert again.num_drafted > 0


@pytest.mark.fallback(RAISED)
def test_buffers_of_a_dead_drafter_are_released(monkeypatch):
    made, released = [], []
    init, release = PreallocatedKVCache.__init__, PreallocatedKVCache.release

    def made_by(cache, *args, **kwargs):
        init(cache, *args, **kwargs)
        made.append(cache)

    def released_by(cache):
        release(cache)
        released.append(cache)

    monkeypatch.setattr(PreallocatedKVCache, "__init__", made_by)
    monkeypatch.setattr(PreallocatedKVCache, "release", released_by)
    target, draft = new_pair("llama")
    with hook(draft, Fault(3, Mistake("on purpose"))):
        assert_decodes_as_plain(target, draft, ragged_prompts(2, seed=5), max_new_tokens=NUM_NEW)
    assert len(made) == 2
    assert all(any(cache is other for other in released) for cache in made)


@pytest.mark.fallback(RAISED)
@each_value(family=["falcon_h1", "falcon_h1", "mamba2"], early_exit=[None, 1, None], at=[1, 3, 6])
def test_hooks_are_removed_after_a_draft_fault(family, early_exit, at):
    """Include recurrent layers, because the target's plain steps use them after an early exit."""
    target, draft = new_pair(family)
    layer, before = (target if early_exit else draft).base_model.layers[0], hooks_of(target, draft)
    options = {
        "assistant_early_exit": early_exit,
        "max_new_tokens": NUM_NEW,
        "num_assistant_tokens": K,
    }
    inputs = ragged_prompts(2, seed=5)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    stats, draft_options = (
        hf_speculate.SpeculationStats(),
        {} if early_exit else {"assistant_model": draft},
    )
    with hook(layer, Fault(at + bool(early_exit), Mistake("on purpose"))):
        ours = target.generate(**inputs, **options, **draft_options, speculation_stats=stats)
    assert_equal_ids(plain, ours)
    assert any(RAISED in reason for reason in stats.fallbacks)
    assert hooks_of(target, draft) == before


@pytest.mark.fallback(RAISED)
@pytest.mark.parametrize(("number", "family"), list(enumerate(HEADS)))
def test_head_that_raises_leaves_the_text(number, family, tmp_path):
    """Fail in the first or last linear layer; the first may be the one that reads target states."""
    head, target = HEADS[family](tmp_path)
    linear = [module for module in head.network.modules() if isinstance(module, nn.Linear)]
    hf_speculate.enable(target)
    inputs = ragged_prompts(1 + number % 3, seed=2, vocab_size=VOCAB_SIZE)
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": K}
    for layer, at in ((linear[0], 1), (linear[-1], 2), (linear[0], 5)):
        with hook(layer, Fault(at, Mistake("on purpose"))):
            stats = assert_decodes_as_plain(target, head, inputs, **options)
        assert len(stats.fallbacks) == 1
        assert RAISED in stats.fallbacks[0]
    assert assert_decodes_as_plain(target, head, inputs, **options).num_drafted > 0
    hf_speculate.disable(target)


class Faulty(Drafter):
    """Drafter that reads the target's states and repeats the newest token.

    `method` fails at its n-th call.
    """

    hidden_layers = (1,)

    def __init__(self, method, fault):
        self.method, self.fault = method, fault

    def _tick(self, method):
        if method == self.method:
            self.fault.tick()

    def draft(self, request):
        self._tick("draft")
        newest = request.query_token_ids[:, -1:]
        return DraftOut(newest, torch.ones_like(newest[:, 0], dtype=torch.int32), None, None)

    def project_states(self, states):
        self._tick("project_states")
        return states

    def rows(self, indices):
        self._tick("rows")


class FaultyInside(Faulty):
    """The same drafter, marked as part of the library."""

    def is_callers(self, error):
        return False


CALLS = [(method, at) for method in ("draft", "project_states", "rows") for at in (1, 2)]


@pytest.mark.fallback(
    "plain decoding, because the drafter (custom drafter) raised Mistake: on purpose"
)
@pytest.mark.parametrize(("method", "at"), CALLS)
def test_drafter_error_is_raised_or_ends_the_drafts(method, at):
    target, inputs = pair("llama")[0], ragged_prompts(4, seed=2)
    # Rows leave one by one.
    ends = target.generate(**inputs, max_new_tokens=NUM_NEW)[:2, -9].tolist()
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": K, "eos_token_id": ends}
    error = Mistake("on purpose")
    with pytest.raises(Mistake) as caught:
        target.generate(**inputs, **options, drafter=lambda setup: Faulty(method, Fault(at, error)))
    assert caught.value is error
    draft_options = {"drafter": lambda setup: FaultyInside(method, Fault(at, error))}
    stats = assert_decodes_as_plain(target, None, inputs, **options, **draft_options)
    assert len(stats.fallbacks) == 1


@pytest.mark.fallback(RAISED)
def test_warning_points_at_the_call_once():
    target, draft = pair("llama")
    options = {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": NUM_NEW}
    with hook(draft, Fault(3, Mistake("on purpose"))), pytest.warns(UserWarning) as caught:
        target.generate(torch.tensor([[5, 6]]), **options)
    (warning,) = [warning for warning in caught if RAISED in str(warning.message)]
    assert warning.filename == __file__


@pytest.mark.parametrize("error", ["interrupt", "halt"])
def test_interrupts_in_a_draft_pass_through(error):
    target, draft = pair("llama")
    raised = ERRORS[error]()
    options = {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": NUM_NEW}
    with hook(draft, Fault(2, raised)), pytest.raises((KeyboardInterrupt, Halt)) as caught:
        target.generate(torch.tensor([[5, 6]]), **options)
    assert caught.value is raised
    (note,) = raised.__notes__
    assert re.fullmatch("hf_speculate: raised while tokens were drafted, round 1", note)


@pytest.mark.fallback(f"{RAISED} (model LlamaForCausalLM) raised OutOfMemoryError")
def test_lack_of_memory_ends_the_drafts():
    target, draft = pair("llama")
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": K}
    with hook(draft, Fault(2, torch.OutOfMemoryError("no memory, on purpose"))):
        stats = assert_decodes_as_plain(target, draft, ragged_prompts(2, seed=1), **options)
    assert len(stats.fallbacks) == 1


def test_error_of_the_device_is_raised():
    target, draft = pair("llama")
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": K, "assistant_model": draft}
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    with hook(draft, Fault(2, error)), pytest.raises(torch.AcceleratorError) as caught:
        target.generate(**ragged_prompts(2, seed=1), **options)
    assert caught.value is error


def test_device_error_behind_a_host_error_is_recognised(monkeypatch):
    """Hide a device error behind a host error, so that only the next wait reports it."""
    waits: list[Any] = [None, RuntimeError("CUDA error: an illegal memory access was encountered")]

    def synchronize(device):
        if isinstance(waits[0], Exception):
            raise waits[0]

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    records = []
    while waits:
        records.append(is_of_device(Mistake("on the host"), torch.device("cuda")))
        waits.pop(0)
    assert records == [False, True]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "verifier": "coupled", "seed": 3}])
@pytest.mark.parametrize("at", [1, 2])
def test_ids_outside_the_vocabulary_reach_neither_model(at, options):
    """Make the draft score ids past the vocabulary, or give it fewer embeddings than configured."""
    target, draft = pair("llama", 0.0)
    draft_options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": K, **options}
    stats = assert_decodes_as_plain(
        target, with_fault(draft, "tables", at, 0), ragged_prompts(2, seed=3), **draft_options
    )
    assert stats.num_drafted > 0


@pytest.mark.fallback("computes NaN or infinity")
@each_value(
    value=[torch.nan, torch.inf],
    options=[
        {},
        {"do_sample": True, "verifier": "coupled", "seed": 3},
        {"prompt_lookup_num_tokens": 2},
    ],
    cache_kind=["dynamic", "preallocated"],
)
def test_rows_with_nan_drafts_stop_drafting_alone(value, options, cache_kind):
    """Spoil the first row of the draft's logits from a later forward on, as NaN states would."""
    target, draft = new_pair("llama")
    num_calls = itertools.count()

    def spoil(module, args, kwargs, output):
        output.logits[:1] += value if next(num_calls) > 2 else 0
        return output

    inputs = ragged_prompts(3, seed=5)
    with draft.register_forward_hook(spoil, with_kwargs=True):
        draft_options = {
            "max_new_tokens": 100,
            "num_assistant_tokens": K,
            "speculation_cache": cache_kind,
            **options,
        }
        stats = assert_decodes_as_plain(target, draft, inputs, **draft_options)
    assert len(stats.fallbacks) == 1
    assert stats.drafted_per_row[0] < min(stats.drafted_per_row[1:]) / 2
    assert min(stats.accepted_per_row[1:]) > 5


@pytest.mark.fallback("computes NaN or infinity")
@pytest.mark.parametrize("family", ["EAGLE-3", "DFlash", "PARD"])
def test_head_of_nan_logits_is_soon_left_out(family, tmp_path):
    head, target = HEADS[family](tmp_path)
    assert target is target_of()
    next(head.network.parameters()).fill_(torch.nan)
    hf_speculate.enable(target)
    inputs = ragged_prompts(2, seed=2, vocab_size=VOCAB_SIZE)
    stats = assert_decodes_as_plain(target, head, inputs, max_new_tokens=30, num_assistant_tokens=K)
    hf_speculate.disable(target)
    assert stats.draft_lens[-1] == 0
    assert len(stats.fallbacks) == 1


@pytest.mark.fallback(RAISED)
@pytest.mark.parametrize("at", [1, 4])
def test_draft_fault_in_a_running_batch_leaves_all_texts(at):
    """Fail while a row's prompt or all rows are read; later rows join with a working drafter."""
    target, draft = new_pair("llama")
    texts = [ragged_prompts(1, seed=seed)["input_ids"][0].tolist() for seed in range(6)]
    source = iter([RowPrompt(text) for text in texts])
    options = {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": 12}
    decoder = ContinuousDecoder(target, 2, options)
    with hook(draft, Fault(at, Mistake("on purpose"))):
        results = [
            result for finished in decoder.decode(lambda: next(source, None)) for result in finished
        ]
    drafted = {}
    for prompt, token_ids, _, num_drafted, _, error in results:
        plain = target.generate(torch.tensor([prompt.token_ids]), max_new_tokens=12)[0]
        assert error is None
        assert plain.tolist() == [*prompt.token_ids, *token_ids]
        drafted[texts.index(list(prompt.token_ids))] = num_drafted
    assert len(drafted) == 6
    assert min(drafted[number] for number in (4, 5)) > 0
    assert [RAISED in reason for reason in decoder.stats.fallbacks] == [True]


@pytest.mark.fallback(RAISED)
def test_failed_draft_counts_as_no_rejection():
    """Fail in the first forward: nothing was verified, so nothing counts as rejected."""
    target = hf_speculate.enable(make_model("llama"))
    draft = noisy_copy(make_model("llama", num_hidden_layers=1))
    for at, has_verified in ((1, False), (10**9, True)):
        with hook(draft, Fault(at, Mistake("on purpose"))):
            target.generate(torch.tensor([[5, 6]]), assistant_model=draft, max_new_tokens=NUM_NEW)
        memories = MemoryStore.of(target)._by_draft.get(draft, {}).values()
        assert any(any(memory.acceptance._drafted) for memory in memories) == has_verified
