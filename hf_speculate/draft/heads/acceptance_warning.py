"""Warns of a low acceptance rate at the first drafted position."""

import warnings

from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.models.layer_capture import FINAL_STATE
from hf_speculate.stats import SpeculationStats

# Below this acceptance rate of first tokens a head probably reads wrong layers; published heads reach 0.4.
_LEAST_ACCEPTANCE_RATE = 0.2
_MIN_DRAFTS = 200


def warn_of_low_first_acceptance(spec: HeadSpec, stats: SpeculationStats) -> None:
    """Warn if few of the first drafted tokens of a call were accepted, and the head reads layers that may be wrong.

    Args:
        spec: of the head.
        stats: of the call.
    """
    if not spec.hidden_layers or FINAL_STATE in spec.hidden_layers or not stats.drafted_per_position:
        return
    num_drafted = stats.drafted_per_position[0]
    if num_drafted < _MIN_DRAFTS or stats.accepted_per_position[0] >= _LEAST_ACCEPTANCE_RATE * num_drafted:
        return
    warnings.warn(
        f"fewer than {_LEAST_ACCEPTANCE_RATE:.0%} of the first tokens that {spec.name} drafted were accepted; it may "
        "read other layers than it was trained on: measure it with head.check_layers(target, prompts)",
        stacklevel=4,
    )
