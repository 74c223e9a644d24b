"""Compare passed and returned KV caches with plain `generate`, and texts while buffers grow."""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticSlidingWindowLayer

import hf_speculate
from hf_speculate.cache.ragged_layer import MIN_STEP, WINDOW_SLACK
from hf_speculate.compat import CACHE_NAME, TAKES_CACHE
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from tests.cases import (
    ACCEPTED_ALL,
    AttentionCalls,
    Unchanged,
    assert_decodes_as_plain,
    assert_equal_ids,
    each_value,
    pair,
    plain_and_ours,
)
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.reliability.faults import Fault, FaultyCriterion, FaultyStreamer, Mistake, hook
from tests.support.fake_cuda import FakeCuda
from tests.support.tiny import SLIDING_WINDOW, TINY_FAMILIES, make_model, noisy_copy, ragged_prompts

K = 4
NUM_NEW = 24
BATCH_SIZE = 4
# Differs from the padding id of the prompts. Plain `generate` feeds it like any other token.
PAD = 2
ROOM = 96  # number of tokens; more than two turns need
STATE_TOLERANCE = 1e-9  # float64 round-off between a forward of one token and one of several
# Gemma 2 and Bloom compute the attention softmax in float32 for every dtype.
FLOAT32_TOLERANCE = 1e-4
SAID = torch.tensor([[9, 8], [7, 6], [5, 4], [3, 11]])
ONE_ROW = {
    "input_ids": torch.tensor([[5, 6, 7, 9]]),
    "attention_mask": torch.ones(1, 4, dtype=torch.int64),
}
DRAFTS: dict[str, dict[str, Any]] = {
    "model": {"num_assistant_tokens": K},
    "long drafts": {"num_assistant_tokens": 2 * NUM_NEW},
    "adaptive": {"num_assistant_tokens_schedule": "adaptive"},
    "hybrid": {"prompt_lookup_num_tokens": K, "num_assistant_tokens": K},
    "copying": {"prompt_lookup_num_tokens": K, "assistant_model": None},
    "chunked": {"num_assistant_tokens": K, "prefill_chunk_size": 3},
    "lock step": {"num_assistant_tokens": K, "logits_processor": [Unchanged()]},
}


@torch.no_grad()
def prefilled(target, input_ids: Tensor, attention_mask: Tensor | None = None) -> DynamicCache:
    positions = None if attention_mask is None else (attention_mask.cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache(config=target.config)
    target(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions,
        **{CACHE_NAME: cache},
    )
    return cache


def parts_of(cache: Cache) -> list[Any]:
    is_pair = isinstance(cache, EncoderDecoderCache)
    return [cache.self_attention_cache, cache.cross_attention_cache] if is_pair else [cache]


def cache_contents(cache: Cache) -> list[tuple]:
    """Copy the keys, values and other state of each layer.

    The oldest column of a full static window is left out, because it is never read.
    """
    tensors = []
    for layer in (
        layer for kv_cache in parts_of(cache) for layer in kv_cache.layers if layer.is_initialized
    ):
        length = int(layer.get_seq_length())
        first = int(isinstance(layer, StaticSlidingWindowLayer) and length >= layer.max_cache_len)
        states = (states[:, :, first:].clone() for states in (layer.keys, layer.values))
        tensors.append((*states, type(layer), length, getattr(layer, "record_past", None)))
    return tensors


def assert_same_contents(mine: list[tuple], other: list[tuple], tolerance: float = 0.0) -> None:
    assert len(mine) == len(other) > 0
    for (keys, values, *rest), (their_keys, their_values, *their_rest) in zip(
        mine, other, strict=True
    ):
        assert rest == their_rest
        torch.testing.assert_close(keys, their_keys, atol=tolerance, rtol=0)
        torch.testing.assert_close(values, their_values, atol=tolerance, rtol=0)


def tolerance_of(family: str) -> float:
    return FLOAT32_TOLERANCE if family in ("gemma2", "bloom") else STATE_TOLERANCE


def prompts() -> dict[str, Tensor]:
    return ragged_prompts(BATCH_SIZE, seed=12, min_len=3, max_len=11)


@cache
def ends(family: str) -> list[int]:
    """Return ids from the plain texts that end the rows at different times."""
    target, _ = pair(family)
    inputs = prompts()
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, inputs["input_ids"].shape[1] :]
    return [int(text[row, 3 + 5 * row]) for row in range(BATCH_SIZE - 1)]


