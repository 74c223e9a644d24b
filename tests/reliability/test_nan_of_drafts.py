"""Test that NaN logits in the target after a rejected draft change no text, score or cache.

`NAN_ID` occurs in no text, but is drafted again and again. In some tests, its embedding is NaN, as
after an overflow in half precision, and attention spreads NaN over the row. In others, NaN
overwrites the states of a forward before the rollback, as with attention that skips masked columns.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import hf_speculate
from hf_speculate.compat import CACHE_NAME, TAKES_CACHE
from hf_speculate.engine.target_session import EndPadding
from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt
from tests.cases import (
    VERIFIERS,
    Unchanged,
    assert_decodes_as_plain,
    assert_equal_ids,
    new_pair,
    pair,
)
from tests.draft.test_custom import Watcher
from tests.generation.test_caches import FLOAT32_TOLERANCE, assert_same_contents, cache_contents
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.options.compiled.conftest import backend as backend
from tests.options.compiled.test_graphs import decode
from tests.support.compiled_calls import compile_config, compiled_and_eager, small_pair
from tests.support.grammars import Brackets, Grammar, WatchedGrammar
from tests.support.nan_drafts import (
    NAN_ID,
    drafts_of_nan,
    embedding_is_nan,
    without_nan,
    written_states_are_nan,
)
from tests.support.recurrent_cases import assert_equal_caches
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_configs import RECURRENT_FAMILIES

NUM_NEW = 16
PAD = 2
# Draft lengths. After a shorter draft, attention reads columns that a longer one has written.
LENS = (3, 0, 3, 1)


def call_of(
    family: str, batch_size: int
) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Tensor]]:
    is_pair = family in ("t5", "bart")
    inputs = (
        inputs_of(family, batch_size)
        if is_pair
        else ragged_prompts(batch_size, seed=4, min_len=3, max_len=11)
    )
    return *(encoder_pair(family) if is_pair else pair(family)), without_nan(inputs)


def assert_equal_outputs(plain: Any, ours: Any, family: str) -> None:
    assert_equal_ids(plain.sequences, ours.sequences)
    caches = plain[CACHE_NAME], ours[CACHE_NAME]
    if family in RECURRENT_FAMILIES:
        assert_equal_caches(*caches, FLOAT32_TOLERANCE)
    else:
        assert_same_contents(*map(cache_contents, caches), FLOAT32_TOLERANCE)


STATES = {"output_hidden_states": True, "output_logits": True}
COUPLED = {"do_sample": True, "verifier": "coupled", "seed": 3, "top_k": 9}
PREALLOCATED, DYNAMIC = {"speculation_cache": "preallocated"}, {"speculation_cache": "dynamic"}
# Kind, number of rows, options of both calls, options of the call with drafts.
Call = tuple[str, int, dict[str, Any], dict[str, Any]]
# With these kinds, attention reads buffers past a row's end. With others, a rollback removes
# everything.
BUFFERED: list[Call] = [
    *((family, 4, {}, PREALLOCATED) for family in ("llama", "mistral_window", "gemma2")),
    ("llama", 3, COUPLED, {}),
    *(
        ("llama", 3, options, {})
        for options in ({"remove_invalid_values": True}, {**COUPLED, "eta_cutoff": 1e-3})
    ),
    ("llama", 3, {"cache_implementation": "static"}, {}),
]
CALLS: list[Call] = [
    *BUFFERED,
    *((family, 4, {}, DYNAMIC) for family in ("llama", "mistral_window")),
    ("llama", 1, STATES, {}),
    ("llama", 3, {"logits_processor": [Unchanged()]}, {}),
    *(
        (family, 3, {}, {})
        for family in ("bloom", "gpt_oss", "deepseek_v3", "llama4", "gpt_neo", "t5", "bart")
    ),
    *((family, 3, {}, {}) for family in ("falcon_h1", "lfm2")),
    ("mamba2", 3, {**COUPLED, "eta_cutoff": 1e-3}, {}),  # a warper that fails on NaN
]


def assert_equal_states(one: Any, other: Any) -> None:
    for name in ("scores", "logits", "hidden_states", "attentions"):
        pair = getattr(one, name, None), getattr(other, name, None)
        torch.testing.assert_close(*pair, atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("scripted", [LENS], indirect=True)
@pytest.mark.parametrize(
    ("spoil", "family", "batch_size", "options", "own"),
    [(embedding_is_nan, *call) for call in CALLS]
    + [(written_states_are_nan, *call) for call in BUFFERED],
)
def test_text_scores_and_caches_equal_plain(spoil, family, batch_size, options, own, scripted):
    target, draft, inputs = call_of(family, batch_size)
    options = {
        "max_new_tokens": NUM_NEW,
        "return_dict_in_generate": True,
        "output_scores": True,
        **options,
    }
    own = {"assistant_model": draft, "num_assistant_tokens": 3, **own}
    with drafts_of_nan(target, draft, spoil):
        plain, ours = (
            target.generate(**inputs, **options),
            target.generate(**inputs, **options, **own),
        )
        new = plain.sequences[:, -NUM_NEW:]
        options |= {
            "eos_token_id": [int(new[row, 2 + 4 * row]) for row in range(batch_size - 1)],
            "pad_token_id": PAD,
        }
        ended, ours_ended = (
            target.generate(**inputs, **options),
            target.generate(**inputs, **options, **own),
        )
    assert NAN_ID not in new
    assert_equal_outputs(plain, ours, family)
    assert_equal_outputs(ended, ours_ended, family)
    assert_equal_states(plain, ours)
    stats = ours.speculation
    # In Mamba 2, the states after a token do not depend on later tokens.
    assert (stats.num_rescored > 0) == (family != "mamba2")
    assert stats.num_drafted > stats.num_accepted + ours_ended.speculation.num_accepted > 0
    assert stats.status == 0


@pytest.mark.parametrize("scripted", [LENS], indirect=True)
def test_padding_at_the_end_reads_no_rejected_columns(scripted, monkeypatch):
    """Fill the columns of rejected tokens with NaN, as their forward may have left them."""
    target, draft, inputs = call_of("llama", 2)
    options = {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, "pad_token_id": PAD}
    own = {"assistant_model": draft, "num_assistant_tokens": 3, **PREALLOCATED}
    finish, spoilt = EndPadding.finish, []

    def spoil(padding, model, kv_cache, batch):
        num_forwards, holds_rejected = len(forwards), kv_cache.holds_rejected
        for layer in kv_cache.cache.layers if holds_rejected else ():
            for row, end in enumerate(kv_cache.layout.lens):
                for states in layer.buffers:
                    states[row, :, end - layer.base :] = torch.nan
        finish(padding, model, kv_cache, batch)
        spoilt.append(holds_rejected and len(forwards) > num_forwards)

    forwards = []
    target.register_forward_hook(lambda *args: forwards.append(1))
    monkeypatch.setattr(EndPadding, "finish", spoil)
    new = target.generate(**inputs, **options).sequences[:, -NUM_NEW:].tolist()
    for end in range(2, NUM_NEW - 1):
        options["eos_token_id"] = [new[0][end], new[1][end + 1]]
        plain, ours = (target.generate(**inputs, **options, **more) for more in ({}, own))
        assert_equal_outputs(plain, ours, "llama")
    assert any(spoilt)


INSIDE = {"verifier": "typical", "do_sample": True, "relax_only_inside": (5, 9)}


@pytest.mark.parametrize("verifier", [*VERIFIERS, "spans"])
def test_verifier_decides_as_if_the_token_were_finite(verifier):
    """Keep drafts although the target's logits are NaN, so samples keep their distribution."""
    (target, draft), texts = pair("llama"), []
    options = {"assistant_model": draft, "num_assistant_tokens": 4, "max_new_tokens": 40, "seed": 5}
    options |= {
        **VERIFIERS.get(verifier, INSIDE),
        "draft_sampling": "sample",
        "return_dict_in_generate": True,
    }
    for spoil in (embedding_is_nan, lambda target: nullcontext()):
        with drafts_of_nan(target, draft, spoil, likely=0.0, every=1):
            output = target.generate(**call_of("llama", 3)[2], **options)
        texts.append((output.sequences.tolist(), output.speculation))
    (text, nan), (finite_text, finite) = texts
    assert text == finite_text
    assert nan.num_rescored > 0 == finite.num_rescored
    if verifier not in ("greedy", "coupled"):  # their rounds become plain steps
        assert nan.accepted_per_position == finite.accepted_per_position
        assert nan.drafted_per_position == finite.drafted_per_position


