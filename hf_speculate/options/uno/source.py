"""The draft source for Uno adapters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.acceptance_tallies import AcceptanceBound, AcceptanceTallies, DraftCounts
from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.source import FactorySource, HistoryKey, hint_of
from hf_speculate.engine.step_weights import StepWeights
from hf_speculate.errors import UnsupportedGenerationError, warn_user
from hf_speculate.options.uno.adapter import UnoAdapter
from hf_speculate.options.uno.drafter import UnoDrafter
from hf_speculate.stats import SpeculationStats

# K in published runs; adapters are trained with blocks of 2 to 16 tokens.
DEFAULT_DRAFT_TOKENS = 8
# Acceptance rates of second draft tokens; the first draft tokens are the target's own.
SECOND_TOKENS_BOUND = AcceptanceBound(least_rate=0.1, num_drafted=200)
_EAGER = "the forward with the adapter runs eagerly, because its hooks are on the target"


class UnoSource(FactorySource):
    """The draft source for a Uno adapter."""

    drafter: UnoDrafter
    drafts_at_once = True
    unsynced = "a Uno adapter"

    def __init__(self, adapter: UnoAdapter, argument: str = "assistant_model"):
        self.adapter, self.argument, self.hint = adapter, argument, hint_of(argument)

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"Uno adapter {self.adapter.name}"

    def settings(self, config: SpeculationConfig) -> SpeculationConfig:
        """Bound the draft length by `DEFAULT_DRAFT_TOKENS` unless the call sets it."""
        for name in ("prompt_lookup_num_tokens", "draft_state"):
            if getattr(config, name) is not None:
                raise UnsupportedGenerationError(
                    f"{name} cannot be combined with a Uno adapter, got one as {self.argument}; "
                    "omit one of them"
                )
        if config.num_assistant_tokens is not None:
            return config
        return replace(
            config,
            num_assistant_tokens=DEFAULT_DRAFT_TOKENS,
            num_assistant_tokens_schedule=config.schedule,
        )

    def start(self, setup: DrafterSetup) -> UnoDrafter:
        drafter = self.adapter(setup)
        if setup.compilation is not None:
            setup.compilation.on_failure(_EAGER)
        return drafter

    def history_key(self) -> HistoryKey:
        adapter = "Uno adapter", self.adapter.source, self.adapter.revision
        return HistoryKey(None, (adapter, False))

    def step_bytes(self, target: PreTrainedModel) -> int | None:
        return StepWeights.of(target).num_bytes + self.drafter.layers.num_bytes

    def after_call(self, target: PreTrainedModel, stats: SpeculationStats) -> None:
        """Warn once if few second draft tokens were accepted."""
        drafted, accepted = stats.drafted_per_position, stats.accepted_per_position
        second = DraftCounts(
            *(counts[1] if len(counts) > 1 else 0 for counts in (drafted, accepted))
        )
        if AcceptanceTallies.of(target).add(self.adapter, second, SECOND_TOKENS_BOUND):
            warn_user(
                f"fewer than {SECOND_TOKENS_BOUND.least_rate:.0%} of the second tokens that "
                f"{self.adapter.name} drafted were accepted; it may be another LoRA than a Uno "
                "adapter, belong to another checkpoint, or need its mask_token_id"
            )


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> UnoSource:
    """Make the draft source for an adapter in `assistant_model` or `drafter`."""
    argument = "drafter" if values.get("assistant_model") is None else "assistant_model"
    return UnoSource(values[argument], argument)
