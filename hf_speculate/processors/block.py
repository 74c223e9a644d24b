"""Runs a LogitsProcessorList on all K+1 positions of a round at once.

Position j of row b gets what transformers' own list would give for the prefix `input_ids[b, :prefix_lens[b]]` followed
by `draft_token_ids[b, :j]`. The list keeps its order. A processor is called once for all (row, position) pairs that
show it the same number of tokens: one call where it reads nothing but the scores, where the last few tokens tell it
everything, and where prefixes can be made equally long; else one call per prefix length. A processor with state is
called K+1 times, from left to right, and must be rolled back after.

The results are bit-equal to the position-by-position ones wherever torch reduces a row in the same order whatever the
number of rows. It does not for the entropies of TypicalLogitsWarper and EtaLogitsWarper on one row of 32768 or more
entries, which the CPU sums in pieces, one per thread (differences of 5e-7 to 2e-6), nor for a GPU's cumulative sums.
"""

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_speculate.errors import ConfigError, ShapeError, UnsupportedGenerationError
from hf_speculate.processors.encoder_ids import by_row
from hf_speculate.processors.of_rows import TokenRows
from hf_speculate.processors.prefixes import Prefixes
from hf_speculate.processors.registry import (
    Reads,
    RollbackProcessor,
    any_ids,
    find_context_len,
    find_reads,
    keeps_nan,
    name_of,
    offers_forced_text,
)
from hf_speculate.processors.used import note_lost_rows
from hf_speculate.rows.per_row import PerRow, RowIndices
from hf_speculate.transfers import upload

_NO_TOKEN = -1
# device and processor -> the module with a faster path, imported when such scores come
_FAST_PATHS: dict[tuple[str, type], str] = {
    ("cpu", TopKLogitsWarper): "hf_speculate.options.cpu.top_k_top_p",
    ("cpu", TopPLogitsWarper): "hf_speculate.options.cpu.top_k_top_p",
}


