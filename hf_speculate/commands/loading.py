"""Loads the models that a command names."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_speculate.enabling import enable
from hf_speculate.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Pair:
    """A target that is enabled, and what goes with it.

    Args:
        target: decodes.
        draft: proposes; None: no model does.
        tokenizer: the target's, padding on the left.
        draft_tokenizer: the draft's own, None where the vocabularies are one.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    draft_tokenizer: PreTrainedTokenizerBase | None

    @property
    def arguments(self) -> dict[str, Any]:
        """What `generate()` is told of the draft."""
        if self.draft is None:
            return {}
        if self.draft_tokenizer is None:
            return {"assistant_model": self.draft}
        return {
            "assistant_model": self.draft,
            "tokenizer": self.tokenizer,
            "assistant_tokenizer": self.draft_tokenizer,
        }


def load_pair(target: str, draft: str | None, dtype: str, device: str, notes: Console | None = None) -> Pair:
    """Load the models and their tokenizers.

    Args:
        target: name or path.
        draft: name or path; None: there is none.
        dtype: of `DTYPES`; "auto" is the checkpoint's.
        device: as torch names it; "auto" is the GPU where there is one, "map" spreads each model over all devices.
        notes: is told what is being loaded.

    Raises:
        ConfigError: the dtype is none, or a model cannot be found.
        OSError: the draft's tokenizer cannot be found.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; leave it out for the checkpoint's")
    logging.disable_progress_bar()
    with notes.status(f"loading {target}") if notes is not None else nullcontext():
        model = enable(_load(target, dtype, device))
        tokenizer = load_tokenizer(target)
    if draft is None:
        return Pair(model, None, tokenizer, None)
    with notes.status(f"loading {draft}") if notes is not None else nullcontext():
        draft_model = _load(draft, dtype, device)
        draft_tokenizer = AutoTokenizer.from_pretrained(draft)
    is_same = draft_tokenizer.get_vocab() == tokenizer.get_vocab()
    return Pair(model, draft_model, tokenizer, None if is_same else draft_tokenizer)


def load_tokenizer(target: str) -> PreTrainedTokenizerBase:
    """The target's tokenizer, padding on the left.

    Raises:
        ConfigError: it cannot be found.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target, padding_side="left")
    except OSError as error:
        raise _not_found(target, error) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _load(name: str, dtype: str, device: str) -> PreTrainedModel:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    placement = {"device_map": "auto"} if device == "map" else {}
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **placement).eval()
    except OSError as error:
        raise _not_found(name, error) from error
    return model if placement else model.to(device)  # type: ignore[arg-type]  # a device by its name


def _not_found(name: str, error: OSError) -> ConfigError:
    reason = str(error).splitlines()[0]
    return ConfigError(
        f"a model must be a folder, or a name on the Hub that can be reached, got {name!r} ({reason}); "
        "look at the spelling, or download it first"
    )
