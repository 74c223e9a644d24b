"""Reads the config of a PARD draft: an ordinary small language model that drafts in parallel."""

from collections.abc import Sequence
from typing import Any

from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.kinds import HeadKind
from hf_speculate.draft.heads.target_parts import TargetShape
from hf_speculate.errors import ConfigError


def describe_pard(
    config: dict[str, Any],
    found: HeadKind,
    name: str,
    shape: TargetShape,
    hidden_layers: Sequence[int] | None = None,
) -> HeadSpec:
    """The spec of a PARD draft, which needs the target's vocabulary and none of its states.

    Args:
        config: content of `config.json`.
        found: the kind and the format.
        name: of the folder.
        shape: of the target.
        hidden_layers: must be None.

    Raises:
        ConfigError: layers are given.
    """
    if hidden_layers is not None:
        raise ConfigError(
            f"aux_layers must be left out for a PARD draft, which reads no hidden states, got {list(hidden_layers)}; "
            "leave it out"
        )
    vocab_size = int(config["vocab_size"])
    return HeadSpec(
        kind="pard",
        format=found.format,
        name=name,
        hidden_layers=(),
        hidden_size=int(config["hidden_size"]),
        target_hidden_size=int(config["hidden_size"]),
        vocab_size=vocab_size,
        draft_vocab_size=min(vocab_size, shape.vocab_size),
        max_position_embeddings=config.get("max_position_embeddings"),
        is_vocab_padded=True,
    )
