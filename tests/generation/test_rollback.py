"""Processors with state that can take calls back run inside a block, on the draft too, equal to plain decoding."""

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

import hf_speculate
from tests.cases import ACCEPTED_ALL, CACHES, DRAFTERS, VERIFIERS, Unchanged, assert_equal_ids, each_value, pair
from tests.generation.test_options import Recorder
from tests.grammars import Brackets, Grammar, PureGrammar, RollbackGrammar, Table, WatchedGrammar, masked
from tests.tiny import make_law_model, noisy_copy, ragged_prompts

K = 4
NUM_NEW = 20
VOCAB_SIZE = 64
EOS = [token_id for token_id in range(VOCAB_SIZE) if token_id % 8 == 7]  # outside of brackets only


@cache
def smallest(noise: float = 0.1) -> tuple[Any, Any]:
    """A pair of one layer, for what does not depend on the model. Shared between tests: change neither."""
    target = make_law_model(VOCAB_SIZE, seed=0)
    return hf_speculate.enable(target), noisy_copy(target, noise)


def decode(processor: Any, inputs: dict, draft: Any = None, kind: str = "", **options: Any) -> Any:
    """One call of a pair's target, greedy unless told; `draft` is False for none, None for the pair's."""
    target, near = pair(kind) if kind else smallest()
    own: dict[str, Any] = {}
    if draft is not False:
        own = {"assistant_model": near if draft is None else draft, "num_assistant_tokens": K}
    own = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, **own, **options}
    return target.generate(**inputs, **own, logits_processor=LogitsProcessorList([processor]))


def assert_obeys(machine: Any, ids: torch.Tensor, prompt_len: int, eos: list[int] | None) -> None:
    for row in ids[:, prompt_len:].tolist():
        state = machine.start
        for token_id in row:
            state = machine.step(state, token_id)
            assert state is not None
            if eos is not None and token_id in eos:
                break


@each_value(eos_token_id=[None, EOS], batch_size=[1, 3], kind=["llama", "mistral_window"])
def test_a_grammar_gives_the_greedy_text_of_plain(kind, batch_size, eos_token_id):
    inputs = ragged_prompts(batch_size, seed=3)
    options = {"kind": kind, "eos_token_id": eos_token_id}
    plain = decode(Grammar(Brackets()), inputs, False, **options)
    for keeps_rows in (False, True):
        stats = hf_speculate.SpeculationStats()
        ours = decode(
            RollbackGrammar(Brackets()), inputs, **options, speculation_stats=stats, return_dict_in_generate=keeps_rows
        )
        assert_equal_ids(plain, ours.sequences if keeps_rows else ours)
        assert not stats.lock_step
        assert stats.fallbacks == []
        assert stats.num_accepted > 0
    assert_obeys(Brackets(), plain, inputs["input_ids"].shape[1], eos_token_id)


def test_rows_that_end_at_different_times_leave_the_grammar():
    inputs = ragged_prompts(4, seed=8)
    plain = decode(Grammar(Brackets()), inputs, False, eos_token_id=EOS)
    watched = WatchedGrammar(Brackets(), inputs["input_ids"].shape[1])
    assert_equal_ids(plain, decode(watched, inputs, eos_token_id=EOS))
    assert len(watched.row_ids) < 4


def test_without_the_protocol_a_grammar_moves_rows_in_lock_step():
    inputs, stats = ragged_prompts(3, seed=3), hf_speculate.SpeculationStats()
    plain = decode(Grammar(Brackets()), inputs, False, eos_token_id=EOS)
    assert_equal_ids(plain, decode(Grammar(Brackets()), inputs, eos_token_id=EOS, speculation_stats=stats))
    assert stats.lock_step
    assert "Grammar" in stats.fallbacks[0]


@each_value(keeps_rows=[False, True], batch_size=[1, 4])
def test_the_state_is_never_left_on_a_refused_prefix(batch_size, keeps_rows):
    inputs = ragged_prompts(batch_size, seed=3)
    prompt_len = inputs["input_ids"].shape[1]
    watched = WatchedGrammar(Brackets(), prompt_len)
    ids = decode(watched, inputs, eos_token_id=EOS, return_dict_in_generate=keeps_rows)
    texts = (ids.sequences if keeps_rows else ids)[:, prompt_len:].tolist()
    assert watched.num_rollbacks > 0
    assert watched.num_forks > 0
    for row, followed in watched.log:
        assert texts[row][: len(followed)] == followed
    assert max(len(followed) for _, followed in watched.log) > 2 * K


