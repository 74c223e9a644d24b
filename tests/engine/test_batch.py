"""Test the rows of a batch: their state, drafter input, padding and draft lengths."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.draft.base import Drafter
from hf_speculate.engine import draft_length as draft_lengths
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.draft_length import DraftLength
from hf_speculate.engine.draft_session import DraftSession, RowProgress
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.schedule import Choice, RowOutcome
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import (
    DraftOut,
    RoundRecord,
    SampleStrategy,
    Scored,
    StageSeconds,
    Trimmed,
    Verified,
)
from tests.cases import pair
from tests.schedule.scripted import ScriptedSchedule
from tests.support.tiny import make_model, ragged_prompts


def test_selected_rows_keep_their_state():
    ids = torch.tensor([[0, 5, 6], [1, 2, 3], [0, 0, 9]])
    batch = Batch(ids, torch.tensor([11, 12, 13]), 8, [2, 3, 1])
    assert batch.begin_round().positions.tolist() == [2, 3, 1]
    batch.is_finished = [False, True, False]
    batch.rows([2, 0])
    assert (batch.row_ids, batch.is_finished) == ([2, 0], [False, False])
    assert (batch.num_hidden, batch.num_left) == ([-2, -1], [5, 5])
    assert batch.tokens.token_ids[:, :3].tolist() == [[0, 0, 9], [0, 5, 6]]
    keys = batch.begin_round()
    assert (keys.seeds.tolist(), keys.rounds.tolist(), keys.positions.tolist()) == (
        [13, 11],
        [2, 2],
        [1, 2],
    )


@pytest.mark.parametrize("is_lock_step", [False, True])
def test_drafts_end_with_the_last_row(is_lock_step):
    is_finished = [False, False, True]
    batch = SimpleNamespace(
        num_left=[2, 5, 9],
        draft_limits=[8] * 3,
        is_finished=is_finished,
        row_ids=[0, 1, 2],
        num_rows=3,
    )
    draft_length = DraftLength(ScriptedSchedule([8, 8]), is_lock_step)
    proposed = [[]] * 3
    assert draft_length.next(batch, [8, 8, 8], proposed, 0).num_draft_tokens == 4
    # The drafter cannot serve one of the rows.
    assert draft_length.next(batch, [8, 0, 8], proposed, 0).num_draft_tokens == (
        0 if is_lock_step else 1
    )


def test_logits_of_a_round_stay_within_a_share_of_the_memory(monkeypatch):
    batch = SimpleNamespace(
        num_left=[9] * 3,
        draft_limits=[8] * 3,
        is_finished=[False] * 3,
        row_ids=[0, 1, 2],
        num_rows=3,
    )
    model, lens = make_model("llama"), []
    plan = SimpleNamespace(target=SimpleNamespace(model=model, device=model.device))
    num_bytes = 9 * vocab_size_of(model) * 4  # logits for three rows with two drafted tokens each
    for num_missing in (0, 1, num_bytes):
        memory = 8 * (num_bytes - num_missing)
        monkeypatch.setattr(draft_lengths, "memory_bytes", lambda device, memory=memory: memory)
        max_logits = draft_lengths.max_logits_of(plan)
        draft_length = DraftLength(ScriptedSchedule([8]), max_logits=max_logits)
        lens.append(draft_length.next(batch, [8] * 3, [[]] * 3, 0).num_draft_tokens)
    assert lens == [2, 1, 0]


def test_outcomes_leave_out_finished_and_unserved_rows():
    schedule = ScriptedSchedule([3])
    ids = torch.zeros(3, 3, dtype=torch.int64)
    verified = Verified(ids, [[1], [2, 5], [3]], [3, 2, 0], [0, 1, 0], 0, ids)
    trimmed = Trimmed([0, 2, 1], [False] * 3, [True, False, False], [9, 3, 4])
    rest = DraftOut(ids, ids[:, 0], None, None), Scored(ids), verified, trimmed, StageSeconds(), 0.0
    record = RoundRecord(
        1, [4, 6, 8], [False, True, True], [True, True, False], 3, 1, [0, 7, 5], *rest
    )
    draft_length = DraftLength(schedule)
    draft_length.on_round(record)
    (outcome,) = schedule.outcomes
    assert outcome.rows == [
        RowOutcome(6, 2, 1, 2, is_model=True),
        RowOutcome(8, 0, 0, 1, is_model=False),
    ]
    assert outcome.num_rows == 3
    draft_length.on_round(record._replace(is_served=[False] * 3))
    assert len(schedule.outcomes) == 1


class ProposesNothing(Drafter):
    """Drafter that never finds a match.

    It records its inputs.
    """

    def __init__(self):
        self.queries = []

    def draft(self, request):
        self.queries.append(request.query_token_ids)
        nothing = request.query_token_ids[:, :0]
        return DraftOut(nothing, nothing.sum(1).int(), None, None)


def test_finished_rows_feed_their_last_token_for_other_ranks():
    drafter = ProposesNothing()
    batch = Batch(torch.tensor([[5, 6, 7]]), torch.tensor([0]), 8, [3])
    faults = DraftFaults(SpeculationStats(), "the drafter", torch.device("cpu"), drafter.is_callers)
    drafts, target_cache = (
        DraftSession(drafter, faults, [0], SampleStrategy.GREEDY),
        DynamicKVCache(DynamicCache(), 1),
    )
    drafts.begin(batch)
    for is_finished in (False, True, True):
        batch.is_finished = [is_finished]
        drafts.propose(batch, Choice(2, 2), batch.begin_round(), [2], target_cache)
    assert [query.tolist() for query in drafter.queries] == [[[5, 6, 7]], [[7]], [[7]]]


@pytest.mark.parametrize(
    ("row", "num_real", "kept", "with_padding"),
    [
        (RowProgress(9, 12, prompt_len=5, is_finished=False), 9, 7, 7),
        (RowProgress(9, 12, prompt_len=5, is_finished=True), 9, 7, 7),
        (RowProgress(6, 8, prompt_len=5, is_finished=True), 8, 5, 5),  # the prompt is kept
        # the tokens read so far are kept
        (RowProgress(6, 4, prompt_len=5, is_finished=True), 4, 4, 4),
        (RowProgress(6, 8, prompt_len=5, is_finished=False), 3, 4, 5),  # the padding is kept
    ],
)
def test_draft_cache_keeps_tokens_outside_the_next_query(row, num_real, kept, with_padding):
    assert row.num_kept(num_query=2) == kept
    assert row.num_kept_with_padding(num_query=2, num_real=num_real) == with_padding


def test_ended_row_has_a_score_for_padding_only():
    (target, draft), inputs, pad = pair("llama"), ragged_prompts(3, seed=4), 5
    first = target.generate(**inputs, max_new_tokens=1)[0, -1]
    options = {
        "eos_token_id": int(first),
        "pad_token_id": pad,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    ours = target.generate(
        **inputs, **options, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=6
    )
    assert ours.sequences[0, -5:].tolist() == [pad] * 5
    for scores in ours.scores[1:]:
        assert scores[0, pad] == 0
        assert scores[0].isneginf().sum() == len(scores[0]) - 1
