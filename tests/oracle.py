"""A drafter that knows the text, and is right for as many tokens as a test wants."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_speculate.draft.base import DrafterSetup, DraftRequest
from hf_speculate.types import DraftOut


class Oracle:
    """Drafts each row's text; in round r of row b its first (r + b) mod (K + 1) tokens are right.

    Args:
        texts: [B, N] int64, the tokens after the prompts.
        vocab_size: V.

    Attributes:
        accepted: how many tokens of a draft stayed, over all rows and rounds that were told of.
    """

    def __init__(self, texts: Tensor, vocab_size: int = 64):
        self.texts = texts.tolist()
        self.vocab_size = vocab_size
        self.places = [1] * len(self.texts)  # the token after the prompt is the target's
        self.row_ids = list(range(len(self.texts)))
        self.num_rounds = 0
        self.accepted: set[int] = set()

    def __call__(self, setup: DrafterSetup) -> "Oracle":
        return self

    def draft(self, request: DraftRequest) -> DraftOut:
        kept, num_draft_tokens = request.kept, request.num_draft_tokens
        if kept is not None:
            for row, num in enumerate(kept.num_emitted.tolist()):
                self.places[row] += num
                self.accepted |= {num - 1} if num else set()
        drafts = []
        for row, place in enumerate(self.places):
            num_right = (self.num_rounds + self.row_ids[row]) % (num_draft_tokens + 1)
            text = (self.texts[self.row_ids[row]] + [0] * num_draft_tokens)[place:][:num_draft_tokens]
            drafts.append([token if at < num_right else (token + 1) % self.vocab_size for at, token in enumerate(text)])
        self.num_rounds += 1
        ids = torch.tensor(drafts)
        return DraftOut(ids, torch.full((len(ids),), num_draft_tokens, dtype=torch.int32), None, None)

    def rows(self, indices: Sequence[int]) -> None:
        self.places = [self.places[row] for row in indices]
        self.row_ids = [self.row_ids[row] for row in indices]
