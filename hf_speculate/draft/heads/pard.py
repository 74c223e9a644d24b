"""PARD: an ordinary language model with a token whose slots it fills in one forward.

Source:
    PARD: An et al. (arXiv:2504.18583).
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_speculate.compat import CACHE_NAME
from hf_speculate.draft.heads.folder import unserved
from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.load_network import ConfigSource, LoadRequest
from hf_speculate.draft.heads.network import TargetParts
from hf_speculate.draft.heads.parallel import SlotInputs, SlotNetwork
from hf_speculate.draft.heads.row_cache import PlacedCache
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.models.language_model import vocab_size_of

_SERVED = ("llama", "qwen2", "qwen3")


class PardNetwork(SlotNetwork):
    """A transformers model, whose layers share one attention mask."""

    def __init__(self, model: PreTrainedModel, pard_token: int, vocab_size: int):
        super().__init__(DraftVocabulary(vocab_size), [None] * model.config.num_hidden_layers)
        self.model, self.pard_token = model, pard_token
        self._last_id = int(model.config.vocab_size) - 1

    def fill(self, inputs: SlotInputs, parts: TargetParts) -> Tensor:
        token_ids = inputs.token_ids.clamp_max(self._last_id).masked_fill(inputs.is_slot, self.pard_token)
        # given in any case, or the model would make one from the cache's length
        mask = replace(inputs.placed, is_bare=False).mask(0)  # [B, 1, N, T]
        decoder: Any = self.model.get_decoder()
        output = decoder(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=inputs.placed.columns,
            use_cache=True,
            **{CACHE_NAME: PlacedCache(inputs.placed)},
        )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def logits(self, normed: Tensor, parts: TargetParts) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        return head(normed)  # type: ignore[no-any-return]


def read_pard(source: ConfigSource) -> tuple[HeadSpec, None]:
    """A PARD draft, which needs the target's vocabulary and none of its states."""
    source.check_no_layers("a PARD draft, which reads no hidden states")
    config = source.config
    model_type = config.get("model_type")
    if model_type not in _SERVED or "sliding_attention" in (config.get("layer_types") or ()):
        raise unserved(f"a PARD draft of model_type {model_type!r}", f"full attention and one of {', '.join(_SERVED)}")
    spec = source.spec(
        config,
        (),
        draft_vocab_size=min(int(config["vocab_size"]), source.shape.vocab_size),
        is_vocab_padded=True,
    )
    return spec, None


def load_pard(request: LoadRequest) -> PardNetwork:
    """A PARD draft, read by transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        request.folder.source, dtype=request.dtype, trust_remote_code=False, attn_implementation="sdpa"
    )
    model.to(request.device)  # type: ignore[arg-type]  # transformers wraps torch's own method
    return PardNetwork(model, int(request.folder.config["pard_token"]), vocab_size_of(request.target))
