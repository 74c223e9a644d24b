"""Load a head's target and the rows that it generated; add command-line options for training."""

import argparse
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from training.eagle3.rows import Rows, write_rows
from training.pair.corpus import list_sources, read_source, stdlib_root
from training.pair.store import load_model, load_tokenizer
from training.pair.tokens import encode_texts

EXAMPLES = Path(__file__).resolve().parents[2]


def add_row_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the target, the text folder, the number of batches and the seed."""
    parser.add_argument("--target", type=Path, default=EXAMPLES / "pair" / "target")
    parser.add_argument(
        "--work-dir", type=Path, default=EXAMPLES.parent / "build" / "eagle3", help="text, training"
    )
    parser.add_argument(
        "--batches", type=int, default=8, help="batches of 96 rows that the target writes"
    )
    parser.add_argument("--seed", type=int, default=0)


def load_target_rows(args: argparse.Namespace) -> tuple[LlamaForCausalLM, list[Rows]]:
    """Load the target in float32 and its batches, the last of which is held out."""
    torch.set_flush_denormal(True)
    target, root = load_model(args.target, torch.float32, "cpu"), stdlib_root()
    texts = [read_source(root, name) for name in list_sources(root).training]
    stream = encode_texts(load_tokenizer(args.target), texts)
    return target, write_rows(target, stream, args.batches + 1, args.seed, args.work_dir / "text")
