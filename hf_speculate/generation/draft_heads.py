"""Draft heads in a call: found by name or by `use_mtp`, and made its drafter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.engine.model_state import model_state
from hf_speculate.errors import UnsupportedGenerationError
from hf_speculate.generation.draft_source import DraftSource


def named_head(model: PreTrainedModel, assistant: Any) -> Any:
    """The draft head that `assistant_model` names by folder or id, loaded once; any other assistant as it is."""
    return model_state(model).heads.get(assistant, model) if isinstance(assistant, str | Path) else assistant


def own_mtp_head(model: PreTrainedModel) -> DraftHead:
    """The MTP layers of the target's checkpoint, loaded once."""
    return model_state(model).heads.get(str(model.config.name_or_path), model)


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
