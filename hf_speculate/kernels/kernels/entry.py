"""The kernel decorator `entry_point`, which avoids specialising on sizes, strides and alignment."""

from functools import partial

import triton

_RUN_TIME = [
    "target_stride_b", "target_stride_i", "target_stride_v", "draft_stride_b", "draft_stride_i",
    "draft_stride_v", "temperature", "threshold", "alpha", "epsilon", "plane", "num_sequences",
    "num_rows", "num_draft_tokens", "num_programs", "vocab_size", "num_chunks",
    "chunks_per_program", "pieces_per_program", "top_k", "top_p", "most_below", "draw",
    "out_stride_b", "out_lse_stride_b",
]  # fmt: skip
# Kernels load from these pointers one entry at a time. Logits are not listed, because their
# alignment decides the width of their loads.
_SMALL = [
    "ids_ptr", "lens_ptr", "temperatures_ptr", "cutoffs_ptr", "seeds_ptr", "rounds_ptr",
    "positions_ptr", "draft_lse_ptr", "out_ids_ptr", "out_lse_ptr",
]  # fmt: skip

entry_point = partial(
    triton.jit, do_not_specialize=_RUN_TIME, do_not_specialize_on_alignment=_SMALL
)
