"""Loads PARD drafts."""

from functools import partial

from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.kinds import unserved
from hf_speculate.draft.heads.load_request import LoadRequest
from hf_speculate.draft.heads.parallel import ParallelDrafter
from hf_speculate.draft.heads.pard import PardNetwork
from hf_speculate.draft.heads.pard_config import describe_pard

_SERVED = ("llama", "qwen2", "qwen3")


def load_pard(request: LoadRequest) -> DraftHead:
    """A PARD draft.

    Args:
        request: what is to be loaded.

    Raises:
        UnsupportedModelError: the model is of a family that is not served, or has windows.
    """
    config = request.folder.config
    model_type = config.get("model_type")
    if model_type not in _SERVED or "sliding_attention" in (config.get("layer_types") or ()):
        raise unserved(f"a PARD draft of model_type {model_type!r}", f"full attention and one of {', '.join(_SERVED)}")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        request.folder.source, dtype=request.dtype, trust_remote_code=False, attn_implementation="sdpa"
    )
    model.to(request.device)  # type: ignore[arg-type]  # transformers wraps torch's own method
    network = PardNetwork(model, int(config["pard_token"]), request.source.shape.vocab_size)
    spec = describe_pard(request.source)
    return DraftHead(spec, network, request.target.config, partial(ParallelDrafter, network))
