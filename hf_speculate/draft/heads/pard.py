"""PARD: an ordinary language model with a token whose slots it fills in one forward.

Source:
    PARD: An et al. (arXiv:2504.18583).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.draft.heads.mtp import PlacedCache
from hf_speculate.draft.heads.parallel import SlotInputs
from hf_speculate.draft.heads.row_cache import RowCache
from hf_speculate.draft.heads.target_parts import TargetParts
from hf_speculate.draft.heads.vocabulary import DraftVocabulary


class PardNetwork(nn.Module):
    """A `SlotNetwork` over a transformers model.

    Args:
        model: of the target's tokenizer; one attention mask serves all its layers.
        pard_token: id that stands in slots.
        vocab_size: V, the target's ids, which may be padded to another number than the model's.
    """

    def __init__(self, model: PreTrainedModel, pard_token: int, vocab_size: int):
        super().__init__()
        self.model = model
        self.pard_token = pard_token
        self.vocabulary = DraftVocabulary(vocab_size)
        self.windows: tuple[int | None, ...] = (None,) * model.config.num_hidden_layers
        self._last_id = int(model.config.vocab_size) - 1

    def project(self, states: Tensor) -> Tensor:
        """See `SlotNetwork.project`; there are no states."""
        return states

    def fill(self, inputs: SlotInputs, cache: RowCache, parts: TargetParts) -> Tensor:
        """See `SlotNetwork.fill`."""
        token_ids = inputs.token_ids.clamp_max(self._last_id).masked_fill(inputs.is_slot, self.pard_token)
        decoder: Any = self.model.get_decoder()
        output = decoder(
            input_ids=token_ids,
            attention_mask=self._mask(inputs),
            position_ids=inputs.placed.columns,
            past_key_values=PlacedCache(cache, inputs.placed),
            use_cache=True,
        )
        states: Tensor = output.last_hidden_state
        return states

    def logits(self, outputs: Tensor, parts: TargetParts) -> Tensor:
        """See `SlotNetwork.logits`."""
        head: Any = self.model.get_output_embeddings()
        logits: Tensor = head(outputs)
        return logits

    def _mask(self, inputs: SlotInputs) -> Tensor:
        """[B, 1, N, T] additive; given in any case, or the model would make one from the cache's length."""
        mask = inputs.placed.mask(0)
        if mask is not None:
            return mask
        batch_size, num = inputs.token_ids.shape
        device = inputs.token_ids.device
        return torch.zeros(batch_size, 1, num, inputs.placed.width, dtype=self.model.dtype, device=device)
