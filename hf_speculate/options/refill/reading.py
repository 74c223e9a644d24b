"""Read prompts chunk by chunk before their rows join a running batch."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hf_speculate.engine.batch import Batch
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.engine.observers import Observer
from hf_speculate.engine.stage_clock import Stage
from hf_speculate.engine.target_session import PromptChunk
from hf_speculate.models.recurrent_layers import reads_prompts_in_chunks
from hf_speculate.options.refill.row_prompts import RowPrompt, RowRound
from hf_speculate.options.refill.running_batch import FinishedRow
from hf_speculate.types import RoundRecord


class Reading:
    """The chunked prefill of a call.

    The target reads the prompts first, then the drafter.
    """

    def __init__(self, decoder: SpeculativeDecoder, observer: Observer):
        self.plan, self.batch = decoder.plan, Batch.of(decoder.plan)
        self.decoder = replace(decoder, observers=[*decoder.observers, observer])
        # tokens not yet read by the target; None before the first read
        self._chunks: deque[PromptChunk] | None = None

    @property
    def row_ids(self) -> list[int]:
        return list(self.plan.call.row_ids)

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens in a chunk, over all rows."""
        query_ids = self.plan.call.prompts.query_ids
        return len(query_ids) * min(self._chunk_size or query_ids.shape[1], query_ids.shape[1])

    @property
    def is_whole(self) -> bool:
        """Whether each model reads the prompts in one forward."""
        size = self._chunk_size
        return size is None or self.plan.call.prompts.query_ids.shape[1] <= size

    def read_chunk(self) -> bool:
        """Read a chunk; return whether more tokens are left to read."""
        clock = self.decoder.clock
        with torch.no_grad(), clock:
            is_unread = self._read()
            clock.enter(None)
        return is_unread

    def finished(self) -> list[FinishedRow]:
        """Return the rows finished by the first token after their prompt."""
        batch = self.batch
        left = dict(zip(batch.row_ids, batch.is_finished, strict=True))
        ended = [row_id for row_id in self.row_ids if left.get(row_id, True)]
        return [
            FinishedRow(row_id, self.decoder.output.take(row_id), 0, 0, 0, None) for row_id in ended
        ]

    @property
    def _chunk_size(self) -> int | None:
        return self.plan.call.prefill_chunk_size

    @property
    def _draft_chunk_size(self) -> int | None:
        """Tokens per row in a chunk for the draft model; None to read all tokens at once."""
        draft = self.plan.draft
        return self._chunk_size if draft is None or reads_prompts_in_chunks(draft.model) else None

    def _read(self) -> bool:
        decoder, batch = self.decoder, self.batch
        if self._chunks is None:
            self._chunks = deque(decoder.begin(batch))
        if not self._chunks:
            decoder.clock.enter(Stage.DRAFT)
            return decoder.drafts.read_ahead(batch, self._draft_chunk_size)
        scored = decoder.read_chunk(batch, self._chunks.popleft())
        if not self._chunks:
            decoder.emit_first(batch, scored)
        return not all(batch.is_finished)


@dataclass
class RowsObserver(Observer):
    """Observer that calls the callbacks of rows.

    It passes each round to `on_round` of each row's prompt, and the target's logits for new tokens
    to `on_logits` of the prompt.
    """

    stage = Stage.REPORT
    prompts: Mapping[int, RowPrompt]  # by row

    def on_round(self, record: RoundRecord) -> None:
        for row in record.live_rows:
            prompt, num_emitted = self.prompts[record.row_ids[row]], record.trimmed.num_emitted[row]
            num_before = record.trimmed.num_new[row] - num_emitted
            if prompt.on_logits is not None and num_emitted:
                token_ids = record.verified.new_ids[row][:num_emitted]
                prompt.on_logits(num_before, token_ids, record.scored.logits[row, :num_emitted])
            if prompt.on_round is not None:
                num_accepted = min(record.verified.num_accepted[row], num_emitted)
                prompt.on_round(
                    RowRound(num_before, num_emitted, num_accepted, record.drafted_by(row))
                )
