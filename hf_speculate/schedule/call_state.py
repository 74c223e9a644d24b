"""The state of a call under the adaptive schedule: its estimates, its budget, and what the drafter has yet to read."""

from dataclasses import dataclass, field

from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.budget import Budget
from hf_speculate.schedule.costs import CostModel
from hf_speculate.schedule.exploration import Exploration
from hf_speculate.schedule.prior import FIRST_DRAFT_TOKENS, DraftPrior

_GROWTH = 2  # tokens by which a draft may be longer than the last one: estimates of long drafts rest on few rounds


@dataclass
class CallState:
    """The state of a call that the choice of the next round reads."""

    max_draft_tokens: int  # K_max
    prior: DraftPrior
    acceptance: AcceptanceModel
    costs: CostModel
    budget: Budget
    exploration: Exploration = field(default_factory=Exploration)
    num_unread: int = 0  # tokens of each row that the drafter has yet to read
    num_prompt: int = 0  # how many of them the target's prefill read
    num_last: int = 0  # K of the last drafted round
    counts_prompt: bool = True  # whether throughput takes the draft's prefill into account

    @property
    def longest_draft(self) -> int:
        """K of the next round at most."""
        longest = max(self.num_last + _GROWTH, FIRST_DRAFT_TOKENS)
        if not self.costs.num_sizes:
            longest = self.prior.first_draft_tokens
        return min(longest, self.max_draft_tokens)
