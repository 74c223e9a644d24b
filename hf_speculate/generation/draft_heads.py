"""Turns a draft head that is passed as `assistant_model` into the drafter of a call."""

from dataclasses import replace

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.errors import UnsupportedGenerationError
from hf_speculate.generation.draft_source import ASSISTED


def with_head(config: SpeculationConfig, head: DraftHead) -> SpeculationConfig:
    """The settings of a call that drafts with a head.

    If nobody set a number of tokens, the head's default K bounds it.

    Args:
        config: the call's settings.
        head: the assistant.

    Raises:
        UnsupportedGenerationError: a setting needs a draft model.
    """
    for name in ("prompt_lookup_num_tokens", "draft_state"):
        if getattr(config, name) is not None:
            raise UnsupportedGenerationError(
                f"{name} must be left out with a draft head as assistant_model, got one; leave it out, or "
                f"{ASSISTED.hint}"
            )
    if config.num_assistant_tokens is None and head.default_draft_tokens is not None:
        config = replace(
            config, num_assistant_tokens=head.default_draft_tokens, num_assistant_tokens_schedule=config.schedule
        )
    return replace(config, drafter=head)
