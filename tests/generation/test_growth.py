"""Test that work outside the models' forwards does not grow with vocabulary, prompt or depth."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.options.cuda import attention_backends
from tests.support.tiny import make_model, noisy_copy
from tests.support.tiny_tokenizers import letters_tokenizer

V, L, T = 4096, 2, 300  # T exceeds the minimum chunk size of 256 tokens
FIRST_LETTER = 0x4E00
SOURCES = ["draft", "another vocabulary", "lookup", "early exit"]
TOP_P = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 1}
# Sampling processes the vocabulary in blocks of V.
LARGER = {"vocab_size": 2 * V}, {"num_prompt": 2 * T}, {"num_prompt": 2 * T, **TOP_P}
# Count Python calls only in these files: on the first call of an operator, torch also runs its own
# registration code.
COUNTED = ("hf_speculate/", "transformers/", "torch/nn/modules/")
MOST_MORE = 2  # calls that depend on where the prompt ends in a buffer
MOST_PER_LAYER = 8  # short functions of the library, per layer of each model
# caches made from configs: one by transformers for the target, and two for the draft
MOST_CACHES = 3


class Counts(TorchDispatchMode):
    """Dispatch mode that counts operators and Python calls outside the models' forwards."""

    def __init__(self, *models: PreTrainedModel):
        super().__init__()
        self.operators: Counter[str] = Counter()
        # Operators whose output has a number for each token of the vocabulary.
        self.large: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()  # by file and function
        self._models, self._depth = models, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._depth:
            self.operators[str(func)] += 1
            if (
                isinstance(output, Tensor)
                and output.dim()
                and output.shape[-1] >= V
                and not func.is_view
            ):
                self.large[str(func)] += 1
        return output

    def of(self, call: Any) -> "Counts":
        steps = (self._enter, self._leave)
        hooks = [hook for model in self._models for hook in self._hooked(model, *steps)]
        with self:
            sys.setprofile(self._count)
            try:
                call()
            finally:
                sys.setprofile(None)
                for hook in hooks:
                    hook.remove()
        return self

    def _hooked(self, model: PreTrainedModel, enter: Any, leave: Any) -> tuple[Any, Any]:
        return model.register_forward_pre_hook(enter), model.register_forward_hook(leave)

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and not self._depth and any(name in file for name in COUNTED):
            self.calls[file, frame.f_code.co_name] += 1


def counts(
    source: str, vocab_size: int = V, num_layers: int = L, num_prompt: int = T, **options: Any
) -> Counts:
    """Count the work in the second call of a pair whose drafts are all accepted.

    Without a draft model, the call drafts nothing.
    """
    sizes = {
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 4096,
    }
    target = make_model("llama", dtype=torch.float32, **sizes)
    draft = noisy_copy(target, 0.0)
    options |= {
        "max_new_tokens": 10,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
    }
    if source == "lookup":
        options |= {
            "prompt_lookup_num_tokens": options.pop("num_assistant_tokens"),
            "max_new_tokens": 2,
        }
    elif source == "early exit":
        options |= {"assistant_early_exit": 1, "max_new_tokens": 2}
    else:
        options["assistant_model"] = draft
    if source == "another vocabulary":  # the same letters in reverse order, except one
        letters = [chr(FIRST_LETTER + index) for index in range(vocab_size)]
        options |= {"tokenizer": letters_tokenizer(letters)}
        options |= {"assistant_tokenizer": letters_tokenizer(["?", *letters[-2::-1]])}
        for table in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            table.weight.copy_(table.weight.flip(0))
    ids = torch.arange(num_prompt)[None] % 256 + 3

    def call() -> None:
        hf_speculate.generate(target, ids, attention_mask=torch.ones_like(ids), **options)

    call()
    return Counts(target, draft).of(call)


@pytest.mark.parametrize("larger", LARGER, ids=["vocabulary", "prompt", "prompt, sampled"])
@pytest.mark.parametrize("source", SOURCES)
def test_operator_count_ignores_vocabulary_and_prompt_size(source, larger):
    few = counts(source, **{name: value for name, value in larger.items() if name in TOP_P})
    many = counts(source, **larger)
    assert min(sum(few.operators.values()), sum(few.calls.values())) > 100
    assert many.operators - few.operators == Counter()
    # Selects the tokens that the draft shares.
    chosen = {"aten.index_select.default"} if source == "another vocabulary" else set()
    assert "do_sample" in larger or set(many.large) <= chosen
    assert not any(name == "get_vocab" for _, name in many.calls)
    assert sum((many.calls - few.calls).values()) <= MOST_MORE, many.calls - few.calls


@pytest.mark.parametrize("source", SOURCES)
def test_operator_count_grows_little_with_layers(source, monkeypatch):
    monkeypatch.setitem(attention_backends._served, 0, True)  # as on a GPU
    num_more, few = 10, counts(source)
    many = counts(source, num_layers=L + num_more)
    assert many.operators - few.operators == Counter()
    walks = {"named_modules", "_named_members", "get_layer_types_and_kwargs"}
    assert not walks & {name for _, name in many.calls - few.calls}
    num_models = 2 if source in SOURCES[:2] else 1
    own = sum(num for (file, _), num in (many.calls - few.calls).items() if "hf_speculate" in file)
    assert own <= MOST_PER_LAYER * num_models * num_more
    num_caches = sum(
        num for (_, name), num in many.calls.items() if name == "get_layer_types_and_kwargs"
    )
    assert num_caches <= MOST_CACHES
