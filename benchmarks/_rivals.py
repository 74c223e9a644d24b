"""Other methods to verify a round: transformers, textbook code in eager torch, FlashInfer."""

import importlib

import torch
from _rounds import PROMPT_LEN, Round, warped
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.utils import _speculative_sampling


def processors_of(round_: Round) -> LogitsProcessorList:
    """Return the processors that transformers builds from the sampling settings of a round.

    The list is empty if the settings have no effect.
    """
    processors = LogitsProcessorList()
    if round_.warp.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(round_.warp.temperature))
    if round_.warp.top_k is not None:
        processors.append(TopKLogitsWarper(round_.warp.top_k))
    return processors


class Assisted:
    """One round of assisted generation in transformers.

    The round starts after the target's forward. Rows run one by one, because transformers takes
    only one row.
    """

    def __init__(self, select: str) -> None:
        self.select = select  # "rejection", "multinomial" or "argmax"

    def __call__(self, round_: Round) -> list[Tensor]:
        processors = LogitsProcessorList() if self.select == "argmax" else processors_of(round_)
        rows = range(round_.target_logits.shape[0])
        return [self.row(round_, slice(row, row + 1), processors) for row in rows]

    def row(self, round_: Round, row: slice, processors: LogitsProcessorList) -> Tensor:
        """Return valid ids [1, n+1]; float32 logits are processed in place, as in transformers."""
        candidate_ids, num_draft_tokens = round_.candidate_ids[row], round_.num_draft_tokens
        logits = round_.target_logits[row].to(dtype=torch.float32, device=candidate_ids.device)
        _ = logits.clone()  # transformers always makes this copy, for `output_logits`
        if len(processors) > 0:
            for position in range(num_draft_tokens + 1):
                prefix = candidate_ids[:, : PROMPT_LEN + position]
                logits[:, position, :] = processors(prefix, logits[:, position, :])
        if self.select == "rejection":
            return _speculative_sampling(
                candidate_ids, round_.draft_scores[row], num_draft_tokens, logits
            )[0]
        if self.select == "multinomial":
            chosen = torch.multinomial(logits.softmax(dim=-1)[0], num_samples=1).T  # [1, K+1]
        else:
            chosen = logits.argmax(dim=-1)
        differs = candidate_ids[:, PROMPT_LEN:] != chosen[:, :-1]
        num_matches = (differs.cumsum(dim=-1) < 1).sum()
        return chosen[:, : num_matches + 1]


def transformers_sample(round_: Round) -> Tensor:
    """Run one sampling step as in transformers, after the forward, and return ids [B, 1]."""
    logits = round_.target_logits[:, 0].to(copy=True, dtype=torch.float32)
    scores = processors_of(round_)(round_.candidate_ids[:, :PROMPT_LEN], logits)
    return torch.multinomial(scores.softmax(dim=-1), num_samples=1)


def _at(probs: Tensor, ids: Tensor) -> Tensor:
    return probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _emit(round_: Round, num_accepted: Tensor, final_ids: Tensor) -> Tensor:
    """Return ids [B, K+1]: `num_accepted` [B] drafted ids, `final_ids` [B, 1], then -1."""
    ids = torch.cat((round_.draft_token_ids, final_ids), dim=-1).scatter(
        1, num_accepted.unsqueeze(-1), final_ids
    )
    columns = torch.arange(ids.shape[1], device=ids.device)
    return ids.masked_fill(columns > num_accepted.unsqueeze(-1), -1)


def _prefix(accepted: Tensor) -> Tensor:
    return accepted.long().cumprod(-1).sum(-1)


def _pick(probs: Tensor, positions: Tensor) -> Tensor:
    return probs[torch.arange(probs.shape[0], device=probs.device), positions]


def _pick_or_zero(probs: Tensor, positions: Tensor) -> Tensor:
    """Return the distribution at `positions` [B], or zeros past the last position."""
    inside = positions < probs.shape[1]
    return _pick(probs, positions.clamp(max=probs.shape[1] - 1)) * inside.unsqueeze(-1)


def textbook_greedy(round_: Round) -> Tensor:
    best = round_.target_logits.argmax(-1)
    num_accepted = _prefix(best[:, :-1] == round_.draft_token_ids)
    return _emit(round_, num_accepted, best.gather(1, num_accepted.unsqueeze(-1)))


