"""Second launch of `sample`: merge the chunks of every row."""

import triton.language as tl

from .acceptance import POSITIONS_AT_ONCE
from .entry import entry_point
from .rows import logsumexps, merge_races, merge_rows


@entry_point
def draw_kernel(
    floats_ptr, ints_ptr, plane, temperatures_ptr, out_ids_ptr, out_lse_ptr, num_rows, num_chunks,
    TOP_IDS: tl.constexpr,
):  # fmt: skip
    """Write the sampled id and the log-sum-exp of every row.

    At temperature 0, these are the argmax and the maximum. Grid: (rows / POSITIONS_AT_ONCE,).
    """
    first_row = tl.program_id(0) * POSITIONS_AT_ONCE
    lanes = tl.arange(0, POSITIONS_AT_ONCE)
    rows = first_row + lanes
    mask = rows < num_rows
    tops, top_ids, sums = merge_rows(
        floats_ptr, ints_ptr, plane, first_row, lanes, mask, num_chunks, True
    )
    ids = merge_races(floats_ptr, ints_ptr, plane, first_row, lanes, mask, num_chunks, tops)
    lses = logsumexps(tops, sums)
    if TOP_IDS:  # temperature 0 for all rows, or for some
        takes_argmax = mask
        if temperatures_ptr is not None:
            takes_argmax = tl.load(temperatures_ptr + rows, mask=mask, other=1.0) == 0.0
        ids = tl.where(takes_argmax, top_ids, ids)
        lses = tl.where(takes_argmax & (lses == lses), tops, lses)
    tl.store(out_ids_ptr + rows, ids.to(tl.int64), mask=mask)
    tl.store(out_lse_ptr + rows, lses, mask=mask)
