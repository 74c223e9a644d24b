"""Block processing: a LogitsProcessorList on all K+1 positions of a round at once.

Position j of row b gets the scores of transformers' own list for the prefix `input_ids[b,
:prefix_lens[b]]` followed by `draft_token_ids[b, :j]`. The list keeps its order. A processor is
called once for all (row, position) pairs with equally many visible tokens. One call is enough if it
reads the scores only, if the last few tokens decide, or if prefixes can be padded to one length;
otherwise each prefix length is a call. A processor with state is called K+1 times, from left to
right, and must be rolled back after the round.

The results are bit-equal to position-by-position ones wherever torch reduces a row in the same
order for any number of rows. There are two exceptions. A CPU sums the entropies of
TypicalLogitsWarper and EtaLogitsWarper in one piece per thread for a single row of 32768 or more
entries (differences of 5e-7 to 2e-6). A GPU's cumulative sums differ too.
"""

import copy
import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
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
# Maps device and processor to the module with a faster path. The module is imported on first use.
_FAST_PATHS: dict[tuple[str, type], str] = {
    ("cpu", TopKLogitsWarper): "hf_speculate.options.cpu.top_k_top_p",
    ("cpu", TopPLogitsWarper): "hf_speculate.options.cpu.top_k_top_p",
    ("cuda", TopPLogitsWarper): "hf_speculate.options.cuda.top_p",
}

