"""A `DraftState` spares the draft model what it has read in earlier calls, and changes nothing else."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, GenerationConfig

import hf_speculate
from hf_speculate import DraftState, SpeculationStats
from hf_speculate.errors import ConfigError
from hf_speculate.models.inferencer import Inferencer
from tests.cases import assert_equal_ids, pair
from tests.generation.test_compiled import compile_config, small_pair
from tests.generation.test_ownership import STATE_TOLERANCE, FailingStreamer
from tests.tiny import PAD_TOKEN_ID, SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

NUM_NEW = 12
K = 3
SAID = [[41, 42, 43], [44], [45, 46]]  # what follows each row's answer in the next turn


def padded(rows):
    """Rows of ids as left-padded inputs."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD_TOKEN_ID] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def rows_of(inputs):
    """The real tokens of each row."""
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def answers(output, inputs, end=None):
    """Each row's prompt and answer; fillers behind an end go."""
    new = output[:, inputs["input_ids"].shape[1] :].tolist()
    real = [row[: row.index(end) + 1] if end in row else row for row in new]
    return [text + ids for text, ids in zip(rows_of(inputs), real, strict=True)]


class Feeds:
    """Widths of what a model's forwards are fed."""

    def __init__(self, model):
        self.model, self.widths = model, []

    def __enter__(self):
        def note(module, args, kwargs):
            self.widths.append(kwargs["input_ids"].shape[1])

        self.handle = self.model.register_forward_pre_hook(note, with_kwargs=True)
        return self

    def __exit__(self, *error):
        self.handle.remove()


def say(target, draft, inputs, state=None, **options):
    """One turn: ids, statistics and the widths that the draft was fed."""
    stats = SpeculationStats()
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": K, **options}
    with Feeds(draft) as feeds:
        ids = target.generate(**inputs, assistant_model=draft, draft_state=state, speculation_stats=stats, **options)
    return ids, stats, feeds.widths


def assert_holds_what_its_texts_give(state, draft):
    """The states are those that the draft has after reading each row's text alone."""
    for row, text in enumerate(state._held.token_ids):
        cache = DynamicCache()
        if text:
            with torch.no_grad():
                draft(input_ids=torch.tensor([text]), past_key_values=cache, use_cache=True)
        for layer, states in zip(cache.layers, state._held.kv_states, strict=bool(text)):
            for one, other in ((layer.keys, states.keys), (layer.values, states.values)):
                assert torch.allclose(one[0], other[row, :, : len(text)], atol=STATE_TOLERANCE, rtol=0)


def assert_turns_are_the_same(target, draft, batch_size, state, num_turns=3, end_after=None, **options):
    """Some turns with the state and without: texts, drafts, and what the draft reads."""
    inputs = ragged_prompts(batch_size, seed=1, min_len=4, max_len=9)
    for turn in range(num_turns):
        if end_after is not None:  # of the first row, so that rows end at different times
            options["eos_token_id"] = int(target.generate(**inputs, max_new_tokens=NUM_NEW)[0, end_after - NUM_NEW])
        num_held = state.num_tokens
        ids, stats, widths = say(target, draft, inputs, state, **options)
        expected_ids, expected, expected_widths = say(target, draft, inputs, None, **options)
        assert_equal_ids(expected_ids, ids)
        assert (stats.num_accepted, stats.num_drafted) == (expected.num_accepted, expected.num_drafted)
        assert_holds_what_its_texts_give(state, draft)
        prompt_len = inputs["input_ids"].shape[1]
        assert expected_widths[0] == prompt_len + 1
        assert widths[1:] == expected_widths[1:] or batch_size > 1  # ended rows stay where a state is kept
        if not turn:
            assert widths[0] == prompt_len + 1
        elif batch_size == 1:
            assert widths[0] == prompt_len + 1 - num_held
            assert widths[0] <= len(SAID[0]) + K + 2
        else:
            assert widths[0] < prompt_len
        texts = answers(ids, inputs, options.get("eos_token_id"))
        inputs = padded([text + SAID[row] for row, text in enumerate(texts)])
    assert stats.num_accepted > 0


