"""Second launch of `sample`: merge the chunks of every row."""

import triton.language as tl

from .acceptance import POSITIONS_AT_ONCE
from .entry import entry_point
from .rows import logsumexps, merge_maxes, merge_races, merge_sums


@entry_point
def draw_kernel(
    floats_ptr, ints_ptr, plane, temperatures_ptr, out_ids_ptr, out_lse_ptr, num_rows, num_chunks,
    TOP_IDS: tl.constexpr,
):  # fmt: skip
    """Write the sampled id and the log-sum-exp of every row; at temperature 0 the argmax and the maximum.

    Grid: (rows / POSITIONS_AT_ONCE,).
    """
    lanes = tl.program_id(0) * POSITIONS_AT_ONCE + tl.arange(0, POSITIONS_AT_ONCE)
    mask = lanes < num_rows
    rows = lanes.to(tl.int64)
    tops, top_ids = merge_maxes(floats_ptr, ints_ptr, rows, mask, num_chunks)
    sums = merge_sums(floats_ptr, floats_ptr + plane, rows, mask, num_chunks, tops)
    ids = merge_races(floats_ptr, floats_ptr + 2 * plane, ints_ptr + plane, rows, mask, num_chunks, tops)
    lses = logsumexps(tops, sums)
    if TOP_IDS:  # temperature 0 for all, or for some
        takes_argmax = mask
        if temperatures_ptr is not None:
            takes_argmax = tl.load(temperatures_ptr + lanes, mask=mask, other=1.0) == 0.0
        ids = tl.where(takes_argmax, top_ids, ids)
        lses = tl.where(takes_argmax, tops, lses)
    tl.store(out_ids_ptr + rows, ids.to(tl.int64), mask=mask)
    tl.store(out_lse_ptr + rows, lses, mask=mask)
