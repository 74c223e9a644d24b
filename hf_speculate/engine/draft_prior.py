"""The prior of a call's draft source: what its rounds are likely to cost, from the weights that they read."""

from transformers import PreTrainedModel

from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.step_weights import StepWeights
from hf_speculate.schedule import DraftPrior


def draft_prior(target: PreTrainedModel, source: DraftSource) -> DraftPrior:
    """What is known of a draft source before its first round."""
    weights = StepWeights.of(target)
    is_known = not weights.is_quantised
    if source.model is not None:
        is_known &= not StepWeights.of(source.model).is_quantised
        return DraftPrior(cost_ratio(target, source.model), is_verification_known=is_known)
    num_bytes = source.step_bytes(target)
    ratio = None if num_bytes is None else num_bytes / max(weights.num_bytes, 1)
    return DraftPrior(ratio, source.drafts_at_once, is_known)


def cost_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """The bytes that a draft step reads in one process over those of a plain step."""
    return StepWeights.of(draft).num_bytes / max(StepWeights.of(target).num_bytes, 1)
