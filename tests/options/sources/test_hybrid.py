"""Test the hybrid drafter: its contract, the choice for each row, and its learning."""

import pytest
import torch

from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.suffix import SuffixSettings, point_masses
from hf_speculate.options.sources.hybrid import HybridDrafter, mixed_draft
from hf_speculate.schedule import Choice
from hf_speculate.types import DraftOut, SampleStrategy
from tests.cases import assert_decodes_as_plain, pair
from tests.draft.test_model import make_drafter
from tests.options.heads.rounds import BySum
from tests.schedule.scripted import ScriptedSchedule
from tests.support.tiny import make_model, noisy_copy

GREEDY = SampleStrategy.GREEDY


@pytest.fixture(scope="module")
def llama():
    return make_model("llama")


def make(llama, batch_size, num=4, processors=()):
    model, kv_cache = make_drafter(llama, batch_size, processors=processors)
    return HybridDrafter(
        model, SuffixSettings(max_draft_tokens=8), num, torch.device("cpu")
    ), kv_cache


def begin(drafter, texts):
    """Read texts up to their last tokens as prompts, and the last tokens as emitted."""
    drafter.begin(torch.tensor([text[:-1] for text in texts]))
    drafter.look_up([text[-1:] for text in texts])


def draft(drafter, kv_cache, query, num=4):
    return drafter.draft(DraftRequest(torch.tensor(query), kv_cache, num, GREEDY))


def test_mixed_round_names_the_rows_in_the_cache(llama):
    drafter, kv_cache = make(llama, 2)
    copied = [9, 1, 2, 3, 4, 5, 1, 2, 3, 4] * 6
    own = list(range(1, 61))
    begin(drafter, [copied, own])
    drafted = draft(drafter, kv_cache, [copied, own], 8)
    assert drafted.token_ids[0].tolist() == [9, 1, 2, 3, 4, 5, 1, 2]
    assert drafted.lens.tolist() == [8, 4]
    assert drafted.cached.num_ahead == 3
    assert list(drafted.cached.is_own) == [False, True]


def test_model_reads_tokens_emitted_in_rounds_of_proposals(llama):
    drafter, kv_cache = make(llama, 1, processors=[BySum()])
    text = [1, 2, 3, 4, 5, 6, 7] * 8
    begin(drafter, [text])
    for new in ([1, 2, 3], [4, 5, 6]):
        text = text + new
        drafter.look_up([new])
        assert drafter.cut_proposal(4).token_ids.tolist() == [text[-7:][:4]]
        assert kv_cache.num_columns == 0
    text += [50]  # a token without a match
    drafter.look_up([[50]])
    last = draft(drafter, kv_cache, [text])
    assert last.cached is None
    alone, other_cache = make_drafter(llama, 1, processors=[BySum()])
    assert torch.equal(last.token_ids, draft(alone, other_cache, [text]).token_ids)


def test_proposals_of_all_rows_leave_the_cache_alone(llama):
    drafter, kv_cache = make(llama, 1)
    text = [1, 2, 3, 4, 5, 6, 7] * 8
    begin(drafter, [text])
    drafted = draft(drafter, kv_cache, [text])
    assert drafted.cached.num_ahead == -len(text)
    assert kv_cache.num_columns == 0


def test_each_source_learns_from_its_own_rounds(llama):
    drafter, kv_cache = make(llama, 1)
    begin(drafter, [[1, 2, 3, 1]])
    (row,), (text,) = drafter._rows, drafter.matches.texts
    draft(drafter, kv_cache, [[1, 2, 3, 1]])
    assert row.num_model == 4  # a match of one token is expected to gain less
    before = row.model_rates.expected([0])
    drafter.look_up([[2, 3, 9]])
    after = row.model_rates.expected([0])
    assert after > before
    assert text.rates.expected([0]) > 0.3
    drafter.look_up([[9]])  # a round without model drafts
    assert row.model_rates.expected([0]) == after


def test_matched_tokens_in_mixed_rounds_are_point_masses():
    logits = torch.randn(2, 2, 5)
    drafted = DraftOut(
        torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2]), logits, logits.logsumexp(-1)
    )
    mixed = mixed_draft(
        point_masses([[4, 0, 2], []], torch.device("cpu")), drafted, torch.tensor([True, False])
    )
    assert mixed.token_ids.tolist() == [[4, 0, 2], [3, 4, 0]]
    assert mixed.lens.tolist() == [3, 2]
    assert torch.equal(mixed.token_logits[0].softmax(-1), torch.eye(5)[[4, 0, 2]])
    assert torch.equal(mixed.token_logits[1, :2], logits[1])
    assert torch.allclose(mixed.logsumexp, mixed.token_logits.logsumexp(-1))


def test_rows_keep_their_state_after_selection(llama):
    drafter, kv_cache = make(llama, 3)
    texts = [[1, 2, 3, 4] * 5, list(range(1, 21)), [9, 8, 7, 6, 5] * 4]
    begin(drafter, texts)
    draft(drafter, kv_cache, texts)
    drafter.rows([2, 0])
    kv_cache.rows([2, 0])
    drafter.look_up([[9, 8], [1, 2]])
    assert draft(drafter, kv_cache, [[9, 8], [1, 2]]).token_ids.tolist() == [
        [7, 6, 5, 9],
        [3, 4, 1, 2],
    ]


def test_row_takes_the_source_with_more_expected_tokens(llama):
    drafter, _ = make(llama, 2)
    begin(drafter, [[1, 2, 3, 1], [1, 2, 3, 1]])
    rows, texts = drafter._rows, drafter.matches.texts
    models, copies = ((row.model_rates, text.rates) for row, text in zip(rows, texts, strict=True))
    for _ in range(8):
        for good, poor in (models, reversed(copies)):
            good.observe([0, 1, 2, 3], 4)
            poor.observe([0], 0)
    both = zip(rows, texts, strict=True)
    assert [row.prefers_match(text, 3, 4) for row, text in both] == [False, True]


@pytest.mark.usefixtures("scripted")
def test_short_row_beside_a_long_one_keeps_its_text(monkeypatch):
    """Use proposals to move one row far ahead, then call the model with very different rows."""
    monkeypatch.setattr(ScriptedSchedule, "choose", choose_by_turns)
    target, lookup = pair("llama")[0], {"prompt_lookup_num_tokens": 8}
    draft = noisy_copy(make_model("llama", num_hidden_layers=1))
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 9, 11, 12]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    reports = []
    options = {"max_new_tokens": 60, "pad_token_id": 0, "num_assistant_tokens": None}
    options["speculation_callback"] = reports.append
    stats = assert_decodes_as_plain(target, draft, inputs, **options, **lookup)
    assert stats.num_drafted > 0
    proposed = {name for report in reports if report.num_round % 9 for name in report.drafted_by}
    drafted = {
        name for report in reports if report.num_round % 9 == 0 for name in report.drafted_by
    }
    assert proposed <= {"", "prompt lookup"} and "model LlamaForCausalLM" in drafted


def choose_by_turns(schedule, rows, num_rows, max_tokens, num_unread=0):
    """Choose eight rounds with proposals only, then one with the model."""
    schedule.num_unread.append(num_unread)
    num_tokens = min(8, max_tokens)
    is_model = len(schedule.num_unread) % 9 == 0
    return Choice(num_tokens, num_tokens if is_model else 0)
