"""Define a draft source outside the library.

`generate(repeats=Repeats(N))` drafts each row's last N tokens again.
"""

from dataclasses import dataclass, field

import torch

from hf_speculate.draft.base import Drafter
from hf_speculate.draft.source import DraftSource, HistoryKey, hint_of
from hf_speculate.types import DraftOut


@dataclass
class Repeats:
    num_tokens: int
    texts: list = field(default_factory=list)  # new tokens of each row, known after the call
    num_accepted: int = 0


class RepeatSource(DraftSource):
    argument = "repeats"
    hint = hint_of(argument)
    description = "the last tokens again"

    def __init__(self, repeats):
        self.repeats = repeats

    def samples(self, config, do_sample):
        return False  # a proposal is a point mass

    def history_key(self):
        return HistoryKey(None, (f"{self.repeats.num_tokens} repeated tokens", False))

    def make_drafter(self, setup, runners, meet=None):
        return RepeatDrafter(self.repeats.num_tokens)

    def keep(self, token_ids):
        self.repeats.texts.append(list(token_ids))

    def after_call(self, target, stats):
        self.repeats.num_accepted += stats.num_accepted


class RepeatDrafter(Drafter):
    reads_kept = False

    def __init__(self, num_tokens):
        self.max_draft_tokens = self.min_query_len = num_tokens

    def draft(self, request):
        ids = request.query_token_ids[:, -self.max_draft_tokens :][:, : request.num_draft_tokens]
        return DraftOut(ids, torch.full((len(ids),), ids.shape[1], dtype=torch.int32), None, None)

    def rows(self, indices):
        """Do nothing, because rows have no state."""


def make_source(target, values):
    return RepeatSource(values["repeats"])
