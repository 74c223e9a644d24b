"""Draft heads that calls name by folder or Hub id."""

from pathlib import Path

from transformers import PreTrainedModel

from hf_speculate.errors import ConfigError
from hf_speculate.options.heads.folder import HeadFolder
from hf_speculate.options.heads.head import DraftHead
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.options.heads.recognise import is_head, is_mtp_checkpoint, text_fields


def find_head(source: str, target: PreTrainedModel, is_mtp: bool) -> DraftHead | None:
    """The head of a folder or a Hub repository; None if that holds none. `is_mtp`: MTP layers of the target there.

    Raises:
        ConfigError: the files do not load.
        UnsupportedModelError: it is a head that is not served, or that does not fit the target.
    """
    return load_drafter(source, target) if is_mtp or _names_head(source, target) else None


def _names_head(source: str | Path, target: PreTrainedModel) -> bool:
    """Whether a folder holds a head for the target, or is its checkpoint with MTP layers; not a draft model."""
    try:
        folder = HeadFolder(source)
    except ConfigError:
        return False  # it may hold an adapter; loading a model then says what is wrong
    config, text = folder.config, target.config.get_text_config(decoder=True)
    if is_head(config):
        return True
    if is_mtp_checkpoint(config, target.config.model_type):  # a smaller model of the family has such layers, too
        sizes = ("hidden_size", "num_hidden_layers")
        return all(text_fields(config).get(name) == getattr(text, name) for name in sizes)
    # a few early heads have the config of an ordinary model; one of the Hub is loaded as such, and lacks weights
    return Path(folder.source).is_dir() and "fc.weight" in {name.removeprefix("model.") for name in folder.names()}
