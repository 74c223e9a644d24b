"""List mutants in the reference implementation of the verifiers and in the random numbers."""

from tests.mutants.base import Fault, mutants_of

MUTANTS = mutants_of(
    {
        (
            "hf_speculate/kernels/reference/chain.py",
            "kernels/test_against_oracle.py kernels/test_edges.py",
        ): {
            "a draft's length does not bound it": Fault(
                "good_ids & counted, lens", "good_ids, lens", "kernels/test_invariance.py"
            ),
            "one drafted token too many counts": Fault(
                "< lens.unsqueeze(-1)", "<= lens.unsqueeze(-1)", "kernels/test_invariance.py"
            ),
            "tokens after a rejected one are accepted": Fault(
                "chain.acceptable).cumprod(-1, dtype=torch.int64).sum(-1))",
                "chain.acceptable).to(torch.int64).sum(-1))",
            ),
            "tokens after the end are returned": Fault(
                "columns > here, -1", "columns > here + 1, -1"
            ),
            "bad ids are not reported": Fault("alpha=BAD_DRAFT_ID", "alpha=0"),
            "the status of rows is mixed up": Fault(
                "torch.where(rows, yes.status", "torch.where(~rows, yes.status"
            ),
        },
        (
            "hf_speculate/kernels/reference/rejection.py",
            "kernels/test_distributions.py kernels/test_against_oracle.py",
        ): {
            "test against q / p": Fault(
                "(log_u < target_of_token - draft_of_token)",
                "(log_u < draft_of_token - target_of_token)",
            ),
            "a coin of another stream": Fault(
                "uniforms(keys, Stream.ACCEPT, offsets", "uniforms(keys, Stream.CORRECTION, offsets"
            ),
            "one coin for all positions": Fault(
                "chain.token_ids.device).unsqueeze(0)\n    return uniforms",
                "chain.token_ids.device).unsqueeze(0) * 0\n    return uniforms",
            ),
            "the residual is not clamped": Fault(
                "out=draft_probs).clamp_(min=0.0)", "out=draft_probs).abs_()"
            ),
            "the correction is drawn from p": Fault(
                "residual_rows = end.rejected\n", "residual_rows = end.rejected & False\n"
            ),
            "the residual of the wrong position": Fault(
                "pieces.gather_at(draft.logits, end.last)",
                "pieces.gather_at(draft.logits, end.last * 0)",
            ),
            "an empty residual is not reported": Fault(
                "empty, alpha=EMPTY_RESIDUAL", "empty, alpha=0", "kernels/test_edges.py"
            ),
            "the bonus shares the noise of position 0": Fault(
                "Stream.CORRECTION, end.num_accepted)", "Stream.CORRECTION, end.num_accepted * 0)"
            ),
            "a plain step draws other noise": Fault(
                "Stream.CORRECTION, torch.zeros_like",
                "Stream.RACE, torch.zeros_like",
                "kernels/test_invariance.py",
            ),
            "a point mass keeps its token in the residual": Fault(
                "torch.ne(\n            pieces.token_ids", "torch.ge(pieces.token_ids"
            ),
            "scores of the next position": Fault(
                "logits_at(target.logits[:, :-1], target.warp",
                "logits_at(target.logits[:, 1:], target.warp",
            ),
        },
        (
            "hf_speculate/kernels/reference/block.py",
            "kernels/test_distributions.py kernels/test_against_oracle.py",
        ): {
            "log ratios are not bounded by 0": Fault(
                "return sums - sums.cummax(-1).values.clamp_(min=0.0)",
                "return sums.clamp_(max=0.0)",
            ),
            "the shortest passing prefix": Fault(
                "num_accepted = (counts * (passed & (counts <= lens))).amax(-1)",
                "num_accepted = (counts * (passed & (counts <= "
                "lens))).cumprod(-1).amax(-1).clamp(max=num_draft_tokens)",
            ),
            "the residual masses are not clamped": Fault(
                "draft_rows.sums.unsqueeze(-1))).clamp_(min=0.0)",
                "draft_rows.sums.unsqueeze(-1))).abs_()",
            ),
            "the residual ignores the ratio": Fault("end, kept_ratios)", "end, None)"),
            "masses of the position before": Fault(
                "target.masses[chunk, 1:-1]", "target.masses[chunk, :-2]"
            ),
            "the last position is tested like inner ones": Fault(
                "torch.where(counts[:-1] < lens, inner",
                "torch.where(counts[:-1] <= lens, inner",
                "kernels/test_edges.py kernels/test_invariance.py",
            ),
        },
        (
            "hf_speculate/kernels/reference/typical.py",
            "kernels/test_against_oracle.py kernels/test_edges.py",
        ): {
            "the entropy has the wrong sign": Fault("(-entropy).exp_()", "entropy.exp_()"),
            "the larger of the two bounds": Fault(
                "clamp_(max=rule.threshold)", "clamp_(min=rule.threshold)"
            ),
            "a probability equal to the bound is accepted": Fault(
                "return masses > thresholds",
                "return masses >= thresholds",
                "verify/test_verifiers.py",
            ),
            "the final token is sampled in greedy calls": Fault(
                "if rule.samples and keys is not None",
                "if keys is not None",
                "verify/test_verifiers.py",
            ),
        },
        (
            "hf_speculate/kernels/reference/coupled.py",
            "kernels/test_distributions.py kernels/test_edges.py",
        ): {
            "noise of another stream": Fault(
                "keys, Stream.RACE, offsets", "keys, Stream.CORRECTION, offsets"
            ),
            "one noise for all positions": Fault(
                "masses.device).unsqueeze(0)", "masses.device).unsqueeze(0) * 0"
            ),
            "invalid rows are accepted": Fault(
                "chain.token_ids) & is_valid[:, :-1]", "chain.token_ids)"
            ),
        },
        ("hf_speculate/kernels/reference/greedy.py", "kernels/test_distributions.py"): {
            "the next position's argmax": Fault(
                "indices[:, :-1] == chain", "indices[:, 1:] == chain", "kernels/test_invariance.py"
            ),
            "the next position's argmax on the host": Fault(
                "== best_ids[num_equal]", "== best_ids[num_equal + 1]"
            ),
            "an invalid row accepts on the host": Fault(
                "math.isfinite(values[num_equal])", "True", "kernels/test_edges.py"
            ),
            "bad ids are lost on the host": Fault(
                "if any(bad_ids)", "if False", "kernels/test_edges.py"
            ),
            "rows at temperature 0 are sampled": Fault(
                "warp.temperature == 0", "warp.temperature < 0", "kernels/test_invariance.py"
            ),
        },
        (
            "hf_speculate/kernels/reference/sampling.py",
            "kernels/test_distributions.py kernels/test_edges.py",
        ): {
            "rows at temperature 0 keep a random token": Fault(
                "torch.where(argmax_rows, best.indices, token_ids)",
                "torch.where(argmax_rows, token_ids, token_ids)",
            ),
            "noise is not divided by": Fault("].div_(noise))", "].mul_(noise))"),
        },
        (
            "hf_speculate/kernels/reference/races.py",
            "kernels/test_edges.py kernels/test_distributions.py",
        ): {
            "the smallest score wins": Fault(
                "pieces.scatter(scores.amax(-1)).argmax(", "pieces.scatter(scores.amax(-1)).argmin("
            ),
            "weights are multiplied by the noise": Fault(
                "weights.div_(\n        exponentials_of",
                "weights.mul_(exponentials_of",
                "kernels/test_distributions.py kernels/test_against_oracle.py",
            ),
        },
        ("hf_speculate/kernels/noise.py", "kernels/test_noise.py"): {
            "the round is ignored": Fault(
                "alpha=ROUND_FACTOR",
                "alpha=0",
                "kernels/test_noise.py generation/test_distribution.py",
            ),
            "the race depends on the round": Fault(
                "if stream != Stream.RACE:",
                "if True:",
                "kernels/test_noise.py generation/test_coupled.py",
            ),
            "the position is ignored": Fault("alpha=POSITION_FACTOR", "alpha=0"),
            "all rows share a seed": Fault("rows == 0, base, _mix64", "rows >= 0, base, _mix64"),
            "uniforms reach 0": Fault(".add_(0.5).mul_(scale)", ".mul_(scale)"),
            "exponentials of u in place of 1 - u": Fault(
                "-UNIFORM_SCALE).log1p_().neg_()", "UNIFORM_SCALE).log_().neg_()"
            ),
        },
        ("hf_speculate/kernels/draws.py", "kernels/test_distributions.py"): {
            "every draw at the first position": Fault(
                "positions=self._positions[step]", "positions=self._positions[0]"
            ),
            "shared noise of the first draw": Fault(
                "noise = self._noise[:, step]", "noise = self._noise[:, 0]"
            ),
        },
        ("hf_speculate/kernels/warped_draws.py", "kernels/test_warping.py"): {
            "every draw with warping at the first position": Fault(
                "self.stream, step, drawn", "self.stream, 0, drawn"
            ),
        },
    }
)
