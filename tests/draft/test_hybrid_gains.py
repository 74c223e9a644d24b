"""The hybrid drafter keeps as many tokens a round as the better of copying and of its model, whatever the text."""

import random

import pytest
import torch

from hf_speculate.draft.base import DrafterDefaults, DraftRequest
from hf_speculate.draft.hybrid import HybridDrafter
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings, point_masses
from hf_speculate.types import Kept, SampleStrategy

NUM_PROMPT, NUM_NEW = 120, 600
NUM_MODEL, NUM_COPIED = 5, 10
SLACK = 1.01  # a few rounds are spent on finding out which of the two is better
GREEDY = SampleStrategy.GREEDY


class Oracle(DrafterDefaults):
    """In place of a draft model: proposes what comes, but for tokens at which it errs."""

    def __init__(self, text: list[int], acceptance: int):
        generator = random.Random(7)
        self.text = text
        self.knows = [generator.randrange(100) < acceptance for _ in text]
        self.num_read = 0
        self.num_runs = 0

    def draft(self, request):
        num_draft_tokens = request.num_draft_tokens
        self.num_runs += 1
        places = range(self.num_read, min(self.num_read + num_draft_tokens, len(self.text)))
        return point_masses([[self.text[at] if self.knows[at] else -2 for at in places]], torch.device("cpu"))


def phrases(generator, num: int) -> list[int]:
    """Text of a few phrases that come again and again."""
    known = [[generator.randrange(1000) for _ in range(40)] for _ in range(4)]
    text: list[int] = []
    while len(text) < num:
        phrase = generator.choice(known)
        begin = generator.randrange(20)
        text += phrase[begin : begin + generator.randrange(10, 30)]
    return text[:num]


def news(generator, num: int) -> list[int]:
    """Text in which pairs of words come again by chance."""
    return [generator.randrange(30) for _ in range(num)]


def of_both(generator, num: int) -> list[int]:
    """One and the other in turn, 50 tokens each."""
    copied, new = phrases(generator, num), news(generator, num)
    return [(copied if at // 50 % 2 else new)[at] for at in range(num)]


CATEGORIES = {"copied": (phrases, 50), "new": (news, 80), "both": (of_both, 80), "both, model poor": (of_both, 40)}


def num_rounds(drafter, oracle: Oracle, text: list[int]) -> int:
    """Rounds until the text is written; a round adds the drafted tokens that are right, and one more."""
    length, seen, kept, rounds = NUM_PROMPT, 0, None, 0
    while length < len(text):
        oracle.num_read = length
        draft = drafter.draft(DraftRequest(torch.tensor([text[seen:length]]), None, NUM_COPIED, GREEDY, kept=kept))
        proposed = draft.token_ids[0, : int(draft.lens[0])].tolist()
        agrees = [one == other for one, other in zip(proposed, text[length:], strict=False)]
        num = [*agrees, False].index(False)
        is_own = draft.cached is None or draft.cached.is_own[0]
        ahead = draft.token_ids.shape[1] - 1 if draft.cached is None else draft.cached.num_ahead
        seen = min(length + min(ahead, num if is_own else 0), len(text) - 1)
        new_ids = text[length : length + num + 1]
        kept = Kept(torch.tensor([new_ids]), torch.tensor([len(new_ids)], dtype=torch.int32))
        length += len(new_ids)
        rounds += 1
    return rounds


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_hybrid_needs_no_more_rounds_than_the_better_of_the_two(category):
    make, acceptance = CATEGORIES[category]
    rounds = {"copying": 0, "model": 0, "hybrid": 0}
    for seed in range(2):
        text = make(random.Random(seed), NUM_PROMPT + NUM_NEW)
        settings = SuffixSettings(max_draft_tokens=NUM_COPIED)
        oracles = [Oracle(text, acceptance) for _ in rounds]
        drafters = {
            "copying": SuffixDrafter(settings),
            "model": HybridDrafter(oracles[1], SuffixSettings(max_draft_tokens=1, max_match_len=1), NUM_MODEL),
            "hybrid": HybridDrafter(oracles[2], settings, NUM_MODEL),
        }
        drafters["model"]._prefers_match = lambda row, num_model: False
        for (name, drafter), oracle in zip(drafters.items(), oracles, strict=True):
            rounds[name] += num_rounds(drafter, oracle, text)
        assert oracles[2].num_runs <= oracles[1].num_runs
    assert rounds["hybrid"] <= SLACK * min(rounds["copying"], rounds["model"]), rounds
    if category != "new":
        assert rounds["hybrid"] < 0.96 * min(rounds["copying"], rounds["model"]), rounds
