"""The constant schedule: the same draft length in every round."""

from hf_speculate.schedule.base import Schedule


class ConstantSchedule(Schedule):
    """Drafts `num_draft_tokens` tokens in every round; 0 decodes token by token."""

    def __init__(self, num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens
