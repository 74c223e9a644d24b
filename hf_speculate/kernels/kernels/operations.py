"""Kernel launches for every operation; `kernels.reference` defines the results."""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._inputs import NUM_BINS, Cut, Proposal, Round, TypicalRule, Warp, WarpedDraw
from ..noise import stream_offset
from ..types import NoiseKeys, Sampled, Stream, Verdict
from . import acceptance
from .cut import cut_counts_kernel, cut_draw_kernel, cut_kernel, cut_tops_kernel
from .decide import decide_kernel, finish_kernel
from .draw import draw_kernel
from .launch import Launch, has_atomics
from .noise import RACE
from .second_pass import block_masses_kernel, block_ratios_kernel, entropies_kernel
from .stats import row_stats_kernel


def _stats(
    launch: Launch,
    *,
    sums: bool,
    spreads: bool = False,
    races: bool = False,
    stream: int = 0,
    **extra: Any,
) -> Tensor:
    """Run the first launch; return the zeroed counters [B] of finished programs."""
    arrivals = launch.scratch(launch.batch_size, dtype=torch.int32)
    # Saved log-sum-exps of the draft make its chunk statistics unnecessary.
    if not launch.reads_draft_stats:
        extra["draft_ptr"] = None
    launch.run(
        row_stats_kernel,
        (launch.layout.num_rows, launch.layout.num_programs),
        arrivals_ptr=arrivals,
        SUMS=sums,
        SPREADS=spreads,
        RACES=races,
        STREAM=stream,
        **extra,
    )
    return arrivals


def _decide(launch: Launch, rule: int, arrivals: Tensor, *, races: bool, **extra: Any) -> Verdict:
    """Run the last launch, or the last two if the device has no atomics."""
    shape = (launch.batch_size, launch.num_draft_tokens + 1)
    device = launch.device
    out = Verdict(
        torch.empty(shape, dtype=torch.int64, device=device),
        launch.scratch(launch.batch_size, dtype=torch.int32),
        launch.scratch(launch.batch_size, dtype=torch.int32),
    )
    num_programs = launch.layout.num_race_programs if races else 1
    is_fused = has_atomics(device)
    outputs: dict[str, Any] = {
        "races_ptr": launch.scratch(launch.batch_size, num_programs, dtype=torch.int64)
        if races
        else None,
        "plans_ptr": launch.scratch(launch.batch_size, 4, dtype=torch.int32)
        if races and not is_fused
        else None,
        "out_ids_ptr": out.token_ids,
        "out_num_ptr": out.num_accepted,
        "out_status_ptr": out.status,
    }
    optional = (
        "draft_lse_ptr",
        "entropy_sums_ptr",
        "ratios_ptr",
        "block_lens_ptr",
        "masses_ptr",
        "passed_ptr",
    )
    arguments = {
        **dict.fromkeys(optional),
        "threshold": 0.0,
        "alpha": 0.0,
        "arrivals_ptr": arrivals,
        **outputs,
        **extra,
    }
    launch.run(
        decide_kernel,
        (launch.batch_size, num_programs),
        RULE=rule,
        RACES=races,
        FUSED=is_fused,
        **arguments,
    )
    if races and not is_fused:
        launch.run(finish_kernel, (launch.batch_size,), num_programs=num_programs, **outputs)
    return out


def greedy(round_: Round) -> Verdict:
    """See `verify_greedy`."""
    if round_.target_logits.shape[0] == 0:
        return reference.greedy(round_)
    launch = Launch(round_, Warp(), None, None, num_float_planes=1, num_int_planes=1)
    return _decide(
        launch, int(acceptance.GREEDY), _stats(launch, sums=False, TOP_IDS=True), races=False
    )


def reject(round_: Round, warp: Warp, proposal: Proposal | None, keys: NoiseKeys) -> Verdict:
    """See `verify_rejection`."""
    return _reject(round_, warp, proposal, keys, None)


def reject_and_test(round_: Round, proposal: Proposal, keys: NoiseKeys) -> tuple[Verdict, Tensor]:
    """See `Operations.reject_and_test`."""
    ids = round_.draft_token_ids
    passed = torch.zeros(ids.shape, dtype=torch.int8, device=ids.device)
    return _reject(round_, Warp(), proposal, keys, passed), passed.bool()


def _reject(
    round_: Round, warp: Warp, proposal: Proposal | None, keys: NoiseKeys, passed_out: Tensor | None
) -> Verdict:
    if warp.is_greedy:
        return greedy(round_)
    if round_.target_logits.shape[0] == 0:
        return reference.reject(round_, warp, proposal, keys)
    launch = Launch(round_, warp, keys, proposal, num_float_planes=2, num_int_planes=1)
    arrivals = _stats(launch, sums=True)
    rule = acceptance.POINT_MASS if proposal is None else acceptance.REJECTION
    return _decide(
        launch,
        int(rule),
        arrivals,
        races=True,
        draft_lse_ptr=_saved_logsumexp(proposal),
        passed_ptr=passed_out,
    )


def _saved_logsumexp(proposal: Proposal | None) -> Tensor | None:
    if proposal is None or proposal.logsumexp is None:
        return None
    return proposal.logsumexp.contiguous()


def typical(round_: Round, warp: Warp, rule: TypicalRule, keys: NoiseKeys | None) -> Verdict:
    """See `verify_typical`."""
    if warp.is_greedy:
        return greedy(round_)
    if round_.target_logits.shape[0] == 0:
        return reference.typical(round_, warp, rule, keys)
    is_exact = rule.entropy_epsilon == 0.0
    launch = Launch(
        round_, warp, keys, None, num_float_planes=3 if is_exact else 2, num_int_planes=1
    )
    extra: dict[str, Any] = {} if rule.samples else {"TOP_IDS": True}
    arrivals = _stats(launch, sums=True, spreads=is_exact, **extra)
    entropy_sums = None
    if not is_exact:
        entropy_sums = launch.scratch(launch.layout.num_rows, launch.layout.num_chunks)
        grid = (launch.layout.num_rows, launch.layout.num_programs)
        launch.run(entropies_kernel, grid, sums_ptr=entropy_sums, epsilon=rule.entropy_epsilon)
    return _decide(
        launch,
        int(acceptance.TYPICAL),
        arrivals,
        races=rule.samples,
        entropy_sums_ptr=entropy_sums,
        threshold=rule.threshold,
        alpha=rule.alpha,
    )


def block(round_: Round, warp: Warp, proposal: Proposal, keys: NoiseKeys) -> Verdict:
    """See `verify_block`."""
    batch_size, num_draft_tokens = round_.draft_token_ids.shape
    if num_draft_tokens < 2:
        return reject(round_, warp, proposal, keys)  # the same for a block of one token
    if warp.is_greedy:
        return greedy(round_)
    if batch_size == 0:
        return reference.block(round_, warp, proposal, keys)
    launch = Launch(round_, warp, keys, proposal, num_float_planes=2, num_int_planes=1)
    arrivals = _stats(launch, sums=True)
    chain: dict[str, Any] = {
        "ratios_ptr": launch.scratch(3, batch_size, num_draft_tokens),
        "block_lens_ptr": launch.scratch(batch_size, dtype=torch.int32),
    }
    saved = _saved_logsumexp(proposal)
    launch.run(block_ratios_kernel, (batch_size,), draft_lse_ptr=saved, **chain)
    num_pairs = batch_size * (num_draft_tokens - 1)
    chain["masses_ptr"] = launch.scratch(num_pairs, launch.layout.num_chunks)
    launch.run(block_masses_kernel, (num_pairs, launch.layout.num_programs), **chain)
    return _decide(
        launch, int(acceptance.BLOCK), arrivals, races=True, draft_lse_ptr=saved, **chain
    )


