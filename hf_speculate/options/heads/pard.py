"""PARD, an ordinary language model with a mask token for parallel drafting.

Source:
    PARD: An et al. (arXiv:2504.18583).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from hf_speculate.compat import CACHE_NAME
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import is_int
from hf_speculate.options.heads.head import HeadSpec
from hf_speculate.options.heads.load_network import ConfigSource, LoadRequest, check_weights, naming
from hf_speculate.options.heads.network import TargetParts
from hf_speculate.options.heads.parallel import SlotInputs, SlotNetwork
from hf_speculate.options.heads.row_cache import TransformersCache
from hf_speculate.options.heads.served import unserved

_HEAD = "lm_head.weight"
_CLASSES: dict[str, Any] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


class PardNetwork(SlotNetwork):
    """A transformers model with mask-token slots.

    Its layers share one attention mask.
    """

    def __init__(self, model: PreTrainedModel, pard_token: int, vocab_size: int):
        super().__init__(DraftVocabulary(vocab_size), [None] * model.config.num_hidden_layers)
        self.model, self.pard_token = model, pard_token

    def fill(self, inputs: SlotInputs, parts: TargetParts) -> Tensor:
        token_ids = parts.known(inputs.token_ids, int(self.model.config.vocab_size))
        token_ids = token_ids.masked_fill(inputs.is_slot, self.pard_token)
        # Without a mask, the model would build one from the cache's length.
        mask = replace(inputs.view, is_bare=False).mask(0)  # [B, 1, N, T]
        decoder: Any = self.model.get_decoder()
        output = decoder(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=inputs.view.columns,
            use_cache=True,
            **{CACHE_NAME: TransformersCache(inputs.view)},
        )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def logits(self, normed: Tensor, parts: TargetParts) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        return head(normed)  # type: ignore[no-any-return]


def read_pard(source: ConfigSource) -> tuple[HeadSpec, None]:
    """Read the spec of a PARD model, which needs the target's vocabulary but no states."""
    source.check_no_layers("a PARD draft, which reads no hidden states")
    config = source.config
    model_type = config.get("model_type")
    if model_type not in _CLASSES or "sliding_attention" in (config.get("layer_types") or ()):
        raise unserved(
            f"a PARD draft of model_type {model_type!r}",
            f"full attention and one of {', '.join(_CLASSES)}",
        )
    size, pard_token = int(config["vocab_size"]), config["pard_token"]
    if not is_int(pard_token) or not 0 <= pard_token < size:
        raise ConfigError(
            f"pard_token of {source.name} must be an id below its vocab_size {size}, got "
            f"{pard_token!r}; download "
            "config.json again"
        )
    spec = source.spec(
        config,
        (),
        draft_vocab_size=min(size, source.shape.vocab_size),
    )
    return spec, None


def load_pard(request: LoadRequest) -> PardNetwork:
    """Load a PARD model as a transformers model."""
    fields, file = request.folder.config, request.folder.weights_file
    model_class = _CLASSES[fields["model_type"]]
    weights = {
        name: weight
        for name, weight in request.folder.weights().items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    with naming(f"{request.folder.source}/config.json", f"the config of {model_class.__name__}"):
        config = model_class.config_class.from_dict(fields)
        with torch.device("meta"):
            expected = model_class(config).state_dict()
    if config.tie_word_embeddings and _HEAD not in weights:
        del expected[_HEAD]
    check_weights(expected, weights, file)
    options = {"dtype": request.dtype, "attn_implementation": "sdpa"}
    model: PreTrainedModel = model_class.from_pretrained(
        None, config=config, state_dict=weights, **options
    )
    model.to(request.device)  # type: ignore[arg-type]  # transformers wraps torch's own method
    return PardNetwork(model, fields["pard_token"], request.spec.vocab_size)
