"""Draft with a model in compiled steps or from device graphs."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.preallocated import MaskSpec
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.token_choice import DraftSettings, choose_step
from hf_speculate.models.inferencer import Chosen
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.options.compiled.language_model import (
    CodedModel,
    CompiledLanguageModel,
    Rows,
    States,
    forward_rows,
)
from hf_speculate.types import DraftOut, NoiseKeys

# Every step reads the two newest tokens, so all steps have the same shape: before the first one,
# the drafter may not have read the older token. Later steps write its states again.
STEP_QUERY_LEN = 2


class Carry(NamedTuple):
    """Tensors passed from one draft step to the next."""

    query: Tensor  # [B, 2] int64, the newest tokens
    ends: Tensor  # [B] int64, column of the first query token
    keys: NoiseKeys | None  # keys of the next token's noise; None to take the argmax


def draft_step(
    model: PreTrainedModel | CodedModel,
    carry: Carry,
    rows: Rows,
    states: States,
    mask_spec: MaskSpec,
    settings: DraftSettings,
) -> tuple[Chosen, Carry]:
    """Choose one token per row and write its states to the cache's buffers `states`."""
    query, ends, keys = carry
    logits = forward_rows(model, query, ends, rows, states, mask_spec).logits[:, -1]  # [B, V]
    chosen = choose_step(logits, keys, settings)
    if keys is not None:
        keys = keys._replace(positions=keys.positions + 1)
    return chosen, Carry(torch.cat([query[:, 1:], chosen.token_ids], dim=1), ends + 1, keys)


class CompiledDrafter(ModelDrafter):
    """A `ModelDrafter` with compiled steps.

    With processors or a confidence threshold, only the forwards in the steps run compiled.
    """

    min_query_len = STEP_QUERY_LEN
    language_model: CompiledLanguageModel

    def draft(self, request: DraftRequest) -> DraftOut:
        kv_cache, draft = self._start(request)
        query, num_draft_tokens, steps = (
            self._sent(request.query_token_ids),
            request.num_draft_tokens,
            None,
        )
        if self.chooser.is_plain:
            query = self._catch_up(query, kv_cache)
            steps = self._steps(query, kv_cache, num_draft_tokens, draft.keys)
        if steps is None:
            self.inferencer.extend(query, kv_cache, num_draft_tokens, draft)
        else:
            kv_cache.advance(query.shape[1] + num_draft_tokens - 1)
            for step in steps:
                draft.tokens.add(step)
            logits = steps[-1].token_logits
            self.chooser.last_logits = None if logits is None else logits[:, -1]
        return draft.finish(self._out_device(request.query_token_ids))

    def _catch_up(self, query: Tensor, kv_cache: KVCache) -> Tensor:
        """Feed all but the newest tokens of a long query (a prompt) and return these [B, Q]."""
        if query.shape[1] < STEP_QUERY_LEN or (
            query.shape[1] == STEP_QUERY_LEN and kv_cache.num_columns
        ):
            return query
        ahead, model = query[:, :-1], self.language_model
        if ahead.shape[1] <= STEP_QUERY_LEN and model.runner.varies:  # after plain steps
            # eagerly, to save one more graph
            LanguageModel.run(model, ahead, kv_cache, logits_to_keep=1)
        else:
            self.inferencer.feed(ahead, kv_cache)
        kv_cache.crop(1)  # the step reads the last fed token again
        return query[:, -STEP_QUERY_LEN:]

    def _steps(
        self, query: Tensor, kv_cache: KVCache, num_steps: int, keys: NoiseKeys | None
    ) -> list[Chosen] | None:
        buffers = self.language_model.buffers(kv_cache)
        if buffers is None or query.shape[1] != STEP_QUERY_LEN:
            return None
        runner = self.language_model.runner
        if keys is not None:
            keys = NoiseKeys(*(buffers.vary(tensor, 0) for tensor in keys))
        backend = runner.sampling_backend or self.settings.backend
        # steps do not end rows
        settings = self.settings._replace(eos_token_ids=None, backend=backend)
        name = f"draft step, {'greedy' if keys is None else settings}"
        ends, rows, states, mask_spec = buffers.arguments(STEP_QUERY_LEN + num_steps - 1)
        query = query.clone(memory_format=torch.contiguous_format)  # other strides would recompile
        carry = Carry(buffers.vary(query, 0), ends, keys)
        return runner.repeat(name, draft_step, num_steps, carry, rows, states, mask_spec, settings)
