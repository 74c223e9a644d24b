"""The verifier protocol, and the registry of verifiers by name."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.types import DraftOut, NoiseKeys, Stream, Verdict


class Verifier(Protocol):
    """Rule that accepts drafted tokens and appends one.

    A device graph may capture a verifier whose attribute `is_capturable` is true: it never reads
    the host, and equal verifiers launch the same operators.
    """

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """Verify one round.

        Args:
            target_logits: [B, K+1, V], processed. Position i holds the distribution of the token
                after i drafted tokens.
            draft: K drafted tokens per row. The first `draft.lens` of a row count.
            keys: keys of the round's noise.

        Returns:
            The accepted tokens and the token after them.
        """


VerifierFactory = Callable[[SpeculationConfig], Verifier]


class VerifierTraits(NamedTuple):
    """Registration of a verifier, see `register_verifier`."""

    factory: VerifierFactory
    is_lossless: bool
    reads_draft_logits: bool
    draft_stream: Stream
    reads_keys: bool


_REGISTRY: dict[str, VerifierTraits] = {}


def register_verifier(
    name: str,
    factory: VerifierFactory,
    *,
    lossless: bool,
    replace: bool = False,
    reads_draft_logits: bool = True,
    draft_stream: Stream = Stream.DRAFT,
    reads_keys: bool = True,
) -> None:
    """Register a verifier as `verifier=name`.

    `examples/custom_verifier.py` is an example; `keep_prefix` builds its verdict.

    Args:
        name: name in calls and configs.
        factory: function from a call's resolved settings to a verifier. It runs once per call.
        lossless: whether the output has the target's distribution.
        replace: whether to replace a registered verifier of the same name.
        reads_draft_logits: whether it reads `DraftOut.token_logits`. If not, drafters keep none.
        draft_stream: noise stream of the drafts: DRAFT, or RACE if the rule samples its tokens with
            RACE and accepts equal drafts.
        reads_keys: whether it reads the keys of the noise. If not, a call without other draws
            computes none.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _REGISTRY and not replace:
        raise ConfigError(
            f"verifier name {name!r} is taken; pass replace=True, or choose another one"
        )
    _REGISTRY[name] = VerifierTraits(
        factory, lossless, reads_draft_logits, Stream(draft_stream), reads_keys
    )


def make_verifier(config: SpeculationConfig) -> Verifier:
    """Make the verifier of a resolved config."""
    return _entry(config).factory(config)


def check_verifier(config: SpeculationConfig) -> None:
    """Raise unless a resolved config names a verifier, and a lossy one if restricted to spans."""
    if _entry(config).is_lossless and config.relax_only_inside is not None:
        lossy = ", ".join(name for name in sorted(_REGISTRY) if not _REGISTRY[name].is_lossless)
        raise ConfigError(
            f"relax_only_inside must come with a lossy verifier, one of {lossy}, got "
            f"{config.verifier!r}, which is "
            "lossless everywhere; set verifier='typical', or relax_only_inside=None"
        )


def traits_of(config: SpeculationConfig) -> VerifierTraits:
    """Return the traits of a call's verifier.

    A verifier restricted to spans has a lossless one beside it. That one may read logits and keys.
    """
    traits = _entry(config)
    return (
        traits
        if config.relax_only_inside is None
        else traits._replace(reads_draft_logits=True, reads_keys=True)
    )


def is_lossless(config: SpeculationConfig) -> bool:
    """Return whether the output of the named verifier has the target's distribution."""
    return _entry(config).is_lossless


def depends_on_draft(config: SpeculationConfig) -> bool:
    """Return whether the output depends on the draft.

    It does not if every token is the target's argmax, or drawn by RACE.
    """
    traits = _entry(config)
    return not traits.is_lossless or (traits.reads_keys and traits.draft_stream is not Stream.RACE)


def _entry(config: SpeculationConfig) -> VerifierTraits:
    if not isinstance(config.verifier, str) or config.verifier not in _REGISTRY:
        raise ConfigError(
            f"verifier must be one of {', '.join(sorted(_REGISTRY))}, got {config.verifier!r}; "
            "register your own with hf_speculate.register_verifier"
        )
    return _REGISTRY[config.verifier]
