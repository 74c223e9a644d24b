"""Read prompts from a column of a data set on the Hub or in a local parquet file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_speculate.errors import ConfigError, import_extra, nearest_name
from hf_speculate.tools.dataset.rows import PROMPT_NAMES, Row, rows_of

_REASON_LEN = 300  # characters of another library's error


def read_data_set(
    path: Path, column: str | None = None, split: str = "train", subset: str | None = None
) -> list[Row]:
    """Read the rows of a data set.

    Args:
        path: a parquet file, or the name of a data set on the Hub.
        column: column with the prompts (texts, chats or turns). None for one of `PROMPT_NAMES`.
        split: split of a data set on the Hub.
        subset: subset of a data set on the Hub. None for the default.

    Raises:
        ConfigError: the data set cannot be read, or has no such column.
        MissingExtraError: datasets is not installed.
    """
    datasets = import_extra("datasets", "data")
    datasets.disable_progress_bars()
    is_file = path.suffix == ".parquet"
    try:
        if is_file:
            loaded = datasets.load_dataset("parquet", data_files=str(path), split="train")
        else:
            loaded = datasets.load_dataset(path.as_posix(), subset, split=split)
    except Exception as error:  # datasets raises errors of any type
        reason = " ".join(str(error).split())[:_REASON_LEN]
        where = f"parquet in {path}" if is_file else f"{path.as_posix()} on the Hub"
        raise ConfigError(
            f"prompts must be in a data set that can be read, got {where} ({type(error).__name__}: "
            f"{reason}); check "
            "the name, --split and --subset"
        ) from error
    name = column or _default_column(loaded.column_names)
    _check_column(name, loaded.column_names)
    return rows_of(_records(loaded, path.name), name)


def _records(loaded: Any, name: str) -> Iterator[tuple[int, Any, str]]:
    """Yield the number, the JSON-serialisable fields and the source of each record."""
    for number, record in enumerate(loaded, 1):
        fields = {
            key: value for key, value in record.items() if value is not None and _is_json(value)
        }
        yield number, fields, f"{name}:{number}"


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):  # images, times and bytes
        return False
    return True


def _default_column(names: list[str]) -> str:
    present = [name for name in PROMPT_NAMES if name in names]
    if len(present) != 1:
        got = (
            f"none with the columns {', '.join(names)}"
            if not present
            else f"none, and {' and '.join(present)}"
        )
        raise ConfigError(f"--column must name the column of the prompts, got {got}; choose one")
    return present[0]


def _check_column(column: str, names: list[str]) -> None:
    if column not in names:
        nearest = nearest_name(column, names)
        hint = f"did you mean {nearest}?" if nearest else f"choose one of {', '.join(names)}"
        raise ConfigError(f"--column must name a column of the data set, got {column!r}; {hint}")
