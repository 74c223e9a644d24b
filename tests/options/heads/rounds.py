"""Run drafters as the decoder does, round by round, with forced acceptance."""

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import hf_speculate
from hf_speculate.draft.base import DrafterSetup, DraftRequest
from hf_speculate.options.heads.head import DraftHead
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy, Stream
from tests.options.heads.designs import NUM_TARGET_LAYERS, TARGET_WIDTH, VOCAB_SIZE
from tests.support.tiny import make_model

PAD = 0
STALE = 1e4  # value in columns behind a row's end; masks hide finite values only


@cache
def target_of(dtype: torch.dtype = torch.float64, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """Return a Llama with six layers. Tests share it: do not change it."""
    return make_model(
        "llama",
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=TARGET_WIDTH,
        head_dim=TARGET_WIDTH // 4,
        num_hidden_layers=NUM_TARGET_LAYERS,
    )


@torch.no_grad()
def states_of(target: PreTrainedModel, text: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Return states [T, A * Ht] of a plain forward.

    They are inputs of layers, or the output of the last layer before or after the final norm.
    """
    num_layers, states = target.config.num_hidden_layers, []
    with contextlib.ExitStack() as stack:
        if num_layers in layers:
            handle = target.model.layers[-1].register_forward_hook(
                lambda module, args, output: states.append(output)
            )
            stack.callback(handle.remove)
        given = target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    parts = [states[0][0] if layer == num_layers else given[layer][0] for layer in layers]
    return torch.cat([given[0][0][:, :0], *parts], -1)


def random_texts(
    lens: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lens
    ]


@hf_speculate.register_row_wise
class BySum(LogitsProcessor):
    """Processor that prefers one token, chosen by the sum of all previous ids and padding."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, (input_ids + 1).sum(1, keepdim=True) % VOCAB_SIZE, 1e3)


class Rounds:
    """Rows of a drafter, advanced token by token as in the decoder."""

    def __init__(
        self,
        head: DraftHead,
        target: PreTrainedModel,
        texts: Sequence[Sequence[int]],
        **changes: Any,
    ):
        longest = max(map(len, texts))
        self.pads = [longest - len(text) for text in texts]
        self.texts = [list(text) for text in texts]
        self.target, self.layers = target, head.hidden_layers
        fields = {
            "target": target,
            "batch_size": len(texts),
            "num_pads": tuple(self.pads),
            "max_length": 512,
            "max_draft_tokens": 16,
            "vocab_size": target.config.vocab_size,
            "eos_token_ids": frozenset(),
            "device": torch.device("cpu"),
            "processors": BlockLogitsProcessorList(),
            "stream": Stream.DRAFT,
        }
        self.drafter = head(DrafterSetup(**fields | changes))
        self.told = [0] * len(texts)  # number of tokens per row that the drafter knows
        self.num_rounds = 0

    def draft(
        self,
        num: int,
        strategy: SampleStrategy = SampleStrategy.GREEDY,
        seeds: Sequence[int] | None = None,
    ) -> DraftOut:
        """Call the drafter with everything that the rows have gained since the last call."""
        self.num_rounds += 1
        self._fill_stale_columns()
        is_first, begins = not any(self.told), [told or 1 for told in self.told]
        new = [text[begin:] for text, begin in zip(self.texts, begins, strict=True)]
        counts = [len(row) for row in new]
        ids = torch.tensor(
            [row + [-1] * (max(counts) - len(row)) for row in new], dtype=torch.int64
        )
        kept = Kept(ids, torch.tensor(counts, dtype=torch.int32), self._states(begins, counts))
        size = max(map(len, self.texts)) if is_first else max(*counts, 1)
        query = torch.tensor([([PAD] * size + text)[-size:] for text in self.texts])
        seeds = torch.tensor(range(len(self.texts)) if seeds is None else seeds)
        positions = torch.tensor([len(text) for text in self.texts])
        keys = NoiseKeys(seeds, torch.full_like(seeds, self.num_rounds), positions)
        self.told = [len(text) for text in self.texts]
        kept = None if is_first and not self.layers else kept
        return self.drafter.draft(DraftRequest(query, None, num, strategy, keys, kept))

    def accept(self, draft: DraftOut, counts: Sequence[int | None], seed: int) -> None:
        """Keep the given number of drafted tokens per row and add one token that was not drafted.

        A row with None gains nothing.
        """
        for row, (text, count) in enumerate(zip(self.texts, counts, strict=True)):
            if count is not None:
                text += (
                    draft.token_ids[row, :count].tolist()
                    + random_texts([1], seed=seed * 31 + row)[0]
                )

    def rows(self, indices: Sequence[int]) -> None:
        self.drafter.rows(indices)
        for name in ("texts", "told", "pads"):
            setattr(self, name, [getattr(self, name)[row] for row in indices])

    def states(self, row: int) -> Tensor:
        """Return the states [n, A * Ht] of all tokens in a row except the newest."""
        return states_of(self.target, self.texts[row][:-1], self.layers)

    def _fill_stale_columns(self) -> None:
        cache = self.drafter.cache
        # [B, heads, T, D]
        for buffer in (part for parts in cache.buffers.values() for part in parts):
            for row, length in enumerate(cache.row_lens.on_host):
                buffer[row, :, length:] = STALE

    def _states(self, begins: Sequence[int], counts: Sequence[int]) -> Tensor | None:
        if not self.layers:
            return None
        rows = []
        for text, begin, count in zip(self.texts, begins, counts, strict=True):
            own = states_of(self.target, text, self.layers)[begin - 1 : begin - 1 + count]
            # The drafter must not read these states.
            junk = own.new_full((max(counts) - count, own.shape[1]), torch.nan)
            rows.append(self.drafter.project_states(torch.cat([own, junk])[None])[0])
        return torch.stack(rows)
