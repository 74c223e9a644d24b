"""Decoding methods to benchmark: plain, transformers' assisted generation, and ours."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.verify.base import check_verifier, is_lossless

PLAIN, TRANSFORMERS, OURS = "plain", "transformers", "ours"
SAMPLING_NAMES = ("temperature", "top_k", "top_p")  # arguments of `generate()` for sampling
_ADAPTIVE = "adaptive"


class DraftLen(NamedTuple):
    """A constant or adaptive draft length."""

    num: int | None  # tokens per round, the maximum if adaptive; None for the default
    is_adaptive: bool

    @property
    def label(self) -> str:
        if not self.is_adaptive:
            return f"K = {self.num}"
        return _ADAPTIVE if self.num is None else f"{_ADAPTIVE} up to {self.num}"

    @property
    def fields(self) -> dict[str, Any]:
        schedule = {"num_assistant_tokens_schedule": _ADAPTIVE if self.is_adaptive else "constant"}
        return schedule if self.num is None else {"num_assistant_tokens": self.num} | schedule


@dataclass(frozen=True)
class Method:
    name: str  # unique among the methods of a comparison
    engine: str  # `PLAIN`, `TRANSFORMERS` (assisted generation or prompt lookup) or `OURS`
    # fields of `SpeculationConfig`; for transformers, only draft length and prompt lookup
    fields: Mapping[str, Any] = field(default_factory=dict)
    do_sample: bool = False  # whether tokens are sampled
    is_lossy: bool = False  # whether the output's distribution differs from plain decoding's
    options: Mapping[str, Any] = field(default_factory=dict)  # other arguments of `generate()`

    @property
    def verifier(self) -> str:
        """Name of the verifier; empty for other engines."""
        return str(self.fields.get("verifier") or "")

    @property
    def num_assistant_tokens(self) -> int | None:
        """The constant draft length; None if it varies or nothing is drafted."""
        is_constant = self.fields.get("num_assistant_tokens_schedule") == "constant"
        return self.fields.get("num_assistant_tokens") if is_constant else None


def parse_draft_len(text: str) -> DraftLen:
    """Parse `5`, `adaptive` or `adaptive:16`."""
    name, colon, max_len = text.partition(":")
    is_adaptive = name == _ADAPTIVE
    digits = max_len if is_adaptive else text
    if not digits.isdecimal() and (colon or not is_adaptive):
        raise ConfigError(
            f"--num-assistant-tokens must be a number, adaptive or adaptive:16, got {text!r}; "
            "write 5 or adaptive"
        )
    draft_len = DraftLen(int(digits) if digits else None, is_adaptive)
    SpeculationConfig(**draft_len.fields)
    return draft_len


def parse_draft_lens(text: str) -> list[DraftLen]:
    lens = [parse_draft_len(word) for word in split(text)]
    if not lens:
        raise ConfigError(
            "--num-assistant-tokens must name at least one number, got none; write 5,adaptive"
        )
    return lens


def parse_thresholds(text: str) -> list[float]:
    try:
        thresholds = [float(word) for word in split(text)]
    except ValueError as error:
        raise ConfigError(
            f"--thresholds must be numbers in (0, 1), got {text!r} ({error}); write 0.05,0.2"
        ) from None
    for threshold in thresholds:
        SpeculationConfig(posterior_threshold=threshold)
    return thresholds


def split(text: str) -> list[str]:
    """Split at commas, without empty or repeated words."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def default_verifier(do_sample: bool) -> str:
    return "rejection" if do_sample else "greedy"


def plain_method(do_sample: bool) -> Method:
    return Method(f"plain, {'sampling' if do_sample else 'greedy'}", PLAIN, do_sample=do_sample)


def assisted_methods(lens: Iterable[DraftLen], do_sample: bool) -> list[Method]:
    """Make the methods of transformers: its defaults, and the first constant draft length."""
    compared = [Method("transformers, defaults", TRANSFORMERS, {}, do_sample)]
    constant = [draft_len for draft_len in lens if not draft_len.is_adaptive and draft_len.num]
    return compared + [
        Method(f"transformers, {draft_len.label}", TRANSFORMERS, draft_len.fields, do_sample)
        for draft_len in constant[:1]
    ]


def lookup_method(num_tokens: int, do_sample: bool) -> Method:
    fields = {"prompt_lookup_num_tokens": num_tokens}
    return Method(f"transformers, lookup {num_tokens}", TRANSFORMERS, fields, do_sample)


def our_methods(
    verifiers: Iterable[str],
    lens: Sequence[DraftLen],
    do_sample: bool,
    fields: Mapping[str, Any],
    thresholds: Sequence[float | None] = (None,),
) -> list[Method]:
    """Combine each verifier with each draft length and threshold.

    Args:
        verifiers: names of verifiers.
        lens: draft lengths.
        do_sample: whether tokens are sampled.
        fields: fields of `SpeculationConfig` shared by all methods.
        thresholds: posterior thresholds, for lossy verifiers only.
            None keeps the default threshold and includes lossless verifiers.
    """
    methods = []
    for verifier, threshold, draft_len in itertools.product(verifiers, thresholds, lens):
        method_fields, name = dict(fields), verifier
        if threshold is not None:
            # As in the defaults, alpha is the square root. A threshold above alpha would have no
            # effect.
            alpha = round(math.sqrt(threshold), 6)
            method_fields = {"posterior_alpha": alpha, **fields, "posterior_threshold": threshold}
            name = f"{verifier} {threshold:g}"
        method_fields |= {"verifier": verifier, **draft_len.fields}
        config = SpeculationConfig(**method_fields).resolve(do_sample)
        check_verifier(config)
        is_lossy = not is_lossless(config)
        if is_lossy or threshold is None:
            methods.append(
                Method(f"{name}, {draft_len.label}", OURS, method_fields, do_sample, is_lossy)
            )
    return methods
