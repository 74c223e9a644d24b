"""Check that a method implements its verification rule.

The checks cover the output distribution, the number of accepted tokens and, for greedy decoding,
the exact ids.
"""

import functools

import torch
from _rounds import Round, Warp, make_round, warped
from _verifiers import Emitted, Run, Verifier
from torch import Tensor

VOCAB_SIZE = 6
NUM_DRAFT_TOKENS = 2
TOP_K = 4
# transformers takes one row per call, so it gets fewer trials.
NUM_TRIALS, NUM_TRIALS_ROW_BY_ROW = 40_000, 3_000
# A correct method fails with one seed in 10,000; the seeds are fixed.
PASS_P_VALUE = 1e-4
MAX_SIGMAS = 4.0
MIN_EXPECTED = 5.0
# A float32 decision closer than this to its threshold may go either way.
BORDER = 1e-4


class DistributionError(Exception):
    """Error for a method that does not implement its verification rule."""


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Return the chi-square p-value of `counts` under `probs` [N], with rare cells pooled.

    The p-value is 0 if an impossible token occurred.
    """
    counts, expected = counts.double(), probs.double() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < MIN_EXPECTED
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counted = expected >= MIN_EXPECTED
    statistic = ((counts - expected)[counted].square() / expected[counted]).sum()
    return torch.special.gammaincc((counted.sum() - 1) / 2, statistic / 2).item()


def padded(emitted: Emitted, num_columns: int) -> Tensor:
    """Return ids [B, K+1] int64 padded with -1, on the CPU."""
    if isinstance(emitted, Tensor):
        return emitted.long().cpu()
    columns = [
        torch.nn.functional.pad(ids, (0, num_columns - ids.shape[-1]), value=-1) for ids in emitted
    ]
    return torch.cat(columns).cpu()


def small_round(warp: Warp, how: str, num_rows: int, device: torch.device, seed: int = 0) -> Round:
    """Make `num_rows` rows with the same distributions over a small vocabulary.

    Each row has its own draft.
    """
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(NUM_DRAFT_TOKENS + 1, VOCAB_SIZE, generator=generator) * 1.5
    draft = target[:-1] + torch.randn(NUM_DRAFT_TOKENS, VOCAB_SIZE, generator=generator)
    small = warp._replace(top_k=None if warp.top_k is None else TOP_K)
    rows = [logits.expand(num_rows, -1, -1).to(device) for logits in (target, draft)]
    return make_round(*rows, small, how)


def expected_accepted(target: Tensor, draft: Tensor, rule: str) -> float:
    """Return the mean number of tokens that rejection sampling accepts.

    Args:
        target: probabilities [K+1, V].
        draft: probabilities [K, V].
        rule: "point mass" for a draft without probabilities.
    """
    if rule == "point mass":
        accept_probs = target[:-1].gather(-1, draft.argmax(-1, keepdim=True)).squeeze(-1)
    else:
        accept_probs = torch.minimum(target[:-1], draft).sum(-1)
    return accept_probs.cumprod(0).sum().item()


def check_counts(ids: Tensor, round_: Round, rule: str) -> None:
    """Raise unless the number of accepted tokens fits rejection sampling; block may accept more."""
    target = warped(round_.target_logits[0], round_.warp).double().softmax(-1).cpu()
    draft = round_.draft_scores[0].double().softmax(-1).cpu()
    accepted = (ids >= 0).sum(-1).double() - 1.0
    sigmas = (accepted.mean() - expected_accepted(target, draft, rule)) / (
        accepted.std() / len(accepted) ** 0.5
    )
    if sigmas < -MAX_SIGMAS or (rule != "block" and sigmas > MAX_SIGMAS):
        raise DistributionError(
            f"accepts {accepted.mean():.4f} tokens a round, {sigmas:.1f} sigmas from what it should"
        )


def check_lossless(ids: Tensor, round_: Round) -> None:
    """Raise unless the emitted ids, completed by target samples, have the target distribution."""
    probs = warped(round_.target_logits[0], round_.warp).double().softmax(-1).cpu()[: ids.shape[1]]
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.multinomial(row_probs, len(ids), replacement=True, generator=generator)
        for row_probs in probs
    ]
    ids = torch.where(ids < 0, torch.stack(drawn, dim=-1), ids)
    joint = probs[0]
    for position_probs in probs[1:]:
        joint = (joint.unsqueeze(-1) * position_probs).flatten()
    powers = VOCAB_SIZE ** torch.arange(ids.shape[1]).flip(0)
    counts = torch.bincount((ids * powers).sum(-1), minlength=joint.numel())
    if (p := p_value(counts, joint)) < PASS_P_VALUE:
        raise DistributionError(
            f"chi-square p-value {p:.1e} of {len(ids)} joint draws against the target's "
            "distribution"
        )


def check_greedy(ids: Tensor, round_: Round) -> None:
    """Raise unless drafted ids are kept up to the first mismatch with the target's argmax."""
    best = round_.target_logits.argmax(-1).tolist()
    for row, drafted, chosen in zip(
        ids.tolist(), round_.draft_token_ids.tolist(), best, strict=True
    ):
        num_accepted = next(
            (i for i, token_id in enumerate(drafted) if token_id != chosen[i]), len(drafted)
        )
        if row != chosen[: num_accepted + 1] + [-1] * (len(drafted) - num_accepted):
            raise DistributionError(
                f"emits {row} where greedy decoding gives {chosen} of the drafted {drafted}"
            )


