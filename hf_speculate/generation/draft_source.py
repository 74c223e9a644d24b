"""Says why a call runs our own loop."""

from typing import NamedTuple

from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError, UnsupportedGenerationError


class Reason(NamedTuple):
    """Why a call runs our own loop, in the words of its refusals."""

    cause: str
    way_out: str


ASSISTED = Reason("assistant_model", "leave assistant_model out to decode without speculation")
EARLY_EXIT = Reason("assistant_early_exit", "leave assistant_early_exit out to decode without speculation")
GENERATOR = Reason("candidate_generator", "leave candidate_generator out to decode without speculation")
OWN = Reason("drafter", "leave drafter out to decode without speculation")
LOOKUP = Reason(
    "prompt_lookup_num_tokens",
    "leave prompt_lookup_num_tokens out to decode without speculation, or hf_speculate.disable(model) for transformers'"
    " own prompt lookup",
)
COUPLED_ALONE = Reason("verifier='coupled'", "set verifier='rejection' to draw as transformers does")


def reason_of(assistant: object, early_exit: object, config: SpeculationConfig, samples: bool) -> Reason | None:
    """Why a call is ours; None: transformers decodes it plainly.

    Args:
        assistant: the draft model, or None.
        early_exit: the number of the target's own layers that draft, or None.
        config: the call's settings.
        samples: whether the call draws tokens.

    Raises:
        ConfigError: there is a draft's state and no draft model.
        UnsupportedGenerationError: there are several sources of drafts; only prompt lookup goes beside a model.
    """
    if config.draft_state is not None and assistant is None and early_exit is None:
        raise ConfigError(
            "draft_state must come with assistant_model or assistant_early_exit, got neither; leave draft_state out"
        )
    models = ((assistant, ASSISTED), (early_exit, EARLY_EXIT))
    given = [reason for source, reason in models if source is not None]
    if config.candidate_generator is not None:
        given.append(GENERATOR)
    if config.drafter is not None:
        given.append(OWN)
    is_model = given in ([ASSISTED], [EARLY_EXIT])
    if config.prompt_lookup_num_tokens is not None and not is_model:
        given.append(LOOKUP)
    if len(given) > 1:
        names = " and ".join(reason.cause for reason in given)
        raise UnsupportedGenerationError(f"there must be one source of drafts, got {names}; {given[-1].way_out}")
    if given:
        return given[0]
    return COUPLED_ALONE if config.verifier == "coupled" and samples else None