# Before 5.24, masks for window layers with recorded pasts serve only one forward.
FAILS_BEFORE_5_24 = [] if TAKES_CACHE else pytest.mark.xfail(strict=True, raises=RuntimeError)


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("mistral_window", marks=FAILS_BEFORE_5_24)]
)
def test_returned_states_equal_a_round_scored_once(family):
    (target, draft), inputs, outputs = (
        new_pair(family, attn_implementation="eager"),
        call_of("llama", 1)[2],
        [],
    )
    options = {
        **VERIFIERS["rejection"],
        "seed": 5,
        **STATES,
        "output_attentions": True,
        "output_scores": True,
    }
    options |= {"return_dict_in_generate": True, "max_new_tokens": 24, "draft_sampling": "sample"}
    for spoil in (embedding_is_nan, lambda target: nullcontext()):
        with drafts_of_nan(target, draft, spoil, likely=0.0, every=1):
            outputs.append(
                target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=4)
            )
    assert_equal_ids(*(output.sequences for output in outputs))
    assert_equal_states(*outputs)
    assert 0 < outputs[0].speculation.num_rescored < outputs[0].speculation.num_batch_rounds


def test_stateful_processor_follows_the_text_only():
    target, draft, inputs = call_of("llama", 3)
    watched, options = (
        WatchedGrammar(Brackets(), inputs["input_ids"].shape[1]),
        {"max_new_tokens": NUM_NEW},
    )
    stats = hf_speculate.SpeculationStats()
    draft_options = {
        "assistant_model": draft,
        "num_assistant_tokens": 3,
        "speculation_stats": stats,
    }
    with drafts_of_nan(target, draft, embedding_is_nan):
        plain = target.generate(**inputs, **options, logits_processor=[Grammar(Brackets())])
        assert_equal_ids(
            plain, target.generate(**inputs, **options, **draft_options, logits_processor=[watched])
        )
    texts = plain[:, -NUM_NEW:].tolist()
    assert all(texts[row][: len(followed)] == followed for row, followed in watched.log)
    assert stats.num_rescored > 0
    assert not stats.lock_step


