"""The draft source for a loaded head or for MTP layers in the target's checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.acceptance_tallies import AcceptanceBound, AcceptanceTallies, DraftCounts
from hf_speculate.draft.base import Drafter, DrafterSetup
from hf_speculate.draft.named import NamedDrafts
from hf_speculate.draft.source import FactorySource, HistoryKey, hint_of
from hf_speculate.errors import UnsupportedGenerationError, warn_user
from hf_speculate.options.heads.head import DraftHead
from hf_speculate.options.heads.layer_capture import FINAL_STATE
from hf_speculate.options.heads.mtp_checkpoint import SERVED_TARGETS
from hf_speculate.options.heads.round import HeadDrafter
from hf_speculate.stats import SpeculationStats

if TYPE_CHECKING:
    from hf_speculate.engine.runners import Runners

# Acceptance rates of first draft tokens; published heads reach 0.4.
FIRST_TOKENS_BOUND = AcceptanceBound(least_rate=0.2, num_drafted=200)


class HeadSource(FactorySource):
    """The draft source for a head."""

    unsynced = "a draft head"
    samples_with_kernels = True

    def __init__(self, head: DraftHead, argument: str = "assistant_model"):
        self.head, self.argument, self.hint = head, argument, hint_of(argument)

    @property
    def description(self) -> str:  # type: ignore[override]
        return self.head.description

    @property
    def drafts_at_once(self) -> bool:  # type: ignore[override]
        return self.head.drafts_at_once

    def settings(self, config: SpeculationConfig) -> SpeculationConfig:
        """Bound the draft length by the head's default K, unless the call sets its own."""
        if self.argument == "drafter":  # treat the head like any other factory
            return config
        for name in ("prompt_lookup_num_tokens", "draft_state"):
            if getattr(config, name) is not None:
                raise UnsupportedGenerationError(
                    f"{name} cannot be combined with a draft head, got one as {self.argument}; "
                    "omit one of them"
                )
        default_k = self.head.default_draft_tokens
        if config.num_assistant_tokens is not None or default_k is None:
            return config
        return replace(
            config, num_assistant_tokens=default_k, num_assistant_tokens_schedule=config.schedule
        )

    def start(self, setup: DrafterSetup) -> Drafter:
        return self.head(setup)

    def begin(self, setup: DrafterSetup) -> "HeadSource":
        begun: Any = super().begin(setup)
        begun.can_capture = isinstance(begun.drafter, HeadDrafter) and begun.drafter.can_capture
        return begun  # type: ignore[no-any-return]

    def make_drafter(
        self, setup: DrafterSetup, runners: "Runners", meet: Callable[[], None] | None = None
    ) -> Drafter:
        if isinstance(self.drafter, HeadDrafter):
            self.drafter.capture(setup, runners)
        return self.drafter

    def history_key(self) -> HistoryKey:
        return HistoryKey(None, (f"drafter {self.description}", False))

    def step_bytes(self, target: PreTrainedModel) -> int | None:
        return self.head.num_step_bytes(target)

    def after_call(self, target: PreTrainedModel, stats: SpeculationStats) -> None:
        """Warn once if few first draft tokens were accepted, with the likely cause."""
        spec, drafted, accepted = (
            self.head.spec,
            stats.drafted_per_position,
            stats.accepted_per_position,
        )
        first = DraftCounts(drafted[0], accepted[0]) if drafted else DraftCounts(0, 0)
        if not AcceptanceTallies.of(target).add(self.head, first, FIRST_TOKENS_BOUND):
            return
        if FINAL_STATE in spec.hidden_layers:
            cause = (
                "it may belong to another target, or to weights that this one had before it was "
                "changed"
            )
        elif spec.hidden_layers:
            cause = (
                "it may read other layers than it was trained on: measure it with "
                "check_layers(head, target, prompts) "
                "of hf_speculate.tools.checks.layers"
            )
        else:
            cause = "it may belong to another target, or read another vocabulary"
        warn_user(
            f"fewer than {FIRST_TOKENS_BOUND.least_rate:.0%} of the first tokens that {spec.name} "
            "drafted were "
            f"accepted; {cause}"
        )


class MtpSource(HeadSource):
    """The draft source for a target's MTP layers.

    The layers are read from the target's checkpoint on first use.
    """

    argument = "use_mtp"
    hint = hint_of(argument)

    def __init__(self, target: PreTrainedModel):
        self.target = target

    @cached_property
    def head(self) -> DraftHead:  # type: ignore[override]
        name, drafts = str(self.target.config.name_or_path), NamedDrafts.of(self.target)
        head: DraftHead = drafts.get(name, self.target, is_mtp=True)
        return head


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> HeadSource:
    """Make the draft source for a head in `assistant_model` or `drafter`."""
    argument = "drafter" if values.get("assistant_model") is None else "assistant_model"
    return HeadSource(values[argument], argument)


def make_mtp_source(target: PreTrainedModel, values: Mapping[str, Any]) -> MtpSource | None:
    """Make the draft source for `use_mtp`; return None if transformers runs the layers itself."""
    return MtpSource(target) if target.config.model_type in SERVED_TARGETS else None
