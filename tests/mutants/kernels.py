"""Mutants of the verifiers' reference implementation and of the random numbers."""

from tests.mutants.base import Mutant

_CHAIN = "triton_kernels/reference/chain.py"
_REJECTION = "triton_kernels/reference/rejection.py"
_BLOCK = "triton_kernels/reference/block.py"
_TYPICAL = "triton_kernels/reference/typical.py"
_COUPLED = "triton_kernels/reference/coupled.py"
_GREEDY = "triton_kernels/reference/greedy.py"
_SAMPLING = "triton_kernels/reference/sampling.py"
_RACES = "triton_kernels/reference/races.py"
_NOISE = "triton_kernels/noise.py"
_DRAWS = "triton_kernels/draws.py"
_ORACLE = "triton_kernels/test_against_oracle.py triton_kernels/test_edges.py"
_REJECTED = "triton_kernels/test_rejection_distribution.py triton_kernels/test_against_oracle.py"
_BLOCKS = "triton_kernels/test_block_distribution.py triton_kernels/test_against_oracle.py"

MUTANTS = (
    Mutant("chain: a draft's length does not bound it", _CHAIN, "good_ids & counted, lens", "good_ids, lens", _ORACLE),
    Mutant(
        "chain: one drafted token too many counts", _CHAIN, "< lens.unsqueeze(-1)", "<= lens.unsqueeze(-1)", _ORACLE
    ),
    Mutant(
        "chain: tokens after a rejected one are accepted",
        _CHAIN,
        "chain.acceptable).cumprod(-1, dtype=torch.int64).sum(-1))",
        "chain.acceptable).to(torch.int64).sum(-1))",
        _ORACLE,
    ),
    Mutant("chain: tokens after the end are returned", _CHAIN, "columns > here, -1", "columns > here + 1, -1", _ORACLE),
    Mutant("chain: bad ids are not reported", _CHAIN, "alpha=BAD_DRAFT_ID", "alpha=0", _ORACLE),
    Mutant(
        "chain: the status of rows is mixed up",
        _CHAIN,
        "torch.where(rows, yes.status",
        "torch.where(~rows, yes.status",
        _ORACLE,
    ),
    Mutant(
        "rejection: test against q / p",
        _REJECTION,
        "(log_u < target_of_token - draft_of_token)",
        "(log_u < draft_of_token - target_of_token)",
        _REJECTED,
    ),
    Mutant(
        "rejection: tokens of larger p may be rejected",
        _REJECTION,
        "(target_of_token >= draft_of_token) | (log_u",
        "(target_of_token > draft_of_token + 1) | (log_u",
        _REJECTED,
    ),
    Mutant(
        "rejection: a coin of another stream",
        _REJECTION,
        "uniforms(keys, Stream.ACCEPT, offsets",
        "uniforms(keys, Stream.CORRECTION, offsets",
        _REJECTED,
    ),
    Mutant(
        "rejection: one coin for all positions",
        _REJECTION,
        "chain.token_ids.device).unsqueeze(0)\n    return uniforms",
        "chain.token_ids.device).unsqueeze(0) * 0\n    return uniforms",
        _REJECTED,
    ),
    Mutant(
        "rejection: the residual is not clamped",
        _REJECTION,
        "residual.add_(scaled).clamp_(min=0.0)",
        "residual.add_(scaled).abs_()",
        _REJECTED,
    ),
    Mutant(
        "rejection: the correction is drawn from p",
        _REJECTION,
        "residual_rows = end.rejected\n",
        "residual_rows = end.rejected & False\n",
        _REJECTED,
    ),
    Mutant(
        "rejection: the residual of the wrong position",
        _REJECTION,
        "pieces.gather_at(draft.logits, end.last)",
        "pieces.gather_at(draft.logits, end.last * 0)",
        _REJECTED,
    ),
    Mutant(
        "rejection: an empty residual is not reported",
        _REJECTION,
        "empty, alpha=EMPTY_RESIDUAL",
        "empty, alpha=0",
        _ORACLE,
    ),
    Mutant(
        "rejection: the bonus shares the noise of position 0",
        _REJECTION,
        "Stream.CORRECTION, end.num_accepted)",
        "Stream.CORRECTION, end.num_accepted * 0)",
        _REJECTED + " generation/test_law.py",
    ),
    Mutant(
        "rejection: a point mass keeps its token in the residual",
        _REJECTION,
        "torch.ne(pieces.token_ids",
        "torch.ge(pieces.token_ids",
        _REJECTED,
    ),
    Mutant(
        "rejection: scores of the next position",
        _REJECTION,
        "logits_at(target.logits[:, :-1], target.warp",
        "logits_at(target.logits[:, 1:], target.warp",
        _REJECTED,
    ),
    Mutant(
        "block: log ratios are not bounded by 0",
        _BLOCK,
        "return sums - sums.cummax(-1).values.clamp_(min=0.0)",
        "return sums.clamp_(max=0.0)",
        _BLOCKS,
    ),
    Mutant(
        "block: the shortest passing prefix",
        _BLOCK,
        "num_accepted = (counts * (passed & (counts <= lens))).amax(-1)",
        "num_accepted = (counts * (passed & (counts <= lens))).cumprod(-1).amax(-1).clamp(max=num_draft_tokens)",
        _BLOCKS,
    ),
    Mutant(
        "block: the residual masses are not clamped",
        _BLOCK,
        "draft_rows.sums.unsqueeze(-1))).clamp_(min=0.0)",
        "draft_rows.sums.unsqueeze(-1))).abs_()",
        _BLOCKS,
    ),
    Mutant("block: the residual ignores the ratio", _BLOCK, "end, kept_ratios)", "end, None)", _BLOCKS),
    Mutant(
        "block: masses of the position before",
        _BLOCK,
        "target.masses[chunk, 1:-1]",
        "target.masses[chunk, :-2]",
        _BLOCKS,
    ),
    Mutant(
        "block: the last position is tested like inner ones",
        _BLOCK,
        "torch.where(counts[:-1] < lens, inner",
        "torch.where(counts[:-1] <= lens, inner",
        _BLOCKS,
    ),
    Mutant("typical: the entropy has the wrong sign", _TYPICAL, "(-entropy).exp_()", "entropy.exp_()", _ORACLE),
    Mutant(
        "typical: the larger of the two bounds",
        _TYPICAL,
        "clamp_(max=rule.threshold)",
        "clamp_(min=rule.threshold)",
        _ORACLE,
    ),
    Mutant(
        "typical: a probability equal to the bound is accepted",
        _TYPICAL,
        "return masses > thresholds",
        "return masses >= thresholds",
        _ORACLE,
    ),
    Mutant(
        "typical: the final token is sampled in greedy calls",
        _TYPICAL,
        "if rule.samples and keys is not None",
        "if keys is not None",
        _ORACLE + " generation/test_law.py",
    ),
    Mutant(
        "coupled: noise of another stream",
        _COUPLED,
        "keys, Stream.RACE, offsets",
        "keys, Stream.CORRECTION, offsets",
        _ORACLE + " generation/test_coupled.py",
    ),
    Mutant(
        "coupled: one noise for all positions",
        _COUPLED,
        "masses.device).unsqueeze(0)",
        "masses.device).unsqueeze(0) * 0",
        _ORACLE + " triton_kernels/test_coupled_distribution.py",
    ),
    Mutant(
        "coupled: invalid rows are accepted",
        _COUPLED,
        "chain.token_ids) & is_valid[:, :-1]",
        "chain.token_ids)",
        _ORACLE,
    ),
    Mutant(
        "greedy: the next position's argmax",
        _GREEDY,
        "best.indices[:, :-1] == chain.token_ids",
        "best.indices[:, 1:] == chain.token_ids",
        _ORACLE,
    ),
    Mutant(
        "greedy: rows at temperature 0 are sampled",
        _GREEDY,
        "warp.temperature == 0",
        "warp.temperature < 0",
        _ORACLE + " triton_kernels/test_warps.py",
    ),
    Mutant(
        "sampling: rows at temperature 0 keep a random token",
        _SAMPLING,
        "torch.where(argmax_rows, best.indices, token_ids)",
        "torch.where(argmax_rows, token_ids, token_ids)",
        "triton_kernels/test_sample.py",
    ),
    Mutant(
        "sampling: noise is not divided by",
        _SAMPLING,
        "].div_(noise))",
        "].mul_(noise))",
        "triton_kernels/test_draws.py triton_kernels/test_sample.py",
    ),
    Mutant(
        "race: the smallest score wins",
        _RACES,
        "pieces.scatter(scores.amax(-1)).argmax(",
        "pieces.scatter(scores.amax(-1)).argmin(",
        _REJECTED + " triton_kernels/test_sample.py",
    ),
    Mutant(
        "race: weights are multiplied by the noise",
        _RACES,
        "weights.div_(exponentials_of",
        "weights.mul_(exponentials_of",
        _REJECTED,
    ),
    Mutant(
        "noise: the round is ignored",
        _NOISE,
        "alpha=ROUND_FACTOR",
        "alpha=0",
        "triton_kernels/test_noise.py generation/test_law.py",
    ),
    Mutant(
        "noise: the race depends on the round",
        _NOISE,
        "if stream != Stream.RACE:",
        "if True:",
        "triton_kernels/test_noise.py generation/test_coupled.py",
    ),
    Mutant(
        "noise: the position is ignored", _NOISE, "alpha=POSITION_FACTOR", "alpha=0", "triton_kernels/test_noise.py"
    ),
    Mutant(
        "noise: all rows share a seed",
        _NOISE,
        "rows == 0, base, _mix64",
        "rows >= 0, base, _mix64",
        "triton_kernels/test_noise.py",
    ),
    Mutant(
        "noise: uniforms reach 0",
        _NOISE,
        ".add_(0.5).mul_(scale)",
        ".mul_(scale)",
        "triton_kernels/test_noise.py triton_kernels/test_extreme_uniforms.py",
    ),
    Mutant(
        "noise: exponentials of u in place of 1 - u",
        _NOISE,
        "-UNIFORM_SCALE).log1p_().neg_()",
        "UNIFORM_SCALE).log_().neg_()",
        "triton_kernels/test_noise.py",
    ),
    Mutant(
        "draws: every draw at the first position",
        _DRAWS,
        "positions=self.keys.positions + step",
        "positions=self.keys.positions",
        "triton_kernels/test_draws.py",
    ),
    Mutant(
        "draws: shared noise of the first draw",
        _DRAWS,
        "noise = self._noise[:, step]",
        "noise = self._noise[:, 0]",
        "triton_kernels/test_draws.py",
    ),
)
