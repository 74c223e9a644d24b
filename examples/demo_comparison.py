"""Compares the demo's greedy texts with plain decoding's, and says whether rounding explains a difference."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from demo_decoding import ASSISTED_K, OURS_GREEDY, PLAIN_GREEDY, Pair, count_tokens, decode
from demo_report import Method, Tally
from hf_speculate.tools.checks.near_ties import DifferenceCheck, logits_after_text


class Comparison:
    """What became of the greedy texts of a pair.

    Args:
        pair: what decodes.
    """

    def __init__(self, pair: Pair):
        # Drafts of constant length: the schedule could find that none pays, and then none would be compared.
        self.pair = replace(pair, num_assistant_tokens=pair.num_assistant_tokens or ASSISTED_K)
        self.check = DifferenceCheck(pair.target)
        self.num_texts = self.num_equal = self.num_wrong = 0
        self.num_verified = 0  # drafted tokens, over all texts
        self.notes: list[str] = []

    @property
    def is_failed(self) -> bool:
        """Whether a text is wrong, or none was compared that drafts could have changed."""
        return self.num_wrong > 0 or self.num_verified == 0

    def add_measured(self, tallies: Mapping[Method, Tally]) -> None:
        """Compare the texts that were measured with plain decoding's of the same prompts."""
        for method, tally in tallies.items():
            if method.engine == "hf_speculate" and not method.is_sampled:
                plain = tallies[replace(PLAIN_GREEDY, batch_size=method.batch_size, kind=method.kind)]
                both = list(zip(tally.outputs, plain.outputs, strict=False))  # one may lack the last pass
                for (inputs, ours), (_, expected) in both:
                    self.add(inputs, expected, ours)
                self.num_verified += tally.num_verified if both else 0

    def add_until(self, end: float, batches: Sequence[dict[str, Tensor]], max_new_tokens: int) -> None:
        """Decode prompts plainly and with drafts until the time is over and a drafted token was verified."""
        longest_s = 0.0
        for inputs in batches:
            begin = time.perf_counter()
            if self.num_verified and begin + longest_s > end:
                break
            expected, _ = decode(PLAIN_GREEDY, self.pair, inputs, max_new_tokens, seed=0)
            ours, stats = decode(OURS_GREEDY, self.pair, inputs, max_new_tokens, seed=0)
            self.add(inputs, expected, ours)
            self.num_verified += stats.num_verified
            longest_s = max(longest_s, time.perf_counter() - begin)

    def add(self, inputs: dict[str, Tensor], expected: Tensor, ours: Tensor) -> None:
        """Compare the new tokens [B, N] of a left-padded batch with plain decoding's [B, N'].

        Where a text first differs, forwards of the target over several shapes say how much rounding explains.
        """
        eos = self.pair.target.generation_config.eos_token_id
        for row, tokens in enumerate(zip(expected, ours, strict=True)):
            theirs, mine = (ids[: count_tokens(ids[None], eos)] for ids in tokens)  # [N], without padding
            num_common = min(len(theirs), len(mine))
            different = (theirs[:num_common] != mine[:num_common]).nonzero()
            self.num_texts += 1
            if len(different):
                prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
                self._explain(prompt, theirs, mine, int(different[0]), num_rows=len(expected))
            elif len(theirs) == len(mine):
                self.num_equal += 1
            else:
                self.num_wrong += 1
                self.notes.append(f"WRONG: a text ends after {len(mine)} tokens, plain decoding's after {len(theirs)}")

    def _explain(self, prompt: Tensor, theirs: Tensor, mine: Tensor, position: int, num_rows: int) -> None:
        block_len = self.pair.num_assistant_tokens + 1
        text = torch.cat([prompt, theirs[:position]])  # [T]
        logits_of = partial(logits_after_text, token_ids=text, block_len=block_len, num_rows=num_rows)
        chosen = int(theirs[position]), int(mine[position])
        plain, other = logits_of(self.pair.target)[0][list(chosen)].tolist()
        found = self.check(chosen, plain - other, position, logits_of)
        self.num_wrong += found.verdict == "bug"
        kind = "near-tie" if found.verdict == "tie" else "WRONG"
        self.notes.append(
            f"{kind} at token {position}: logits {found.gap:.2g} apart, of which rounding explains {found.bound:.2g}"
        )

    def print(self, dtype: str) -> None:
        print(f"{dtype}: {self.num_equal} of {self.num_texts} greedy texts are identical to plain generate()")
        for note in self.notes:
            print(f"  {note}")
        if not self.num_verified:
            print("  WRONG: no drafted token was verified")
