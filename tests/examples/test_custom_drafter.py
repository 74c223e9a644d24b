"""The drafter example: what it learns, what it proposes, and that texts are those of plain decoding."""

import re

import pytest
import torch

import hf_speculate
from hf_speculate.draft.base import DraftRequest
from hf_speculate.types import Kept, SampleStrategy
from tests.cases import assert_equal_ids, pair
from tests.tiny import ragged_prompts

GREEDY = SampleStrategy.GREEDY
NUM_NEW = 24


@pytest.fixture(scope="module")
def drafter_class(import_example):
    return import_example("custom_drafter").BigramDrafter


class Request:
    """What the drafter reads of a `DrafterSetup`."""

    def __init__(self, num_pads):
        self.num_pads, self.device = num_pads, torch.device("cpu")


def told(rows):
    """What was emitted in each row."""
    most = max(map(len, rows))
    ids = torch.tensor([row + [-1] * (most - len(row)) for row in rows])
    return Kept(ids, torch.tensor([len(row) for row in rows], dtype=torch.int32))


def proposed(draft):
    return [ids[:num] for ids, num in zip(draft.token_ids.tolist(), draft.lens.tolist(), strict=True)]


def test_it_proposes_what_followed_and_stops_at_what_it_has_not_seen(drafter_class):
    drafter = drafter_class(Request([0, 2, 3]))
    texts = torch.tensor([[1, 2, 3, 4, 1], [0, 0, 7, 7, 7], [0, 0, 0, 5, 6]])
    draft = drafter.draft(DraftRequest(texts, None, 3, GREEDY))
    assert proposed(draft) == [[2, 3, 4], [7, 7, 7], []]
    assert (draft.token_ids.dtype, draft.lens.dtype) == (torch.int64, torch.int32)
    assert draft.token_logits is None
    drafter.rows([0, 2])
    draft = drafter.draft(DraftRequest(texts[[0, 2], -1:], None, 3, GREEDY, kept=told([[2, 9], [5]])))
    assert proposed(draft) == [[], [6, 5, 6]]  # 9 was never followed; the other row goes round
    draft = drafter.draft(DraftRequest(texts[[0, 2], -1:], None, 4, GREEDY, kept=told([[1], []])))
    assert proposed(draft) == [[2, 9, 1, 2], [6, 5, 6, 5]]  # the newest pair counts


def test_padding_is_not_learnt(drafter_class):
    drafter = drafter_class(Request([3]))
    drafter.draft(DraftRequest(torch.tensor([[0, 0, 0, 5]]), None, 2, GREEDY))
    assert drafter.next_ids == [{}]


def test_rows_may_leave_before_the_first_call(drafter_class):
    drafter = drafter_class(Request([0, 1]))
    drafter.rows([1])
    assert proposed(drafter.draft(DraftRequest(torch.tensor([[0, 3, 3]]), None, 2, GREEDY))) == [[3, 3]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_texts_are_plain(drafter_class, batch_size):
    target, _ = pair("llama")
    inputs, stats = ragged_prompts(batch_size, seed=4), hf_speculate.SpeculationStats()
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": 9}
    ours = target.generate(**inputs, **options, drafter=drafter_class, num_assistant_tokens=4, speculation_stats=stats)
    assert_equal_ids(target.generate(**inputs, **options), ours)
    assert stats.num_drafted > 0


def test_the_script_keeps_some_of_what_it_proposes(run):
    printed = run("custom_drafter.py", "--max-new-tokens", "24")
    assert float(re.search(r"^mean acceptance length (\S+),", printed, re.M)[1]) > 1.1
    assert "texts equal plain decoding's: True" in printed
