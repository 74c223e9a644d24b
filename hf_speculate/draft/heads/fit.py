"""Why a draft head does not fit a target, from its spec and the target's shape alone."""

from dataclasses import asdict
from typing import Any, NamedTuple

from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.target_parts import TargetShape
from hf_speculate.draft.vocab_mapping import MAX_PADDING


class HeadFit(NamedTuple):
    """Whether a head fits a target."""

    spec: HeadSpec
    target: str  # name or path
    problems: tuple[str, ...]  # why it cannot be used; empty if it can
    notes: tuple[str, ...]  # what may lower the acceptance

    @property
    def ok(self) -> bool:
        """Whether `generate()` takes the head for this target."""
        return not self.problems

    @property
    def level(self) -> str:
        """The worst of what was found: "ok", "warning" or "does not fit"."""
        return "does not fit" if self.problems else "warning" if self.notes else "ok"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {**self._asdict(), "spec": asdict(self.spec), "ok": self.ok, "level": self.level}

    def __str__(self) -> str:
        spec = self.spec
        layers = ", ".join(map(str, spec.hidden_layers)) or "none"
        lines = [
            f"{self.level}: {spec.name} as a draft head for {self.target}",
            f"  kind: {spec.kind}, {spec.format} format",
            f"  reads hidden states of layers: {layers} (-1 is the state after the final norm)",
            f"  drafts {spec.draft_vocab_size:,} of {spec.vocab_size:,} tokens",
            f"  default K: {spec.default_draft_tokens or 'none'}",
        ]
        lines += [f"  does not fit: {text}" for text in self.problems]
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.notes)])


def fit_of(spec: HeadSpec, shape: TargetShape, target: str) -> HeadFit:
    """Whether a head fits a target of this shape and name."""
    problems, notes = [], list(spec.notes)
    if spec.hidden_layers and spec.target_hidden_size != shape.hidden_size:
        problems.append(f"it reads states of width {spec.target_hidden_size}, and the target's are {shape.hidden_size}")
    outside = [layer for layer in spec.hidden_layers if not -1 <= layer <= shape.num_layers]
    if outside:
        problems.append(f"it reads the states of layers {outside}, and the target has layers 0 to {shape.num_layers}")
    if spec.num_target_layers not in (None, shape.num_layers):
        problems.append(f"it is for {spec.num_target_layers} layers, and the target has {shape.num_layers}")
    if abs(spec.vocab_size - shape.vocab_size) > (MAX_PADDING if spec.is_vocab_padded else 0):
        problems.append(f"its vocabulary has {spec.vocab_size} tokens, and the target's {shape.vocab_size}")
    if spec.target_name and shape.name and spec.target_name.lower() != shape.name.lower():
        notes.append(
            f"it was trained for {spec.target_name}, and the target is {shape.name}; the acceptance rate may be low"
        )
    return HeadFit(spec, target, tuple(problems), tuple(notes))