def test_drafts_obey_the_grammar_so_more_of_them_are_kept():
    inputs = ragged_prompts(1, seed=3)
    acceptance = []
    for processor in (Grammar(Brackets()), RollbackGrammar(Brackets())):
        stats = hf_speculate.SpeculationStats()
        decode(processor, inputs, speculation_stats=stats, max_new_tokens=60)
        acceptance.append(stats.verified_acceptance_rate)
    assert acceptance[1] > acceptance[0] + 0.1


def test_a_draft_that_equals_the_target_is_never_refused():
    target, same = smallest(ACCEPTED_ALL)
    stats = hf_speculate.SpeculationStats()
    options = {"assistant_model": same, "num_assistant_tokens": K, "max_new_tokens": 40, "speculation_stats": stats}
    target.generate(**ragged_prompts(3, seed=4), **options, logits_processor=[RollbackGrammar(Brackets())])
    assert stats.num_accepted == stats.num_verified > 0


@pytest.mark.parametrize(("drafter", "verifier"), zip(itertools.cycle(DRAFTERS), VERIFIERS, strict=False))
def test_every_verifier_decodes_what_it_does_under_the_same_grammar_without_state(verifier, drafter):
    """So sampled texts keep their law: a pure processor's do."""
    target, draft = smallest()
    inputs = ragged_prompts(3, seed=5)
    own = {"assistant_model": draft, **VERIFIERS[verifier], **DRAFTERS[drafter], "seed": [4, 5, 6]}
    results = []
    for processor in (PureGrammar(Brackets(), inputs["input_ids"].shape[1]), RollbackGrammar(Brackets())):
        stats = hf_speculate.SpeculationStats()
        ids = target.generate(
            **inputs,
            **own,
            max_new_tokens=NUM_NEW,
            eos_token_id=EOS,
            num_assistant_tokens=K,
            speculation_stats=stats,
            logits_processor=[processor],
            temperature=0.9 if own["do_sample"] else None,
            repetition_penalty=1.2,
        )
        results.append((ids, stats.num_accepted, stats.status))
        assert not stats.lock_step
    assert_equal_ids(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("cache", CACHES)
def test_plain_steps_between_drafts_move_the_state_on(scripted, cache):
    inputs = ragged_prompts(3, seed=7)
    plain = decode(Grammar(Brackets()), inputs, False, max_new_tokens=40)
    watched, stats = WatchedGrammar(Brackets(), inputs["input_ids"].shape[1]), hf_speculate.SpeculationStats()
    options = {"speculation_cache": cache, "max_new_tokens": 40, "speculation_stats": stats}
    ours = decode(watched, inputs, num_assistant_tokens=None, **options)
    assert_equal_ids(plain, ours)
    assert stats.rounds_by_draft_len[0] > 3
    for row, followed in watched.log:
        assert ours[row, inputs["input_ids"].shape[1] :].tolist()[: len(followed)] == followed


@pytest.mark.parametrize("foreign", [Unchanged, Recorder])
def test_beside_a_foreign_processor_it_is_called_as_in_plain_and_still_forked(foreign):
    target, draft = smallest()
    inputs = ragged_prompts(3, seed=9)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": EOS, "pad_token_id": 0}
    plain = target.generate(**inputs, **options, logits_processor=[foreign(), Grammar(Brackets())])
    watched = WatchedGrammar(Brackets(), inputs["input_ids"].shape[1])
    ours = target.generate(
        **inputs, **options, assistant_model=draft, num_assistant_tokens=K, logits_processor=[foreign(), watched]
    )
    assert_equal_ids(plain, ours)
    assert watched.num_rollbacks == 0
    assert watched.num_forks > 0
    assert watched.followed == plain[:, inputs["input_ids"].shape[1] : -1].tolist()


class ForbidsAllWhenLost(RollbackGrammar):
    """Gives -inf everywhere after a token that it has forbidden, where it should leave the scores as they are."""

    num_lost = 0

    def __call__(self, input_ids, scores):
        processed = super().__call__(input_ids, scores)
        is_lost = torch.tensor([states[-1] is None for states in self.states])
        ForbidsAllWhenLost.num_lost += int(is_lost.sum())
        return processed.masked_fill(is_lost[:, None], -torch.inf)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_what_is_returned_after_a_forbidden_token_does_not_count(verifier):
    """Copies do not obey the grammar, so forbidden tokens are proposed."""
    target, _ = pair("llama")
    inputs = ragged_prompts(3, seed=1, min_len=8, max_len=16, vocab_size=6)
    options = {"max_new_tokens": NUM_NEW, "seed": 3, **VERIFIERS[verifier]}
    options |= {"prompt_lookup_num_tokens": K, "num_assistant_tokens_schedule": "constant"}
    texts, num_lost = [], ForbidsAllWhenLost.num_lost
    for grammar in (RollbackGrammar, ForbidsAllWhenLost):
        stats = hf_speculate.SpeculationStats()
        processors = [grammar(Brackets())]
        texts.append(target.generate(**inputs, **options, logits_processor=processors, speculation_stats=stats))
        assert stats.status == 0
    assert_equal_ids(*texts)
    assert ForbidsAllWhenLost.num_lost > num_lost


@pytest.mark.parametrize("draft_vocab_size", [60, 72])
def test_a_draft_of_another_table_size_is_masked_by_its_own_size(draft_vocab_size):
    inputs, stats = ragged_prompts(2, seed=3, vocab_size=48), hf_speculate.SpeculationStats()
    draft = make_law_model(draft_vocab_size, seed=1)
    plain = decode(Grammar(Brackets()), inputs, False)
    with pytest.warns(UserWarning, match="taken to be the same"):
        ours = decode(RollbackGrammar(Brackets()), inputs, draft, speculation_stats=stats)
    assert_equal_ids(plain, ours)
    assert stats.num_drafted > 0


@st.composite
def tables(draw):
    """Transitions of 1 to 4 states over 2 to 5 kinds of ids; every state can go on."""
    num_states, num_kinds = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    rows = []
    for _ in range(num_states):
        row = draw(st.lists(st.integers(-1, num_states - 1), min_size=num_kinds, max_size=num_kinds))
        if max(row) < 0:
            row[draw(st.integers(0, num_kinds - 1))] = 0
        rows.append(row)
    return rows


@settings(max_examples=12, deadline=None)
@given(table=tables(), num_draft_tokens=st.integers(1, 6), eos=st.sets(st.integers(1, VOCAB_SIZE - 1), max_size=12))
def test_any_automaton_gives_the_greedy_text_of_plain(table, num_draft_tokens, eos):
    target, draft = smallest()
    inputs = ragged_prompts(3, seed=2, min_len=1, max_len=4)
    options = {"max_new_tokens": 12, "eos_token_id": sorted(eos) or None, "pad_token_id": 0}
    plain = target.generate(**inputs, **options, logits_processor=[Grammar(Table(table))])
    ours = target.generate(
        **inputs,
        **options,
        assistant_model=draft,
        num_assistant_tokens=num_draft_tokens,
        logits_processor=[RollbackGrammar(Table(table))],
    )
    assert_equal_ids(plain, ours)


def test_a_processor_with_state_is_none_of_the_pure_ones():
    processors = hf_speculate.BlockLogitsProcessorList([RollbackGrammar(Brackets())])
    assert processors.is_row_wise
    assert len(processors.row_wise_part()) == 0
    assert isinstance(processors[0], hf_speculate.RollbackProcessor)
    assert not isinstance(Grammar(Brackets()), hf_speculate.RollbackProcessor)


def test_rows_of_different_lengths_are_shown_with_their_first_id_repeated_in_front():
    shown = []

    class Shown(RollbackGrammar):
        def __call__(self, input_ids, scores):
            shown.append(input_ids.tolist())
            return masked(self.machine, [None] * len(input_ids), scores)

    processors = hf_speculate.BlockLogitsProcessorList([Shown(Brackets())])
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    scores = torch.zeros(2, 3, 16)
    processors(ids, scores, torch.tensor([[7, 8], [9, -1]]), prefix_lens=[4, 2])
    assert shown == [
        [[1, 2, 3, 4], [5, 5, 5, 6]],
        [[1, 2, 3, 4, 7], [5, 5, 5, 6, 9]],
        [[1, 2, 3, 4, 7, 8], [5, 5, 5, 6, 9, 0]],
    ]


def test_the_processor_in_the_guide_is_a_whole_one():
    text = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(from transformers import LogitsProcessor\n.*?)^```$", text, re.M | re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    inputs, stats = ragged_prompts(3, seed=3), hf_speculate.SpeculationStats()
    plain = decode(names["NoIdTwice"](), inputs, False)
    assert all(len(set(row)) == NUM_NEW for row in plain[:, -NUM_NEW:].tolist())
    assert_equal_ids(plain, decode(names["NoIdTwice"](), inputs, speculation_stats=stats))
    assert not stats.lock_step
