"""Refuses tokens that were drawn where there was no law."""

from torch import Tensor

from hf_speculate.errors import BadLogitsError
from hf_speculate.types import Status

LAWLESS = int(Status.NAN | Status.ALL_MASKED | Status.POSITIVE_INF)  # a draft's own faults may set these flags too


def fault_of(scores: Tensor, row: int, num_new_tokens: int) -> BadLogitsError | None:
    """The error to raise where plain `generate` raises one, for it draws nothing from such logits; None for a law.

    Args:
        scores: [V], after all processors.
        row: of the output.
        num_new_tokens: of the row, before this one.

    Returns:
        An error where they hold a NaN, a +inf, or nothing but -inf.
    """
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
