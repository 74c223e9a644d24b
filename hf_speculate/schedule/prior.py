"""The prior of a draft source: what its rounds cost before any was measured."""

from dataclasses import dataclass

_EXPENSIVE = 0.3  # plain steps that a draft step takes, above which the first draft is a single token
FIRST_DRAFT_TOKENS = 5  # that need no shorter draft before them


@dataclass(frozen=True)
class DraftPrior:
    """The prior of a draft source: its costs before the first round.

    Args:
        step_ratio: seconds of a draft step over those of a plain step, from the bytes that both read; None if nothing
            is known of the drafter.
        is_parallel: whether one step drafts all tokens of a round.
        is_verification_known: whether the target scores a few tokens about as fast as one; false for quantised weights,
            whose products are often computed row by row.
    """

    step_ratio: float | None = 0.0
    is_parallel: bool = False
    is_verification_known: bool = True

    @property
    def first_draft_tokens(self) -> int:
        """Tokens of the first draft at most: one if its cost is high or not known."""
        if self.step_ratio is None or self.is_expensive or not self.is_verification_known:
            return 1
        return FIRST_DRAFT_TOKENS

    @property
    def is_expensive(self) -> bool:
        """Whether a draft step is known to take a large part of a plain step."""
        return (self.step_ratio or 0.0) > _EXPENSIVE

    @property
    def never_pays(self) -> bool:
        """Whether K drafts and a verification take longer than K + 1 plain steps; only seconds tell if quantised."""
        return self.is_verification_known and (self.step_ratio or 0.0) >= 1 and not self.is_parallel

    def draft_steps(self, num_draft_tokens: int) -> float:
        """Plain steps that a draft of K tokens takes, without reading what came before it."""
        return (self.step_ratio or 0.0) * (1 if self.is_parallel else num_draft_tokens)