@pytest.mark.fallback("lock step")
@each_value(
    drafts=DRAFTS,
    family=["llama", "mistral_window", "gemma2", "bloom"],
    cache_kind=["dynamic", "preallocated", "auto"],
)
def test_rows_of_unequal_length_leave_the_cache_of_plain(family, cache_kind, drafts):
    target, draft = pair(family)
    if drafts == "adaptive":
        draft = make_model(family, num_hidden_layers=1)
    inputs, eos = prompts(), ends(family)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": eos, "pad_token_id": PAD}
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    draft_options = {"assistant_model": draft, "speculation_cache": cache_kind, **DRAFTS[drafts]}
    plain = target.generate(**inputs, **options, **{CACHE_NAME: caches[0]})
    ours = target.generate(**inputs, **options, **{CACHE_NAME: caches[1]}, **draft_options)
    assert_equal_ids(plain, ours)
    new = plain[:, inputs["input_ids"].shape[1] :]
    num_live = [
        next((at for at, token_id in enumerate(row) if token_id in eos), NUM_NEW)
        for row in new.tolist()
    ]
    assert max(num_live) - min(num_live) > K  # with a smaller gap, the test would check nothing
    assert_same_contents(*map(cache_contents, caches), tolerance_of(family))


def test_passed_cache_is_restored_after_an_error_in_padding():
    target, same = pair("mistral_window", ACCEPTED_ALL)  # all rows end in the first round
    inputs, error = prompts(), Mistake("on purpose")
    cache = prefilled(target, *(tensor[:, :3] for tensor in inputs.values()))
    before = cache_contents(cache)
    options = {
        "max_new_tokens": NUM_NEW,
        "eos_token_id": ends("mistral_window"),
        "pad_token_id": PAD,
    }
    options |= {"assistant_model": same, CACHE_NAME: cache, **DRAFTS["long drafts"]}
    with hook(target, Fault(3, error)), pytest.raises(Mistake):
        target.generate(**inputs, **options)
    assert error.__notes__ == [
        "hf_speculate: raised while the target read the padding of finished rows, round 1"
    ]
    assert_same_contents(before, cache_contents(cache))


@pytest.mark.fallback("lock step")
@each_value(
    pad=[64, -1, PAD, 64, -1, PAD],
    drafts=["model", "long drafts", "lock step", "lock step", "model", "hybrid"],
)
def test_pad_id_without_an_embedding_keeps_row_lengths(drafts, pad):
    """Compare with another padding id, because plain `generate` cannot feed this one."""
    target, draft = pair("llama")
    draft_options = {"pad_token_id": pad, "assistant_model": draft, **DRAFTS[drafts]}
    options = {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, "output_scores": True}
    for eos in (ends("llama"), -1):
        plain = target.generate(
            **prompts(), **options, eos_token_id=eos, pad_token_id=PAD if eos != -1 else pad
        )
        ours = target.generate(**prompts(), **options, eos_token_id=eos, **draft_options)
        assert_equal_ids(plain.sequences, ours.sequences.where(ours.sequences != pad, PAD))
        assert ours[CACHE_NAME].get_seq_length() == plain[CACHE_NAME].get_seq_length()
        assert len(ours.scores) == len(plain.scores)
        has_ended = (ours.sequences[:, -2:] == pad).all(1)
        assert has_ended.any() == (eos != -1)
        behind_end = torch.where(torch.arange(64) == pad, 0.0, -torch.inf)
        assert (ours.scores[-1][has_ended] == behind_end).all()


@pytest.mark.parametrize(
    ("family", "batch_size", "max_cache_len"),
    [("llama", 1, None), ("llama", 4, ROOM), ("mistral_window", 4, None), ("gemma2", 4, None)],
)
def test_returned_static_cache_equals_plain(family, batch_size, max_cache_len):
    target, draft = pair(family)
    inputs = prompts() if batch_size > 1 else ONE_ROW
    options = {
        "cache_implementation": "static",
        "max_cache_len": max_cache_len,
        "max_new_tokens": NUM_NEW,
    }
    options |= {"return_dict_in_generate": True, "eos_token_id": ends(family), "pad_token_id": PAD}
    plain_target = copy.deepcopy(target)
    # Plain calls store these values on the model, and later calls use them.
    vars(plain_target).pop("_previous_max_cache_length", None)
    plain = plain_target.generate(**inputs, **options)
    before = vars(target).copy()
    ours = target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=K)
    assert vars(target) == before
    assert_equal_ids(plain.sequences, ours.sequences)
    assert_same_contents(
        *(cache_contents(output[CACHE_NAME]) for output in (plain, ours)), tolerance_of(family)
    )


