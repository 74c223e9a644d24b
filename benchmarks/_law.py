"""Checks that a way emits what its verifier promises, made before it is timed."""

import functools

import torch
from _rounds import Round, Warp, make_round, warped
from _ways import Emitted, Run, Verifier
from torch import Tensor

VOCAB_SIZE = 6
NUM_DRAFT_TOKENS = 2
TOP_K = 4
# transformers takes one row a call.
NUM_TRIALS, NUM_TRIALS_ROW_BY_ROW = 40_000, 3_000
# A right law falls below once in 10,000 choices of seed; the seeds are fixed.
PASS_P_VALUE = 1e-4
MAX_SIGMAS = 4.0
MIN_EXPECTED = 5.0
# Nearer than this to its border a float32 decision may go either way.
BORDER = 1e-4


class LawError(Exception):
    """A way does not keep its law."""


def p_value(counts: Tensor, law: Tensor) -> float:
    """Chi-square p-value of `counts` under `law` [N], rare cells pooled; 0 when something impossible happened."""
    counts, expected = counts.double(), law.double() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < MIN_EXPECTED
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counted = expected >= MIN_EXPECTED
    statistic = ((counts - expected)[counted].square() / expected[counted]).sum()
    return torch.special.gammaincc((counted.sum() - 1) / 2, statistic / 2).item()


def padded(emitted: Emitted, num_columns: int) -> Tensor:
    """Ids [B, K+1] int64 padded with -1, on the CPU."""
    if isinstance(emitted, Tensor):
        return emitted.long().cpu()
    columns = [torch.nn.functional.pad(one, (0, num_columns - one.shape[-1]), value=-1) for one in emitted]
    return torch.cat(columns).cpu()


def small_round(warp: Warp, how: str, num_rows: int, device: torch.device, seed: int = 0) -> Round:
    """`num_rows` times the same laws of a small vocabulary, with drafts of their own."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(NUM_DRAFT_TOKENS + 1, VOCAB_SIZE, generator=generator) * 1.5
    draft = target[:-1] + torch.randn(NUM_DRAFT_TOKENS, VOCAB_SIZE, generator=generator)
    small = warp._replace(top_k=None if warp.top_k is None else TOP_K)
    rows = [one.expand(num_rows, -1, -1).to(device) for one in (target, draft)]
    return make_round(*rows, small, how)


def expected_accepted(target: Tensor, draft: Tensor, law: str) -> float:
    """Mean number of accepted tokens of rejection sampling, from laws [K+1, V] and [K, V]."""
    if law == "point mass":
        kept = target[:-1].gather(-1, draft.argmax(-1, keepdim=True)).squeeze(-1)
    else:
        kept = torch.minimum(target[:-1], draft).sum(-1)
    return kept.cumprod(0).sum().item()


def check_counts(ids: Tensor, round_: Round, law: str) -> None:
    """Raise unless as many tokens were accepted as rejection sampling accepts; block may accept more."""
    target = warped(round_.target_logits[0], round_.warp).double().softmax(-1).cpu()
    draft = round_.draft_scores[0].double().softmax(-1).cpu()
    accepted = (ids >= 0).sum(-1).double() - 1.0
    sigmas = (accepted.mean() - expected_accepted(target, draft, law)) / (accepted.std() / len(accepted) ** 0.5)
    if sigmas < -MAX_SIGMAS or (law != "block" and sigmas > MAX_SIGMAS):
        raise LawError(f"accepts {accepted.mean():.4f} tokens a round, {sigmas:.1f} sigmas from what it should")


def check_lossless(ids: Tensor, round_: Round) -> None:
    """Raise unless the emitted ids, completed by draws from the target, follow the target's law."""
    laws = warped(round_.target_logits[0], round_.warp).double().softmax(-1).cpu()[: ids.shape[1]]
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.multinomial(law, len(ids), replacement=True, generator=generator) for law in laws]
    ids = torch.where(ids < 0, torch.stack(drawn, dim=-1), ids)
    joint = laws[0]
    for law in laws[1:]:
        joint = (joint.unsqueeze(-1) * law).flatten()
    places = VOCAB_SIZE ** torch.arange(ids.shape[1]).flip(0)
    counts = torch.bincount((ids * places).sum(-1), minlength=joint.numel())
    if (p := p_value(counts, joint)) < PASS_P_VALUE:
        raise LawError(f"chi-square p-value {p:.1e} of {len(ids)} joint draws against the target's law")


