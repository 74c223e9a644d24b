"""Copying drafts: the Drafter contract, what is copied, and how much."""

import torch

from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings
from hf_speculate.draft.suffix_store import SuffixStore
from hf_speculate.types import Kept, SampleStrategy
from tests.draft.test_model import DrafterContract, Texts
from tests.tiny import ragged_prompts

GREEDY = SampleStrategy.GREEDY


def draft_of(texts, num=10, num_pads=None, **settings):
    """The drafts of equally long texts, as lists of the tokens that count."""
    drafter = SuffixDrafter(SuffixSettings(**{"max_draft_tokens": 10, "num_pads": num_pads, **settings}))
    return counted(drafter.draft(DraftRequest(torch.tensor(texts), None, num, GREEDY)))


def counted(draft):
    assert draft.token_logits is None
    return [ids[:num] for ids, num in zip(draft.token_ids.tolist(), draft.lens.tolist(), strict=True)]


class TestSuffixDrafter(DrafterContract):
    draws = False

    def make(self, batch_size, attention_mask=None):
        pads = None if attention_mask is None else attention_mask.argmax(1).tolist()
        return SuffixDrafter(SuffixSettings(max_draft_tokens=16, num_pads=pads)), None

    def texts(self, batch_size, seed=3):
        """Prompts of two words, so that every end stood before."""
        prompts = ragged_prompts(batch_size, seed=seed, vocab_size=3)
        return Texts(self.make(batch_size, prompts["attention_mask"]), prompts)


def test_what_followed_the_latest_longest_match_is_copied():
    assert draft_of([[1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 2, 3]]) == [[5, 8, 3, 6, 7, 2]]
    assert draft_of([[1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 2, 3]], max_match_len=1) == [[6, 7, 2, 3]]


def test_a_row_without_a_match_drafts_nothing_and_a_longer_match_more():
    draft = SuffixDrafter(SuffixSettings(10)).draft(
        DraftRequest(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 5]]), None, 10, GREEDY)
    )
    assert draft.lens.tolist() == [0, 4]
    assert draft.token_ids.tolist() == [[0, 0, 0, 0], [6, 7, 5, 6]]
    text = [*range(1, 30)]
    lens = [len(draft_of([text + text[20 - num : 20]], num=99, max_draft_tokens=9)[0]) for num in range(6)]
    assert lens == [0, 4, 6, 8, 9, 9]


def test_padding_is_not_text():
    assert draft_of([[0, 0, 0, 5], [0, 7, 8, 0]], num_pads=[3, 1]) == [[], []]
    assert draft_of([[0, 0, 0, 5], [0, 7, 8, 0]]) == [[], [7, 8, 0, 7]]


def test_nothing_is_copied_past_an_end_of_text():
    text = [1, 2, 3, 4, 5, 1, 2]
    assert draft_of([text], eos_token_ids=frozenset([4, 60])) == [[3, 4]]
    assert draft_of([text], eos_token_ids=frozenset([9])) == [[3, 4, 5, 1, 2, 3]]


def test_a_row_that_gained_nothing_has_ended():
    drafter = SuffixDrafter(SuffixSettings(10))
    texts = torch.tensor([[5, 6, 7, 5], [5, 6, 7, 5]])
    assert counted(drafter.draft(DraftRequest(texts, None, 2, GREEDY))) == [[6, 7], [6, 7]]
    kept = Kept(torch.tensor([[6, 8], [-1, -1]]), torch.tensor([2, 0], dtype=torch.int32))
    assert counted(drafter.draft(DraftRequest(texts, None, 2, GREEDY, kept=kept))) == [[], []]
    kept = Kept(torch.tensor([[6], [-1]]), torch.tensor([1, 0], dtype=torch.int32))
    assert counted(drafter.draft(DraftRequest(texts, None, 2, GREEDY, kept=kept))) == [[8, 6], []]


def test_the_store_is_copied_from_where_its_match_is_longer():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    assert draft_of([[3, 9, 2, 3]], store=store) == [[4, 5]]
    assert draft_of([[2, 3, 9, 2, 3]], store=store) == [[9, 2, 3, 9, 2, 3]]  # as long here, and the row's own
    assert draft_of([[9, 2, 3]], store=store, vocab_size=5) == [[4]]
    assert draft_of([[3, 8, 2, 3]], store=store, vocab_size=4) == [[8, 2, 3, 8]]  # of the longer match nothing is known
    assert draft_of([[9, 2, 3]], store=store, eos_token_ids=frozenset([4])) == [[4]]
