"""Chats of any calls, in any order, give token for token what plain calls without a cache give."""

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

import hf_speculate
from hf_speculate.draft.early_exit import early_exit_model
from tests.tiny import make_law_model, noisy_copy
from tests.tiny_tokenizers import letters_tokenizer

PAD = 0
LETTERS = "_abcdefgh"
VOCAB_SIZE = len(LETTERS)
MAX_LEN = 32  # of a text; a longer one begins anew
NUM_EXAMPLES, NUM_STEPS = 20, 5
MANY_EXAMPLES, MANY_STEPS = 300, 20

TOKENS = st.integers(1, VOCAB_SIZE - 1)
TEXTS = st.lists(TOKENS, min_size=1, max_size=6)
SCHEDULES = ("constant", "heuristic", "adaptive")
CACHE_KINDS = ("auto", "dynamic", "preallocated")
CACHES = ("none", "passed", "returned")


class Ends(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        last, before = input_ids[:, -1], input_ids[:, -2:].sum(1) - input_ids[:, -1]
        return (last + 2 * before) % 7 == 0


class Biases(LogitsProcessor):
    def __call__(self, input_ids, scores):
        biased = (input_ids[:, -1:] + input_ids.shape[1]) % VOCAB_SIZE
        return scores.scatter_add(1, biased, torch.full_like(scores[:, :1], 1.5))


RowWiseEnds = hf_speculate.register_row_wise(type("RowWiseEnds", (Ends,), {}))
RowWiseBiases = hf_speculate.register_row_wise(type("RowWiseBiases", (Biases,), {}))


@cache
def tools(seed: int):
    """A target, a draft of its first layer, the tokenizer."""
    target = make_law_model(VOCAB_SIZE, seed=seed, sharpness=2.0, num_hidden_layers=2)
    draft = noisy_copy(early_exit_model(target, 1), seed=seed)
    return hf_speculate.enable(target), draft, letters_tokenizer(list(LETTERS))


# What plain decoding is not told.
OURS = {"speculation_cache", "num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens"}


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """A call in keywords of `generate()`, and what becomes of the cache."""
    max_new_tokens = draw(st.integers(1, 9))
    own: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min(draw(st.sampled_from([0, 0, 3])), max_new_tokens) or None,
        "eos_token_id": draw(st.lists(TOKENS, max_size=2, unique=True)) or None,
        "stop_strings": draw(st.lists(st.text(LETTERS[1:], min_size=1, max_size=2), max_size=1)) or None,
        "no_repeat_ngram_size": draw(st.sampled_from([0, 0, 3])) or None,
        "speculation_cache": draw(st.sampled_from(CACHE_KINDS)),
    }
    source = draw(st.sampled_from(["model", "lookup", "both"]))
    if source != "lookup":
        schedule = draw(st.sampled_from(SCHEDULES))
        own |= {"num_assistant_tokens": draw(st.integers(1, 5)), "num_assistant_tokens_schedule": schedule}
    if source != "model":
        own["prompt_lookup_num_tokens"] = draw(st.integers(1, 4))
    if draw(st.booleans()):
        own |= {"do_sample": True, "verifier": "coupled", "seed": draw(st.integers(0, 9))}
        own |= {"temperature": draw(st.sampled_from([1.0, 0.7])), "top_k": draw(st.sampled_from([0, 4]))}
    own["stopping_criteria"] = [kind() for kind in draw(st.sampled_from([[], [Ends], [RowWiseEnds]]))]
    own["logits_processor"] = [kind() for kind in draw(st.sampled_from([[], [Biases], [RowWiseBiases]]))]
    return own, draw(st.sampled_from(CACHES))


class Chat(RuleBasedStateMachine):
    """Rows of one text each; calls lengthen them, and the cache goes from call to call where it can."""

    @initialize(seed=st.integers(0, 2), texts=st.lists(TEXTS, min_size=1, max_size=3))
    def begin(self, seed, texts):
        self.target, self.draft, self.tokenizer = tools(seed)
        self._set(texts)

    @rule(call=requests())
    def answer(self, call):
        self._answer(*call)

    def _answer(self, own: dict[str, Any], cache_use: str) -> None:
        plain = {name: value for name, value in own.items() if name not in OURS}
        expected = self.target.generate(**self._inputs(), **plain, tokenizer=self.tokenizer).tolist()
        cache = self.cache
        if cache is None and cache_use == "passed":
            cache = DynamicCache(config=self.target.config)
        more = {"past_key_values": cache, "tokenizer": self.tokenizer}
        drafts = {"assistant_model": self.draft} if "num_assistant_tokens" in own else {}
        more["return_dict_in_generate"] = cache_use == "returned"
        output = self.target.generate(**self._inputs(), **own, **drafts, **more)
        ids = output.sequences if cache_use == "returned" else output
        assert ids.tolist() == expected
        if cache_use == "returned":
            assert cache is None or output.past_key_values is cache
            cache = output.past_key_values
        if cache is not None:
            assert cache.get_seq_length() == ids.shape[1] - 1
            assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        prompt_len = len(self.lines[0])
        if all(PAD not in line[prompt_len:] for line in expected):
            self.lines, self.cache = expected, cache
        else:  # padding between texts is no chat that goes on
            new = [itertools.takewhile(bool, line[prompt_len:]) for line in expected]
            rows = zip(expected, self.pads, new, strict=True)
            self._set([[*line[num_pads:prompt_len], *ids] for line, num_pads, ids in rows])
        if len(self.lines[0]) > MAX_LEN:
            self._set([line[num_pads:][-3:] for line, num_pads in zip(self.lines, self.pads, strict=True)])

    @rule(words=st.lists(TOKENS, min_size=1, max_size=3), call=requests())
    def ask(self, words, call):
        self.lines = [
            line + [1 + (word + row) % (VOCAB_SIZE - 1) for word in words] for row, line in enumerate(self.lines)
        ]
        self._answer(*call)

    @rule(texts=st.lists(TEXTS, max_size=2), data=st.data(), call=requests())
    def change_batch(self, texts, data, call):
        rows = data.draw(st.lists(st.integers(0, len(self.lines) - 1), min_size=1, max_size=3))
        self._set([*(self.lines[row][self.pads[row] :] for row in rows), *texts][:3])
        self._answer(*call)

    def _set(self, texts: list[list[int]]) -> None:
        """Begin with these texts, padded on the left, and no cache."""
        width = max(map(len, texts))
        self.pads = [width - len(text) for text in texts]
        self.lines = [[PAD] * num_pads + text for num_pads, text in zip(self.pads, texts, strict=True)]
        self.cache: DynamicCache | None = None

    def _inputs(self) -> dict[str, torch.Tensor]:
        mask = [[0] * num_pads + [1] * (len(self.lines[0]) - num_pads) for num_pads in self.pads]
        return {"input_ids": torch.tensor(self.lines), "attention_mask": torch.tensor(mask)}


TestChats = Chat.TestCase
TestChats.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=NUM_STEPS, deadline=None)


@pytest.mark.slow
def test_many_long_chats():
    many = settings(max_examples=MANY_EXAMPLES, stateful_step_count=MANY_STEPS, deadline=None)
    run_state_machine_as_test(Chat, settings=many)
