"""Draft with a model in compiled steps, or with all steps of a round in one device graph."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.preallocated import MaskSpec
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.token_choice import (
    DraftSettings,
    choose_step,
    draft_of,
)
from hf_speculate.models.context import Context
from hf_speculate.models.inferencer import Chosen, Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.options.compiled.compilation import Steps, copies
from hf_speculate.options.compiled.language_model import (
    CodedModel,
    CompiledLanguageModel,
    FixedBuffers,
    Numbers,
    Rows,
    States,
    forward_rows,
)
from hf_speculate.processors.of_rows import RowProcessors
from hf_speculate.types import DraftOut, NoiseKeys

# Every step reads the two newest tokens, so all steps have the same shape: before the first one,
# the drafter may not have read the older token. Later steps write its states again.
STEP_QUERY_LEN = 2


def draft_step(
    model: PreTrainedModel | CodedModel,
    carry: Numbers,
    rows: Rows,
    states: States,
    mask_spec: MaskSpec,
    settings: DraftSettings,
) -> tuple[Chosen, Numbers]:
    """Choose one token per row and write its states to the cache's buffers `states`.

    `carry` holds the two newest tokens, two summands of the older one's column, and the keys of the
    next token's noise. Without keys, the argmax is taken.
    """
    numbers = carry.by_row  # [4 or 7, B]
    query, ends = numbers[:STEP_QUERY_LEN].T.contiguous(), numbers[2] + numbers[3]
    keys = NoiseKeys(*numbers[4:].unbind()) if len(numbers) > 4 else None
    logits = forward_rows(model, query, ends, rows, states, mask_spec).logits[:, -1]  # [B, V]
    chosen = choose_step(logits, keys, settings)
    following = [numbers[1:2], chosen.token_ids.T, numbers[2:3] + 1, numbers[3:4]]
    if keys is not None:
        following += [numbers[4:6], numbers[6:] + 1]
    return chosen, Numbers(torch.cat(following))


def finish_draft(
    chosen: Sequence[Chosen],
    rows: Rows,
    states: States,
    mask_spec: MaskSpec,
    settings: DraftSettings,
) -> DraftOut:
    """Join the tokens of a round's steps."""
    return draft_of(chosen, settings)


DRAFT_STEPS = Steps(draft_step, finish_draft)


def sent(draft: DraftOut, device: torch.device) -> DraftOut:
    """Return a draft on a device; itself if it is there."""
    if draft.token_ids.device == device:
        return draft
    moved: DraftOut = tree_map_only(Tensor, lambda tensor: tensor.to(device), draft)
    return moved


def split_steps(num_steps: int, lens: Sequence[int]) -> list[int]:
    """Split a number of steps into captured lengths `lens`, ascending; [num_steps] without any.

    The last part may be longer than what is left.
    """
    parts: list[int] = []
    while lens and num_steps > 0:
        parts.append(max((size for size in lens if size <= num_steps), default=lens[0]))
        num_steps -= parts[-1]
    return parts or [num_steps]


class CompiledDrafter(ModelDrafter):
    """A `ModelDrafter` with compiled steps, or with steps from device graphs.

    A graph holds the steps of a round with the choice of their tokens, for K in `step_lens`. Other
    K are sums of these: rounding up would take longer, as a step reads all weights, than another
    launch does.

    With a confidence threshold, or with processors other than those that the sampling kernel
    replaces, only the forwards in the steps run compiled or from graphs, one by one.
    """

    min_query_len = STEP_QUERY_LEN
    language_model: CompiledLanguageModel

    def __init__(
        self,
        inferencer: Inferencer,
        processors: RowProcessors,
        settings: DraftSettings,
        context: Context | None,
        step_lens: Sequence[int] = (),  # ascending; empty if steps run one by one
    ):
        super().__init__(inferencer, processors, settings, context)
        self.step_lens = step_lens

    def draft(self, request: DraftRequest) -> DraftOut:
        kv_cache, draft = self._start(request)
        query, num_draft_tokens = self._sent(request.query_token_ids), request.num_draft_tokens
        out_device, parts = self._out_device(request.query_token_ids), None
        settings = self._settings(draft.keys)
        if settings is not None:
            query = self._catch_up(query, kv_cache)
            parts = self._parts(query, kv_cache, num_draft_tokens, draft.keys, settings)
        if parts is None:
            self.inferencer.extend(query, kv_cache, num_draft_tokens, draft)
            return draft.finish(out_device)
        kv_cache.advance(query.shape[1] + num_draft_tokens - 1)
        logits = parts[-1].token_logits
        self.chooser.last_logits = None if logits is None else logits[:, -1]
        if parts[0].token_ids.shape[1] == num_draft_tokens:
            return sent(parts[0], out_device)
        for part in parts:
            draft.tokens.add(Chosen(part.token_ids, part.token_logits, part.logsumexp))
        return draft.finish(out_device)

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        self.chooser.forget()  # the forward's graph may overwrite the logits of the last draft
        super().read(token_ids, kv_cache)

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

    def _settings(self, keys: NoiseKeys | None) -> DraftSettings | None:
        """Return the settings of the steps; None if tokens must be chosen between forwards."""
        runner = self.language_model.runner
        settings = self.settings._replace(backend=runner.sampling_backend or self.settings.backend)
        if self.chooser.is_plain:
            return settings
        can_warp = keys is not None and runner.sampling_backend is None
        warp = self.chooser.warp_alone() if can_warp else ()
        return settings._replace(warp=warp) if warp else None

    def _parts(
        self,
        query: Tensor,
        kv_cache: KVCache,
        num_steps: int,
        keys: NoiseKeys | None,
        settings: DraftSettings,
    ) -> list[DraftOut] | None:
        """Run the steps of a round, and return their tokens; None if they must run eagerly."""
        buffers = self.language_model.buffers(kv_cache)
        if buffers is None or query.shape[1] != STEP_QUERY_LEN:
            return None
        runner = self.language_model.runner
        choice = "greedy" if keys is None else settings._replace(eos_token_ids=None)
        sizes = split_steps(num_steps, self.step_lens)
        arguments = buffers.constants(STEP_QUERY_LEN + sum(sizes) - 1)
        carry, parts = self._carry(query, buffers, keys), list[DraftOut]()
        for index, size in enumerate(sizes):
            outputs = runner.repeat(
                f"draft step, {choice}", DRAFT_STEPS, size, carry, *arguments, settings
            )
            if outputs is None:
                return None
            part, following = outputs
            if index + 1 < len(sizes):
                part = copies(part)  # the next replay may overwrite it
                carry.by_row.copy_(following.by_row)
            parts.append(part)
        return parts

    def _carry(self, query: Tensor, buffers: FixedBuffers, keys: NoiseKeys | None) -> Numbers:
        """Return the input of the first step, in one launch."""
        ends = buffers.kv_cache.layout.row_lens.summands()
        rows = [query.T, *(row[None] for row in (*ends, *(keys or ())))]
        return buffers.put("sampled" if keys else "greedy", rows)