def check_typical(ids: Tensor, round_: Round) -> None:
    """Raise unless the rule accepts the same tokens in float64.

    Rows near the threshold are ignored.
    """
    probs = warped(round_.target_logits, round_.warp).double().softmax(-1).cpu()
    drafted = round_.draft_token_ids.cpu()
    entropy = -torch.special.xlogy(probs, probs).sum(-1)
    thresholds = (0.3 * torch.exp(-entropy)).clamp(max=0.09)[:, :-1]
    margins = probs[:, :-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1) - thresholds
    expected = (margins > 0).long().cumprod(-1).sum(-1)
    clear = (margins.abs() > BORDER).all(-1)
    accepted = (ids >= 0).sum(-1) - 1
    finals = ids.gather(1, accepted.unsqueeze(-1)).squeeze(-1)
    best = probs.argmax(-1).gather(1, accepted.unsqueeze(-1)).squeeze(-1)
    if not torch.equal(accepted[clear], expected[clear]) or not torch.equal(finals, best):
        raise DistributionError("keeps other tokens than the rule in float64")


def varied_round(warp: Warp, how: str, num_rows: int, device: torch.device) -> Round:
    """Make a round of rows with different distributions."""
    generator = torch.Generator().manual_seed(2)
    shape = (num_rows, NUM_DRAFT_TOKENS + 1, VOCAB_SIZE)
    target = torch.randn(shape, generator=generator) * 1.5
    draft = target[:, :-1] + 0.5 * torch.randn(target[:, :-1].shape, generator=generator)
    small = warp._replace(top_k=None if warp.top_k is None else TOP_K)
    return make_round(target.to(device), draft.to(device), small, how)


def check(verifier: Verifier, method: str, run: Run, warp: Warp, device: torch.device) -> None:
    """Raise DistributionError unless `run`, the method called `method`, implements the rule.

    If transformers lacks the verifier, its output is checked for rejection sampling.
    """
    rule = verifier.rule
    if method == "transformers" and rule in ("typical", "block"):
        rule = "rejection"
    is_by_row = method == "transformers" and rule != "sample"
    check_rule(
        run, rule, verifier.drafts, warp, NUM_TRIALS_ROW_BY_ROW if is_by_row else NUM_TRIALS, device
    )


@functools.cache
def check_rule(
    run: Run, rule: str, how: str, warp: Warp, num_rows: int, device: torch.device
) -> None:
    """Raise DistributionError unless `run` follows `rule` on drafts made by `how`.

    Results are cached, so each check runs once.
    """
    torch.manual_seed(0)
    if rule in ("greedy", "typical"):
        round_ = varied_round(warp, how, min(num_rows, 2_000), device)
    else:
        round_ = small_round(warp, how, num_rows, device)
    # A copy is needed: transformers processes float32 logits in place.
    ids = padded(
        run(round_._replace(target_logits=round_.target_logits.clone())), NUM_DRAFT_TOKENS + 1
    )
    if rule == "greedy":
        check_greedy(ids, round_)
    elif rule == "typical":
        check_typical(ids, round_)
    else:
        check_lossless(ids, round_)
    if rule in ("rejection", "block", "point mass"):
        check_counts(ids, round_, rule)


def control(verifier: Verifier, device: torch.device) -> None:
    """Raise unless a method with a wrong draft distribution fails its check.

    This ensures that the check detects faults of this size.
    """

    def wrong(round_: Round) -> Emitted:
        flat = torch.zeros_like(round_.draft_logits)
        return verifier.textbook(round_._replace(draft_logits=flat))

    try:
        check(verifier, "textbook", wrong, verifier.warps[-1], device)
    except DistributionError:
        return
    raise DistributionError("the check passes a method with a wrong draft distribution")
