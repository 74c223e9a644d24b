"""Load the models of a command."""

from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_speculate.draft.assistant_model import variant_of
from hf_speculate.errors import ConfigError, import_extra
from hf_speculate.generation.enable import enable
from hf_speculate.options.heads.folder import HeadFolder
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.options.heads.recognise import is_head, is_mtp_checkpoint, named_target
from hf_speculate.tools.cli.console import first_line, note, notes
from hf_speculate.tools.cli.options import Models

_REASON_LEN = 300  # characters; some messages of transformers list all models before the advice


AnyModels = TypeVar("AnyModels", bound=Models)


class Pair(NamedTuple):
    """An enabled target and its draft source."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase  # pads on the left
    arguments: dict[str, Any]  # arguments of `generate()` for the draft source and tokenizers


def load_pair(models: Models, is_quiet: bool = False) -> Pair:
    """Load models and tokenizers; show their names while loading unless `is_quiet`."""
    check_device(models.device)
    logging.disable_progress_bar()
    with notes(is_quiet).status(f"loading {models.target}") as status:
        target = enable(_load(models, models.target, models.revision))
        tokenizer = load_tokenizer(models)
        arguments: dict[str, Any] = {"tokenizer": tokenizer}  # stop strings need it
        if models.draft is not None:
            status.update(f"loading {models.draft}")
            if names_head(models):
                revision = draft_revision(models)
                arguments["assistant_model"] = load_drafter(models.draft, target, revision=revision)
            else:
                revision = models.draft_revision
                arguments["assistant_model"] = draft = _load(models, models.draft, revision)
                if variant_of(draft) is None:  # variants use the tokenizer of their target
                    draft_tokenizer = _read(AutoTokenizer, models, models.draft, revision=revision)
                    if draft_tokenizer.get_vocab() != tokenizer.get_vocab():
                        arguments["assistant_tokenizer"] = draft_tokenizer
    return Pair(target, tokenizer, arguments)


def with_named_target(models: AnyModels) -> AnyModels:
    """Replace a draft head given as TARGET with the target named in its config.

    The head becomes the draft for this target. The revision and the trust in remote code do not
    apply to the target, since the head's author chose it. Options whose TARGET is a model are
    returned unchanged.
    """
    head, config = models.target, _head_config(models)
    if config is None:
        return models
    target, remedy = named_target(config), f"pass the target as TARGET, and --draft {head}"
    if models.draft is not None or not target:
        why = "which needs no --draft" if target else "whose config names no target"
        raise ConfigError(f"TARGET must be a model, got the draft head {head}, {why}; {remedy}")
    try:
        PreTrainedConfig.get_config_dict(target)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the target that the draft head {head} names must be in a folder, or on the Hub, got "
            f"{target!r} "
            f"({_reason(error)}); {remedy}"
        ) from error
    untrusted = f", but none of its code; to run that, {remedy}" if models.trust_remote_code else ""
    note(f"{head} is a draft head for {target}, which is loaded{untrusted}")
    return replace(
        models,
        target=target,
        revision=None,
        draft=head,
        draft_revision=models.revision or models.draft_revision,
        trust_remote_code=False,  # heads contain no code
    )


def _head_config(models: Models) -> dict[str, Any] | None:
    """Return the config of TARGET if TARGET is a draft head.

    Other models that are in the cache do not cause a request to the Hub.
    """
    options: dict[str, Any] = {"local_files_only": True}
    if models.revision is not None:
        options["revision"] = models.revision
    try:
        cached, _ = PreTrainedConfig.get_config_dict(models.target, **options)
        if cached and not is_head(cached):
            return None
    except (OSError, TypeError, ValueError):
        pass  # not cached, or damaged
    try:
        config = HeadFolder(models.target, revision=models.revision).config
    except ConfigError:
        return None  # loading the model will report what is wrong
    return config if is_head(config) else None


def draft_revision(models: Models) -> str | None:
    """Return the draft's revision, or the target's if its own MTP layers draft."""
    is_same = models.draft == models.target and models.draft_revision is None
    return models.revision if is_same else models.draft_revision


def names_head(models: Models) -> bool:
    """Return whether the draft is a head, or the target itself because of its MTP layers."""
    if models.draft is None:
        return False
    try:
        folder = HeadFolder(models.draft, revision=draft_revision(models))
    except ConfigError:
        return False  # loading the model will raise an error
    if models.draft == models.target:
        return is_mtp_checkpoint(folder.config, folder.config.get("model_type"))
    return is_head(folder.config)


def check_device(device: str) -> None:
    """Check that a device can hold models, before anything is loaded."""
    if device == "map":
        import_extra("accelerate", "ranks")
    if device in ("auto", "map"):
        return
    reason = "torch knows no such device"
    try:
        named = torch.device(device)
        reason = ""
        torch.zeros(1, device=named).item()  # reading fails on the meta device
    # the type depends on the device
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"--device must be auto, map or a device of this machine, got {device!r} "
            f"({reason or first_line(error)}); "
            "leave it out for auto"
        ) from error


def load_tokenizer(models: Models) -> PreTrainedTokenizerBase:
    options = {"revision": models.revision, "padding_side": "left"}
    tokenizer: PreTrainedTokenizerBase = _read(AutoTokenizer, models, models.target, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _load(models: Models, name: str, revision: str | None = None) -> PreTrainedModel:
    options = {
        "attn_implementation": models.attn_implementation,
        "dtype": models.dtype,
        "revision": revision,
    }
    options["device_map"] = "auto" if models.device == "map" else None
    model: PreTrainedModel = _read(AutoModelForCausalLM, models, name, **options).eval()
    if models.device == "map":
        return model
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = automatic if models.device == "auto" else models.device
    return model.to(device)  # type: ignore[arg-type,no-any-return]


def _read(auto_class: Any, models: Models, name: str, **options: Any) -> Any:
    """Call `from_pretrained`; raise `ConfigError` for its errors, which may have any type."""
    options["trust_remote_code"] = models.trust_remote_code or None
    try:
        return auto_class.from_pretrained(
            name, **{key: value for key, value in options.items() if value is not None}
        )
    except Exception as error:
        attention = models.attn_implementation
        hint = (
            "install it"
            if isinstance(error, ImportError)
            else "check the spelling, or download it again"
        )
        if attention is not None and (isinstance(error, ImportError) or attention in str(error)):
            hint = "choose another --attn-implementation, or leave it out"
        if isinstance(error, ImportError):
            raise ConfigError(
                f"what {name} needs must be installed, got an error: {_reason(error)}; {hint}"
            ) from error
        kind = "a tokenizer" if auto_class is AutoTokenizer else "a causal language model"
        raise ConfigError(
            f"{kind} must be in a folder, or on the Hub, where transformers can read it, got "
            f"{name!r} "
            f"({type(error).__name__}: {_reason(error)}); {hint}"
        ) from error


def _reason(error: BaseException) -> str:
    """Return an error's text in one line, with its middle removed if it is long."""
    text, half = " ".join(str(error).split()), _REASON_LEN // 2
    return (
        text if len(text) <= _REASON_LEN else f"{text[:half].rstrip()} ... {text[-half:].lstrip()}"
    )
