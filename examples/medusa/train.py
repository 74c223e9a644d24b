"""Trains Medusa heads for the bundled target on text that the target writes itself.

    cd examples && python -m medusa.train    # some ten minutes on one core

The target reads pieces of the Python standard library and goes on from them, half of the rows greedily and half by
sampling; its states and the tokens that followed are what the heads learn from. The target stays as it is. The last
batch of rows is not trained on: how often each head guesses its tokens is printed.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from medusa.heads import MedusaHeads
from pair_training.corpus import list_sources, read_source, stdlib_root
from pair_training.selftext import BATCH_SIZE, ROW_LEN, SelfText, continue_rows, draw_prefixes
from pair_training.store import load_model, load_tokenizer
from pair_training.tokens import encode_texts

EXAMPLES = Path(__file__).resolve().parents[1]
WEIGHTS = Path(__file__).resolve().parent / "heads.safetensors"
EVERY_FILE = 8  # of the training files one in so many is read, which is text enough for minutes
DECAY = 0.8  # of a head's weight in the loss over that of the head before it, as in Medusa


class Settings(NamedTuple):
    """How heads are trained."""

    num_heads: int = 4
    rank: int = 256
    num_steps: int = 400
    rows_per_step: int = 4
    learning_rate: float = 2e-3
    seed: int = 0


def write_text(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_batches: int, seed: int) -> SelfText:
    """Rows of real text that the target continues, `num_batches` times 96 of them."""
    root = stdlib_root()
    texts = [read_source(root, name) for name in list_sources(root).training[::EVERY_FILE]]
    stream: np.ndarray = encode_texts(tokenizer, texts)
    greedy = torch.arange(BATCH_SIZE) % 2 == 0
    batches = []
    for batch in range(num_batches):
        torch.manual_seed(seed * 100_003 + batch)
        batches.append(continue_rows(target, draw_prefixes(stream, batch, seed), ROW_LEN, greedy))
    return SelfText(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def head_losses(heads: MedusaHeads, output: torch.nn.Module, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's loss and its share of right guesses.

    Args:
        heads: to be evaluated.
        output: the target's output matrix.
        ids: [R, W] int64.
        states: [R, W-1, D]; state t is the one from which token t + 1 was chosen.

    Returns:
        Nats a token and the share, both [H].
    """
    num_heads = heads.num_heads
    num = ids.shape[1] - 1 - num_heads  # states after which there is a token for every head
    logits = output(heads(states[:, :num]))  # [R, N, H, V]
    labels = torch.stack([ids[:, 2 + head : 2 + head + num] for head in range(num_heads)], dim=-1)  # [R, N, H]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
    is_right = logits.argmax(-1) == labels  # [R, N, H]
    return losses.view(-1, num_heads).mean(0), is_right.flatten(0, 1).float().mean(0)


def train_heads(target: LlamaForCausalLM, text: SelfText, settings: Settings) -> MedusaHeads:
    """Train new heads on the rows of `text`; the target's output matrix is read and left as it is."""
    torch.manual_seed(settings.seed)
    output = target.get_output_embeddings().requires_grad_(False)
    heads = MedusaHeads(target.config.hidden_size, settings.num_heads, settings.rank)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.num_steps)
    weights = DECAY ** torch.arange(settings.num_heads)
    begin = time.monotonic()
    for step in range(settings.num_steps):
        rows = torch.randint(len(text.ids), (settings.rows_per_step,))
        losses, _ = head_losses(heads, output, text.ids[rows], text.hidden[rows].float())
        optimizer.zero_grad()
        (losses * weights).sum().backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == settings.num_steps - 1:
            shown = " ".join(f"{loss:.2f}" for loss in losses.tolist())
            print(f"step {step}, {time.monotonic() - begin:.0f} s, nats a token by head: {shown}", flush=True)
    return heads.eval().requires_grad_(False)


def cut(part: Tensor) -> tuple[Tensor, Tensor]:
    """All but the last batch of rows, and that one."""
    return part[:-BATCH_SIZE], part[-BATCH_SIZE:]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=EXAMPLES / "pair" / "target")
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    parser.add_argument("--batches", type=int, default=8, help="batches of 96 rows that the target writes")
    parser.add_argument("--steps", type=int, default=Settings().num_steps)
    parser.add_argument("--heads", type=int, default=Settings().num_heads)
    parser.add_argument("--rank", type=int, default=Settings().rank)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    target = load_model(args.target, torch.float32, "cpu")
    begin = time.monotonic()
    text = write_text(target, load_tokenizer(args.target), args.batches + 1, args.seed)
    print(f"{text.ids.numel()} tokens, written in {time.monotonic() - begin:.0f} s")
    seen, held_out = (
        SelfText(*(part[rows] for part in text)) for rows in (slice(-BATCH_SIZE), slice(-BATCH_SIZE, None))
    )
    settings = Settings(num_heads=args.heads, rank=args.rank, num_steps=args.steps, seed=args.seed)
    heads = train_heads(target, seen, settings)
    heads.save(args.output)
    with torch.no_grad():
        parts = zip(held_out.ids.split(8), held_out.hidden.split(8), strict=True)
        output = target.get_output_embeddings()
        rights = torch.stack([head_losses(heads, output, ids, states.float())[1] for ids, states in parts]).mean(0)
    print(f"right guesses on unseen rows by head: {' '.join(f'{share:.3f}' for share in rights.tolist())}")
    print(f"wrote {args.output}, {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
