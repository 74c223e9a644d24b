"""The draft source for Gemma 4 assistants: transformers' model, or a `Gemma4Assistant`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.acceptance_tallies import AcceptanceBound, AcceptanceTallies, DraftCounts
from hf_speculate.draft.base import Drafter, DrafterSetup
from hf_speculate.draft.source import FactorySource, HistoryKey, hint_of
from hf_speculate.errors import UnsupportedGenerationError, warn_user
from hf_speculate.options.gemma4.assistant import Gemma4Assistant
from hf_speculate.options.gemma4.drafter import Gemma4Drafter
from hf_speculate.stats import SpeculationStats

# Acceptance rates of first draft tokens; vLLM reports 0.84 for the assistant of 26B-A4B.
FIRST_TOKENS_BOUND = AcceptanceBound(least_rate=0.2, num_drafted=200)


class Gemma4Source(FactorySource):
    """The draft source for a Gemma 4 assistant."""

    argument = "assistant_model"
    hint = hint_of(argument)
    unsynced = "a Gemma 4 assistant"

    def __init__(self, assistant: Gemma4Assistant):
        self.assistant = assistant

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"assistant {self.assistant.name}"

    def settings(self, config: SpeculationConfig) -> SpeculationConfig:
        """Bound the draft length by the assistant's generation config, unless the call sets it."""
        for name in ("prompt_lookup_num_tokens", "draft_state"):
            if getattr(config, name) is not None:
                raise UnsupportedGenerationError(
                    f"{name} cannot be combined with a Gemma 4 assistant, got one as "
                    f"{self.argument}; omit one of them"
                )
        default_k = getattr(self.assistant.model.generation_config, "num_assistant_tokens", None)
        if config.num_assistant_tokens is not None or default_k is None:
            return config
        return replace(
            config, num_assistant_tokens=default_k, num_assistant_tokens_schedule=config.schedule
        )

    def start(self, setup: DrafterSetup) -> Drafter:
        return Gemma4Drafter(self.assistant, setup)

    def history_key(self) -> HistoryKey:
        return HistoryKey(
            self.assistant.model, (f"Gemma 4 assistant, {self.assistant.position}", False)
        )

    def step_bytes(self, target: PreTrainedModel) -> int | None:
        return self.assistant.num_step_bytes

    def after_call(self, target: PreTrainedModel, stats: SpeculationStats) -> None:
        """Warn once if few first draft tokens were accepted."""
        drafted, accepted = stats.drafted_per_position, stats.accepted_per_position
        first = DraftCounts(drafted[0], accepted[0]) if drafted else DraftCounts(0, 0)
        if AcceptanceTallies.of(target).add(self.assistant.model, first, FIRST_TOKENS_BOUND):
            warn_user(
                f"fewer than {FIRST_TOKENS_BOUND.least_rate:.0%} of the first tokens that "
                f"{self.assistant.name} "
                "drafted were accepted; it may belong to another checkpoint than the target's, or "
                "need the other "
                "position, which check_positions measures"
            )


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> Gemma4Source:
    """Make the draft source for the assistant in `assistant_model`."""
    assistant = values["assistant_model"]
    return Gemma4Source(
        assistant if isinstance(assistant, Gemma4Assistant) else Gemma4Assistant(assistant)
    )
