"""Reads the config of a PARD draft: an ordinary small language model that drafts in parallel."""

from hf_speculate.draft.heads.config_source import ConfigSource
from hf_speculate.draft.heads.head import HeadSpec


def describe_pard(source: ConfigSource) -> HeadSpec:
    """The spec of a PARD draft, which needs the target's vocabulary and none of its states.

    Args:
        source: the config.

    Raises:
        ConfigError: layers are given.
    """
    source.check_no_layers("a PARD draft, which reads no hidden states")
    config = source.config
    vocab_size = int(config["vocab_size"])
    return HeadSpec(
        kind="pard",
        format=source.found.format,
        name=source.name,
        hidden_layers=(),
        hidden_size=int(config["hidden_size"]),
        target_hidden_size=int(config["hidden_size"]),
        vocab_size=vocab_size,
        draft_vocab_size=min(vocab_size, source.shape.vocab_size),
        max_position_embeddings=config.get("max_position_embeddings"),
        is_vocab_padded=True,
    )
