"""Bad logits: the error for a token that was sampled from logits that define no distribution."""

from torch import Tensor

from hf_speculate.errors import BadLogitsError
from hf_speculate.types import Status

BAD_LOGITS = int(Status.NAN | Status.ALL_MASKED | Status.POSITIVE_INF)  # a draft's logits may set these flags too


def bad_logits_error(scores: Tensor, row: int, num_new_tokens: int) -> BadLogitsError | None:
    """The error to raise if plain `generate` could not sample from these logits [V]; None if it could."""
    if scores.isnan().any():
        what = "NaN"
    elif scores.isposinf().any():
        what = "+inf"
    elif scores.isneginf().all():
        what = "-inf for every token"
    else:
        return None
    return BadLogitsError(
        f"logits must be finite or -inf, and not all -inf, to draw a token, got {what} in row {row} after "
        f"{num_new_tokens} new tokens; look for overflow in the model or a processor that forbids every token, or pass "
        "remove_invalid_values=True"
    )
