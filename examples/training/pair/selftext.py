"""Let the target continue training text, so the draft learns from the texts it will draft."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM

from hf_speculate.compat import CACHE_NAME
from training.pair.clock import Budget

ROW_LEN = 320
PREFIX_LENS = (64, 128, 192)
BATCH_SIZE = 96


class SelfText(NamedTuple):
    """Rows of real text continued by the target.

    The states of the target are kept at every position.
    """

    ids: torch.Tensor  # [R, W] int64
    # [R, W-1, D] float16; last hidden states of the target; their logits verify ids[:, 1:]
    hidden: torch.Tensor


@torch.inference_mode()
def continue_rows(
    target: LlamaForCausalLM, prefix_ids: torch.Tensor, row_len: int, greedy: torch.Tensor
) -> SelfText:
    """Continue every row to `row_len` tokens.

    Args:
        target: the model that generates the text.
        prefix_ids: real text, [B, P] int64.
        row_len: W, larger than P.
        greedy: [B] bool, rows that take the likeliest token; the other rows sample at temperature
        1.

    Returns:
        The rows, on the CPU.
    """
    cache = DynamicCache(config=target.config)
    step_ids, ids, hidden = prefix_ids, [prefix_ids], []
    for _ in range(row_len - prefix_ids.shape[1]):
        state = target.model(
            input_ids=step_ids, **{CACHE_NAME: cache}, use_cache=True
        ).last_hidden_state
        hidden.append(state.to(torch.float16).cpu())  # [B, P or 1, D]
        logits = target.lm_head(state[:, -1]).float()  # [B, V]
        sampled = torch.multinomial(logits.softmax(-1), 1)  # [B, 1]
        step_ids = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), sampled)
        ids.append(step_ids)
    return SelfText(torch.cat(ids, 1).cpu(), torch.cat(hidden, 1))


def draw_prefixes(stream: np.ndarray, batch: int, seed: int) -> torch.Tensor:
    """Draw real prefixes [B, P] int64 for a batch from a stream [N] uint16."""
    prefix_len = PREFIX_LENS[batch % len(PREFIX_LENS)]
    starts = np.random.default_rng((seed, 1, batch)).integers(
        0, len(stream) - prefix_len, BATCH_SIZE
    )
    return torch.from_numpy(
        np.stack([stream[start : start + prefix_len].astype(np.int64) for start in starts])
    )


def write_self_text(
    target: LlamaForCausalLM, stream: np.ndarray, folder: Path, minutes: float, seed: int
) -> None:
    """Write batches of self-text to `folder` until the budget is spent; older batches are kept.

    Args:
        target: the trained target in evaluation mode.
        stream: training token ids, [N] uint16.
        folder: folder that gets one file per batch.
        minutes: wall-clock budget for this call.
        seed: seed for prefixes and sampling.
    """
    folder.mkdir(parents=True, exist_ok=True)
    greedy = torch.arange(BATCH_SIZE, device=target.device) % 2 == 0
    batch, budget = len(list(folder.glob("*.pt"))), Budget(minutes)
    bar = tqdm(total=100, desc="self-text", unit="%", mininterval=5)
    while (share := budget.tick()) < 1.0:
        torch.manual_seed(seed * 100_003 + batch)
        prefixes = draw_prefixes(stream, batch, seed).to(target.device)
        rows = continue_rows(target, prefixes, ROW_LEN, greedy)
        torch.save(tuple(rows), folder / f"{batch:04d}.pt")
        batch += 1
        bar.n = round(100 * share)
        bar.set_postfix(rows=batch * BATCH_SIZE)
    bar.close()


def load_self_text(folder: Path) -> SelfText:
    """Load every batch in `folder`."""
    batches = [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))]
    return SelfText(
        torch.cat([ids for ids, _ in batches]), torch.cat([hidden for _, hidden in batches])
    )
