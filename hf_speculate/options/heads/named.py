"""Find a draft head by its folder or Hub id."""

from pathlib import Path

from transformers import PreTrainedModel

from hf_speculate.errors import ConfigError
from hf_speculate.options.heads.folder import HeadFolder
from hf_speculate.options.heads.head import DraftHead
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.options.heads.recognise import is_head, is_mtp_checkpoint, text_fields


def find_head(source: str, target: PreTrainedModel, is_mtp: bool) -> DraftHead | None:
    """Load the head from a folder or a Hub repository; return None if no head is there.

    With `is_mtp`, load the target's MTP layers from the same place.

    Raises:
        ConfigError: the files cannot be loaded.
        UnsupportedModelError: the head is not supported, or does not fit the target.
    """
    return load_drafter(source, target) if is_mtp or _names_head(source, target) else None


def _names_head(source: str | Path, target: PreTrainedModel) -> bool:
    """Return whether a folder holds a head for the target, or its checkpoint with MTP layers."""
    try:
        folder = HeadFolder(source)
    except ConfigError:
        return False  # perhaps an adapter; loading it as a model raises a clearer error
    config, text = folder.config, target.config.get_text_config(decoder=True)
    if is_head(config):
        return True
    # smaller models of the family also have such layers
    if is_mtp_checkpoint(config, target.config.model_type):
        sizes = ("hidden_size", "num_hidden_layers")
        return all(text_fields(config).get(name) == getattr(text, name) for name in sizes)
    # A few early heads have the config of an ordinary model. From the Hub, they are loaded as a
    # model, which fails on missing weights.
    return Path(folder.source).is_dir() and "fc.weight" in {
        name.removeprefix("model.") for name in folder.names()
    }
