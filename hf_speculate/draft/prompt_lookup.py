"""Prompt lookup: draft the tokens after an earlier occurrence of a row's last tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.acceptance_rates import SharedRates
from hf_speculate.draft.base import Drafter, DrafterSetup
from hf_speculate.draft.source import VARIANTS, DraftSource, HistoryKey, hint_of, load_entry
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings

if TYPE_CHECKING:
    from hf_speculate.engine.runners import Runners


class PromptLookup(DraftSource):
    """Draft source for calls with prompt lookup."""

    argument = "prompt_lookup_num_tokens"
    hint = (
        hint_of(argument) + ", or hf_speculate.disable(model) for transformers' own prompt lookup"
    )
    description = "prompt lookup"
    varies_len = True
    store: Any = None  # sequences of earlier calls to search as well; None for none

    def settings(self, config: SpeculationConfig) -> SpeculationConfig:
        """Limit the draft length to `prompt_lookup_num_tokens`.

        The result is the maximum draft length unless drafting is disabled.
        """
        num_assistant_tokens, max_tokens = (
            config.num_assistant_tokens,
            config.prompt_lookup_num_tokens,
        )
        if num_assistant_tokens == 0:
            return config
        if isinstance(num_assistant_tokens, Sequence):
            return replace(
                config,
                num_assistant_tokens=[
                    min(limit, max_tokens or limit) for limit in num_assistant_tokens
                ],
            )
        return replace(
            config, num_assistant_tokens=max_tokens, num_assistant_tokens_schedule=config.schedule
        )

    def samples(self, config: SpeculationConfig, do_sample: bool) -> bool:
        return False

    def history_key(self) -> HistoryKey:
        return HistoryKey(None, ("none", True))

    def make_drafter(
        self, setup: DrafterSetup, runners: "Runners", meet: Callable[[], None] | None = None
    ) -> Drafter:
        rates = SharedRates.of_lookups(setup.target)
        return SuffixDrafter(self.suffix_settings(setup), setup.device, lambda: rates)

    def suffix_settings(self, setup: DrafterSetup) -> SuffixSettings:
        """Return the settings for drafting after a match."""
        config = setup.config
        return SuffixSettings(
            max_draft_tokens=config.prompt_lookup_num_tokens or config.max_draft_tokens,
            max_match_len=config.max_matching_ngram_size,
            eos_token_ids=setup.eos_token_ids,
            vocab_size=setup.vocab_size,
            store=self.store,
            num_pads=setup.num_pads,
        )


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> DraftSource:
    """Make the draft source for `prompt_lookup_num_tokens`.

    With a `suffix_store`, the source also searches earlier calls.
    """
    if values.get("suffix_store") is None:
        return PromptLookup()
    source: DraftSource = load_entry(VARIANTS["suffix_store"])(target, values)
    return source
