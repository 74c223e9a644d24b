"""What the config readers of all kinds of draft heads have in common."""

from typing import Any, NamedTuple

from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.kinds import HeadKind
from hf_speculate.draft.heads.layer_config import LayerConfig
from hf_speculate.draft.heads.target_parts import TargetShape
from hf_speculate.errors import ConfigError


class ConfigSource(NamedTuple):
    """The config of a draft head, and what it is read for."""

    config: dict[str, Any]  # content of `config.json`
    found: HeadKind
    name: str  # of the folder or repository
    shape: TargetShape
    hidden_layers: tuple[int, ...] | None = None  # given by the caller; None for those of the config

    @property
    def layer_fields(self) -> dict[str, Any]:
        """The part of the config that describes the layers."""
        return self.config.get("transformer_layer_config") or self.config

    def check_no_layers(self, head: str) -> None:
        """Refuse layers that the caller gave.

        Args:
            head: what reads no layers, with the reason.

        Raises:
            ConfigError: layers are given.
        """
        if self.hidden_layers is not None:
            raise ConfigError(f"aux_layers must be left out for {head}, got {list(self.hidden_layers)}; leave it out")

    def spec(self, layers: LayerConfig, hidden_layers: tuple[int, ...], **others: Any) -> HeadSpec:
        """The spec of a head with layers of its own.

        Args:
            layers: as the config describes them.
            hidden_layers: ids of the states that it reads.
            others: fields of the spec that only this kind has.
        """
        config = self.config
        speculators: dict[str, Any] = config.get("speculators_config") or {}
        num_draft_tokens = (speculators.get("proposal_methods") or [{}])[0].get("speculative_tokens")
        target = str((speculators.get("verifier") or {}).get("name_or_path") or "")
        # Muse-Glimmer's assistant has no table, so its config says nothing of a vocabulary.
        vocab_size = int(self.layer_fields.get("vocab_size") or self.shape.vocab_size)
        draft_vocab_size = config.get("draft_vocab_size") or config.get("truncated_vocab_size")
        fields = {
            "default_draft_tokens": None if num_draft_tokens is None else int(num_draft_tokens),
            "target_name": target.rstrip("/").rpartition("/")[2],
            **others,
        }
        return HeadSpec(
            kind=self.found.kind,
            format=self.found.format,
            name=self.name,
            hidden_layers=hidden_layers,
            hidden_size=layers.hidden_size,
            target_hidden_size=int(config.get("target_hidden_size") or layers.hidden_size),
            vocab_size=vocab_size,
            draft_vocab_size=int(draft_vocab_size or vocab_size),
            max_position_embeddings=layers.max_position_embeddings,
            **fields,
        )
