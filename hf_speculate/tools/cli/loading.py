"""Loads the models that a command names."""

import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.import_utils import is_accelerate_available

from hf_speculate.errors import ConfigError, MissingExtraError
from hf_speculate.generation.enable import enable
from hf_speculate.tools.cli.console import first_line

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
_REASON_LEN = 200  # letters: transformers lists all its models in some messages


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
        """What `generate()` is told of the draft, and the tokenizer that `stop_strings` need."""
        draft = {"assistant_model": self.draft, "assistant_tokenizer": self.draft_tokenizer}
        return {"tokenizer": self.tokenizer} | {name: value for name, value in draft.items() if value is not None}


def load_pair(target: str, draft: str | None, dtype: str, device: str, notes: Console | None = None) -> Pair:
    """Load the models and their tokenizers.

    Args:
        target: name or path.
        draft: name or path; None: there is none.
        dtype: of `DTYPES`; "auto" is the checkpoint's.
        device: as torch names it; "auto" is the GPU where there is one, "map" spreads each model over all devices.
        notes: is told what is being loaded.

    Raises:
        ConfigError: see `check_placement`; or a model or its tokenizer cannot be found or read.
        MissingExtraError: see `check_placement`.
    """
    check_placement(dtype, device)
    logging.disable_progress_bar()
    with notes.status(f"loading {target}") if notes is not None else nullcontext():
        model = enable(_load(target, dtype, device))
        tokenizer = load_tokenizer(target)
    if draft is None:
        return Pair(model, None, tokenizer, None)
    with notes.status(f"loading {draft}") if notes is not None else nullcontext():
        draft_model = _load(draft, dtype, device)
        draft_tokenizer = _read_tokenizer(draft)
    is_same = draft_tokenizer.get_vocab() == tokenizer.get_vocab()
    return Pair(model, draft_model, tokenizer, None if is_same else draft_tokenizer)


def check_placement(dtype: str, device: str) -> None:
    """Make sure before anything is loaded that a model can be put there.

    Args:
        dtype: see `load_pair`.
        device: see `load_pair`.

    Raises:
        ConfigError: the dtype is none, or this machine has no such device.
        MissingExtraError: models are to be spread, and accelerate is not installed.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; leave it out for the checkpoint's")
    if device == "map" and not is_accelerate_available():
        raise MissingExtraError(
            'accelerate must be installed for --device map, got none; pip install "hf-speculate[ranks]"'
        )
    if device in ("auto", "map"):
        return
    try:
        torch.zeros(1, device=device).item()  # is read too: a device named meta holds nothing
    except (
        AssertionError,
        ImportError,
        NotImplementedError,
        RuntimeError,
    ) as error:  # by kind of device
        here = [torch.accelerator.current_accelerator()] if torch.accelerator.is_available() else []
        names = sorted(["auto", "cpu", "map", *(one.type for one in here if one is not None)])
        raise ConfigError(
            f"--device must be one of {', '.join(names)} here, got {device!r} ({_reason(error)}); leave it out for auto"
        ) from error


def load_tokenizer(target: str) -> PreTrainedTokenizerBase:
    """The target's tokenizer, padding on the left.

    Raises:
        ConfigError: it cannot be found or read.
    """
    tokenizer = _read_tokenizer(target, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _read_tokenizer(name: str, **options: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = _read(
        name, "a tokenizer", "put one beside the model", lambda: AutoTokenizer.from_pretrained(name, **options)
    )
    return tokenizer


def _load(name: str, dtype: str, device: str) -> PreTrainedModel:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    placement = {"device_map": "auto"} if device == "map" else {}
    model: PreTrainedModel = _read(
        name,
        "a model",
        "name a language model that decodes",
        lambda: AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **placement).eval(),
    )
    return model if placement else model.to(device)  # type: ignore[arg-type]  # a device by its name


def _read(name: str, what: str, hint: str, read: Callable[[], Any]) -> Any:
    """What transformers makes of files, whose readers raise errors of every kind."""
    try:
        return read()
    except OSError as error:
        raise _not_found(name, error) from error
    except Exception as error:
        raise ConfigError(
            f"{what} must be one that transformers can read, got {name!r} ({type(error).__name__}: {_reason(error)}); "
            f"{hint}, or download it again"
        ) from error


def _not_found(name: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"a model must be a folder, or a name on the Hub that can be reached, got {name!r} ({_reason(error)}); "
        "look at the spelling, or download it first"
    )


def _reason(error: BaseException) -> str:
    return textwrap.shorten(first_line(error), _REASON_LEN, placeholder=" ...")
