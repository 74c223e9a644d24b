"""Define a custom drafter that learns token pairs from the text of each row and proposes them.

    python examples/custom_drafter.py --max-new-tokens 48

There is no draft model. A table of pairs is a poor drafter, but text repeats itself. The target
verifies every proposal, so the texts are the same as with plain decoding. The script prints the
mean acceptance length and whether the texts are equal.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate.types import DraftOut

PAIR = Path(__file__).resolve().parent / "pair"
PROMPTS = (
    "x = 1\ny = 2\nz = 3\nx = 1\ny = 2\n",
    "assert f(0) == 0\nassert f(1) == 1\nassert f(2) == 1\n",
    'names = ["a", "b", "c", "d", "e"]\n',
)


class BigramDrafter:
    """Drafter over a table of token pairs.

    It proposes, token by token, the last successor of each token in the row.
    `generate(drafter=BigramDrafter)` creates a drafter for every call. A row stops proposing at a
    token without a successor, so rows propose different numbers of tokens, possibly none.

    Args:
        request: the setup of the call.
    """

    def __init__(self, request: hf_speculate.DrafterSetup):
        self.num_pads = list(request.num_pads)  # [B]
        self.device = request.device
        self.newest: list[int] = []  # [B]
        self.next_ids: list[dict[int, int]] = []  # [B] token id -> its last successor

    def draft(self, request: hf_speculate.DraftRequest) -> DraftOut:
        """Return ids [B, K], each a point mass; see `hf_speculate.Drafter.draft`."""
        query_token_ids, num_draft_tokens, kept = (
            request.query_token_ids,
            request.num_draft_tokens,
            request.kept,
        )
        if kept is None:  # the first call: complete texts, padded on the left
            self.next_ids = [{} for _ in self.num_pads]
            texts = [
                row[pad:] for row, pad in zip(query_token_ids.tolist(), self.num_pads, strict=True)
            ]
            self.newest = [text[0] for text in texts]
            new_ids = [text[1:] for text in texts]
        else:
            counts = kept.num_emitted.tolist()
            new_ids = [
                row[:num_emitted]
                for row, num_emitted in zip(kept.token_ids.tolist(), counts, strict=True)
            ]
        for row, ids in enumerate(new_ids):
            self.learn(row, ids)
        drafts = [self.propose(row, num_draft_tokens) for row in range(len(self.newest))]
        max_len = max(map(len, drafts))
        padded = [ids + [0] * (max_len - len(ids)) for ids in drafts]
        # [B, K]
        token_ids = torch.tensor(padded, dtype=torch.int64, device=self.device).reshape(
            len(drafts), max_len
        )
        # [B]
        lens = torch.tensor([len(ids) for ids in drafts], dtype=torch.int32, device=self.device)
        return DraftOut(token_ids, lens, None, None)

    def rows(self, indices: Sequence[int]) -> None:
        """Select rows, as in `hf_speculate.Drafter.rows`; rows may leave before the first call."""
        for name in ("num_pads", "newest", "next_ids"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in indices] if values else [])

    def learn(self, row: int, new_ids: Sequence[int]) -> None:
        """Add the new tokens of a row to its table."""
        for token_id in new_ids:
            self.next_ids[row][self.newest[row]] = token_id
            self.newest[row] = token_id

    def propose(self, row: int, num_draft_tokens: int) -> list[int]:
        """Follow the row's pairs from its newest token and return up to `num_draft_tokens` ids."""
        ids: list[int] = []
        token_id = self.next_ids[row].get(self.newest[row])
        while token_id is not None and len(ids) < num_draft_tokens:
            ids.append(token_id)
            token_id = self.next_ids[row].get(token_id)
        return ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--num-assistant-tokens", type=int, default=4)
    parser.add_argument("--pair", type=Path, default=PAIR)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.pair / "target", padding_side="left")
    model = hf_speculate.enable(
        AutoModelForCausalLM.from_pretrained(args.pair / "target", dtype=torch.float64)
    )
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    stats = hf_speculate.SpeculationStats()
    plain = model.generate(**inputs, max_new_tokens=args.max_new_tokens)
    ours = model.generate(
        **inputs,
        max_new_tokens=args.max_new_tokens,
        drafter=BigramDrafter,
        num_assistant_tokens=args.num_assistant_tokens,
        speculation_stats=stats,
    )
    print(tokenizer.decode(ours[0], skip_special_tokens=True))
    print(
        f"\nmean acceptance length {stats.mean_acceptance_length:.2f}, acceptance rate "
        f"{stats.acceptance_rate:.3f}"
    )
    print(f"texts equal plain decoding's: {torch.equal(plain, ours)}")


if __name__ == "__main__":
    main()