class BlockLogitsProcessorList(LogitsProcessorList):
    """A LogitsProcessorList that also takes scores [B, K+1, V]; with scores [B, V] it is the plain list."""

    def __call__(
        self,
        input_ids: Tensor,
        scores: Tensor,
        draft_token_ids: Tensor | None = None,
        prefix_lens: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Processes one position of every row, or all K+1 of a round.

        Args:
            input_ids: [B, T] int64, right-padded; row b's prefix is its first `prefix_lens[b]` ids.
            scores: [B, V], or [B, K+1, V] of any floating dtype. Never written to in the block form.
            draft_token_ids: [B, K] int64, in the block form; may be left out for K = 0. Past a row's draft length they
                may be anything: the positions that follow such an id hold no meaning.
            prefix_lens: B lengths in 0..T; None for T in every row.
            **kwargs: for processors that ask for more than ids and scores, in the plain form.

        Returns:
            [B, V] as transformers gives it, or [B, K+1, V] float32. Where nothing had to be changed, the block result
            may be `scores` itself.

        Raises:
            ShapeError: when the shapes of a block do not fit each other.
            UnsupportedGenerationError: when a block meets a processor that is not row-wise.
        """
        if scores.dim() != 3:
            plain: Callable[..., Tensor] = super().__call__
            return plain(input_ids, scores, **kwargs)
        if self.foreign:
            raise UnsupportedGenerationError(
                "scores [B, K+1, V] must meet pure row-wise processors only, got "
                f"{', '.join(map(name_of, self.foreign))}; "
                "pass scores [B, V] position by position, or declare the class with register_row_wise"
            )
        takes_half = bool(self) and getattr(self[0], "takes_half", False)
        block = scores if takes_half else scores.float()  # [B, K+1, V]
        if not self:
            return block
        num_rows, num_positions, vocab_size = block.shape
        if draft_token_ids is None:
            draft_token_ids = input_ids.new_empty((num_rows, 0))
        lens = [input_ids.shape[1]] * num_rows if prefix_lens is None else list(prefix_lens)
        shapes = [len(input_ids), *draft_token_ids.shape, len(lens)]
        if shapes != [num_rows, num_rows, num_positions - 1, num_rows] or max(lens) > input_ids.shape[1]:
            raise ShapeError(
                f"input_ids [B, T], draft_token_ids [B, K] and prefix_lens [B] must fit scores {list(scores.shape)}, "
                f"got {list(input_ids.shape)}, {list(draft_token_ids.shape)} and {lens}; pass those of the same rows"
            )
        if draft_token_ids.shape[1] and self.reads_token_ids:
            draft_token_ids = draft_token_ids.clamp(0, vocab_size - 1)
        prefixes = Prefixes(input_ids, draft_token_ids, lens)
        for processor in self:
            block = _run(processor, prefixes, block)
        return block

    can_join = False
    """Whether rows with other processors may join."""

    @property
    def reads_token_ids(self) -> bool:
        """Whether any processor reads more than the scores."""
        return any(find_reads(processor) is not Reads.NOTHING for processor in self)

    @property
    def keep_nan(self) -> bool:
        """Whether the scores of a position are NaN where its logits are."""
        return all(keeps_nan(processor) for processor in self)

    @property
    def foreign(self) -> list[Any]:
        """The processors that must be called as plain `generate()` calls them, in list order."""
        return [processor for processor in self if find_reads(processor) is None]

    def forced_texts(self, tokens: TokenRows, is_asked: Sequence[bool]) -> list[str]:
        """Return [B] texts that must follow the rows, as the first processor with one says."""
        offering = [processor for processor in self if offers_forced_text(processor)]
        texts = [""] * len(is_asked)
        for row, length in enumerate(tokens.lens if offering else ()):
            if is_asked[row]:
                input_ids = tokens.token_ids[row, :length]
                asked = (_forced_text(processor, row, input_ids) for processor in offering)
                texts[row] = next(filter(None, asked), "")
        return texts

    def row_wise_part(self) -> "BlockLogitsProcessorList":
        """The pure row-wise processors, which may run on any model."""
        parts = [p for p in self if find_reads(p) not in (None, Reads.HISTORY, Reads.ROW)]
        return BlockLogitsProcessorList(map(_unsized, parts))

    def by_row(self, num_rows: int) -> "BlockLogitsProcessorList":
        """The list for so many rows: processors that hold something for each prompt hold it for each row."""
        return BlockLogitsProcessorList(by_row(processor, num_rows) for processor in self)

    def for_draft(self) -> "BlockLogitsProcessorList":
        """The processors that run on the draft model: the pure ones, and those with state, of which it uses forks."""
        parts = [_ForkedProcessor(p) if _has_state(p) else p for p in self if find_reads(p) is not None]
        return BlockLogitsProcessorList(_unsized(p) for p in parts)

    def forked(self) -> "BlockLogitsProcessorList":
        """The list with a fork in place of each processor with state; the list itself where there is none."""
        if not any(map(_has_state, self)):
            return self
        return BlockLogitsProcessorList(p.fork() if _has_state(p) else p for p in self)

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Has the processors with state take back each row's last calls, as many as `num_calls` [B]."""
        if any(num_calls):
            for processor in filter(_has_state, self):
                processor.rollback(num_calls)

    def rows(self, indices: Sequence[int] | Tensor) -> "BlockLogitsProcessorList":
        """The list for the rows `indices` [N], in that order; processors with state drop the others in place."""
        kept = RowIndices.of(indices.tolist() if isinstance(indices, Tensor) else indices)
        return BlockLogitsProcessorList(_for_rows(processor, kept) for processor in self)

    def join(self, other: Any) -> None:
        """Does nothing: `other` has the same processors."""


class _ForkedProcessor(PerRow):
    """Stands among a draft model's processors for one of the target's with state, which is rolled back there."""

    def __init__(self, processor: RollbackProcessor):
        self.fork = processor.fork

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.fork()(input_ids, scores)

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Does nothing."""


def _forced_text(processor: Any, row: int, input_ids: Tensor) -> str:
    text = processor.forced_text(row, input_ids)
    if not isinstance(text, str):
        raise ConfigError(
            f"forced_text of a logits processor must return a str, got {type(text).__name__}; decode bytes as far as "
            "they are whole characters"
        )
    return text


def _run(processor: Any, prefixes: Prefixes, block: Tensor) -> Tensor:
    """Runs one processor on scores [B, K+1, V] float32, which it may hand back but not write to."""
    reads, flat = find_reads(processor), block.flatten(0, 1)  # [N, V] of all N pairs of row and position
    if reads is Reads.HISTORY:
        return _run_by_position(processor, prefixes, block)
    if reads is Reads.ROW:
        ids = prefixes.last_ids(range(len(flat)), processor.num_ids_read, _NO_TOKEN)
        return cast(Tensor, processor(ids, flat)).view(block.shape)
    if reads is Reads.NOTHING:
        processed = _run_fast(processor, flat)
        processed = processor(prefixes.input_ids, flat) if processed is None else processed
        return cast(Tensor, processed).view(block.shape)
    groups: dict[int, list[int]] = {}  # the pairs by the number of tokens that they show the processor
    for pair, length in enumerate(prefixes.lens):
        groups.setdefault(find_context_len(processor, length), []).append(pair)
    processed = _run_padded(processor, prefixes, flat) if len(groups) > 1 else None
    if processed is None:
        processed = _run_by_group(processor, prefixes, groups, flat)
    return processed.view(block.shape)


def _run_fast(processor: Any, scores: Tensor) -> Tensor | None:
    """The scores [N, V] of a processor from a faster path, equal bit by bit; None if there is none."""
    path = _FAST_PATHS.get((scores.device.type, type(processor)))
    if path is None:
        return None
    processed: Tensor | None = importlib.import_module(path).apply_cutoff(processor, scores)
    return processed


def _run_by_position(processor: Any, prefixes: Prefixes, block: Tensor) -> Tensor:
    """Calls a processor for all rows once per position of the block [B, K+1, V], which is not written to."""
    processed = torch.empty_like(block)
    last = prefixes.num_positions - 1
    whole_rows = range(last, len(prefixes.lens), last + 1)
    aligned_ids = prefixes.last_ids(whole_rows, max(prefixes.lens))  # [B, T'+K]
    for position in range(last + 1):
        seen_ids = aligned_ids[:, : aligned_ids.shape[1] - (last - position)].contiguous()  # [B, T'+j]
        # the user's code may write into what it is given
        processed[:, position] = processor(seen_ids, block[:, position].clone())
    return processed


def _run_padded(processor: Any, prefixes: Prefixes, flat: Tensor) -> Tensor | None:
    """[N, V] of a processor that is called once, with ids in front of short prefixes; None if they would count."""
    shortest, longest, fill = min(prefixes.lens), max(prefixes.lens), None
    ignored_lens = _ignored_lens_by_row(processor)
    if ignored_lens is not None:  # more of the prefix is ignored
        missing = upload([longest - length for length in prefixes.lens], flat.device)
        ignored_lens = ignored_lens.to(flat.device).repeat_interleave(prefixes.num_positions) + missing
        processor = RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=ignored_lens)
    elif type(processor) is NoRepeatNGramLogitsProcessor and shortest >= processor.ngram_size > 1:
        fill = _NO_TOKEN  # an n-gram with such an id in front repeats nothing, so its end is not looked at
    elif type(processor) is not RepetitionPenaltyLogitsProcessor or processor.prompt_ignore_length or not shortest:
        return None  # else the first id is repeated: a token seen twice is punished once
    return cast(Tensor, processor(prefixes.last_ids(range(len(flat)), longest, fill), flat))


def _run_by_group(processor: Any, prefixes: Prefixes, groups: dict[int, list[int]], flat: Tensor) -> Tensor:
    """[N, V] of a processor that is called once per group of pairs with equally many tokens."""
    reads_ids = find_reads(processor) is Reads.PREFIX
    if len(groups) == 1:
        (seen_len,) = groups
        if not reads_ids:
            return cast(Tensor, processor(any_ids(len(flat), seen_len, flat.device), flat))
        # the user's code may write into what it is given
        return cast(Tensor, processor(prefixes.last_ids(range(len(flat)), seen_len), flat.clone())).to(flat)
    processed = torch.empty_like(flat)
    for seen_len, pairs in groups.items():
        indices = upload(pairs, flat.device)  # [M]
        ids = prefixes.last_ids(pairs, seen_len) if reads_ids else any_ids(len(pairs), seen_len, flat.device)  # [M, n]
        scores = processor(ids, flat.index_select(0, indices))  # [M, V]
        processed.index_copy_(0, indices, scores.to(processed))
    return processed


def _ignored_lens_by_row(processor: Any) -> Tensor | None:
    """The one number per row, [B] int64, that a row-wise processor may hold: its ignored tokens, usually padding."""
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        return processor.prompt_ignore_length
    return None


def _for_rows(processor: Any, kept: RowIndices) -> Any:
    if _has_state(processor):
        note_lost_rows(processor)
        processor.rows(list(kept))
        return processor
    if find_reads(processor) is Reads.ROW:  # other lists have it too
        own = copy.copy(processor)
        own.rows(kept)
        return own
    ignored_lens = _ignored_lens_by_row(processor)
    if ignored_lens is None:
        return processor
    return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=kept.select(ignored_lens))


def _has_state(processor: Any) -> bool:
    return find_reads(processor) is Reads.HISTORY


def _unsized(processor: Any) -> Any:
    """A copy of a processor that sizes itself at its first call, so that it takes the draft model's V and device."""
    if type(processor) not in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        return processor
    unsized = copy.copy(processor)
    unsized.prepared_bias_variables = False
    return unsized
