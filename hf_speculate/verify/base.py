"""The verifier protocol, and the registry of verifiers by name."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.types import DraftOut, NoiseKeys, Stream, Verdict


class Verifier(Protocol):
    """Decides which drafted tokens are accepted, and which token follows them."""

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """Verify one round.

        Args:
            target_logits: [B, K+1, V], processed; position i is the distribution of the token after i drafted tokens.
            draft: K drafted tokens per row, of which `draft.lens` count.
            keys: of the round's noise.

        Returns:
            The accepted tokens and the token that follows them.
        """


VerifierFactory = Callable[[SpeculationConfig], Verifier]


class VerifierTraits(NamedTuple):
    """The registration of a verifier, see `register_verifier`."""

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
    """Make a verifier available as `verifier=name`.

    `examples/custom_verifier.py` is an example; `keep_prefix` builds its verdict.

    Args:
        name: used in calls and configs.
        factory: makes the verifier from a call's resolved settings, once per call.
        lossless: whether the output has the target's distribution.
        replace: whether to replace a registered verifier of the same name.
        reads_draft_logits: whether it reads `DraftOut.token_logits`; if not, drafters keep none.
        draft_stream: noise stream of the drafts: DRAFT, or RACE for a rule that samples its own tokens with RACE and
            accepts drafts that agree.
        reads_keys: whether it reads the keys of the noise; if not, a call that draws nothing computes none.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _REGISTRY and not replace:
        raise ConfigError(f"verifier name {name!r} is taken; pass replace=True, or choose another one")
    _REGISTRY[name] = VerifierTraits(factory, lossless, reads_draft_logits, Stream(draft_stream), reads_keys)


def make_verifier(config: SpeculationConfig) -> Verifier:
    """The verifier that a resolved config names."""
    return _entry(config).factory(config)


def check_verifier(config: SpeculationConfig) -> None:
    """Check that a resolved config names a verifier, and a lossy one if it is restricted to spans."""
    if _entry(config).is_lossless and config.relax_only_inside is not None:
        lossy = ", ".join(name for name in sorted(_REGISTRY) if not _REGISTRY[name].is_lossless)
        raise ConfigError(
            f"relax_only_inside must come with a lossy verifier, one of {lossy}, got {config.verifier!r}, which is "
            "lossless everywhere; set verifier='typical', or relax_only_inside=None"
        )


def traits_of(config: SpeculationConfig) -> VerifierTraits:
    """The traits of a call's verifier; outside of spans a lossless one decides, which may read everything."""
    traits = _entry(config)
    return traits if config.relax_only_inside is None else traits._replace(reads_draft_logits=True, reads_keys=True)


def is_lossless(config: SpeculationConfig) -> bool:
    """Whether the output of the named verifier has the target's distribution."""
    return _entry(config).is_lossless


def depends_on_draft(config: SpeculationConfig) -> bool:
    """Whether the output depends on what is drafted: not if each token is the argmax, or drawn by RACE."""
    traits = _entry(config)
    return not traits.is_lossless or (traits.reads_keys and traits.draft_stream is not Stream.RACE)


def _entry(config: SpeculationConfig) -> VerifierTraits:
    if not isinstance(config.verifier, str) or config.verifier not in _REGISTRY:
        raise ConfigError(
            f"verifier must be one of {', '.join(sorted(_REGISTRY))}, got {config.verifier!r}; "
            "register your own with hf_speculate.register_verifier"
        )
    return _REGISTRY[config.verifier]
