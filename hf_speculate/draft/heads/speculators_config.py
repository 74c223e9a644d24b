"""Fields that all kinds of heads have in the speculators format."""

from typing import Any, NamedTuple


class ProposalFields(NamedTuple):
    """Recommended draft length and target of a speculators config."""

    num_tokens: int | None  # K that it recommends
    target_name: str  # last part of the target's name; empty if there is none


def proposal_of(config: dict[str, Any]) -> ProposalFields:
    """The default K and the target's name, where a speculators config has them.

    Args:
        config: content of `config.json`.
    """
    fields: dict[str, Any] = config.get("speculators_config") or {}
    methods = fields.get("proposal_methods") or [{}]
    num = methods[0].get("speculative_tokens")
    name = str((fields.get("verifier") or {}).get("name_or_path") or "")
    return ProposalFields(None if num is None else int(num), name.rstrip("/").rpartition("/")[2])
