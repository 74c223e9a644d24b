"""Loads the models that a command names."""

import textwrap
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.import_utils import is_accelerate_available

from hf_speculate.draft.heads.folder import HeadFolder
from hf_speculate.draft.heads.kinds import is_head, is_mtp_checkpoint
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.errors import ConfigError, MissingExtraError
from hf_speculate.generation.enable import enable
from hf_speculate.tools.cli.console import first_line
from hf_speculate.tools.cli.options import Models

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
_REASON_LEN = 200  # characters; some messages of transformers list all its models


class Pair(NamedTuple):
    """An enabled target, its tokenizer, which pads on the left, and arguments of `generate()`: what drafts for it."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: dict[str, Any]


def load_pair(models: Models, log: Console | None = None) -> Pair:
    """Load models and tokenizers; `log` shows what is being loaded."""
    check_placement(models.dtype, models.device)
    logging.disable_progress_bar()
    with log.status(f"loading {models.target}") if log is not None else nullcontext():
        target = enable(_load(models, models.target, models.revision))
        tokenizer = load_tokenizer(models)
    arguments: dict[str, Any] = {"tokenizer": tokenizer}  # of stop strings
    if models.draft is None:
        return Pair(target, tokenizer, arguments)
    with log.status(f"loading {models.draft}") if log is not None else nullcontext():
        if names_head(models):
            arguments["assistant_model"] = load_drafter(models.draft, target)
        else:
            arguments["assistant_model"] = _load(models, models.draft)
            draft_tokenizer = _read_tokenizer(models, models.draft)
            if draft_tokenizer.get_vocab() != tokenizer.get_vocab():
                arguments["assistant_tokenizer"] = draft_tokenizer
    return Pair(target, tokenizer, arguments)


def names_head(models: Models) -> bool:
    """Whether the draft is a head, or the target itself for the MTP layers of its checkpoint; not a draft model."""
    if models.draft is None:
        return False
    try:
        folder = HeadFolder(models.draft)
    except ConfigError:
        return False  # loading a model then says what is wrong
    if models.draft == models.target:
        return is_mtp_checkpoint(folder.config, folder.config.get("model_type"))
    return is_head(folder.config)


def check_placement(dtype: str, device: str) -> None:
    """Check before anything is loaded that models can be put there."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; leave it out for the checkpoint's")
    if device == "map" and not is_accelerate_available():
        raise MissingExtraError(
            "accelerate must be installed for --device map, got none; run pip install accelerate, or choose a device"
        )
    if device in ("auto", "map"):
        return
    try:
        torch.zeros(1, device=device).item()  # is read, too: the meta device holds no values
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:  # depends on the device
        here = [torch.accelerator.current_accelerator()] if torch.accelerator.is_available() else []
        names = sorted(["auto", "cpu", "map", *(one.type for one in here if one is not None)])
        raise ConfigError(
            f"--device must be one of {', '.join(names)} here, got {device!r} ({_reason(error)}); leave it out for auto"
        ) from error


def load_tokenizer(models: Models) -> PreTrainedTokenizerBase:
    """The target's tokenizer, padding on the left."""
    tokenizer = _read_tokenizer(models, models.target, models.revision)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _read_tokenizer(models: Models, name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    hint = "save one beside the model"
    tokenizer: PreTrainedTokenizerBase = _read(AutoTokenizer, models, name, "a tokenizer", hint, revision=revision)
    return tokenizer


def _load(models: Models, name: str, revision: str | None = None) -> PreTrainedModel:
    options = {"attn_implementation": models.attn_implementation, "dtype": models.dtype, "revision": revision}
    options["device_map"] = "auto" if models.device == "map" else None
    hint = "name a causal language model"
    model: PreTrainedModel = _read(AutoModelForCausalLM, models, name, "a model", hint, **options).eval()
    if models.device == "map":
        return model
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(automatic if models.device == "auto" else models.device)  # type: ignore[arg-type,no-any-return]


def _read(auto_class: Any, models: Models, name: str, what: str, hint: str, **options: Any) -> Any:
    """Call `from_pretrained`, which raises errors of all types for unreadable files."""
    options["trust_remote_code"] = models.trust_remote_code or None
    try:
        return auto_class.from_pretrained(name, **{key: value for key, value in options.items() if value is not None})
    except OSError as error:
        raise ConfigError(
            f"a model must be a folder, or a name on the Hub that can be reached, got {name!r} ({_reason(error)}); "
            "check the spelling, or download it first"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{what} must be one that transformers can read, got {name!r} ({type(error).__name__}: {_reason(error)}); "
            f"{hint}, or download it again"
        ) from error


def _reason(error: BaseException) -> str:
    return textwrap.shorten(first_line(error), _REASON_LEN, placeholder=" ...")