@hf_speculate.register_row_wise
class FailsOnNan(LogitsProcessor):
    """Processor that plain decoding would never hand NaN."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert not scores.isnan().any()
        return scores - 1


def test_processors_get_no_nan_of_drafts():
    target, draft, inputs = call_of("llama", 3)
    options = {"max_new_tokens": NUM_NEW, "logits_processor": [FailsOnNan()]}
    with drafts_of_nan(target, draft, embedding_is_nan):
        stats = assert_decodes_as_plain(target, draft, inputs, **options, num_assistant_tokens=3)
    assert stats.num_rescored > 0


class DraftsNan(Watcher):
    """Drafter that proposes `NAN_ID` and reads the states of plain forwards."""

    def continued(self, row, text, num):
        wrong = zip(
            text[-1:] + super().continued(row, text, num),
            super().continued(row, text, num),
            strict=False,
        )
        return [NAN_ID if before % 3 == 0 else token_id for before, token_id in wrong]


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("options", [{}, {"logits_processor": [Unchanged()]}, PREALLOCATED])
def test_drafters_get_the_states_of_the_second_scoring(options):
    target, draft, inputs = call_of("llama", 3)
    factory = lambda setup: DraftsNan(target, setup, layers=(0, 1, -1))  # noqa: E731
    with drafts_of_nan(target, draft, embedding_is_nan):
        plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
        stats = hf_speculate.SpeculationStats()
        draft_options = {
            "drafter": factory,
            "num_assistant_tokens": 4,
            "speculation_stats": stats,
            **options,
        }
        assert_equal_ids(plain, target.generate(**inputs, max_new_tokens=NUM_NEW, **draft_options))
    assert 0 < stats.num_rescored < stats.num_batch_rounds


@pytest.mark.parametrize("options", [{}, COUPLED])
def test_joining_rows_equal_rows_alone(options):
    target, draft = pair("llama")
    arguments = [{"max_new_tokens": (5, 30, 12)[key % 3], **options} for key in range(7)]
    rows = [
        RowPrompt([8 + key, 9, 11 + 2 * key], seed=3, arguments=own, key=key)
        for key, own in enumerate(arguments)
    ]
    with drafts_of_nan(target, draft, embedding_is_nan):
        decoder = ContinuousDecoder(
            target, 3, {"assistant_model": draft, "num_assistant_tokens": 3, **options}
        )
        results = [
            result
            for finished in decoder.decode(partial(next, iter(rows), None))
            for result in finished
        ]
        for one in results:
            alone = target.generate(
                torch.tensor([one.prompt.token_ids]), **{**one.prompt.arguments, "seed": 3}
            )
            assert alone[0, 3:].tolist() == one.token_ids, one.prompt.key
    assert len(results) == len(rows)
    assert 0 < decoder.stats.num_rescored < decoder.stats.num_batch_rounds


@pytest.mark.slow
def test_compiled_rounds_are_scored_again_eagerly():
    target, draft = small_pair("llama")
    inputs = call_of("llama", 3)[2]
    with drafts_of_nan(target, draft, embedding_is_nan):
        ids, _, stats = compiled_and_eager(target, draft, inputs, compile_config())
        assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    assert stats.compiled == ["target", "draft"]
    assert stats.num_rescored > 0


def test_rounds_from_graphs_are_scored_again_eagerly(backend):
    target, draft = pair("llama")
    inputs = call_of("llama", 3)[2]
    with drafts_of_nan(target, draft, embedding_is_nan):
        ids, stats = decode(target, inputs, assistant_model=draft)
        assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    assert stats.graphed == ["target", "draft"]
    assert stats.num_rescored > 0


@pytest.mark.fallback("computes NaN or infinity")
@pytest.mark.parametrize("scripted", [LENS], indirect=True)
def test_draft_model_with_nan_drafts_alike_from_any_cache(scripted):
    (target, draft), inputs, results = pair("llama"), call_of("llama", 4)[2], []
    with drafts_of_nan(target, draft, embedding_is_nan, every=9), embedding_is_nan(draft):
        for draft_options in (PREALLOCATED, DYNAMIC):
            stats = assert_decodes_as_plain(
                target, draft, inputs, max_new_tokens=40, num_assistant_tokens=3, **draft_options
            )
            results.append((stats.num_rescored, stats.draft_lens, stats.accepted_per_position))
    assert results[0] == results[1]
    assert results[0][0] > 0


def overflowing() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a half-precision pair: a neuron of the target is 2e5 for `NAN_ID` and 0 otherwise."""
    target = make_model("llama", dtype=torch.float16)
    embeddings, layer = target.get_input_embeddings().weight, target.model.layers[0]
    embeddings[:, -1], layer.self_attn.o_proj.weight[-1] = 0, 0
    layer.mlp.up_proj.weight[0], layer.mlp.gate_proj.weight[0] = 0, 0
    draft = noisy_copy(target, 0.02)
    embeddings[NAN_ID, -1] = 1
    layer.mlp.up_proj.weight[0, -1], layer.mlp.gate_proj.weight[0, -1] = 2000, 200
    return hf_speculate.enable(target), draft


@pytest.mark.parametrize("batch_size", [1, 4])
def test_token_overflowing_in_half_precision_may_be_drafted(batch_size):
    (target, draft), inputs = overflowing(), call_of("llama", batch_size)[2]
    with drafts_of_nan(target, draft, lambda target: nullcontext(), every=9):
        stats = assert_decodes_as_plain(
            target, draft, inputs, max_new_tokens=24, num_assistant_tokens=3
        )
    assert stats.num_rescored > 0
    assert stats.num_accepted > 0
