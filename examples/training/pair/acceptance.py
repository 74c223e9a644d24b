"""Measure how often the target accepts the draft's tokens, without any decoding engine.

A drafted token is verified only after accepted tokens, so it is always conditioned on the target's
own text, and one pass of the draft over this text gives every verdict. In greedy decoding, a
drafted token is accepted if the target has the same token. In sampling, given that the target's
text has token y, the drafted token is accepted with probability min(1, q(y) / p(y)). Over all
tokens, this is the overlap of p and q.

Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
"""

from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NUM_NEW_TOKENS = 128


class Verdicts(NamedTuple):
    """Verdicts on a draft along text of the target."""

    rows: list[list[bool]]  # one list per text, one verdict per new token
    overlap: float | None  # sampling: mean over positions of sum(min(p, q)); greedy: None


class Walk(NamedTuple):
    """Counts over rounds of K draft tokens."""

    num_accepted: int
    num_verified: int
    num_rounds: int  # complete: with a rejection, or room for all K tokens and the bonus
    num_tokens: int  # tokens in complete rounds

    @property
    def verified_acceptance_rate(self) -> float:
        """Accepted over verified tokens."""
        return self.num_accepted / self.num_verified

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens in a complete round."""
        return self.num_tokens / self.num_rounds


def walk_rounds(rows: list[list[bool]], num_draft_tokens: int) -> Walk:
    """Walk every text in rounds of `num_draft_tokens`.

    The first rejected token counts as verified; later tokens of the round do not.
    """
    accepted = verified = rounds = tokens = 0
    for row in rows:
        position = 0
        while position < len(row):
            verdicts = row[position : position + num_draft_tokens]
            run = verdicts.index(False) if False in verdicts else len(verdicts)
            refused = run < len(verdicts)
            accepted += run
            verified += run + refused
            if refused or position + num_draft_tokens < len(row):
                rounds += 1
                tokens += run + 1
            position += run + 1
    return Walk(accepted, verified, rounds, tokens)


def bound(acceptance: float, num_draft_tokens: int, cost: float, factor: float) -> float:
    """Return the largest speed-up that the pair allows at K draft tokens.

    Args:
        acceptance: a, in 0..1.
        num_draft_tokens: K.
        cost: c, the time of a draft step over that of a target step.
        factor: v(K+1), the time of a target forward of K+1 rows over that of one row.
    """
    tokens = sum(acceptance**power for power in range(num_draft_tokens + 1))
    return tokens / (num_draft_tokens * cost + factor)


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Return positions [B, W] int64 for left-padded rows, given their mask [B, W] int64."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def padded_logits(
    model: LlamaForCausalLM, ids: torch.Tensor, mask: torch.Tensor, num_last: int
) -> torch.Tensor:
    """Return the logits that verify the last tokens in `ids`.

    Args:
        model: the target or the draft.
        ids: [B, W] int64.
        mask: [B, W] int64.
        num_last: number of verified tokens.

    Returns:
        [B, num_last, V] float32.
    """
    output = model(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        position_ids=position_ids(mask)[:, :-1],
        use_cache=False,
        logits_to_keep=num_last,
    )
    return output.logits.float()


@torch.inference_mode()
def verdicts_of(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    seed: int | None,
) -> Verdicts:
    """Let the target continue the prompts and verify the draft on every new token.

    Args:
        target: model that generates NUM_NEW_TOKENS tokens per prompt.
        draft: model to verify.
        tokenizer: tokenizer of both models, padding on the left.
        prompts: P texts.
        seed: seed for sampling at temperature 1.
            None for greedy decoding.
    """
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(
        target.device
    )
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    sampling = {}
    if seed is not None:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "top_k": 0}
    ids = target.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, **sampling)  # [P, W]
    new_ids = ids[:, inputs["input_ids"].shape[1] :]  # [P, N]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(new_ids)], 1)  # [P, W]
    draft_probs = padded_logits(draft, ids, mask, new_ids.shape[1]).softmax(-1)  # [P, N, V]
    ended = (new_ids == tokenizer.eos_token_id).long()  # [P, N]
    alive = ended.cumsum(-1) == ended  # [P, N]; the text up to and including the first EOS
    overlap = None
    if seed is None:
        stands = draft_probs.argmax(-1) == new_ids  # [P, N]
    else:
        target_probs = padded_logits(target, ids, mask, new_ids.shape[1]).softmax(-1)  # [P, N, V]
        p = target_probs.gather(-1, new_ids[..., None])[..., 0]  # [P, N]
        q = draft_probs.gather(-1, new_ids[..., None])[..., 0]  # [P, N]
        stands = torch.rand_like(p) * p < q
        overlap = torch.minimum(target_probs, draft_probs).sum(-1)[alive].mean().item()
    rows = [
        row[: int(is_alive.sum())].tolist() for row, is_alive in zip(stands, alive, strict=True)
    ]
    return Verdicts(rows, overlap)