def check_greedy(ids: Tensor, round_: Round) -> None:
    """Raise unless the drafted ids stay exactly while they are the target's argmax."""
    best = round_.target_logits.argmax(-1).tolist()
    for row, drafted, chosen in zip(ids.tolist(), round_.draft_token_ids.tolist(), best, strict=True):
        kept = next((i for i, one in enumerate(drafted) if one != chosen[i]), len(drafted))
        if row != chosen[: kept + 1] + [-1] * (len(drafted) - kept):
            raise LawError(f"emits {row} where greedy decoding gives {chosen} of the drafted {drafted}")


def check_typical(ids: Tensor, round_: Round) -> None:
    """Raise unless the rule, in float64, keeps as many tokens as were kept, rows at the border aside."""
    laws = warped(round_.target_logits, round_.warp).double().softmax(-1).cpu()
    drafted = round_.draft_token_ids.cpu()
    entropy = -torch.special.xlogy(laws, laws).sum(-1)
    thresholds = (0.3 * torch.exp(-entropy)).clamp(max=0.09)[:, :-1]
    margins = laws[:, :-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1) - thresholds
    expected = (margins > 0).long().cumprod(-1).sum(-1)
    clear = (margins.abs() > BORDER).all(-1)
    accepted = (ids >= 0).sum(-1) - 1
    finals = ids.gather(1, accepted.unsqueeze(-1)).squeeze(-1)
    best = laws.argmax(-1).gather(1, accepted.unsqueeze(-1)).squeeze(-1)
    if not torch.equal(accepted[clear], expected[clear]) or not torch.equal(finals, best):
        raise LawError("keeps other tokens than the rule in float64")


def varied_round(warp: Warp, how: str, num_rows: int, device: torch.device) -> Round:
    """Rows with laws of their own."""
    generator = torch.Generator().manual_seed(2)
    shape = (num_rows, NUM_DRAFT_TOKENS + 1, VOCAB_SIZE)
    target = torch.randn(shape, generator=generator) * 1.5
    draft = target[:, :-1] + 0.5 * torch.randn(target[:, :-1].shape, generator=generator)
    small = warp._replace(top_k=None if warp.top_k is None else TOP_K)
    return make_round(target.to(device), draft.to(device), small, how)


def check(verifier: Verifier, way: str, run: Run, warp: Warp, device: torch.device) -> None:
    """Raise LawError unless `run`, the way called `way`, keeps the law it claims.

    transformers' way is held to the law of what it does, which is rejection where it lacks the verifier.
    """
    law = verifier.law
    if way == "transformers" and law in ("typical", "block"):
        law = "rejection"
    is_by_row = way == "transformers" and law != "sample"
    check_law(run, law, verifier.drafts, warp, NUM_TRIALS_ROW_BY_ROW if is_by_row else NUM_TRIALS, device)


@functools.cache
def check_law(run: Run, law: str, how: str, warp: Warp, num_rows: int, device: torch.device) -> None:
    """Raise LawError unless `run` keeps `law` on drafts made as `how` says; the same check is made once."""
    torch.manual_seed(0)
    if law in ("greedy", "typical"):
        round_ = varied_round(warp, how, min(num_rows, 2_000), device)
    else:
        round_ = small_round(warp, how, num_rows, device)
    # A copy: transformers processes float32 logits in place.
    ids = padded(run(round_._replace(target_logits=round_.target_logits.clone())), NUM_DRAFT_TOKENS + 1)
    if law == "greedy":
        check_greedy(ids, round_)
    elif law == "typical":
        check_typical(ids, round_)
    else:
        check_lossless(ids, round_)
    if law in ("rejection", "block", "point mass"):
        check_counts(ids, round_, law)


def control(verifier: Verifier, device: torch.device) -> None:
    """Raise unless a way that is told a wrong draft law fails its check: the check would see a fault of that size."""

    def wrong(round_: Round) -> Emitted:
        flat = torch.zeros_like(round_.draft_logits)
        return verifier.textbook(round_._replace(draft_logits=flat))

    try:
        check(verifier, "textbook", wrong, verifier.warps[-1], device)
    except LawError:
        return
    raise LawError("the check passes a way that was told a wrong draft law")