def test_returned_static_cache_of_recurrent_states_equals_plain():
    target, draft = pair("jamba")
    options = {
        "cache_implementation": "static",
        "max_new_tokens": NUM_NEW,
        "return_dict_in_generate": True,
    }
    plain, ours = plain_and_ours(target, draft, ONE_ROW, **options)
    assert_equal_ids(plain.sequences, ours.sequences)
    for expected, layer in zip(plain[CACHE_NAME].layers, ours[CACHE_NAME].layers, strict=True):
        assert type(layer) is type(expected)
        for name in ("conv_states", "recurrent_states", "has_previous_state", "keys", "values"):
            torch.testing.assert_close(
                getattr(layer, name, None), getattr(expected, name, None), atol=1e-5, rtol=0
            )


def test_passed_static_cache_of_recurrent_states_is_refused():
    target, draft = pair("jamba")
    cache = StaticCache(target.config, ROOM)
    with pytest.raises(
        UnsupportedGenerationError, match="got one of LinearAttentionLayer, StaticLayer"
    ):
        target.generate(**ONE_ROW, assistant_model=draft, max_new_tokens=2, **{CACHE_NAME: cache})


@each_value(batch_size=[1, 4], family=["llama", "mistral_window"])
def test_returned_static_cache_serves_the_next_turn(family, batch_size):
    target, draft = pair(family)
    inputs, results = prompts() if batch_size > 1 else ONE_ROW, []
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": ends(family), "pad_token_id": PAD}
    static = {
        "cache_implementation": "static",
        "max_cache_len": ROOM,
        "return_dict_in_generate": True,
    }
    draft_options = {"assistant_model": draft, "num_assistant_tokens": K}
    for first, second in (
        ({}, {}),
        ({}, draft_options),
        (draft_options, {}),
        (draft_options, {**draft_options, "speculation_cache": "dynamic"}),
    ):
        output = copy.deepcopy(target).generate(**inputs, **options, **first, **static)
        ids, kept_cache = (
            torch.cat([output.sequences, SAID[:batch_size]], dim=1),
            output[CACHE_NAME],
        )
        mask = torch.ones_like(ids)
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        before = [layer.keys.data_ptr() for layer in kept_cache.layers]
        text = target.generate(
            ids, attention_mask=mask, **options, **second, **{CACHE_NAME: kept_cache}
        )
        assert [layer.keys.data_ptr() for layer in kept_cache.layers] == before
        results.append((text, cache_contents(kept_cache)))
    for text, contents in results[1:]:
        assert_equal_ids(results[0][0], text)
        assert_same_contents(results[0][1], contents, STATE_TOLERANCE)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_is_accepted_under_the_name_of_any_version(name):
    target, draft = pair("llama")
    texts = []
    for draft_options in ({}, {"assistant_model": draft, "num_assistant_tokens": K}):
        kv_cache = prefilled(target, ONE_ROW["input_ids"][:, :-1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FutureWarning)
            texts.append(
                target.generate(
                    **ONE_ROW, **draft_options, **{name: kv_cache}, max_new_tokens=NUM_NEW
                )
            )
        assert kv_cache.get_seq_length() == ONE_ROW["input_ids"].shape[1] + NUM_NEW - 1
        warned = [warning.filename for warning in caught if "use `cache`" in str(warning.message)]
        assert warned == ([__file__] if TAKES_CACHE and name != "cache" else [])
    assert_equal_ids(*texts)


def test_encoder_decoder_static_caches_equal_plain():
    target, draft = encoder_pair("t5")
    options = {
        "cache_implementation": "static",
        "max_cache_len": ROOM,
        "max_new_tokens": NUM_NEW,
        **inputs_of("t5", 2),
    }
    plain = copy.deepcopy(target).generate(**options, return_dict_in_generate=True)[CACHE_NAME]
    draft_options = {"assistant_model": draft, "num_assistant_tokens": K}
    ours = target.generate(**options, return_dict_in_generate=True, **draft_options)
    assert all(type(kv_cache) is StaticCache for kv_cache in parts_of(ours[CACHE_NAME]))
    assert_same_contents(cache_contents(plain), cache_contents(ours[CACHE_NAME]), STATE_TOLERANCE)
    del options["cache_implementation"], options["max_cache_len"]
    options["decoder_input_ids"] = ours.sequences
    fresh = target.generate(**options)  # plain decoding feeds a passed cache the whole text again
    assert_equal_ids(fresh, target.generate(**options, **draft_options, **{CACHE_NAME: plain}))
    assert [int(kv_cache.get_seq_length()) for kv_cache in parts_of(plain)] == [
        fresh.shape[1] - 1,
        12,
    ]


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("is_at_end", [False, True])
def test_passed_static_cache_is_unchanged_by_a_failed_call(is_at_end):
    (target, draft), fault = pair("mistral_window"), Fault(1 if is_at_end else 5, Mistake())
    cache = StaticCache(config=target.config, max_cache_len=ROOM)
    options = {"max_new_tokens": 2 * SLIDING_WINDOW, CACHE_NAME: cache}
    ids = target.generate(ONE_ROW["input_ids"], **options)
    before = cache_contents(cache)
    if is_at_end:
        options["streamer"] = FaultyStreamer(fault, "end")
    else:
        options["stopping_criteria"] = [FaultyCriterion(fault)]
    with pytest.raises(Mistake):
        target.generate(ids, assistant_model=draft, num_assistant_tokens=K, **options)
    assert_same_contents(before, cache_contents(cache))


def test_static_cache_without_room_is_refused_with_its_need():
    inputs = ragged_prompts(1, seed=1, min_len=6)
    num_columns = inputs["input_ids"].shape[1] + 9 - 1
    # Layers with a window drop old columns.
    for family, room, num_new in (("llama", num_columns, 9), ("mistral_window", ROOM, 2 * ROOM)):
        target, draft = pair(family)
        options = {**inputs, "max_new_tokens": num_new}
        draft_options = {
            "assistant_model": draft,
            "num_assistant_tokens": K,
            CACHE_NAME: StaticCache(config=target.config, max_cache_len=room),
        }
        assert_equal_ids(target.generate(**options), target.generate(**options, **draft_options))
    target, draft = pair("llama")
    cache = StaticCache(config=target.config, max_cache_len=num_columns - 1)
    with pytest.raises(
        UnsupportedGenerationError, match=f"make it with max_cache_len={num_columns}"
    ):
        target.generate(**inputs, max_new_tokens=9, assistant_model=draft, **{CACHE_NAME: cache})
    assert not cache.layers[0].is_initialized


K = 4
# ALiBi needs the dynamic cache.
FITTING = tuple(family for family in TINY_FAMILIES if family != "bloom")


@pytest.mark.parametrize("family", FITTING)
def test_text_equals_plain_while_buffers_grow_and_windows_move(family):
    """Fill a window's buffers with the prompt.

    The buffers move once before the text reaches the first growth step.
    """
    inputs = ragged_prompts(5, seed=5, max_len=WINDOW_SLACK + 3 * SLIDING_WINDOW)
    assert MIN_STEP < 90
    for cache_kind, chunk_size in (("dynamic", None), ("preallocated", None), ("preallocated", 41)):
        options = {
            "max_new_tokens": 90,
            "prefill_chunk_size": chunk_size,
            "num_assistant_tokens": K,
        }
        stats = assert_decodes_as_plain(
            *pair(family), inputs, **options, speculation_cache=cache_kind
        )
        assert stats.cache == cache_kind


@each_value(
    attention=["eager", "sdpa"],
    family=["llama", "mistral_window", "llama"],
    cache_kind=["preallocated", "auto"],
)
def test_chunk_of_padding_leaves_the_states_of_plain(family, attention, cache_kind):
    """Decode in float32, where the masks are not kept finite, so NaN would reach the tokens."""
    target = hf_speculate.enable(
        make_model(family, dtype=torch.float32, attn_implementation=attention)
    )
    inputs = ragged_prompts(3, seed=1)
    assert not inputs["attention_mask"][2, :9].any()
    options = {"max_new_tokens": 12, "prefill_chunk_size": 3, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    draft_options = {
        "assistant_model": noisy_copy(target),
        "num_assistant_tokens": K,
        "speculation_cache": cache_kind,
    }
    ours = target.generate(**inputs, **options, **draft_options)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert_same_contents(*(cache_contents(output[CACHE_NAME]) for output in (plain, ours)), 1e-4)
    # No query can see the padding states now. The states of the text must still be right.
    options["return_dict_in_generate"] = False
    assert_equal_ids(plain.sequences, target.generate(**inputs, **options, **draft_options))


def test_window_layer_holds_its_window_only():
    (target, draft), inputs = pair("cohere2"), ragged_prompts(1, min_len=230, max_len=230)
    options = {
        "max_new_tokens": 150,
        "num_assistant_tokens": K,
        "speculation_cache": "preallocated",
    }
    with AttentionCalls() as calls:
        target.generate(**inputs, **options, assistant_model=draft)
    bytes_of_column = calls.keys[0][:, :, :1].nbytes
    last = [
        (keys.shape[2], keys.untyped_storage().nbytes() // bytes_of_column)
        for keys in calls.keys[-8:]
    ]
    windowed, full = (last[offset::2] for offset in (0, 1))
    assert min(seen for seen, _ in full) > 360
    assert max(seen for seen, _ in windowed) <= SLIDING_WINDOW + K + 1
    assert (
        max(capacity for _, capacity in windowed)
        < SLIDING_WINDOW + WINDOW_SLACK + 2 * MIN_STEP
        < 360
    )


@pytest.mark.fallback("no graphs")
@each_value(family=["mistral_window", "cohere2"], batch_size=[1, 3], num_held=[SLIDING_WINDOW, 13])
def test_passed_cache_with_a_cut_window_continues_on_a_gpu(family, batch_size, num_held):
    """Pass a cut cache, whose buffers hold no column before the window.

    Attention rounds down the index of the first column that it reads.
    """
    target, draft = map(copy.deepcopy, pair(family))
    inputs = ragged_prompts(batch_size, min_len=16, max_len=19)
    beginning = {name: value[:, :num_held] for name, value in inputs.items()}
    options = {"max_new_tokens": 12, "return_dict_in_generate": True}
    expected = target.generate(**inputs, **options, **{CACHE_NAME: prefilled(target, **beginning)})
    draft_options = {
        "assistant_model": draft,
        "num_assistant_tokens": K,
        "speculation_cache": "preallocated",
    }
    draft_options["verifier_backend"] = "torch"
    with FakeCuda():
        for model in (target, draft):
            model.to("cuda:0")
        inputs, beginning = (
            {name: value.to("cuda:0") for name, value in part.items()}
            for part in (inputs, beginning)
        )
        draft_options[CACHE_NAME] = prefilled(target, **beginning)
        assert_equal_ids(
            expected.sequences,
            target.generate(**inputs, **options, **draft_options).sequences.to("cpu"),
        )


def test_dynamic_cache_serves_models_without_preallocation():
    target, inputs = pair("llama")[0], {"input_ids": torch.tensor([[5, 6, 7]])}
    passed, holes = {CACHE_NAME: DynamicCache(config=target.config)}, torch.tensor([[1, 0, 1]])
    for family, arguments, message in (
        ("bloom", inputs, "it takes no position_ids"),
        ("llama", {**inputs, "attention_mask": holes}, "the attention mask has holes"),
        ("llama", {**inputs, **passed}, ""),  # the cache is the user's, so no second copy is made
    ):
        target, draft = pair(family)
        draft_options = {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": 6}
        draft_options["speculation_stats"] = hf_speculate.SpeculationStats()
        target.generate(**arguments, **draft_options)
        stats, name = draft_options["speculation_stats"], type(target).__name__
        assert stats.cache == "dynamic"
        parts = ("target", "draft") if message else ()
        assert stats.fallbacks == [f"{part} cache: dynamic, because {message}" for part in parts]
        if message:
            with pytest.raises(
                UnsupportedModelError, match=f"for {name}, got 'preallocated': {message}; leave"
            ):
                target.generate(**arguments, **draft_options, speculation_cache="preallocated")


def test_draft_state_with_windows_uses_the_dynamic_cache():
    target, draft = pair("mistral_window")
    options = {"max_new_tokens": 6, "assistant_model": draft, "num_assistant_tokens": K}
    options["speculation_stats"] = hf_speculate.SpeculationStats()
    for draft_options, num in (({}, 0), ({"draft_state": hf_speculate.DraftState()}, 1)):
        target.generate(**ONE_ROW, **options, **draft_options)
        texts = options["speculation_stats"].fallbacks
        assert (
            sum(
                text.startswith("draft cache: dynamic, because growing buffers drop")
                for text in texts
            )
            == num
        )


def test_cache_without_windows_cannot_be_preallocated():
    target, draft = pair("mistral_window")
    options = {**ragged_prompts(1, seed=1, min_len=6), "max_new_tokens": 3 * SLIDING_WINDOW}
    draft_options = {"assistant_model": draft, "num_assistant_tokens": K}
    # without the model's config, the cache treats all layers as full attention
    draft_options[CACHE_NAME] = DynamicCache()
    target(options["input_ids"][:, :4], **{CACHE_NAME: draft_options[CACHE_NAME]})
    with pytest.raises(
        UnsupportedModelError, match="made without its config, and knows no windows"
    ):
        target.generate(**options, **draft_options, speculation_cache="preallocated")
    assert_equal_ids(target.generate(**options), target.generate(**options, **draft_options))
