"""Names the methods to decode that are measured against each other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.verify.base import check_verifier, is_lossless

PLAIN, TRANSFORMERS, OURS = "plain", "transformers", "ours"
_ADAPTIVE = "adaptive"


class DraftLen(NamedTuple):
    """How many tokens a round drafts: `num` in every round, or with `is_adaptive` up to `num` (None: the default)."""

    num: int | None
    is_adaptive: bool

    @property
    def label(self) -> str:
        """For the name of a method."""
        if not self.is_adaptive:
            return f"K = {self.num}"
        return _ADAPTIVE if self.num is None else f"{_ADAPTIVE} up to {self.num}"

    @property
    def fields(self) -> dict[str, Any]:
        """What `generate()` is told."""
        schedule = {"num_assistant_tokens_schedule": _ADAPTIVE if self.is_adaptive else "constant"}
        return schedule if self.num is None else {"num_assistant_tokens": self.num} | schedule


@dataclass(frozen=True)
class Method:
    """One method to decode.

    Args:
        name: unique among those that are measured together.
        engine: `PLAIN`, `TRANSFORMERS` (its assisted generation) or `OURS`.
        fields: of `SpeculationConfig`; of transformers' engine only those that set the number of tokens.
        do_sample: whether tokens are drawn.
        is_lossy: whether the text's law is another than plain decoding's.
    """

    name: str
    engine: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    do_sample: bool = False
    is_lossy: bool = False

    @property
    def verifier(self) -> str:
        """Its name; empty where nothing of ours verifies."""
        return str(self.fields.get("verifier", ""))

    @property
    def num_assistant_tokens(self) -> int | None:
        """Tokens drafted in every round; None where the number moves, or nothing drafts."""
        is_constant = self.fields.get("num_assistant_tokens_schedule") == "constant"
        return self.fields.get("num_assistant_tokens") if is_constant else None


def parse_draft_lens(text: str) -> list[DraftLen]:
    """Read numbers of tokens from `5,8,adaptive,adaptive:16`.

    Args:
        text: numbers, `adaptive`, and `adaptive:` with the most tokens, between commas.

    Raises:
        ConfigError: it is something else.
    """
    lens = []
    for word in split(text):
        name, colon, most = word.partition(":")
        is_adaptive = name == _ADAPTIVE
        digits = most if is_adaptive else word
        if not digits.isdecimal() and (colon or not is_adaptive):
            raise ConfigError(
                f"--num-assistant-tokens must be numbers, adaptive or adaptive:16 between commas, got {word!r}; "
                "write 3,5,adaptive, say"
            )
        lens.append(DraftLen(int(digits) if digits else None, is_adaptive))
        SpeculationConfig(**lens[-1].fields)
    if not lens:
        raise ConfigError("--num-assistant-tokens must name one number at least, got none; write 5,adaptive, say")
    return lens


def parse_thresholds(text: str) -> list[float]:
    """Read values of `posterior_threshold` between commas.

    Raises:
        ConfigError: one is no number in (0, 1).
    """
    thresholds = []
    for word in split(text):
        try:
            thresholds.append(float(word))
        except ValueError:
            raise ConfigError(
                f"--thresholds must be numbers in (0, 1) between commas, got {word!r}; write 0.05,0.2, say"
            ) from None
        SpeculationConfig(posterior_threshold=thresholds[-1])
    return thresholds


def split(text: str) -> list[str]:
    """The words between commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def default_verifier(do_sample: bool) -> str:
    """The exact verifier that is taken where none is named."""
    return "rejection" if do_sample else "greedy"


def plain_method(do_sample: bool) -> Method:
    """Decoding without drafts."""
    return Method(f"plain, {'sampling' if do_sample else 'greedy'}", PLAIN, do_sample=do_sample)


def assisted_methods(lens: Iterable[DraftLen], do_sample: bool) -> list[Method]:
    """Assisted generation of transformers: with its defaults, and with the first constant number of tokens."""
    constant = [
        Method(f"transformers, {one.label}", TRANSFORMERS, one.fields, do_sample) for one in _constant(lens)[:1]
    ]
    return [Method("transformers, its defaults", TRANSFORMERS, {}, do_sample), *constant]


def our_methods(
    verifiers: Iterable[str], lens: Sequence[DraftLen], do_sample: bool, fields: Mapping[str, Any]
) -> list[Method]:
    """Every verifier with every number of tokens.

    Args:
        verifiers: registered names.
        lens: numbers of tokens.
        do_sample: whether tokens are drawn.
        fields: of `SpeculationConfig`, for all of them.

    Raises:
        ConfigError: a verifier is not registered or does not go with `do_sample`, or a field has a wrong value.
    """
    return [_our_method(verifier, one, do_sample, fields) for verifier in verifiers for one in lens]


def threshold_methods(
    verifiers: Iterable[str],
    thresholds: Sequence[float],
    lens: Sequence[DraftLen],
    do_sample: bool,
    fields: Mapping[str, Any],
) -> list[Method]:
    """The lossy ones of the verifiers with every `posterior_threshold` and every number of tokens.

    Where `fields` leave `posterior_alpha` open it is the threshold's square root, as in the default pair of 0.09 and
    0.3: with one alpha for all, a threshold above it would change nothing.

    Args:
        verifiers: registered names.
        thresholds: in (0, 1).
        lens: numbers of tokens.
        do_sample: whether tokens are drawn.
        fields: of `SpeculationConfig`, for all of them.

    Raises:
        ConfigError: as `our_methods`.
    """
    found = []
    for verifier in verifiers:
        for threshold in thresholds:
            alpha = {"posterior_alpha": round(math.sqrt(threshold), 6)}
            with_it = {**alpha, **fields, "posterior_threshold": threshold}
            methods = [_our_method(verifier, one, do_sample, with_it) for one in lens]
            found += [method for method in methods if method.is_lossy]
    return found


def drift_len(lens: Sequence[DraftLen]) -> DraftLen:
    """The number of tokens that drift is looked at with: constant where one is, as a lossy text depends on it."""
    return next(iter(_constant(lens)), lens[0])


def _our_method(verifier: str, draft_len: DraftLen, do_sample: bool, fields: Mapping[str, Any]) -> Method:
    fields = {**fields, "verifier": verifier, **draft_len.fields}
    config = SpeculationConfig(**fields).resolve(do_sample)
    check_verifier(config)
    threshold = fields.get("posterior_threshold")
    is_lossy = not is_lossless(config)
    name = verifier if threshold is None or not is_lossy else f"{verifier} {threshold:g}"
    return Method(f"{name}, {draft_len.label}", OURS, fields, do_sample, is_lossy)


def _constant(lens: Iterable[DraftLen]) -> list[DraftLen]:
    return [one for one in lens if not one.is_adaptive]
