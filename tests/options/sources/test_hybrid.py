"""The hybrid drafter: the contract, each row's choice, and what it learns from."""

import pytest
import torch

from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.suffix import SuffixSettings, point_masses
from hf_speculate.options.sources.hybrid import MAX_BEHIND, HybridDrafter, _mixed
from hf_speculate.types import DraftOut, Kept, SampleStrategy
from tests.draft.test_model import make_drafter
from tests.options.heads.rounds import BySum
from tests.tiny import make_model

GREEDY = SampleStrategy.GREEDY


@pytest.fixture(scope="module")
def llama():
    return make_model("llama")


def make(llama, batch_size, num=4, processors=()):
    model, kv_cache = make_drafter(llama, batch_size, processors=processors)
    return HybridDrafter(model, SuffixSettings(max_draft_tokens=8), num, torch.device("cpu")), kv_cache


def kept(*rows, num_rounds=1):
    width = max(map(len, rows))
    ids = torch.tensor([list(row) + [-1] * (width - len(row)) for row in rows])
    return Kept(ids, torch.tensor([len(row) for row in rows], dtype=torch.int32), num_rounds=num_rounds)


def test_a_mixed_round_says_which_rows_the_cache_follows(llama):
    drafter, kv_cache = make(llama, 2)
    copied = [9, 1, 2, 3, 4, 5, 1, 2, 3, 4] * 6
    own = list(range(1, 61))
    draft = drafter.draft(DraftRequest(torch.tensor([copied, own]), kv_cache, 8, GREEDY))
    assert draft.token_ids[0].tolist() == [9, 1, 2, 3, 4, 5, 1, 2]
    assert draft.lens.tolist() == [8, 4]
    assert draft.cached.num_ahead == 3
    assert list(draft.cached.is_own) == [False, True]


def test_rounds_in_which_all_rows_copy_leave_the_cache_and_the_next_run_reads_what_was_missed(llama):
    drafter, kv_cache = make(llama, 1, processors=[BySum()])
    text = [1, 2, 3, 4, 5, 6, 7] * 8
    first = drafter.draft(DraftRequest(torch.tensor([text]), kv_cache, 4, GREEDY))
    assert first.cached.num_ahead == 0  # run for the prompt only
    num_cached, num_behind = kv_cache.num_columns, 0
    for new in ([1, 2, 3], [4, 5, 6]):
        text, num_behind = text + new, num_behind + 3
        draft = drafter.draft(DraftRequest(torch.tensor([text[-num_behind:]]), kv_cache, 4, GREEDY, kept=kept(new)))
        assert draft.token_ids.tolist() == [text[-7:][:4]]
        assert draft.cached.num_ahead == -num_behind
        assert kv_cache.num_columns == num_cached
    text += [50]  # stood nowhere
    last = drafter.draft(DraftRequest(torch.tensor([text[-7:]]), kv_cache, 4, GREEDY, kept=kept([50])))
    assert last.cached is None
    alone, shared_cache = make_drafter(llama, 1, processors=[BySum()])
    expected = alone.draft(DraftRequest(torch.tensor([text]), shared_cache, 4, GREEDY)).token_ids
    assert torch.equal(last.token_ids, expected)


def test_the_model_is_run_before_it_lags_too_far(llama):
    drafter, kv_cache = make(llama, 1)
    text, behind, num_ahead = [1, 2, 3, 4, 5, 6, 7] * 8, 0, -1
    drafter.draft(DraftRequest(torch.tensor([text]), kv_cache, 4, GREEDY))
    while num_ahead < 0:
        text, behind = text + text[-7:][:4], behind + 4
        draft = drafter.draft(DraftRequest(torch.tensor([text[-behind:]]), kv_cache, 4, GREEDY, kept=kept(text[-4:])))
        num_ahead = draft.cached.num_ahead
    assert MAX_BEHIND - 8 <= behind <= MAX_BEHIND


def test_rates_of_matches_follow_every_round_and_the_models_those_in_which_it_drafted(llama):
    drafter, kv_cache = make(llama, 1)
    drafter.draft(DraftRequest(torch.tensor([[1, 2, 3, 1]]), kv_cache, 4, GREEDY))
    (row,), (text,) = drafter._rows, drafter.matches.texts
    assert row.num_model == 4  # the model's tokens: a match of one token is expected to gain less
    assert text.proposal.token_ids == [2, 3, 1, 2]
    text.extend([2, 3, 9])
    row.learn([2, 3, 9], num_rounds=1)
    copied, modelled = text.rates, row.model_rates
    assert (copied.accepted, copied.verified) == ([1.0, 0.97, 0.0, 0.0, 0.0], [1.0, 1.97, 0.0, 0.0, 0.0])
    assert (modelled.accepted, modelled.verified) == ([1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    row.learn([2, 3], num_rounds=2)  # one rejected at once, and a plain step: the sequence still agrees
    assert (modelled.accepted[0], modelled.verified[0]) == (0.97, 1.97)


def test_the_distribution_of_a_matched_token_in_a_mixed_round_is_a_point_mass():
    logits = torch.randn(2, 2, 5)
    drafted = DraftOut(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2]), logits, logits.logsumexp(-1))
    mixed = _mixed(point_masses([[4, 0, 2], []], torch.device("cpu")), drafted, torch.tensor([True, False]))
    assert mixed.token_ids.tolist() == [[4, 0, 2], [3, 4, 0]]
    assert mixed.lens.tolist() == [3, 2]
    assert torch.equal(mixed.token_logits[0].softmax(-1), torch.eye(5)[[4, 0, 2]])
    assert torch.equal(mixed.token_logits[1, :2], logits[1])
    assert torch.allclose(mixed.logsumexp, mixed.token_logits.logsumexp(-1))


def test_rows_keep_what_belongs_to_them(llama):
    drafter, kv_cache = make(llama, 3)
    texts = [[1, 2, 3, 4] * 5, list(range(1, 21)), [9, 8, 7, 6, 5] * 4]
    drafter.draft(DraftRequest(torch.tensor(texts), kv_cache, 4, GREEDY))
    drafter.rows([2, 0])
    kv_cache.rows([2, 0])
    draft = drafter.draft(DraftRequest(torch.tensor([[9, 8], [1, 2]]), kv_cache, 4, GREEDY, kept=kept([9, 8], [1, 2])))
    assert draft.token_ids.tolist() == [[7, 6, 5, 9], [3, 4, 1, 2]]


def test_each_row_takes_the_source_with_more_expected_tokens(llama):
    drafter, kv_cache = make(llama, 2)
    drafter.draft(DraftRequest(torch.tensor([[1, 2, 3, 1], [1, 2, 3, 1]]), kv_cache, 4, GREEDY))
    rows, texts = drafter._rows, drafter.matches.texts
    models, copies = ((row.model_rates, text.rates) for row, text in zip(rows, texts, strict=True))
    for _ in range(8):
        for good, poor in (models, reversed(copies)):
            good.observe([0, 1, 2, 3], 4)
            poor.observe([0], 0)
    matches = [text.proposal for text in texts]
    both = zip(rows, texts, matches, strict=True)
    assert [row.prefers_match(text, match, 4) for row, text, match in both] == [False, True]
