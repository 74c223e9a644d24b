"""Measure model-free drafting and transformers' prompt lookup, per row and round.

    python benchmarks/suffix.py

Times are listed by text length. A round is one call of the drafter, which reads the tokens emitted
since the last call and drafts K tokens for every row. Updating and searching the index is also
timed separately. The text is Python's standard library, encoded by the bundled tokenizer, and
differs between rows. Rounds are timed in two ways: back to back, in blocks of one length each,
and after other work. The other work writes more memory than the processor caches hold, like a
forward of a large model. transformers takes one row of the same texts, back to back.
"""

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from _harness import add_common_arguments, markdown, parse_common, spread, write_results
from _subjects import PAIR
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN

NAME = "suffix"
TARGET_LEN, MAX_US = 32_768, 20.0  # per row and round
MAX_GROWTH = 2.0  # limit for the growth from the shortest to the longest text
BLOCK_ROUNDS = 25  # rounds per block of one length
OTHER_BYTES = 64 << 20  # bytes written before each round that is timed after other work


def library_tokens(num_tokens: int) -> list[int]:
    """Return token ids of Python's standard library, repeated if there are too few."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        if len(ids) >= num_tokens:
            break
    return (ids * (num_tokens // len(ids) + 1))[:num_tokens]


class Text:
    """Rows of equal length, with their drafter."""

    def __init__(self, ids: Tensor, length: int, args: argparse.Namespace):
        self.ids, self.length, self.num_each = ids, length, args.emitted
        self.num_draft_tokens = args.num_draft_tokens
        self.drafter = SuffixDrafter(SuffixSettings(max_draft_tokens=args.num_draft_tokens))
        begin = time.perf_counter()
        self.drafter.begin(ids[:, :length])
        self.build_us = (time.perf_counter() - begin) / ids[:, :length].numel() * 1e6
        self.theirs = PromptLookupCandidateGenerator(
            num_output_tokens=args.num_draft_tokens, max_length=1 << 30
        )
        self.us: list[float] = []
        self.later_us: list[float] = []  # after other work
        self.index_us: list[float] = []
        self.their_us: list[float] = []

    def round(self, us: list[float]) -> None:
        """Run one round after the next tokens of each row, and append its microseconds to `us`."""
        new_ids = self._next().tolist()
        begin = time.perf_counter()
        self.drafter.look_up(new_ids)
        self.drafter.cut_proposal(self.num_draft_tokens)
        us.append((time.perf_counter() - begin) * 1e6 / len(new_ids))

    def index_round(self) -> None:
        """Run one round with only the indices of the rows."""
        new_ids = self._next().tolist()
        begin = time.perf_counter()
        for row, ids in zip(self.drafter.texts, new_ids, strict=True):
            row.index.extend(ids)
            row.index.find(row.token_ids[-MAX_MATCH_LEN:])
        self.index_us.append((time.perf_counter() - begin) * 1e6 / len(new_ids))

    def their_round(self) -> None:
        """Run one round in transformers on the first row."""
        row_ids = self.ids[:1, : self.length]
        begin = time.perf_counter()
        self.theirs.get_candidates(row_ids)
        self.their_us.append((time.perf_counter() - begin) * 1e6)

    def _next(self) -> Tensor:
        """Return the next tokens [B, N] of each row."""
        self.length += self.num_each
        return self.ids[:, self.length - self.num_each : self.length]


def measure(ids: list[int], batch_size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all lengths, and return one row of results per length."""
    num_blocks = args.rounds // BLOCK_ROUNDS
    num_new = 3 * num_blocks * BLOCK_ROUNDS * args.emitted
    texts = []
    for length in tqdm(
        args.lengths, desc=f"indexing, {batch_size} rows", leave=False, disable=None
    ):
        rows = [ids[row * 1000 : row * 1000 + length + num_new] for row in range(batch_size)]
        texts.append(Text(torch.tensor(rows), length, args))
    buffer = torch.zeros(OTHER_BYTES, dtype=torch.uint8)
    for _ in tqdm(
        range(num_blocks), desc=f"blocks of rounds, {batch_size} rows", leave=False, disable=None
    ):
        for text in texts:
            for _ in range(BLOCK_ROUNDS):
                text.round(text.us)
            for _ in range(BLOCK_ROUNDS):
                text.index_round()
            text.their_round()
        for _ in range(BLOCK_ROUNDS):
            for text in texts:
                buffer += 1
                text.round(text.later_us)
    return [
        {
            "batch_size": batch_size,
            "length": length,
            "us_per_row_and_round": spread(text.us),
            "us_of_the_index": spread(text.index_us),
            "us_after_other_work": spread(text.later_us),
            "transformers_us_per_round": spread(text.their_us),
            "build_us_per_token": text.build_us,
            "index_bytes_per_token": text.drafter.texts[0].index.num_bytes / text.length,
        }
        for length, text in zip(args.lengths, texts, strict=True)
    ]


def shown(us: dict[str, float]) -> str:
    """Format a median together with the fastest and the slowest round."""
    return "{median:.1f} ({min:.1f} to {max:.0f})".format(**us)


COLUMNS = {
    "rows": lambda row: row["batch_size"],
    "tokens": lambda row: row["length"],
    "us per row and round (min to max)": lambda row: shown(row["us_per_row_and_round"]),
    "of these the index": lambda row: shown(row["us_of_the_index"]),
    "after other work": lambda row: shown(row["us_after_other_work"]),
    "transformers, us per round": lambda row: shown(row["transformers_us_per_round"]),
    "us to index a token": lambda row: row["build_us_per_token"],
    "bytes per token": lambda row: f"{row['index_bytes_per_token']:.0f}",
}


def table(content: dict[str, Any]) -> str:
    """Format medians together with the fastest and the slowest rounds."""
    return markdown(COLUMNS, content["rows"])


def growths(rows: list[dict[str, Any]]) -> list[float]:
    """Return the median for the longest text over the shortest, by batch size and timing."""
    samples = []
    for batch_size in sorted({row["batch_size"] for row in rows}):
        for name in ("us_per_row_and_round", "us_after_other_work"):
            us = {
                row["length"]: row[name]["median"]
                for row in rows
                if row["batch_size"] == batch_size
            }
            samples.append(us[max(us)] / us[min(us)])
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=1, limit_s=300.0)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 8192, 32_768, 131_072])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=500, help="of either way of timing")
    parser.add_argument("--emitted", type=int, default=3, help="new tokens per row and round")
    parser.add_argument("--num-draft-tokens", type=int, default=10)
    args = parse_common(parser)
    num_tokens = max(args.lengths) + 1000 * max(args.batch_sizes) + 3 * args.rounds * args.emitted
    ids = library_tokens(num_tokens)
    rows = [row for batch_size in args.batch_sizes for row in measure(ids, batch_size, args)]
    path = write_results(NAME, args, rows, args.results)
    print(table({"rows": rows}))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
