"""A guide of outlines-core fits the protocol of processors that take calls back."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import hf_speculate
from tests.cases import assert_equal_ids, each_value
from tests.tiny import make_law_model, noisy_copy, ragged_prompts

outlines_core = pytest.importorskip("outlines_core", reason="outlines-core is not installed")

VOCAB_SIZE, EOS = 64, 63
K = 4
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789."


class InLockStep(LogitsProcessor):
    """One guide a row, which follows the row's tokens until one does not fit, as EOS never does."""

    def __init__(self, index: Any):
        self.index = index
        self.guides: list[Any] = []  # [B]
        self.num_lost: list[int] = []  # [B] last calls whose token the guide did not take

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.guides:
            self.guides = [outlines_core.Guide(self.index, K + 1) for _ in input_ids]
            self.num_lost = [0] * len(input_ids)
        else:
            for row, token_id in enumerate(input_ids[:, -1].tolist()):
                if self.num_lost[row] or token_id not in self.guides[row].get_tokens() or token_id == EOS:
                    self.num_lost[row] += 1
                else:
                    self.guides[row].advance(token_id, return_tokens=False)
        mask = torch.zeros_like(scores, dtype=torch.bool)
        for row, guide in enumerate(self.guides):
            if not self.num_lost[row]:
                mask[row] = True
                mask[row, guide.get_tokens()] = False
        return scores.masked_fill(mask, -torch.inf)


class TakesBack(InLockStep):
    def rollback(self, num_calls: Sequence[int]) -> None:
        for row, num in enumerate(num_calls):
            num_lost = min(num, self.num_lost[row])
            self.num_lost[row] -= num_lost
            self.guides[row].rollback_state(num - num_lost)

    def rows(self, indices: Sequence[int]) -> None:
        self.guides = [self.guides[row] for row in indices]
        self.num_lost = [self.num_lost[row] for row in indices]

    def fork(self) -> "TakesBack":
        fork = TakesBack(self.index)
        fork.guides, fork.num_lost = copy.deepcopy(self.guides), list(self.num_lost)
        return fork


@pytest.fixture(scope="module")
def index():
    vocabulary = outlines_core.Vocabulary(EOS, {character: [place] for place, character in enumerate(CHARACTERS)})
    return outlines_core.Index(r"[a-z]+([0-9]{2,3}[A-Z]*\.)+", vocabulary)


@each_value(do_sample=[False, True], batch_size=[1, 3])
def test_a_guide_gives_the_text_of_plain(index, batch_size, do_sample):
    target = hf_speculate.enable(make_law_model(VOCAB_SIZE, seed=0))
    inputs, acceptance = ragged_prompts(batch_size, seed=3), []
    options = {"max_new_tokens": 24, "eos_token_id": EOS, "pad_token_id": 0}
    if do_sample:
        options |= {"do_sample": True, "verifier": "coupled", "seed": 2, "top_k": 0}
    plain = target.generate(**inputs, **options, logits_processor=[InLockStep(index)])
    for make in (InLockStep, TakesBack):
        stats = hf_speculate.SpeculationStats()
        own = {"assistant_model": noisy_copy(target, 0.1), "num_assistant_tokens": K, "speculation_stats": stats}
        assert_equal_ids(plain, target.generate(**inputs, **options, **own, logits_processor=[make(index)]))
        assert stats.lock_step == (make is InLockStep)
        acceptance.append(stats.verified_acceptance_rate)
    assert acceptance[0] < acceptance[1]
