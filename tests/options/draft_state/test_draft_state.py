"""Test that a `DraftState` avoids reading tokens twice across calls, and changes nothing else."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from hf_speculate import DraftState, SpeculationStats
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import ConfigError
from tests.cases import assert_equal_ids, pair
from tests.generation.test_caches import STATE_TOLERANCE
from tests.reliability.faults import Fault, FaultyStreamer, Mistake
from tests.support.compiled_calls import compile_config, small_pair
from tests.support.tiny import PAD_TOKEN_ID, noisy_copy, ragged_prompts

NUM_NEW = 12
K = 3
SAID = [[41, 42, 43], [44], [45, 46]]  # tokens added after an answer, by row or turn


def padded(rows):
    """Return rows of ids as left-padded inputs."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD_TOKEN_ID] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def answers(output, inputs, end=None):
    """Return each row's prompt and answer, without padding after its end."""
    texts, prompt_len = [], inputs["input_ids"].shape[1]
    for row, mask in zip(output.tolist(), inputs["attention_mask"], strict=True):
        new = row[prompt_len:]
        texts.append(
            row[prompt_len - int(mask.sum()) : prompt_len]
            + (new[: new.index(end) + 1] if end in new else new)
        )
    return texts


def say(target, draft, inputs, state=None, **options):
    """Run one turn; return ids, statistics and the widths of the draft's inputs."""
    stats = SpeculationStats()
    draft_options = {
        "assistant_model": draft,
        "draft_state": state,
        "speculation_stats": stats,
        "num_assistant_tokens": K,
    }
    widths: list[int] = []
    watched = torch.nn.Identity() if "compile_config" in options else draft.get_input_embeddings()
    handle = watched.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    ids = target.generate(**inputs, **{"max_new_tokens": NUM_NEW, **draft_options, **options})
    handle.remove()
    return ids, stats, widths


def assert_holds_what_its_texts_give(state, draft):
    """Assert that the states equal those of a draft that has read only the text of each row."""
    for row, text in enumerate(state._saved.token_ids):
        cache = DynamicCache()
        if text:
            with torch.no_grad():
                draft(input_ids=torch.tensor([text]), **{CACHE_NAME: cache}, use_cache=True)
        for layer, states in zip(cache.layers, state._saved.kv_states, strict=bool(text)):
            for saved, expected in ((layer.keys, states.keys), (layer.values, states.values)):
                assert torch.allclose(
                    saved[0], expected[row, :, : len(text)], atol=STATE_TOLERANCE, rtol=0
                )


def assert_turns_are_the_same(target, draft, batch_size, end_after=None, **options):
    """Compare texts, drafts and draft inputs over several turns with and without the state."""
    state, inputs = DraftState(), ragged_prompts(batch_size, seed=1, min_len=4, max_len=9)
    for turn in range(3):
        if end_after is not None:  # an id from the first row, so rows end at different times
            options["eos_token_id"] = int(
                target.generate(**inputs, max_new_tokens=NUM_NEW)[0, end_after - NUM_NEW]
            )
        num_saved, prompt_len = state.num_tokens, inputs["input_ids"].shape[1]
        ids, stats, widths = say(target, draft, inputs, state, **options)
        expected_ids, expected, expected_widths = say(target, draft, inputs, None, **options)
        assert_equal_ids(expected_ids, ids)
        assert (stats.num_accepted, stats.num_drafted) == (
            expected.num_accepted,
            expected.num_drafted,
        )
        assert_holds_what_its_texts_give(state, draft)
        assert expected_widths[0] == prompt_len + 1
        # With a draft state, finished rows stay in the batch.
        assert widths[1:] == expected_widths[1:] or batch_size > 1
        assert widths[0] == prompt_len + 1 - num_saved or (
            batch_size > 1 and turn and widths[0] < prompt_len
        )
        texts = answers(ids, inputs, options.get("eos_token_id"))
        inputs = padded([text + SAID[row] for row, text in enumerate(texts)])
    assert stats.num_accepted > 0


@pytest.mark.parametrize(
    ("family", "batch_size", "end_after", "options"),
    [
        ("llama", 1, None, {}),
        ("llama", 3, None, {"repetition_penalty": 1.3, "assistant_confidence_threshold": 0.3}),
        (
            "llama",
            3,
            None,
            {"do_sample": True, "seed": 3, "verifier": "coupled", "repetition_penalty": 1.2},
        ),
        ("llama", 3, 4, {"speculation_cache": "dynamic"}),
        (
            "llama",
            3,
            4,
            {"speculation_cache": "preallocated", "num_assistant_tokens_schedule": "heuristic"},
        ),
        ("mistral_window", 3, None, {}),
    ],
)
def test_later_turns_read_new_tokens_only(family, batch_size, end_after, options):
    """Let rows end early, which keeps them up to the last token that was read."""
    assert_turns_are_the_same(*pair(family), batch_size, end_after=end_after, **options)


