"""The settings of a call that drafts with a draft head."""

from dataclasses import replace

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.errors import UnsupportedGenerationError
from hf_speculate.generation.draft_source import DraftSource


def with_head(config: SpeculationConfig, head: DraftHead, source: DraftSource) -> SpeculationConfig:
    """The settings of a call that drafts with a head; if they set no number of tokens, its default K bounds it."""
    for name in ("prompt_lookup_num_tokens", "draft_state"):
        if getattr(config, name) is not None:
            raise UnsupportedGenerationError(
                f"{name} must be left out with a draft head, got one with {source.cause}; leave it out, or "
                f"{source.hint}"
            )
    if config.num_assistant_tokens is None and head.default_draft_tokens is not None:
        config = replace(
            config, num_assistant_tokens=head.default_draft_tokens, num_assistant_tokens_schedule=config.schedule
        )
    return replace(config, drafter=head)