@pytest.mark.parametrize(
    ("kind", "batch_size", "cache_kind"),
    [("llama", 1, "auto"), ("llama", 3, "auto"), ("mistral_window", 3, "auto"), ("gpt2", 3, "dynamic")],
)
def test_turns_are_the_same_and_the_draft_reads_what_is_new(kind, batch_size, cache_kind):
    assert_turns_are_the_same(*pair(kind), batch_size, DraftState(), speculation_cache=cache_kind)


@pytest.mark.parametrize(("cache_kind", "schedule"), [("dynamic", "constant"), ("preallocated", "heuristic")])
def test_rows_that_end_early_are_carried_as_far_as_they_were_read(cache_kind, schedule):
    options = {"speculation_cache": cache_kind, "num_assistant_tokens_schedule": schedule}
    assert_turns_are_the_same(*pair("llama"), 3, DraftState(), end_after=4, **options)


@pytest.mark.parametrize("scripted", [(K, 0, 0)], indirect=True)
@pytest.mark.parametrize("cache_kind", ["dynamic", "preallocated"])
def test_what_ended_rows_are_fed_is_not_taken_for_their_text(cache_kind, scripted):
    """In plain steps between drafted rounds, ended rows fall behind those that go on."""
    assert_turns_are_the_same(*pair("llama"), 3, DraftState(), end_after=4, speculation_cache=cache_kind)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3},
        {"assistant_confidence_threshold": 0.3},
        {"do_sample": True, "seed": 3, "top_k": 20},
        {"do_sample": True, "seed": 3, "verifier": "coupled", "repetition_penalty": 1.2},
        {"do_sample": True, "seed": 3, "verifier": "typical"},
    ],
    ids=str,
)
def test_processors_and_verifiers_see_the_same_texts(options):
    assert_turns_are_the_same(*pair("llama"), 3, DraftState(), num_turns=2, **options)


@pytest.mark.parametrize("kind", ["llama", "mistral_window"])
def test_the_targets_cache_may_be_passed_along(kind):
    target, draft = pair(kind)
    state, cache, text = DraftState(), DynamicCache(config=target.config), [5, 6, 7]
    for _ in range(3):
        inputs = padded([text])
        plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
        ids, _, widths = say(target, draft, inputs, state, past_key_values=cache)
        assert_equal_ids(plain, ids)
        text = [*ids[0].tolist(), *SAID[0]]
    assert widths[0] <= len(SAID[0]) + K + 2


def test_beside_prompt_lookup_a_row_copies_and_asks_as_without():
    target, draft = pair("llama")
    state, text = DraftState(), [5, 6, 7, 5, 6, 7, 5, 6]
    for turn in range(3):
        results = [say(target, draft, padded([text]), one, prompt_lookup_num_tokens=4)[:2] for one in (state, None)]
        assert_equal_ids(results[1][0], results[0][0])
        assert results[0][1].num_accepted == results[1][1].num_accepted
        assert results[0][1].rounds_by_draft_len == results[1][1].rounds_by_draft_len
        text = [*results[0][0][0].tolist(), *SAID[turn]]
    assert state.num_tokens


def test_an_early_exit_is_the_same_draft_in_every_call():
    target, _ = pair("llama")
    state, text = DraftState(), [5, 6, 7]
    options = {"assistant_early_exit": 1, "num_assistant_tokens": K, "max_new_tokens": NUM_NEW}
    for _ in range(2):
        num_held, num_read, texts, stats = state.num_tokens, [], [], [SpeculationStats(), SpeculationStats()]
        for one, counts in zip((state, None), stats, strict=True):
            read = []
            layer = target.model.layers[0]  # the target's and the draft's
            handle = layer.register_forward_pre_hook(lambda module, args, read=read: read.append(args[0].shape[1]))
            texts.append(target.generate(**padded([text]), **options, draft_state=one, speculation_stats=counts))
            handle.remove()
            num_read.append(sum(read))
        assert_equal_ids(*texts)
        assert stats[0].num_accepted == stats[1].num_accepted
        assert num_read[1] - num_read[0] == num_held
        text = [*texts[0][0].tolist(), *SAID[0]]
    assert num_held > 3


