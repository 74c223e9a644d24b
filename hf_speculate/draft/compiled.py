"""The compiled drafter: drafts all tokens of a round as one compiled unit."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.preallocated import LayerKinds
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.model import DraftSettings, ModelDrafter
from hf_speculate.models.compiled import CompiledLanguageModel, Rows, States, forward_rows
from hf_speculate.models.inferencer import Inferencer, num_until
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.triton_kernels import sample
from hf_speculate.types import DraftOut, NoiseKeys, SampleStrategy, Stream

# Steps are unrolled, so longer drafts would take long to compile; they run step by step.
MAX_UNROLLED_STEPS = 16
# A unit is fed the two newest tokens whether or not the drafter has seen them, so it has one shape for all rounds.
UNIT_QUERY_LEN = 2


class Unrolled(NamedTuple):
    """The result of a unit."""

    token_ids: Tensor  # [B, K] int64
    token_logits: Tensor | None  # [B, K, V] if the verifier reads them
    logsumexp: Tensor | None  # [B, K] float32


class Choosing(NamedTuple):
    """How a unit chooses tokens, the same in all steps."""

    num_steps: int
    stream: Stream
    keeps_logits: bool


def draft_steps(
    model: PreTrainedModel,
    query: Tensor,
    rows: Rows,
    states: States,
    kinds: LayerKinds,
    choosing: Choosing,
    keys: NoiseKeys | None,
) -> Unrolled:
    """Decode tokens one after another, from the newest tokens [B, 2] int64; the last one is not fed.

    Args:
        model: the draft model.
        query: fed first.
        rows: lengths and padding of the rows before it.
        states: the cache's buffers, written to.
        kinds: what the layers attend to.
        choosing: how tokens are chosen.
        keys: of the round's noise; None to take the argmax.
    """
    ids, kept_logits, sums = [], [], []
    for step in range(choosing.num_steps):
        logits = forward_rows(model, query, rows, states, kinds)[:, -1]  # [B, V]
        rows = rows._replace(ends=rows.ends + query.shape[1])
        if keys is None:
            token_ids = logits.argmax(dim=-1)
        else:
            step_keys = keys._replace(positions=keys.positions + step)
            token_ids, logsumexp = sample(logits, keys=step_keys, stream=choosing.stream, backend="torch")
            kept_logits.append(logits)
            sums.append(logsumexp)
        ids.append(token_ids)
        query = token_ids[:, None]
    if keys is None or not choosing.keeps_logits:
        return Unrolled(torch.stack(ids, dim=1), None, None)
    return Unrolled(torch.stack(ids, dim=1), torch.stack(kept_logits, dim=1), torch.stack(sums, dim=1))


class CompiledDrafter(ModelDrafter):
    """A `ModelDrafter` that runs its steps as one compiled unit.

    With logits processors or a confidence threshold, only the forward of each step runs compiled.

    Args:
        language_model: the draft model.
        num_steps: the draft lengths K that are compiled, ascending. K is rounded up to one of them; `lens` and the
            cache count the tokens that were requested.
        processors: see `ModelDrafter`.
        settings: see `DraftSettings`.
        chunk_size: see `Inferencer`.
    """

    min_query_len = UNIT_QUERY_LEN

    def __init__(
        self,
        language_model: CompiledLanguageModel,
        num_steps: Sequence[int],
        processors: BlockLogitsProcessorList | None = None,
        settings: DraftSettings | None = None,
        chunk_size: int | None = None,
    ):
        super().__init__(Inferencer(language_model, chunk_size=chunk_size), processors, settings)
        self.language_model = language_model
        self.num_steps = tuple(num_steps)

    def draft(self, request: DraftRequest) -> DraftOut:
        """See `Drafter.draft`; `kv_cache` is required."""
        kv_cache, num_draft_tokens = request.kv_cache, request.num_draft_tokens
        target_device = request.query_token_ids.device
        num_steps = next((num for num in self.num_steps if num >= num_draft_tokens), MAX_UNROLLED_STEPS + 1)
        chooses_plainly = not len(self.processors) and not self.settings.confidence_threshold
        query = request.query_token_ids.to(self.language_model.device)
        if kv_cache is not None and chooses_plainly and num_steps <= MAX_UNROLLED_STEPS:
            request.check()
            query = self._catch_up(query, kv_cache)
            keys = request.keys if request.sample_strategy is SampleStrategy.RANDOM else None
            unrolled = self._unrolled(query, kv_cache, num_steps, keys)
            if unrolled is not None:
                kv_cache.advance(query.shape[1] + num_draft_tokens - 1)
                return self._proposal(unrolled, num_draft_tokens, target_device)
        return super().draft(request._replace(query_token_ids=query.to(target_device)))

    def _catch_up(self, query: Tensor, kv_cache: KVCache) -> Tensor:
        """Feed a query that is longer than a unit's, such as the prompt; returns what is left to feed, [B, Q]."""
        if query.shape[1] < UNIT_QUERY_LEN or (query.shape[1] == UNIT_QUERY_LEN and kv_cache.num_columns):
            return query
        self.inferencer.feed(query[:, :-1], kv_cache)
        kv_cache.crop(1)  # it is fed again: a prompt may be a single token
        return query[:, -UNIT_QUERY_LEN:]

    def _unrolled(self, query: Tensor, kv_cache: KVCache, num_steps: int, keys: NoiseKeys | None) -> Unrolled | None:
        buffers = self.language_model.buffers(kv_cache)
        if buffers is None or query.shape[1] != UNIT_QUERY_LEN:
            return None
        choosing = Choosing(num_steps, self.settings.stream, self.settings.keeps_logits)
        if keys is not None:
            keys = NoiseKeys(*(part.to(query.device) for part in keys))
        query = query.clone(
            memory_format=torch.contiguous_format
        )  # a slice has other strides, which would be compiled again
        name = f"draft of {num_steps}, {'greedy' if keys is None else choosing}"
        arguments = buffers.arguments(UNIT_QUERY_LEN + num_steps - 1)
        result: Unrolled | None = self.language_model.compilation.run(
            name, draft_steps, query, *arguments, choosing, keys
        )
        return result

    def _proposal(self, unrolled: Unrolled, num_draft_tokens: int, device: torch.device) -> DraftOut:
        """The first `num_draft_tokens` tokens of a unit; `lens` ends rows at EOS."""
        token_ids = unrolled.token_ids[:, :num_draft_tokens]
        if self.settings.eos_token_ids is None:
            lens = torch.full((token_ids.shape[0],), num_draft_tokens, dtype=torch.int32, device=token_ids.device)
        else:
            counts = torch.arange(1, num_draft_tokens + 1, dtype=torch.int32, device=token_ids.device)
            lens = num_until(token_ids, self.settings.eos_token_ids, counts)
        logits, sums = (
            None if part is None else part[:, :num_draft_tokens].to(device)
            for part in (unrolled.token_logits, unrolled.logsumexp)
        )
        return DraftOut(token_ids.to(device), lens.to(device), logits, sums)