# They read the scores only, and never the host.
_CAPTURABLE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class BlockLogitsProcessorList(LogitsProcessorList):
    """LogitsProcessorList for one position or a block.

    Scores [B, K+1, V] are processed as a block. With scores [B, V] it is the plain list.
    """

    def __call__(
        self,
        input_ids: Tensor,
        scores: Tensor,
        draft_token_ids: Tensor | None = None,
        prefix_lens: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Process one position of every row, or all K+1 positions of a round.

        Args:
            input_ids: [B, T] int64, right-padded. Row b's prefix is its first `prefix_lens[b]` ids.
            scores: [B, V], or [B, K+1, V] of any floating dtype. A block is never written to.
            draft_token_ids: [B, K] int64 for a block; None if K = 0. Ids behind a row's draft
                length may have any value; scores at the positions after them are meaningless.
            prefix_lens: B lengths in 0..T; None for T in every row.
            **kwargs: further arguments of processors, without a block only.

        Returns:
            [B, V] as from transformers, or [B, K+1, V] float32. An unchanged block may be `scores`
            itself.

        Raises:
            ShapeError: the shapes of a block do not fit each other.
            UnsupportedGenerationError: a processor is not row-wise, and scores are a block.
        """
        if scores.dim() != 3:
            plain: Callable[..., Tensor] = super().__call__
            return plain(input_ids, scores, **kwargs)
        if self.foreign:
            raise UnsupportedGenerationError(
                "scores [B, K+1, V] must meet pure row-wise processors only, got "
                f"{', '.join(map(name_of, self.foreign))}; "
                "pass scores [B, V] position by position, or declare the class with "
                "register_row_wise"
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
        if (
            shapes != [num_rows, num_rows, num_positions - 1, num_rows]
            or max(lens) > input_ids.shape[1]
        ):
            raise ShapeError(
                "input_ids [B, T], draft_token_ids [B, K] and prefix_lens [B] must fit scores "
                f"{list(scores.shape)}, "
                f"got {list(input_ids.shape)}, {list(draft_token_ids.shape)} and {lens}; pass "
                "those of the same rows"
            )
        if draft_token_ids.shape[1] and self.reads_token_ids:
            draft_token_ids = draft_token_ids.clamp(0, vocab_size - 1)
        prefixes = Prefixes(input_ids, draft_token_ids, lens)
        for processor in self:
            block = _run(processor, prefixes, block)
        return block

    can_join = False
    """Rows with other processors may not join."""

    @property
    def reads_token_ids(self) -> bool:
        """Whether any processor reads more than the scores."""
        return any(find_reads(processor) is not Reads.NOTHING for processor in self)

    @property
    def keep_nan(self) -> bool:
        """Whether the scores of a position are NaN where its logits are."""
        return all(keeps_nan(processor) for processor in self)

    @property
    def capture_key(self) -> Hashable | None:
        """See `RowProcessors.capture_key`."""
        keys = tuple(_capture_key(processor) for processor in self)
        return None if None in keys else keys

    @property
    def foreign(self) -> list[Any]:
        """Processors for position-by-position calls as in plain `generate()`, in list order."""
        return [processor for processor in self if find_reads(processor) is None]

    def forced_texts(self, tokens: TokenRows, is_asked: Sequence[bool]) -> list[str]:
        """Return the forced text of each row, [B], of the first processor with one."""
        offering = [processor for processor in self if offers_forced_text(processor)]
        texts = [""] * len(is_asked)
        for row, length in enumerate(tokens.lens if offering else ()):
            if is_asked[row]:
                input_ids = tokens.token_ids[row, :length]
                asked = (_forced_text(processor, row, input_ids) for processor in offering)
                texts[row] = next(filter(None, asked), "")
        return texts

    def row_wise_part(self) -> "BlockLogitsProcessorList":
        """Return the pure row-wise processors. They may run on any model."""
        parts = [p for p in self if find_reads(p) not in (None, Reads.HISTORY, Reads.ROW)]
        return BlockLogitsProcessorList(map(_unsized, parts))

    def by_row(self, num_rows: int) -> "BlockLogitsProcessorList":
        """Return the list for `num_rows` rows, with values per prompt repeated for its rows."""
        return BlockLogitsProcessorList(by_row(processor, num_rows) for processor in self)

    def for_draft(self) -> "BlockLogitsProcessorList":
        """Return the processors for the draft model: pure ones, and forks of those with state."""
        parts = [
            _ForkedProcessor(p) if _has_state(p) else p for p in self if find_reads(p) is not None
        ]
        return BlockLogitsProcessorList(_unsized(p) for p in parts)

    def forked(self) -> "BlockLogitsProcessorList":
        """Return the list with forks in place of processors with state; itself without them."""
        if not any(map(_has_state, self)):
            return self
        return BlockLogitsProcessorList(p.fork() if _has_state(p) else p for p in self)

    def split_warp(self) -> tuple["BlockLogitsProcessorList", dict[str, Any]]:
        """See `RowProcessors.split_warp`."""
        if self and getattr(self[-1], "joins_draw", False):
            return BlockLogitsProcessorList(self[:-1]), self[-1].arguments
        return self, {}

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Take back the last `num_calls` [B] calls of each row in processors with state."""
        if any(num_calls):
            for processor in filter(_has_state, self):
                processor.rollback(num_calls)

    def rows(self, indices: Sequence[int] | Tensor) -> "BlockLogitsProcessorList":
        """Return the list for the rows `indices` [N], in this order.

        Processors with state drop the other rows in place.
        """
        row_indices = RowIndices.of(indices.tolist() if isinstance(indices, Tensor) else indices)
        return BlockLogitsProcessorList(_for_rows(processor, row_indices) for processor in self)

    def join(self, other: Any) -> None:
        """Do nothing: `other` has the same processors."""


class _ForkedProcessor(PerRow):
    """Draft model's stand-in for a processor with state.

    Each draft calls a new fork. The target's list rolls the processor itself back.
    """

    def __init__(self, processor: RollbackProcessor):
        self.fork = processor.fork

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.fork()(input_ids, scores)

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Do nothing: a fork is discarded after its draft."""


def _forced_text(processor: Any, row: int, input_ids: Tensor) -> str:
    text = processor.forced_text(row, input_ids)
    if not isinstance(text, str):
        raise ConfigError(
            f"forced_text of a logits processor must return a str, got {type(text).__name__}; "
            "decode bytes as far as "
            "they are whole characters"
        )
    return text


def _run(processor: Any, prefixes: Prefixes, block: Tensor) -> Tensor:
    """Run one processor on scores [B, K+1, V] float32.

    It may return them, but not write to them.
    """
    # [N, V] of all N pairs of row and position
    reads, flat = find_reads(processor), block.flatten(0, 1)
    if reads is Reads.HISTORY:
        return _run_by_position(processor, prefixes, block)
    if reads is Reads.ROW:
        ids = prefixes.last_ids(range(len(flat)), processor.num_ids_read, _NO_TOKEN)
        return cast(Tensor, processor(ids, flat)).view(block.shape)
    if reads is Reads.NOTHING:
        processed = _run_fast(processor, flat)
        processed = processor(prefixes.input_ids, flat) if processed is None else processed
        return cast(Tensor, processed).view(block.shape)
    groups: dict[int, list[int]] = {}  # pairs by their number of visible tokens
    for pair, length in enumerate(prefixes.lens):
        groups.setdefault(find_context_len(processor, length), []).append(pair)
    processed = _run_padded(processor, prefixes, flat) if len(groups) > 1 else None
    if processed is None:
        processed = _run_by_group(processor, prefixes, groups, flat)
    return processed.view(block.shape)


def _run_fast(processor: Any, scores: Tensor) -> Tensor | None:
    """Return a processor's scores [N, V] from a bit-equal faster path.

    The result is None if there is no such path.
    """
    path = _FAST_PATHS.get((scores.device.type, type(processor)))
    if path is None:
        return None
    processed: Tensor | None = importlib.import_module(path).apply_cutoff(processor, scores)
    return processed


def _run_by_position(processor: Any, prefixes: Prefixes, block: Tensor) -> Tensor:
    """Call a processor once per position of a block [B, K+1, V], without writing to it."""
    processed = torch.empty_like(block)
    last = prefixes.num_positions - 1
    whole_rows = range(last, len(prefixes.lens), last + 1)
    aligned_ids = prefixes.last_ids(whole_rows, max(prefixes.lens))  # [B, T'+K]
    for position in range(last + 1):
        # [B, T'+j]
        seen_ids = aligned_ids[:, : aligned_ids.shape[1] - (last - position)].contiguous()
        # The user's code may write into its arguments.
        processed[:, position] = processor(seen_ids, block[:, position].clone())
    return processed


def _run_padded(processor: Any, prefixes: Prefixes, flat: Tensor) -> Tensor | None:
    """Call a processor once, with filler ids in front of short prefixes.

    Returns:
        Scores [N, V]; None if the filler would change them.
    """
    shortest, longest, fill = min(prefixes.lens), max(prefixes.lens), None
    ignored_lens = _ignored_lens_by_row(processor)
    if ignored_lens is not None:  # the processor ignores the filler too
        missing = upload([longest - length for length in prefixes.lens], flat.device)
        ignored_lens = (
            ignored_lens.to(flat.device).repeat_interleave(prefixes.num_positions) + missing
        )
        processor = RepetitionPenaltyLogitsProcessor(
            processor.penalty, prompt_ignore_length=ignored_lens
        )
    elif type(processor) is NoRepeatNGramLogitsProcessor and shortest >= processor.ngram_size > 1:
        fill = _NO_TOKEN  # no n-gram with this id repeats another one
    elif (
        type(processor) is not RepetitionPenaltyLogitsProcessor
        or processor.prompt_ignore_length
        or not shortest
    ):
        return None  # otherwise the first id is repeated: a token seen twice is punished once
    return cast(Tensor, processor(prefixes.last_ids(range(len(flat)), longest, fill), flat))


def _run_by_group(
    processor: Any, prefixes: Prefixes, groups: dict[int, list[int]], flat: Tensor
) -> Tensor:
    """Call a processor once per group of pairs with equally many visible tokens; return [N, V]."""
    reads_ids = find_reads(processor) is Reads.PREFIX
    if len(groups) == 1:
        (seen_len,) = groups
        if not reads_ids:
            return cast(Tensor, processor(any_ids(len(flat), seen_len, flat.device), flat))
        # The user's code may write into its arguments.
        return cast(
            Tensor, processor(prefixes.last_ids(range(len(flat)), seen_len), flat.clone())
        ).to(flat)
    processed = torch.empty_like(flat)
    for seen_len, pairs in groups.items():
        indices = upload(pairs, flat.device)  # [M]
        # [M, n]
        ids = (
            prefixes.last_ids(pairs, seen_len)
            if reads_ids
            else any_ids(len(pairs), seen_len, flat.device)
        )
        scores = processor(ids, flat.index_select(0, indices))  # [M, V]
        processed.index_copy_(0, indices, scores.to(processed))
    return processed


def _ignored_lens_by_row(processor: Any) -> Tensor | None:
    """Return the ignored tokens of each row, [B] int64, usually padding.

    The result is None without such counts.
    """
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, Tensor
    ):
        return processor.prompt_ignore_length
    return None


def _for_rows(processor: Any, row_indices: RowIndices) -> Any:
    if _has_state(processor):
        note_lost_rows(processor)
        processor.rows(list(row_indices))
        return processor
    if find_reads(processor) is Reads.ROW:  # other lists hold this object too
        processor_copy = copy.copy(processor)
        processor_copy.rows(row_indices)
        return processor_copy
    ignored_lens = _ignored_lens_by_row(processor)
    if ignored_lens is None:
        return processor
    return RepetitionPenaltyLogitsProcessor(
        processor.penalty, prompt_ignore_length=row_indices.select(ignored_lens)
    )


def _capture_key(processor: Any) -> Hashable | None:
    settings = tuple(sorted(vars(processor).items()))
    is_known = type(processor) in _CAPTURABLE and all(
        isinstance(value, int | float) for _, value in settings
    )
    return (type(processor), settings) if is_known else None


def _has_state(processor: Any) -> bool:
    return find_reads(processor) is Reads.HISTORY


def _unsized(processor: Any) -> Any:
    """Copy a processor with lazy buffers.

    Its first call sizes them for the draft model's V and device.
    """
    if type(processor) not in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        return processor
    unsized = copy.copy(processor)
    unsized.prepared_bias_variables = False
    return unsized
