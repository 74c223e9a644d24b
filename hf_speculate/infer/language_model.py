"""A causal language model as a function from tokens to logits, with the cache as its memory."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.errors import ShapeError
from hf_speculate.infer.attention import folding
from hf_speculate.infer.kv_cache import KVCache
from hf_speculate.infer.rope import growing_rope
from hf_speculate.types import Scored


class LanguageModel:
    """Calls a transformers model with the mask and position ids that its cache's rows need.

    Args:
        model: a decoder-only model with a language modelling head.
        max_position: upper bound of position ids, for tokens drafted past the end of the text.
        keeps_states: whether states, hidden states or attentions outlive the call. Where they do not, forwards run in
            torch's inference mode, which takes 6-8 % off a forward of small layers (2-core CPU, 16 of width 192).
    """

    def __init__(self, model: PreTrainedModel, max_position: int | None = None, keeps_states: bool = True):
        self.model = model
        self.max_position = max_position
        self.device = model.device  # where query tokens are expected
        self._mode = torch.no_grad if keeps_states or growing_rope(model) else torch.inference_mode
        parameters = inspect.signature(type(model).forward).parameters
        self._takes_position_ids = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    @property
    def eos_token_id(self) -> int:
        """The model's (first) end-of-sequence id.

        Raises:
            ValueError: the model has none.
        """
        eos = self.model.generation_config.eos_token_id
        if eos is None or eos == []:
            raise ValueError("eos_token_id must be set in the model's generation config, got None; set it there")
        return int(eos[0] if isinstance(eos, list) else eos)

    def forward(self, query_token_ids: Tensor, kv_cache: KVCache, *, logits_to_keep: int | None = None) -> Tensor:
        """Score the query tokens; `kv_cache` is advanced by them, in place.

        Args:
            query_token_ids: [B, Q] int64, Q >= 1.
            kv_cache: holds the states of all tokens before the query.
            logits_to_keep: only the last so many positions; all Q unless told.

        Returns:
            Logits [B, Q', V] in the model's dtype.

        Raises:
            ShapeError: the query is empty.
        """
        return self.run(query_token_ids, kv_cache, logits_to_keep=logits_to_keep).logits

    def run(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        *,
        logits_to_keep: int | None = None,
        **forward_options: Any,
    ) -> Scored:
        """As `forward`, but with the model's whole output, for callers that want hidden states or attentions."""
        num_query = query_token_ids.shape[1]
        if num_query < 1:
            raise ShapeError(f"query_token_ids must be [B, Q] with Q >= 1, got {list(query_token_ids.shape)}")
        options = dict(forward_options)
        mask = kv_cache.mask(num_query)
        if mask is not None:
            options["attention_mask"] = mask
        if self._takes_position_ids:
            options["position_ids"] = kv_cache.position_ids(num_query, self.max_position)
        if self._takes_logits_to_keep and logits_to_keep is not None:
            options["logits_to_keep"] = logits_to_keep
        with self._mode(), folding():
            output = self.model(
                input_ids=query_token_ids, past_key_values=kv_cache.cache, use_cache=True, return_dict=True, **options
            )
        kv_cache.advance(num_query)
        logits = output.logits if logits_to_keep is None else output.logits[:, -logits_to_keep:]  # [B, Q', V]
        return Scored(logits, output.get("hidden_states"), output.get("attentions"))
