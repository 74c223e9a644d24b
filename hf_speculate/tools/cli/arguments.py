"""Convert options to prompts and arguments of `generate()`, before a model is loaded."""

import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import GenerationConfig

from hf_speculate.config import PLAIN_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError, nearest_name
from hf_speculate.tools.bench.methods import SAMPLING_NAMES, parse_draft_len
from hf_speculate.tools.cli.options import Drafting, Generation, Speculation, Table, names_data_set
from hf_speculate.tools.cli.transformers_fields import check_fields
from hf_speculate.tools.dataset.rows import ROW_SETTINGS, Row, lines_of, read_rows, rows_of
from hf_speculate.tools.dataset.tables import read_data_set
from hf_speculate.verify.base import check_verifier

_OWN_OPTIONS = ("max_new_tokens", *SAMPLING_NAMES, "repetition_penalty")
# Not supported in `--set`, because these have their own option, or change the number of rows or the
# return value of `generate()`.
_EXCLUDED = {
    *_OWN_OPTIONS,
    "do_sample",
    "num_return_sequences",
    "return_dict_in_generate",
    "transformers_version",
}
_THEIRS = {
    name for name in vars(GenerationConfig()) if not name.startswith(("_", "output_"))
} - _EXCLUDED
SETTINGS = {*PLAIN_NAMES, *_THEIRS}  # names allowed in `--set`


class Decoding(NamedTuple):
    plain: dict[str, Any]  # arguments of `generate()`
    fields: dict[str, Any]  # fields of `SpeculationConfig`


def decoding_of(options: Generation, max_new_tokens: int = 256) -> Decoding:
    set_options = {
        name: value for name in _OWN_OPTIONS if (value := getattr(options, name)) is not None
    }
    for name, value in set_options.items():
        ROW_SETTINGS[name]._replace(hint="leave it out for the default")(_option(name), value)
    sampling = [name for name in SAMPLING_NAMES if name in set_options]
    if sampling and not options.sample:
        raise ConfigError(
            f"{_option(sampling[0])} must come with --sample, got it alone; add --sample"
        )
    fields, others = _settings_of(options.settings or ())
    plain = {"max_new_tokens": max_new_tokens, "do_sample": options.sample, **set_options, **others}
    return Decoding(plain, fields)


def arguments_of(options: Speculation) -> dict[str, Any]:
    """Return all arguments of `generate()`, including those for speculative decoding."""
    decoding = decoding_of(options)
    named = {"verifier": options.verifier, "seed": options.seed}
    fields = {name: value for name, value in named.items() if value is not None} | drafting_of(
        options
    )
    fields |= decoding.fields
    check_verifier(SpeculationConfig(**fields).resolve(options.sample))
    return decoding.plain | fields


def drafting_of(options: Drafting) -> dict[str, Any]:
    """Return the fields of `SpeculationConfig` for draft length and prompt lookup."""
    num_tokens = options.num_assistant_tokens
    fields = {} if num_tokens is None else parse_draft_len(num_tokens).fields
    if options.lookup is not None:
        fields |= {"prompt_lookup_num_tokens": options.lookup}
    SpeculationConfig(**fields)
    return fields


def _settings_of(settings: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse `--set` into fields of `SpeculationConfig` and `GenerationConfig`."""
    fields: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if name in {*_OWN_OPTIONS, "do_sample"}:
            raise ConfigError(
                f"--set must leave out what has an option, got {name}; use {_option(name)}"
            )
        if not equals or name not in SETTINGS:
            nearest = nearest_name(name, SETTINGS - {name})
            hint = (
                f"did you mean {nearest}?"
                if nearest
                else "see the table of settings in the documentation"
            )
            raise ConfigError(
                "--set must be name=value with a plain field of SpeculationConfig or "
                "GenerationConfig, "
                f"got {setting!r}; {hint}"
            )
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text  # a bare word, as in typical_correction=sample
        (fields if name in PLAIN_NAMES else options)[name] = value
    check_fields(options)
    return fields, options


def _option(name: str) -> str:
    return "--sample" if name == "do_sample" else "--" + name.replace("_", "-")


def read_input() -> str:
    """Read all text from the standard input."""
    return _decoded(_input_stream().read(), "the standard input")


def read_input_line() -> str | None:
    """Read the next line from the standard input, without the line end; None at end of input."""
    line = _input_stream().readline()
    return _decoded(line, "the standard input").rstrip("\n") if line else None


def _input_stream() -> Any:
    """Return the standard input as a stream of bytes if possible, otherwise of text.

    With bytes, the lines after a decoding error are still readable.
    """
    return getattr(sys.stdin, "buffer", sys.stdin)


def _decoded(content: bytes | str, source: str) -> str:
    """Decode UTF-8 bytes, remove a byte order mark, and convert line ends to newlines."""
    if isinstance(content, str):
        return content
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"prompts must be UTF-8, got other bytes in {source} ({error}); write it in UTF-8"
        ) from error


def read_prompts(
    path: Path, *, text_as: Literal["prompt", "lines"] | None = "prompt", table: Table | None = None
) -> list[Row]:
    """Read prompts from a file, the standard input, or a data set.

    Args:
        path: JSON lines if the path is `.jsonl` or `-` (the standard input) or `text_as` is None; a
            data set if a table is given and the path names one; otherwise text.
        text_as: "prompt" for one prompt per text file, "lines" for one per line.
            None reads all files as JSON lines.
        table: options for data sets. None for a command without data sets.
    """
    if table is not None and names_data_set(path):
        return read_data_set(path, table.column, table.split, table.subset)
    if table is not None and (table.subset is not None or table.split != "train"):
        raise ConfigError(
            f"--split and --subset must come with a data set on the Hub, got {path}; leave them out"
        )
    column = None if table is None else table.column
    if str(path) == "-":
        return rows_of(lines_of(sys.stdin.buffer, "standard input"), column)
    if path.suffix == ".jsonl" or text_as is None:
        return read_rows(path, column)
    if column is not None:
        raise ConfigError(
            f"--column must come with JSON lines or a data set, got {path}; leave it out"
        )
    content = _decoded(path.read_bytes(), str(path))
    texts = enumerate(content.split("\n") if text_as == "lines" else [content], 1)
    rows = [
        Row(number, text, source=f"{path.name}:{number}") for number, text in texts if text.strip()
    ]
    if not rows:
        raise ConfigError(
            f"the file of prompts must hold at least one, got none in {path}; write one prompt per "
            "line"
        )
    return rows
