"""Save and load suffix stores: outputs with their keys, and a digest of the tokenizer."""

import hashlib
import json
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError

_FORMAT = "hf_speculate suffix store 1"


class StoredOutput(NamedTuple):
    """One output and its key."""

    key: Hashable
    token_ids: Sequence[int]


def write_outputs(
    path: Path, outputs: Sequence[StoredOutput], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write outputs atomically, oldest first.

    The tensors are `token_ids` [N] int32 of all outputs, `lens` [M] int64, `keys` [M] int64
    (indices into the list of keys), and `key_names` [S] uint8 (the list as JSON).
    """
    key_indices: dict[Hashable, int] = {}
    keys = [key_indices.setdefault(output.key, len(key_indices)) for output in outputs]
    names = json.dumps([_as_json(key) for key in key_indices]).encode()
    tensors: dict[str, Any] = {
        "token_ids": np.array(
            [token for output in outputs for token in output.token_ids], dtype=np.int32
        ),
        "lens": np.array([len(output.token_ids) for output in outputs], dtype=np.int64),
        "keys": np.array(keys, dtype=np.int64),
        "key_names": np.frombuffer(names, dtype=np.uint8),
    }
    content = save(tensors, metadata={"format": _FORMAT, "tokenizer": fingerprint(tokenizer)})
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read_outputs(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[StoredOutput]:
    """Read the outputs in a file, oldest first.

    Raises:
        ConfigError: the file holds no store, or a store of another tokenizer.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ConfigError(
                    f"a suffix store must be in {path}, got another file; choose another path"
                )
            if metadata.get("tokenizer") != fingerprint(tokenizer):
                raise ConfigError(
                    f"the suffix store in {path} must be of this tokenizer, got one of another "
                    "vocabulary; choose "
                    "another file"
                )
            token_ids, lens, keys, names = (
                file.get_tensor(name) for name in ("token_ids", "lens", "keys", "key_names")
            )
        key_names = [_as_key(name) for name in json.loads(names.tobytes())]
        outputs = np.split(token_ids, np.cumsum(lens)[:-1]) if len(lens) else []
        return [
            StoredOutput(key_names[key], output.tolist())
            for key, output in zip(keys, outputs, strict=True)
        ]
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"a suffix store must be in {path}, got a file that cannot be read ({error}); choose "
            "another path"
        ) from error


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of a tokenizer's vocabulary."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _as_json(key: Hashable) -> Any:
    if isinstance(key, tuple):
        return [_as_json(part) for part in key]
    if key is None or (isinstance(key, str | int) and not isinstance(key, bool)):
        return key
    raise ConfigError(
        f"keys must be strings, integers or tuples of them to be saved, got {type(key).__name__}; "
        "return a string"
    )


def _as_key(name: Any) -> Hashable:
    return tuple(map(_as_key, name)) if isinstance(name, list) else name