def textbook_rejection(round_: Round) -> Tensor:
    target = warped(round_.target_logits, round_.warp).softmax(-1)
    draft = round_.draft_logits.to(torch.float32).softmax(-1)
    target_of_token, draft_of_token = (
        _at(target[:, :-1], round_.draft_token_ids),
        _at(draft, round_.draft_token_ids),
    )
    num_accepted = _prefix(torch.rand_like(draft_of_token) * draft_of_token < target_of_token)
    residual = (_pick(target, num_accepted) - _pick_or_zero(draft, num_accepted)).clamp(min=0.0)
    return _emit(round_, num_accepted, torch.multinomial(residual, 1))


def textbook_point_mass(round_: Round) -> Tensor:
    target = warped(round_.target_logits, round_.warp).softmax(-1)
    target_of_token = _at(target[:, :-1], round_.draft_token_ids)
    num_accepted = _prefix(torch.rand_like(target_of_token) < target_of_token)
    without = target[:, :-1].scatter(-1, round_.draft_token_ids.unsqueeze(-1), 0.0)
    weights = _pick(torch.cat((without, target[:, -1:]), dim=1), num_accepted)
    return _emit(round_, num_accepted, torch.multinomial(weights, 1))


def textbook_typical(round_: Round) -> Tensor:
    target = warped(round_.target_logits, round_.warp).softmax(-1)
    entropy = -torch.special.xlogy(target, target).sum(-1)
    thresholds = (0.3 * torch.exp(-entropy)).clamp(max=0.09)
    num_accepted = _prefix(_at(target[:, :-1], round_.draft_token_ids) > thresholds[:, :-1])
    return _emit(round_, num_accepted, target.argmax(-1).gather(1, num_accepted.unsqueeze(-1)))


def textbook_block(round_: Round) -> Tensor:
    target = warped(round_.target_logits, round_.warp).softmax(-1)
    draft = round_.draft_logits.to(torch.float32).softmax(-1)
    ratios = _at(target[:, :-1], round_.draft_token_ids) / _at(draft, round_.draft_token_ids)
    num_rows, num_draft_tokens = ratios.shape
    rho = torch.ones(num_rows, device=ratios.device)
    accepted_rho, num_accepted = rho, torch.zeros(num_rows, dtype=torch.int64, device=ratios.device)
    for position in range(num_draft_tokens):
        rho = (rho * ratios[:, position]).clamp(max=1.0)
        coin = torch.rand_like(rho)
        if position + 1 < num_draft_tokens:
            scaled = rho.unsqueeze(-1) * target[:, position + 1]
            mass = (scaled - draft[:, position + 1]).clamp(min=0.0).sum(-1)
            passed = coin * (mass + 1.0 - rho) <= mass
        else:
            passed = coin < rho
        num_accepted = torch.where(passed, position + 1, num_accepted)
        accepted_rho = torch.where(passed, rho, accepted_rho)
    accepted_rho = torch.where(num_accepted < num_draft_tokens, accepted_rho, 1.0)
    scaled = accepted_rho.unsqueeze(-1) * _pick(target, num_accepted)
    residual = (scaled - _pick_or_zero(draft, num_accepted)).clamp(min=0.0)
    return _emit(round_, num_accepted, torch.multinomial(residual, 1))


def textbook_coupled(round_: Round) -> Tensor:
    """Run a race on fresh noise, to time coupling without the drafter's part."""
    target = warped(round_.target_logits, round_.warp).softmax(-1)
    winners = (target / torch.empty_like(target).exponential_()).argmax(-1)
    num_accepted = _prefix(winners[:, :-1] == round_.draft_token_ids)
    return _emit(round_, num_accepted, winners.gather(1, num_accepted.unsqueeze(-1)))


def textbook_sample(round_: Round) -> Tensor:
    return torch.multinomial(warped(round_.target_logits[:, 0], round_.warp).softmax(-1), 1)


def flashinfer_rejection(round_: Round) -> Tensor:
    """Run FlashInfer's softmax on both sides and its chain kernel on the same logits."""
    sampling = importlib.import_module("flashinfer.sampling")
    vocab_size = round_.target_logits.shape[-1]
    target = round_.target_logits.to(torch.float32).view(-1, vocab_size)
    if round_.warp.top_k is not None:
        target = sampling.top_k_mask_logits(target, min(round_.warp.top_k, vocab_size - 1))
    target_probs = sampling.softmax(target, temperature=round_.warp.temperature).view(
        round_.target_logits.shape
    )
    draft_probs = sampling.softmax(round_.draft_logits.to(torch.float32).view(-1, vocab_size))
    ids = round_.draft_token_ids.to(torch.int32)
    return sampling.chain_speculative_sampling(
        draft_probs.view(round_.draft_logits.shape), ids, target_probs
    )[0]
