"""The prior of a call's draft source: what its rounds are likely to cost, from the weights that they read."""

from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.engine.step_weights import StepWeights
from hf_speculate.schedule import DraftPrior


def draft_prior(target: PreTrainedModel, draft: PreTrainedModel | None, config: SpeculationConfig) -> DraftPrior:
    """What is known of a draft source before its first round."""
    weights = StepWeights.of(target)
    is_known = not weights.is_quantised
    if draft is not None:  # the first layers of the target, too
        is_known &= not StepWeights.of(draft).is_quantised
        return DraftPrior(cost_ratio(target, draft), is_verification_known=is_known)
    drafter = config.drafter
    if drafter is None:
        return DraftPrior(0.0, is_verification_known=is_known)  # prompt lookup runs no model
    num_bytes = getattr(drafter, "num_step_bytes", None)  # of a draft head; nothing is known of other drafters
    ratio = None if num_bytes is None else num_bytes(target) / max(weights.num_bytes, 1)
    return DraftPrior(ratio, getattr(drafter, "drafts_at_once", False), is_known)


def cost_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """The bytes that a draft step reads in one process over those of a plain step."""
    return StepWeights.of(draft).num_bytes / max(StepWeights.of(target).num_bytes, 1)