def test_compiled_rounds_carry_their_states_out_of_the_pool(monkeypatch):
    target, draft = small_pair("llama")
    state, text, read = DraftState(), [5, 6, 7, 8], []
    feed = Inferencer.feed
    monkeypatch.setattr(
        Inferencer, "feed", lambda self, query, cache: (read.append(query.shape[1]), feed(self, query, cache))[1]
    )
    options = {"assistant_model": draft, "num_assistant_tokens": 2, "compile_config": compile_config()}
    for _ in range(2):
        inputs, results, reads = padded([text]), [], []
        for one in (state, None):
            stats, num_before = SpeculationStats(), sum(read)
            ids = target.generate(**inputs, **options, max_new_tokens=NUM_NEW, draft_state=one, speculation_stats=stats)
            results.append((ids, stats.num_accepted, stats.compiled))
            reads.append(sum(read) - num_before)
        assert_equal_ids(results[1][0], results[0][0])
        assert results[0][1:] == results[1][1:]
        assert results[0][2] == ["target", "draft"]
        text = [*results[0][0][0].tolist(), *SAID[0]]
    assert 0 < reads[0] <= len(SAID[0]) + 5 < reads[1]


def test_the_adaptive_schedule_keeps_what_it_never_reads():
    """A draft of the target's size is never called; the state goes on holding what it held."""
    target, draft = pair("llama")
    state = DraftState()
    ids, _, _ = say(target, draft, padded([[5, 6, 7]]), state)
    num_held = state.num_tokens
    text = [*ids[0].tolist(), 8]
    ids, stats, widths = say(target, draft, padded([text]), state, num_assistant_tokens_schedule="adaptive")
    assert widths == [] and not stats.num_drafted
    assert state.num_tokens == num_held
    say(target, draft, padded([[*ids[0].tolist(), 9]]), state)
    assert state.num_tokens > num_held


def test_an_edited_prompt_is_read_from_the_edit_on():
    target, draft = pair("mistral_window")
    state, text = DraftState(), list(range(1, 4 * SLIDING_WINDOW))
    say(target, draft, padded([text]), state)
    text[20] = 50
    expected = say(target, draft, padded([text]))
    ids, stats, widths = say(target, draft, padded([text]), state)
    assert_equal_ids(expected[0], ids)
    assert stats.num_accepted == expected[1].num_accepted
    assert widths[0] == len(text) - 20 + 1


def test_padding_may_differ_between_turns():
    target, draft = pair("llama")
    state = DraftState()
    rows = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    ids, _, _ = say(target, draft, padded(rows), state)
    first, second = answers(ids, padded(rows))
    rows = [first + [20] * 9, [*second, 21]]  # the padding changes sides
    expected = say(target, draft, padded(rows))
    ids, stats, widths = say(target, draft, padded(rows), state)
    assert_equal_ids(expected[0], ids)
    assert stats.num_accepted == expected[1].num_accepted
    assert widths[0] < padded(rows)["input_ids"].shape[1]


@pytest.mark.parametrize("other", ["draft", "batch size", "dtype", "text", "weights object"])
def test_what_does_not_fit_starts_anew(other):
    target, draft = make_model("llama"), None
    hf_speculate.enable(target)
    draft = noisy_copy(target)
    state, text = DraftState(), [5, 6, 7, 8, 9]
    ids, _, _ = say(target, draft, padded([text]), state)
    rows = [[*ids[0].tolist(), 30]]
    if other == "draft":
        draft = noisy_copy(target, 0.1, seed=4)
    elif other == "batch size":
        rows = rows * 2
    elif other == "dtype":
        draft = draft.to(torch.float32)
    elif other == "text":
        rows = [[1, *rows[0]]]
    else:
        draft = copy.deepcopy(draft)
    plain = target.generate(**padded(rows), max_new_tokens=NUM_NEW)
    ids, _, widths = say(target, draft, padded(rows), state)
    assert_equal_ids(plain, ids)
    assert widths[0] == len(rows[0]) + 1
    assert state.num_tokens


