"""Draft sources: what drafts in a call, as error messages name it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.errors import ConfigError, UnsupportedGenerationError


class DraftSource(NamedTuple):
    """What makes a call speculative, as error messages name it."""

    cause: str
    hint: str


def _argument(name: str, other: str = "") -> DraftSource:
    return DraftSource(name, f"leave {name} out to decode without speculation{other}")


ASSISTED = _argument("assistant_model")
EARLY_EXIT = _argument("assistant_early_exit")
GENERATOR = _argument("candidate_generator")
CUSTOM = _argument("drafter")
LOOKUP = _argument("prompt_lookup_num_tokens", ", or hf_speculate.disable(model) for transformers' own prompt lookup")
MTP = _argument("use_mtp")
NO_DRAFTS = DraftSource("continuous batching", "decode static batches")
COUPLED_ALONE = DraftSource("verifier='coupled'", "set verifier='rejection' to sample as transformers does")


def find_draft_source(
    assistant: object, early_exit: object, config: SpeculationConfig, samples: bool
) -> DraftSource | None:
    """What makes a call speculative; None if transformers decodes it plainly."""
    if config.draft_state is not None and assistant is None and early_exit is None:
        raise ConfigError(
            "draft_state must come with assistant_model or assistant_early_exit, got neither; leave draft_state out"
        )
    sources = {
        ASSISTED: assistant,
        EARLY_EXIT: early_exit,
        GENERATOR: config.candidate_generator,
        CUSTOM: config.drafter,
    }
    given = [source for source, value in sources.items() if value is not None]
    if config.prompt_lookup_num_tokens is not None and given not in ([ASSISTED], [EARLY_EXIT]):
        given.append(LOOKUP)
    if len(given) > 1:
        raise several_sources(given)
    if given:
        return given[0]
    return COUPLED_ALONE if config.verifier == "coupled" and samples else None


def several_sources(sources: Sequence[DraftSource]) -> UnsupportedGenerationError:
    """The error of a call with more than one draft source."""
    names = " and ".join(source.cause for source in sources)
    surplus = "one of them" if len(sources) == 2 else "all but one"
    return UnsupportedGenerationError(f"pass one draft source, got {names}; omit {surplus}")


def with_head(config: SpeculationConfig, head: DraftHead, source: DraftSource) -> SpeculationConfig:
    """The settings of a call that drafts with a head; if they set no number of tokens, its default K bounds it."""
    for name in ("prompt_lookup_num_tokens", "draft_state"):
        if getattr(config, name) is not None:
            raise UnsupportedGenerationError(
                f"{name} cannot be combined with a draft head, got one as {source.cause}; omit one of them"
            )
    num = head.default_draft_tokens
    if config.num_assistant_tokens is None and num is not None:
        config = replace(config, num_assistant_tokens=num, num_assistant_tokens_schedule=config.schedule)
    return replace(config, drafter=head)
