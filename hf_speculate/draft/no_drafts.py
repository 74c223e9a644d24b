"""Null draft source for calls that decode token by token."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.source import DraftSource, hint_of
from hf_speculate.rows.per_row import PerRow
from hf_speculate.types import DraftOut

if TYPE_CHECKING:
    from hf_speculate.engine.runners import Runners


class NoDrafter(PerRow, Drafter):
    """Drafter that never drafts."""

    max_draft_tokens = 0
    can_join = True

    def draft(self, request: DraftRequest) -> DraftOut:
        raise NotImplementedError


class NoDrafts(DraftSource):
    """Draft source for calls without drafts."""

    drafts = False

    def __init__(self, argument: str, hint: str, *, is_token_by_token: bool = False):
        self.argument, self.hint, self.is_token_by_token = argument, hint, is_token_by_token

    def samples(self, config: SpeculationConfig, do_sample: bool) -> bool:
        return False

    def make_drafter(
        self, setup: DrafterSetup, runners: "Runners", meet: Callable[[], None] | None = None
    ) -> Drafter:
        return NoDrafter()


CONTINUOUS = NoDrafts("continuous batching", "decode static batches")
FORCED_TEXT_ALONE = NoDrafts("grammar_draft", hint_of("grammar_draft"))
COUPLED_ALONE = NoDrafts(
    "verifier='coupled'",
    "set verifier='rejection' to sample as transformers does",
    is_token_by_token=True,
)
