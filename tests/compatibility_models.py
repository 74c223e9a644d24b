"""Rows of the model families in `docs/compatibility.md`: the KV cache of each class, or the message that refuses it."""

from collections.abc import Iterator

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from hf_speculate.errors import UnsupportedModelError
from hf_speculate.generation.draft_source import ASSISTED
from hf_speculate.generation.validate_models import check_models
from tests.generation.test_models import DYNAMIC_ONLY
from tests.generation.test_preallocated import FITTING
from tests.tiny import KINDS, MORE_KINDS, make_config
from tests.tiny_recurrent import RECURRENT_KINDS, UNSUPPORTED_RECURRENT, unsupported_config

BUFFERS = "preallocated, or dynamic"
_READERS = {  # what attends to an encoder or reads images
    "T5ForConditionalGeneration": "dynamic",
    "BartForConditionalGeneration": "dynamic",
    "WhisperForConditionalGeneration": "dynamic",
    "LlavaForConditionalGeneration": BUFFERS,
    "Qwen2VLForConditionalGeneration": BUFFERS,
    "Qwen3_5ForConditionalGeneration": "hybrid",
}


def family_rows() -> list[tuple[str, str]]:
    """Class of a model whose text tests compare with plain decoding, and its KV cache."""
    rows = {(_class_name(kind), _cache_kind(kind)) for kind in (*KINDS, *MORE_KINDS, *RECURRENT_KINDS)}
    return sorted(rows | set(_READERS.items()), key=lambda row: (row[0].lower(), row[1]))


def refused_rows() -> Iterator[tuple[str, str]]:
    """Class of a model with recurrent states, and the message that refuses it."""
    for kind in UNSUPPORTED_RECURRENT:
        model = AutoModelForCausalLM.from_config(unsupported_config(kind))
        with pytest.raises(UnsupportedModelError) as caught:
            check_models([model], ASSISTED)
        yield type(model).__name__, str(caught.value)


def _class_name(kind: str) -> str:
    name: str = MODEL_FOR_CAUSAL_LM_MAPPING[type(make_config(kind))].__name__
    return f"{name} with ALiBi" if kind == "falcon_alibi" else name


def _cache_kind(kind: str) -> str:
    if kind in RECURRENT_KINDS:
        return "hybrid"
    return BUFFERS if kind in FITTING or (kind in MORE_KINDS and kind not in DYNAMIC_ONLY) else "dynamic"
