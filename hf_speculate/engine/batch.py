"""Batch: the rows being decoded, with their tokens, seeds and finished flags."""

import copy
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.engine.plan import Plan
from hf_speculate.rows.per_row import PerRow
from hf_speculate.rows.row_lens import RowCounts
from hf_speculate.rows.token_buffer import TokenBuffer
from hf_speculate.transfers import upload
from hf_speculate.types import DeviceRows, DraftOut, NoiseKeys, RoundRows, Trimmed, Verified

_NUM_ROUNDS = 256  # number of round numbers per upload to the device
_FIRST_CAPACITY = 1024  # initial room for new tokens in a row's buffer, which grows on demand


class Batch(PerRow):
    """B rows of prompts and new tokens."""

    BY_ROW = (
        "num_hidden",
        "max_lengths",
        "row_ids",
        "is_finished",
        "prompt_lens",
        "draft_limits",
        "_rounds_before",
    )
    TENSORS = ("seeds",)
    PARTS = ("tokens", "host_tokens")

    def __init__(
        self,
        input_ids: Tensor,  # [B, T] int64, the left-padded prompts, on the target's device
        seeds: Tensor,  # [B] int64 row seeds
        max_length: int,  # maximum number of output columns
        # [B] number of real tokens in each prompt, including the tokens in a passed cache
        num_prompt_tokens: Sequence[int],
        # whether the noise keys are read; otherwise, `keys` returns placeholders
        reads_keys: bool = True,
        first_row: int = 0,  # index of the first output row
        # [B] maximum number of draft tokens per round; None for no limit
        draft_limits: Sequence[int] | None = None,
    ):
        num_rows, self.prompt_len = input_ids.shape
        self.tokens = TokenBuffer(input_ids, min(max_length, self.prompt_len + _FIRST_CAPACITY))
        self.host_tokens = (
            self.tokens if input_ids.device.type == "cpu" else TokenBuffer(input_ids.cpu())
        )
        self.seeds = seeds
        # number of tokens minus the number of columns
        self.num_hidden = [num_tokens - self.prompt_len for num_tokens in num_prompt_tokens]
        self.max_lengths = [max_length] * num_rows
        self.row_ids = list(range(first_row, first_row + num_rows))
        self.is_finished = [False] * num_rows
        self.was_live = [True] * num_rows  # rows that were not finished before the last commit
        self.num_rounds = 0
        self.prompt_lens = [self.prompt_len] * num_rows
        self.draft_limits = list(draft_limits or [MAX_ASSISTANT_TOKENS] * num_rows)
        self._rounds_before = [0] * num_rows  # number of rounds before each row joined the batch
        self._reads_keys = reads_keys
        self._rounds: Tensor | None = None  # [N, B] int64, number of each round in every row
        self._key_pads: Tensor | None = None  # [B, 1] int64, column minus position of noise keys
        self._no_draft: DraftOut | None = None  # made when first needed
        # flags of the rows with new tokens, and the same flags as [B] int64
        self._gains: tuple[list[bool], Tensor] | None = None
        # noise keys of a round, with its number and the row lengths; None if they are not known
        self._known_keys: tuple[int, list[int], NoiseKeys] | None = None

    @classmethod
    def of(cls, plan: Plan) -> "Batch":
        """Return the batch for a planned call before its first forward."""
        call, config, num_rows = plan.call, plan.config, plan.call.batch_size
        seeds = config.row_seeds(num_rows, call.do_sample).to(call.prompts.input_ids.device)
        numbers = call.max_length, call.num_prompt_tokens, plan.reads_keys, call.row_lists.first_row
        return cls(
            call.prompts.input_ids,
            call.ranks.broadcast(seeds),
            *numbers,
            config.draft_limits(num_rows),
        )

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)

    @property
    def num_left(self) -> list[int]:
        """[B] number of remaining tokens in each row."""
        return [
            max_len - length
            for max_len, length in zip(self.max_lengths, self.tokens.lens, strict=True)
        ]

    def begin_round(self) -> NoiseKeys:
        self.num_rounds += 1
        return self.keys()

    def keys(self) -> NoiseKeys:
        if self._key_pads is None:
            self._key_pads = upload([-num for num in self.num_hidden], self.seeds.device)[:, None]
        if not self._reads_keys:
            return NoiseKeys(self.seeds, self._key_pads[:, 0], self._key_pads[:, 0])
        if self._known_keys is not None and self._known_keys[0] == self.num_rounds:
            _, lens, keys = self._known_keys
            if lens is self.tokens.lens:
                return keys
        positions = self.tokens.row_lens.positions(1, pads=self._key_pads)[:, 0]
        if self._rounds is None or self.num_rounds >= len(self._rounds):
            numbers = torch.arange(self.num_rounds + _NUM_ROUNDS, device=self.seeds.device)
            self._rounds = numbers[:, None] - upload(self._rounds_before, self.seeds.device)
        return NoiseKeys(self.seeds, self._rounds[self.num_rounds], positions)

    def round_rows(self, num_round: int) -> RoundRows:
        """Return the state of the rows before a round, with the numbers used in `keys`."""
        lens = self.tokens.lens
        return RoundRows(
            self.host_tokens.last(2).tolist(),
            [num_round - before for before in self._rounds_before],
            [length + num for length, num in zip(lens, self.num_hidden, strict=True)],
            [not is_finished for is_finished in self.is_finished],
            self.seeds,
        )

    def know(self, rows: DeviceRows | None) -> None:
        """Take over the state before the next round from the device.

        Args:
            rows: The state. None if the device has overwritten the previous state.
        """
        if rows is not None:
            self.tokens.know_last(rows.newest_ids)
            self._known_keys = self.num_rounds + 1, self.tokens.lens, rows.keys
        elif self._known_keys is not None:
            self.tokens.know_last(None)
            self._known_keys = None

    def no_draft(self) -> DraftOut:
        """Return a draft without tokens, whose scoring is a plain decoding step."""
        if self._no_draft is None or len(self._no_draft.lens) != self.num_rows:
            lens = torch.zeros(self.num_rows, dtype=torch.int32, device=self.seeds.device)
            self._no_draft = DraftOut(lens.new_empty((len(lens), 0)).long(), lens, None, None)
        return self._no_draft

    def commit(self, verified: Verified, trimmed: Trimmed) -> None:
        """Append the emitted tokens of a round and update the finished flags."""
        self.was_live = [not is_finished for is_finished in self.is_finished]
        if verified.is_captured and self.host_tokens is not self.tokens:
            rows = zip(verified.new_ids, trimmed.num_emitted, strict=True)
            is_read = self.tokens.row_lens.is_on_device  # whether a drafter reads the lengths there
            counts = self._counts(verified, trimmed) if is_read else RowCounts(trimmed.num_emitted)
            self.tokens.append_later([ids[:count] for ids, count in rows], counts)
        else:
            self.tokens.append(verified.token_ids, self._counts(verified, trimmed))
        if self.host_tokens is not self.tokens:
            width = verified.token_ids.shape[1]
            ids = [row + [0] * (width - len(row)) for row in verified.new_ids]
            self.host_tokens.append(torch.tensor(ids, device="cpu"), trimmed.num_emitted)
        self.is_finished = list(trimmed.is_finished)

    def end_rows(self, row_ids: Collection[int]) -> None:
        """Finish rows at their current length, given their indices among the output rows."""
        flags = zip(self.row_ids, self.is_finished, strict=True)
        self.is_finished = [row_id in row_ids or is_finished for row_id, is_finished in flags]

    def selected(self, indices: Sequence[int]) -> "Batch":
        """Return a copy with the rows `indices`; this batch is not changed."""
        batch = copy.copy(self)
        is_host = self.host_tokens is self.tokens
        batch.tokens = self.tokens.copy()
        batch.host_tokens = batch.tokens if is_host else self.host_tokens.copy()
        batch.rows(indices)
        return batch

    def join(self, other: "Batch") -> None:
        """Append the rows of `other` after their prefill; their rounds are counted from here."""
        other._rounds_before = [self.num_rounds - other.num_rounds] * other.num_rows
        super().join(other)

    def forget(self) -> None:
        self._rounds = self._key_pads = self._gains = self._known_keys = None

    def _counts(self, verified: Verified, trimmed: Trimmed) -> RowCounts:
        counts, on_device = trimmed.num_emitted, verified.device_num_accepted
        if on_device is None or len(counts) == 1:
            return RowCounts(counts)
        gains_all = [
            count == accepted + 1
            for count, accepted in zip(counts, verified.num_accepted, strict=True)
        ]
        if all(gains_all):
            return RowCounts(counts, on_device, 1)
        if any(count and not has_all for count, has_all in zip(counts, gains_all, strict=True)):
            return RowCounts(counts)  # a row stops before its last verified token
        if self._gains is None or self._gains[0] != gains_all:
            self._gains = gains_all, upload(gains_all, on_device.device)
        return RowCounts(counts, (on_device + 1) * self._gains[1], 0)