def test_another_adapter_of_the_draft_starts_anew():
    target = hf_speculate.enable(make_model("llama"))
    lora = {"r": 2, "init_lora_weights": False}
    draft = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"], **lora), adapter_name="one")
    draft.add_adapter("other", LoraConfig(target_modules=["v_proj"], **lora))
    draft.to(torch.float64).eval()
    state, inputs = DraftState(), padded([[5, 6, 7, 8, 9]])
    options = {"do_sample": True, "seed": 4, "max_new_tokens": 20, "num_assistant_tokens": 4, "assistant_model": draft}
    for name in ("one", "other", "one"):
        draft.set_adapter(name)
        expected = target.generate(**inputs, **options)
        assert_equal_ids(expected, target.generate(**inputs, **options, draft_state=state))
    with draft.disable_adapter():
        expected = target.generate(**inputs, **options)
        assert_equal_ids(expected, target.generate(**inputs, **options, draft_state=state))
    assert state.num_tokens


def test_it_is_empty_after_a_call_that_failed():
    target, draft = pair("llama")
    state = DraftState()
    ids, _, _ = say(target, draft, padded([[5, 6, 7]]), state)
    assert state.num_tokens > 3
    with pytest.raises(RuntimeError, match="on purpose"):
        say(target, draft, padded([ids[0].tolist()]), state, streamer=FailingStreamer(6, RuntimeError))
    assert (state.num_tokens, state.num_bytes) == (0, 0)


def test_window_layers_that_have_dropped_states_leave_nothing():
    target, draft = pair("mistral_window")
    text = torch.randint(1, 64, (230,), generator=torch.Generator().manual_seed(2)).tolist()
    held = []
    for cache_kind in ("auto", "preallocated"):
        state = DraftState()
        say(target, draft, padded([text]), state, speculation_cache=cache_kind)
        held.append(state.num_tokens)
        expected, (ids, _, _) = (
            target.generate(**padded([[*text, 9]]), max_new_tokens=NUM_NEW),
            say(target, draft, padded([[*text, 9]]), state, speculation_cache=cache_kind),
        )
        assert_equal_ids(expected, ids)
    assert held[0] > 230
    assert held[1] == 0


def test_holes_in_the_mask_are_not_carried():
    target, draft = pair("llama")
    state = DraftState()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.tensor([[1, 0, 1, 1]])}
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    assert_equal_ids(plain, say(target, draft, inputs, state)[0])
    assert not state.num_tokens


def test_it_counts_its_bytes_and_forgets_on_reset():
    target, draft = pair("llama")
    state = DraftState()
    assert (state.num_tokens, state.num_bytes) == (0, 0)
    say(target, draft, padded([[5, 6, 7]]), state)
    assert 3 + NUM_NEW - K - 1 <= state.num_tokens < 3 + NUM_NEW
    assert state.num_bytes == state.num_tokens * 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, width, float64
    state.reset()
    assert (state.num_tokens, state.num_bytes) == (0, 0)


def test_a_config_that_carries_it_leaves_what_was_read_in_it():
    target, draft = pair("llama")
    state = DraftState()
    config = GenerationConfig(max_new_tokens=NUM_NEW, pad_token_id=0, num_assistant_tokens=K)
    config.draft_state = state
    target.generate(torch.tensor([[5, 6, 7]]), generation_config=config, assistant_model=draft)
    assert state.num_tokens > 3
    assert copy.deepcopy(config).draft_state is state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_state": {}}, "draft_state must be a DraftState, got dict"),
        ({"draft_state": DraftState()}, "draft_state must come with assistant_model or assistant_early_exit, got neit"),
        ({"draft_state": DraftState(), "prompt_lookup_num_tokens": 3}, "draft_state must come with assistant_model"),
    ],
)
def test_it_belongs_to_a_draft_model(options, message):
    target, _ = pair("llama")
    with pytest.raises(ConfigError, match=message):
        target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, **options)
