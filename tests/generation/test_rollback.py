"""Test stateful processors with rollback, applied to blocks and drafts, against plain decoding."""

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import DRAFTERS, VERIFIERS, assert_equal_ids, each_value, pair
from tests.generation.test_options import Recorder
from tests.support.grammars import Brackets, Grammar, PureGrammar, RollbackGrammar, WatchedGrammar
from tests.support.tiny import make_small_model, noisy_copy, ragged_prompts

K = 4
NUM_NEW = 20
VOCAB_SIZE = 64
# valid only outside brackets
EOS = [token_id for token_id in range(VOCAB_SIZE) if token_id % 8 == 7]


@cache
def smallest() -> tuple[Any, Any]:
    """Return a pair of one-layer models. Tests share them: change neither."""
    target = make_small_model(VOCAB_SIZE, seed=0)
    return hf_speculate.enable(target), noisy_copy(target, 0.1)


def decode(
    processor: Any, inputs: dict, is_assisted: bool = True, family: str = "", **options: Any
) -> Any:
    """Run one call of the target in a pair, greedy by default."""
    target, draft = pair(family) if family else smallest()
    draft_options = {"assistant_model": draft, "num_assistant_tokens": K} if is_assisted else {}
    draft_options = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, **draft_options, **options}
    return target.generate(
        **inputs, **draft_options, logits_processor=LogitsProcessorList([processor])
    )


@pytest.mark.fallback("lock step")
@each_value(eos_token_id=[None, EOS], batch_size=[1, 3], family=["llama", "mistral_window"])
def test_grammar_gives_the_greedy_text_of_plain(family, batch_size, eos_token_id):
    inputs, options = (
        ragged_prompts(batch_size, seed=3),
        {"family": family, "eos_token_id": eos_token_id},
    )
    plain, acceptance = decode(Grammar(Brackets()), inputs, False, **options), []
    for grammar in (Grammar, RollbackGrammar):
        stats = hf_speculate.SpeculationStats()
        assert_equal_ids(
            plain, decode(grammar(Brackets()), inputs, **options, speculation_stats=stats)
        )
        assert stats.lock_step == bool(stats.fallbacks) == (grammar is Grammar)
        acceptance.append(stats.verified_acceptance_rate)
    assert acceptance[1] > acceptance[0]  # drafts follow the grammar too


@each_value(keeps_rows=[False, True], batch_size=[1, 4, 4])
def test_state_is_never_left_on_a_rejected_prefix(batch_size, keeps_rows):
    inputs = ragged_prompts(batch_size, seed=3)
    prompt_len = inputs["input_ids"].shape[1]
    watched = WatchedGrammar(Brackets(), prompt_len)
    ids = decode(watched, inputs, eos_token_id=EOS, return_dict_in_generate=keeps_rows)
    texts = (ids.sequences if keeps_rows else ids)[:, prompt_len:].tolist()
    assert min(watched.num_rollbacks, watched.num_forks) > 0
    assert all(texts[row][: len(followed)] == followed for row, followed in watched.log)
    assert max(len(followed) for _, followed in watched.log) > 2 * K
    assert (len(watched.row_ids) < batch_size) == (batch_size > 1 and not keeps_rows)


@pytest.mark.parametrize(
    ("drafter", "verifier"), [*zip(itertools.cycle(DRAFTERS), VERIFIERS, strict=False)]
)
def test_verifiers_decode_as_with_a_stateless_grammar(verifier, drafter):
    """Include sampling, where texts must keep their distribution, as with a stateless processor."""
    target, draft = smallest()
    inputs, results = ragged_prompts(3, seed=5), []
    draft_options = {
        "assistant_model": draft,
        **VERIFIERS[verifier],
        **DRAFTERS[drafter],
        "seed": [4, 5, 6],
    }
    draft_options |= {
        "max_new_tokens": NUM_NEW,
        "eos_token_id": EOS,
        "num_assistant_tokens": K,
        "repetition_penalty": 1.2,
    }
    for processor in (
        PureGrammar(Brackets(), inputs["input_ids"].shape[1]),
        RollbackGrammar(Brackets()),
    ):
        stats = hf_speculate.SpeculationStats()
        ids = target.generate(
            **inputs, **draft_options, speculation_stats=stats, logits_processor=[processor]
        )
        results.append((ids.tolist(), stats.num_accepted, stats.status, stats.lock_step))
    assert results[0] == results[1]
    assert not results[0][-1]


