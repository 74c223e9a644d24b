"""The rows under way: their tokens, caches, seeds, how far the drafter has followed each, how they are treated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.engine.hidden_states import HiddenStates
from hf_speculate.token_buffer import TokenBuffer
from hf_speculate.types import DraftOut, HostKept, Kept, NoiseKeys, SampleStrategy


@dataclass(frozen=True)
class DecoderSettings:
    """How the loop treats rows.

    Args:
        draft_strategy: how the drafter proposes.
        max_length: columns of the output at most, the prompt's included.
        pad_token_id: fills finished rows; None: without EOS rows go on until all have stopped, as in plain `generate`.
        keeps_rows: finished rows stay in the batch, because the cache is handed back or rows move in lock step.
        is_lock_step: all rows advance by the same count.
        prefill_chunk_size: prompt tokens per forward; None: all at once.
        min_draft_query: tokens of each row that the drafter is fed at least, some of them again.
        drafts_on_host: the drafter reads tokens, which it is then handed on the host.
        drafts_freely: the drafter may draft fewer tokens than asked, whatever its rows need.
        draws: tokens are drawn, so that logits must hold a law.
    """

    draft_strategy: SampleStrategy
    max_length: int
    pad_token_id: int | None
    keeps_rows: bool = False
    is_lock_step: bool = False
    prefill_chunk_size: int | None = None
    min_draft_query: int = 1
    drafts_on_host: bool = False
    drafts_freely: bool = False
    draws: bool = False


@dataclass
class Batch:
    """The rows under way.

    Args:
        tokens: prompt and new tokens of each row, on the target's device.
        query_ids: [B, Q] int64, the prompt's tokens that the target's cache does not hold.
        target_cache: the target's states.
        draft_cache: the draft model's states; None for drafters without one.
        seeds: [B] int64 row seeds.
        num_prompt_tokens: [B] real tokens of each prompt.
        num_pads: [B] tokens of padding before the text of each prompt; None: none.
        states: what the drafter is yet to be told of the target's hidden states; None: it reads none.
    """

    tokens: TokenBuffer
    query_ids: Tensor
    target_cache: KVCache
    draft_cache: KVCache | None
    seeds: Tensor
    num_prompt_tokens: list[int]
    num_pads: list[int] | None = None
    states: HiddenStates | None = None

    def __post_init__(self) -> None:
        on_host = self.tokens.token_ids.device.type == "cpu"
        self.prompt_len = self.tokens.lens[0]
        self.host_tokens = self.tokens if on_host else self.separate_host_tokens()
        self.row_ids = list(range(len(self.tokens.lens)))  # each row's place in the output
        self.is_finished = [False] * len(self.row_ids)
        self.num_held = [0] * len(self.row_ids)  # tokens of each row that the drafter has seen
        self.num_pads = self.num_pads or [0] * len(self.row_ids)
        self.num_valid: list[int] | None = None  # real tokens that the draft cache holds for sure; None: nobody asks
        self.told_lens: list[int] | None = None  # each row's length at the drafter's last call
        self.told_round = 0  # the round of that call
        self.new_ids: list[list[int]] | None = None  # what each row has gained since then; None: nobody asks
        self.num_rounds = 0

    def separate_host_tokens(self) -> TokenBuffer:
        """A copy of the rows on the host, for a target on an accelerator."""
        return TokenBuffer(self.tokens.token_ids[:, : self.prompt_len].cpu())

    def keys(self) -> NoiseKeys:
        """The noise of the coming round."""
        lens = zip(self.tokens.lens, self.num_prompt_tokens, strict=True)
        positions = [length - self.prompt_len + num for length, num in lens]
        device = self.seeds.device
        rounds = torch.full_like(self.seeds, self.num_rounds)
        return NoiseKeys(self.seeds, rounds, torch.tensor(positions, dtype=torch.int64, device=device))

    def kept(self, tokens: TokenBuffer) -> Kept | None:
        """What was emitted since the drafter's last call, over plain steps in between; None before the first call.

        With hidden states it is what they are of, before the first call too; they are handed over and forgotten.

        Args:
            tokens: where it is read: `tokens` or `host_tokens`.
        """
        told_lens, states = self.told_lens, None
        device = tokens.token_ids.device
        if self.states is not None:
            told_lens = [length - num for length, num in zip(tokens.lens, self.states.counts, strict=True)]
            states = self.states.take(device)
        if told_lens is None:
            return None
        counts = [length - told for length, told in zip(tokens.lens, told_lens, strict=True)]
        offsets = torch.arange(max(counts), device=device)  # [N]
        columns = torch.tensor(told_lens, device=device)[:, None] + offsets  # [B, N]
        num_emitted = torch.tensor(counts, dtype=torch.int32)
        ids = tokens.token_ids.gather(1, columns.clamp_max(tokens.token_ids.shape[1] - 1))  # [B, N]
        ids = ids.masked_fill(offsets >= num_emitted.to(device)[:, None], -1)
        return Kept(ids, num_emitted, states, num_rounds=self.num_rounds - self.told_round)

    def kept_on_host(self) -> Kept | None:
        """As `kept`, for a drafter that reads tokens on the host: what the judge had there already."""
        if self.new_ids is None:
            return None
        return HostKept.of(self.new_ids, self.num_rounds - self.told_round)

    def tell(self, is_on_host: bool = False) -> None:
        """Note that the drafter has been told all that was emitted.

        Args:
            is_on_host: whether it is to be told of what comes by `kept_on_host`.
        """
        self.told_lens = list(self.tokens.lens)
        self.told_round = self.num_rounds
        self.new_ids = [[] for _ in self.row_ids] if is_on_host else None

    def note(self, new_ids: list[list[int]], num_emitted: list[int]) -> None:
        """Take down what rows have gained, where somebody will ask.

        Args:
            new_ids: [B] tokens that were judged good.
            num_emitted: [B] how many of them the text has gained.
        """
        if self.new_ids is not None:
            for gained, ids, num in zip(self.new_ids, new_ids, num_emitted, strict=True):
                gained += ids[:num]

    def rows(self, indices: list[int]) -> None:
        """Keep the rows `indices` of everything."""
        self.tokens.rows(indices)
        if self.host_tokens is not self.tokens:
            self.host_tokens.rows(indices)
        self.target_cache.rows(indices)
        if self.draft_cache is not None:
            self.draft_cache.rows(indices)
        if self.states is not None:
            self.states.rows(indices)
        index = torch.tensor(indices, device=self.seeds.device)
        self.seeds = self.seeds[index]
        if self.told_lens is not None:
            self.told_lens = [self.told_lens[row] for row in indices]
        for name in ("num_prompt_tokens", "row_ids", "is_finished", "num_held", "num_pads", "num_valid", "new_ids"):
            values = getattr(self, name)
            setattr(self, name, None if values is None else [values[row] for row in indices])

    @contextmanager
    def undone_on_error(self, is_cache_passed: bool) -> Iterator[None]:
        """Bring the user's cache back when what runs inside fails; let go of the caches in any case.

        Args:
            is_cache_passed: whether the target's cache is the user's.
        """
        try:
            snapshot = self.target_cache.snapshot() if is_cache_passed else None
            try:
                yield
            except BaseException:
                if is_cache_passed:
                    self.target_cache.restore(snapshot)
                raise
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the caches."""
        for cache in (self.target_cache, self.draft_cache):
            if cache is not None:
                cache.release()

    def no_draft(self) -> DraftOut:
        """A proposal of no tokens: scoring it is a plain decoding step."""
        device, batch_size = self.tokens.token_ids.device, len(self.tokens.lens)
        empty = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        return DraftOut(empty, torch.zeros(batch_size, dtype=torch.int32, device=device), None, None)
