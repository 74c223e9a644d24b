"""The folder or Hub repository of a draft head, with its config and weights."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedConfig

from hf_speculate.errors import ConfigError
from hf_speculate.models.language_model import COMPUTE_DTYPES
from hf_speculate.options.heads.served import PLAIN_WEIGHTS, unserved
from hf_speculate.options.heads.weight_files import PATTERNS, first_file, read_names, read_weights

_QUANTISED = (
    "weight_scale",
    "weight_scale_inv",
    "input_scale",
    ".scales",
    "qweight",
    "weight_packed",
)
VOCABULARY_WEIGHTS = ("d2t", "t2d")  # draft-to-target ids, and marks of the target ids in use


class HeadFolder:
    """A draft head's folder, Hub repository or subfolder.

    Weights are downloaded on first use, and only from the subfolder.

    Raises:
        ConfigError: there is no config.json, or the subfolder is not a path under the folder.
    """

    def __init__(self, source: str | Path, subfolder: str = "", revision: str | None = None):
        self._root, self._subfolder = str(source), PurePosixPath(subfolder)
        self._revision = revision  # branch, tag or commit of a repository; None for its main branch
        if self._subfolder.is_absolute() or ".." in self._subfolder.parts:
            raise ConfigError(
                f"subfolder must be a path below the folder of the head, got {subfolder!r}; leave "
                "it out for the "
                "folder itself"
            )
        self.source = (
            f"{self._root.rstrip('/')}/{self._subfolder}" if self._subfolder.parts else self._root
        )
        self.config: dict[str, Any] = {}
        reason = None
        try:
            options = {} if revision is None else {"revision": revision}
            parts = "/".join(self._subfolder.parts)
            self.config, _ = PreTrainedConfig.get_config_dict(source, subfolder=parts, **options)
        # caused by the Hub, the network or the id
        except (OSError, TypeError, ValueError) as error:
            reason = error
        if not self.config or not isinstance(self.config, dict):
            raise ConfigError(
                "a draft head must be a folder or a Hub repository with a config.json, got "
                f"{self.source!r}; "
                f"check the path or the id ({reason or 'the folder has none'})"
            ) from reason

    @property
    def name(self) -> str:
        """The last part of the folder's path or of the repository's id."""
        return (
            Path(self.source).resolve().name
            if Path(self.source).is_dir()
            else self.source.rpartition("/")[2]
        )

    @property
    def weights_file(self) -> Path:
        """The file with the weights, or their index."""
        return first_file(self._folder)

    def weights(self, is_wanted: Callable[[str], bool] = bool) -> dict[str, Tensor]:
        """Read the weights with wanted names into CPU memory, keyed by their names in the files.

        Raises:
            ConfigError: a file is damaged, or cannot be downloaded.
            UnsupportedModelError: there are no weights, or they are quantised.
        """
        weights = read_weights(self._folder, is_wanted)
        for name, weight in sorted(weights.items()):
            is_plain = (
                weight.dtype in COMPUTE_DTYPES or name.removeprefix("model.") in VOCABULARY_WEIGHTS
            )
            if name.endswith(_QUANTISED) or not is_plain:
                dtype = str(weight.dtype).removeprefix("torch.")
                raise unserved(f"quantised weights ({name} in {dtype})", PLAIN_WEIGHTS)
        return weights

    def names(self) -> set[str]:
        """Read the names of the weights in the files."""
        return read_names(self._folder)

    @cached_property
    def _folder(self) -> Path:
        root = Path(self._root)
        try:
            if not root.is_dir():
                patterns = [str(self._subfolder / pattern) for pattern in PATTERNS]
                options: dict[str, Any] = {"revision": self._revision, "allow_patterns": patterns}
                root = Path(snapshot_download(self._root, **options))
            return root / self._subfolder
        except (OSError, ValueError) as error:  # errors of the Hub or the network
            raise ConfigError(
                f"the weights of {self.source!r} must be in a folder or on the Hub, got none that "
                "can be downloaded; "
                f"check the network ({error})"
            ) from error