@pytest.mark.parametrize("scripted", [(K, 0, 0)], indirect=True)
@pytest.mark.parametrize("cache_kind", ["dynamic", "preallocated"])
def test_tokens_fed_to_ended_rows_are_not_kept_as_text(cache_kind, scripted):
    """Let finished rows fall behind the others in plain steps between drafted rounds."""
    assert_turns_are_the_same(*pair("llama"), 3, end_after=4, speculation_cache=cache_kind)


@pytest.mark.parametrize(
    "own",
    [
        {"prompt_lookup_num_tokens": 4},
        {"assistant_early_exit": 1, "assistant_model": None},
        # States are copied out of the pool.
        {"compile_config": compile_config(), "num_assistant_tokens": 2},
    ],
)
def test_draft_state_changes_no_draft_of_other_sources(own):
    target, draft = small_pair("llama") if "compile_config" in own else pair("llama")
    state, text = DraftState(), [5, 6, 7, 5, 6, 7, 5, 6]
    for turn in range(3):
        (ids, stats, _), (expected_ids, expected, _) = (
            say(target, draft, padded([text]), memory, **own) for memory in (state, None)
        )
        assert_equal_ids(expected_ids, ids)
        assert stats.num_accepted == expected.num_accepted
        assert stats.rounds_by_draft_len == expected.rounds_by_draft_len
        assert stats.compiled == (["target", "draft"] if "compile_config" in own else [])
        if "assistant_model" not in own:
            assert_holds_what_its_texts_give(state, draft)
        text = [*ids[0].tolist(), *SAID[turn]]
    assert state.num_tokens > 8


OTHERS = {
    "draft": lambda draft, row: (noisy_copy(draft, 0.1, seed=4), [row]),
    "batch size": lambda draft, row: (draft, [row, row]),
    "dtype": lambda draft, row: (draft.to(torch.float32), [row]),
    "text": lambda draft, row: (draft, [[1, *row]]),
    "edited text": lambda draft, row: (draft, [[*row[:10], 50, *row[11:]]]),
    "weights object": lambda draft, row: (copy.deepcopy(draft), [row]),
    "adapter": lambda draft, row: (draft.set_adapter("other") or draft, [row]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_mismatched_state_is_rebuilt(other):
    target = pair("mistral_window")[0]
    draft, state = noisy_copy(target), DraftState()
    if other == "adapter":
        lora = LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False)
        draft = get_peft_model(draft, lora, adapter_name="one").to(torch.float64)
        draft.add_adapter("other", lora)
    ids, _, _ = say(target, draft, padded([[5, 6, 7, 8, 9]]), state)
    draft, rows = OTHERS[other](draft, [*ids[0].tolist(), 30])
    plain = target.generate(**padded(rows), max_new_tokens=NUM_NEW)
    ids, _, widths = say(target, draft, padded(rows), state)
    assert_equal_ids(plain, ids)
    # Tokens before the edit are kept.
    assert widths[0] == len(rows[0]) + 1 - 10 * (other == "edited text")
    assert state.num_tokens


def test_state_is_empty_after_a_reset_or_a_failed_call():
    target, draft = pair("llama")
    state = DraftState()
    for _ in range(2):
        ids, _, _ = say(target, draft, padded([[5, 6, 7]]), state)
        assert 3 + NUM_NEW - K - 1 <= state.num_tokens < 3 + NUM_NEW
        # Layers, keys and values, heads, width, bytes.
        assert state.num_bytes == state.num_tokens * 2 * 2 * 2 * 8 * 8
        state.reset()
        assert (state.num_tokens, state.num_bytes) == (0, 0)
    say(target, draft, padded([[5, 6, 7]]), state)
    streamer = FaultyStreamer(Fault(6, Mistake("on purpose")), "put")
    with pytest.raises(Mistake):
        say(target, draft, padded([ids[0].tolist()]), state, streamer=streamer)
    assert (state.num_tokens, state.num_bytes) == (0, 0)


def test_window_layers_with_dropped_states_are_not_kept():
    target, draft = pair("mistral_window")
    text = torch.randint(1, 64, (230,), generator=torch.Generator().manual_seed(2)).tolist()
    for cache_kind, is_held in (("auto", True), ("preallocated", False)):
        state = DraftState()
        say(target, draft, padded([text]), state, speculation_cache=cache_kind)
        assert (state.num_tokens > 230) == is_held
        assert is_held or not state.num_tokens
        plain = target.generate(**padded([[*text, 9]]), max_new_tokens=NUM_NEW)
        assert_equal_ids(
            plain, say(target, draft, padded([[*text, 9]]), state, speculation_cache=cache_kind)[0]
        )


def test_draft_state_needs_a_draft_model():
    for state, draft_options in (
        ({}, {}),
        (DraftState(), {}),
        (DraftState(), {"prompt_lookup_num_tokens": 3}),
    ):
        with pytest.raises(ConfigError, match="draft_state must"):
            pair("llama")[0].generate(
                torch.tensor([[5, 6, 7]]), max_new_tokens=3, draft_state=state, **draft_options
            )