def coupled(round_: Round, warp: Warp, keys: NoiseKeys) -> Verdict:
    """See `verify_coupled`."""
    if warp.is_greedy:
        return greedy(round_)
    if round_.target_logits.shape[0] == 0:
        return reference.coupled(round_, warp, keys)
    launch = Launch(round_, warp, keys, None, num_float_planes=3, num_int_planes=2)
    arrivals = _stats(launch, sums=True, races=True, stream=int(RACE))
    return _decide(launch, int(acceptance.COUPLED), arrivals, races=False)


def sample(logits: Tensor, warp: Warp, keys: NoiseKeys, stream: Stream) -> Sampled:
    """See `kernels.sample`."""
    num_rows = logits.shape[0]
    if num_rows == 0:
        return reference.sample(logits, warp, keys, stream)
    no_ids = torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    launch = Launch(
        Round(logits.unsqueeze(1), no_ids, None),
        warp,
        keys,
        None,
        num_float_planes=3,
        num_int_planes=2,
    )
    _stats(launch, sums=True, races=True, stream=stream_offset(stream))
    out = Sampled(
        torch.empty(num_rows, dtype=torch.int64, device=logits.device), launch.scratch(num_rows)
    )
    grid = (-(-num_rows // int(acceptance.POSITIONS_AT_ONCE)),)
    launch.run(
        draw_kernel, grid, num_rows=num_rows, out_ids_ptr=out.token_ids, out_lse_ptr=out.logsumexp
    )
    return out


def cut(logits: Tensor, temperature: float, rule: Cut) -> Tensor:
    """See `warp_logits`."""
    num_rows = logits.shape[0]
    if num_rows == 0:
        return reference.cut(logits, temperature, rule)
    launch, counts = _begin_cut(
        logits, temperature, None, None, num_float_planes=1, num_int_planes=0
    )
    out = launch.scratch(*logits.shape)
    launch.run(
        cut_kernel,
        (num_rows, launch.layout.num_chunks),
        counts_ptr=counts,
        out_ptr=out,
        **rule._asdict(),
    )
    return out


def cut_and_draw(
    logits: Tensor,
    temperature: float,
    rule: Cut,
    keys: NoiseKeys,
    stream: Stream,
    draw: int,
    out: WarpedDraw,
) -> None:
    """Draw token number `draw` of a round from logits [B, V] after `cut`.

    The device must have atomics, see `has_atomics`.
    """
    num_rows = logits.shape[0]
    arrivals = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    launch, counts = _begin_cut(
        logits, temperature, keys, arrivals, num_float_planes=4, num_int_planes=2
    )
    launch.run(
        cut_draw_kernel,
        (num_rows, launch.layout.num_chunks),
        counts_ptr=counts,
        arrivals_ptr=arrivals,
        draw=draw,
        out_ptr=out.logits,
        out_stride_b=out.logits.stride(0),
        out_ids_ptr=out.token_ids,
        out_lse_ptr=out.logsumexp,
        out_lse_stride_b=out.logsumexp.stride(0),
        STREAM=stream_offset(stream),
        **rule._asdict(),
    )


def _begin_cut(
    logits: Tensor,
    temperature: float,
    keys: NoiseKeys | None,
    arrivals: Tensor | None,
    **planes: int,
) -> tuple[Launch, Tensor]:
    """Run the first two launches of `cut`; they also set `arrivals` [B] to 0.

    Returns:
        The launch, and the bin counts, int32 [B, NUM_BINS].
    """
    num_rows = logits.shape[0]
    no_ids = torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    launch = Launch(
        Round(logits.unsqueeze(1), no_ids, None), Warp(temperature), keys, None, **planes
    )
    grid, counts = (
        (num_rows, launch.layout.num_chunks),
        launch.scratch(num_rows, NUM_BINS, dtype=torch.int32),
    )
    launch.run(cut_tops_kernel, grid, counts_ptr=counts, arrivals_ptr=arrivals)
    launch.run(cut_counts_kernel, grid, counts_ptr=counts)
    return launch, counts