@pytest.mark.fallback("lock step")
def test_grammar_beside_a_custom_processor_is_forked():
    inputs, (target, draft) = ragged_prompts(3, seed=9), smallest()
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": EOS, "pad_token_id": 0}
    plain = target.generate(**inputs, **options, logits_processor=[Recorder(), Grammar(Brackets())])
    watched = WatchedGrammar(Brackets(), inputs["input_ids"].shape[1])
    options |= {
        "assistant_model": draft,
        "num_assistant_tokens": K,
        "logits_processor": [Recorder(), watched],
    }
    assert_equal_ids(plain, target.generate(**inputs, **options))
    assert (watched.num_rollbacks, watched.num_forks > 0) == (0, True)
    assert watched.followed == plain[:, inputs["input_ids"].shape[1] : -1].tolist()


class Incomparable(RollbackGrammar):
    """Processor that is not hashable and must not be compared."""

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("processors are compared by identity")


def test_used_processor_is_refused_by_a_later_call():
    inputs, used = ragged_prompts(4, seed=3), RollbackGrammar(Brackets())
    expected = decode(used, inputs, eos_token_id=EOS)
    assert len(used.states) < 4
    message = (
        "must be a new one in each call, got a RollbackGrammar that holds the last rows of an "
        "earlier call; make"
    )
    for batch_size in (4, len(used.states)):
        with pytest.raises(UnsupportedGenerationError, match=message):
            decode(used, ragged_prompts(batch_size, seed=3), eos_token_id=EOS)
    assert_equal_ids(expected, decode(RollbackGrammar(Brackets()), inputs, eos_token_id=EOS))
    assert_equal_ids(expected, decode(Incomparable(Brackets()), inputs, eos_token_id=EOS))


class ForbidsAllWhenLost(RollbackGrammar):
    """Processor that returns -inf everywhere after a forbidden token.

    It should leave the scores unchanged there.
    """

    num_lost = 0

    def __call__(self, input_ids, scores):
        processed = super().__call__(input_ids, scores)
        is_lost = torch.tensor([states[-1] is None for states in self.states])
        ForbidsAllWhenLost.num_lost += int(is_lost.sum())
        return processed.masked_fill(is_lost[:, None], -torch.inf)


@pytest.mark.fallback("rejection in place of block")
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_scores_after_a_forbidden_token_are_ignored(verifier):
    """Draft from matches, which ignore the grammar and so contain forbidden tokens."""
    inputs = ragged_prompts(3, seed=1, min_len=8, max_len=16, vocab_size=6)
    options = {
        "max_new_tokens": NUM_NEW,
        "seed": 3,
        **VERIFIERS[verifier],
        "prompt_lookup_num_tokens": K,
    }
    texts, num_lost = [], ForbidsAllWhenLost.num_lost
    for grammar in (RollbackGrammar, ForbidsAllWhenLost):
        options |= {
            "num_assistant_tokens_schedule": "constant",
            "logits_processor": [grammar(Brackets())],
        }
        texts.append(pair("llama")[0].generate(**inputs, **options))
    assert_equal_ids(*texts)
    assert ForbidsAllWhenLost.num_lost > num_lost


def test_processor_of_the_guide_is_complete():
    text = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(
        encoding="utf-8"
    )
    (code,) = re.findall(
        r"^```python\n(from transformers import LogitsProcessor\n.*?)^```$", text, re.M | re.S
    )
    names: dict[str, Any] = {}
    exec(code, names)
    inputs, stats = ragged_prompts(3, seed=3), hf_speculate.SpeculationStats()
    plain = decode(names["NoIdTwice"](), inputs, False)
    assert all(len(set(row)) == NUM_NEW for row in plain[:, -NUM_NEW:].tolist())
    assert_equal_ids(plain, decode(names["NoIdTwice"](), inputs, speculation_stats=stats))
    assert not stats.lock_step
