"""Read the rows of a data set, which are prompts with ids; encode and group them by length."""

import codecs
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError, counted
from hf_speculate.field_checks import Check, integer, is_list, real

# the first of "turns" is the prompt, as in Spec-Bench's files
PROMPT_NAMES = ("messages", "prompt", "text", "turns")
ID_NAMES = ("id", "question_id")
# names used in a result, which extra fields must not have
RESULT_NAMES = ("finish_reason", "id", "num_tokens", "text")
_MAX_NOTES = 19  # number of errors shown after the first
_LEFT_OUT = "leave it out for the run's own"
_FROM_0 = integer("an int of at least 0", 0, math.inf, _LEFT_OUT)
_POSITIVE = real("above 0 and finite", lambda value: 0 < value < math.inf, _LEFT_OUT)
_SHARE = real("in (0, 1]", lambda value: 0 < value <= 1, _LEFT_OUT)
# Fields of a line that are arguments of `generate()` for its row.
ROW_SETTINGS: dict[str, Check] = {
    "max_new_tokens": integer("an int of at least 1", 1, math.inf, _LEFT_OUT),
    "stop_strings": Check(
        "be a string or a list of strings",
        lambda value: (
            bool(value)
            and (
                isinstance(value, str)
                or is_list(value, lambda text: text and isinstance(text, str))
            )
        ),
        _LEFT_OUT,
    ),
    "seed": _FROM_0,
    "temperature": _POSITIVE,
    "top_k": _FROM_0,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "repetition_penalty": _POSITIVE,
    "no_repeat_ngram_size": _FROM_0,
}
# settings that only apply to sampling
SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "typical_p")


class Problems:
    """Collector of errors.

    Read each entry with `with problems: read(entry)`; `check` raises the errors.
    """

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if isinstance(error, ConfigError):
            self._errors.append(error)
            return True
        return False

    def check(self) -> None:
        """Raise the first error, with the others as notes."""
        if not self._errors:
            return
        first, *others = self._errors
        for error in others[:_MAX_NOTES]:
            first.add_note(str(error))
        if len(others) > _MAX_NOTES:
            first.add_note(f"and {counted(len(others) - _MAX_NOTES, 'further error')}")
        raise first


@dataclass(frozen=True)
class Row:
    id: str | int  # the given id, or the line number
    content: str | list[dict[str, Any]]  # text, or chat messages
    extras: dict[str, Any] = field(default_factory=dict)  # further fields, copied to the result
    source: str = "the prompt"  # file and line, for error messages
    num_turns: int = 1  # number of turns in the data set; `content` is the first turn

    @property
    def key(self) -> str:
        """Unique id as a string."""
        return str(self.id)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `generate()` for this row, without its seed."""
        values = {name: self.extras.get(name) for name in ROW_SETTINGS if name != "seed"}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def category(self) -> str:
        """The category of a benchmark's question; empty if there is none."""
        return str(self.extras.get("category", ""))


def read_rows(
    prompts: str | Path | Iterable[str | Mapping[str, Any]], column: str | None = None
) -> list[Row]:
    """Read rows from a file of JSON lines, or from values.

    Args:
        prompts: a file with one JSON value per line, or an iterable of such values.
            A value is a string, or an object with a prompt and optionally an id.
        column: name of the prompt's field.
            None for one of `PROMPT_NAMES`.
    """
    entries: Iterable[tuple[int, Any, str]]
    if isinstance(prompts, str | Path):
        path = Path(prompts)
        if not path.is_file():
            raise ConfigError(
                f"the file of prompts must exist, got {path}; write one JSON object per line into "
                "it"
            )
        entries = lines_of(path.read_bytes().split(b"\n"), path.name)
    else:
        entries = ((number, entry, f"prompt {number}") for number, entry in enumerate(prompts, 1))
    return rows_of(entries, column)


def rows_of(entries: Iterable[tuple[int, Any, str]], column: str | None = None) -> list[Row]:
    """Make rows from entries.

    Args:
        entries: number, value and source of each row; a value of type bytes is a line of JSON.
        column: name of the prompt's field.
            None for one of `PROMPT_NAMES`.

    Raises:
        ConfigError: an entry is invalid; the error's notes name further invalid entries.
    """
    rows: dict[str, Row] = {}
    problems = Problems()
    for number, entry, source in entries:
        with problems:
            value = _decoded(entry, source) if isinstance(entry, bytes) else entry
            row = _row_of(
                value if column is None else entry_of(value, column, source), number, source
            )
            if (earlier := rows.setdefault(row.key, row)) is not row:
                where = f"{earlier.source} and at {source}"
                raise ConfigError(
                    f"ids must be unique, got {row.key!r} at {where}; give each prompt its own id, "
                    "or none"
                )
    problems.check()
    if not rows:
        raise ConfigError(
            "there must be at least one prompt, got none; write one JSON object per line"
        )
    return list(rows.values())


def lines_of(lines: Iterable[bytes], name: str) -> Iterator[tuple[int, bytes, str]]:
    """Yield the number, content and source of each line that is not blank."""
    for number, marked_line in enumerate(lines, 1):
        line = marked_line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line, f"{name}:{number}"


def _decoded(line: bytes, source: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"each line must be JSON in UTF-8, got {error} at {source}; write one object per line"
        ) from None


def digest_of(rows: Sequence[Row]) -> str:
    """Compute a digest over the rows' ids, contents and extra fields, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_encoded(row) + b"\n")
    return digest.hexdigest()


def _encoded(row: Row) -> bytes:
    return json.dumps(
        [row.id, row.content, row.extras], ensure_ascii=False, sort_keys=True
    ).encode()


def entry_of(record: Any, column: str, source: str) -> dict[str, Any]:
    """Make an entry whose prompt is a field of a record.

    Other fields whose names are used for prompts or results are left out.

    Raises:
        ConfigError: the record has no such field.
    """
    names = list(record) if isinstance(record, Mapping) else []
    if column not in names:
        hint = f"choose one of {', '.join(names)}" if names else "write objects with that field"
        raise ConfigError(
            f"--column must name a field with the prompt, got {column!r} at {source}; {hint}"
        )
    left_out, value = {*PROMPT_NAMES, *RESULT_NAMES, column} - {"id"}, record[column]
    fields = {name: field for name, field in record.items() if name not in left_out}
    is_chat = isinstance(value, list) and value and isinstance(value[0], Mapping)
    return {
        "messages" if is_chat else "turns" if isinstance(value, list) else "prompt": value,
        **fields,
    }


def _row_of(entry: Any, number: int, source: str) -> Row:
    fields: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {}
    contents = {name: fields.pop(name) for name in PROMPT_NAMES if name in fields}
    present = {name: value for name, value in contents.items() if value is not None}
    content: Any
    name, content = (
        present.popitem() if len(present) == 1 else ("", entry if isinstance(entry, str) else None)
    )
    num_turns = 1
    if name == "turns" and isinstance(content, list) and content:
        content, num_turns = content[0], len(content)
    is_chat = (
        isinstance(content, list)
        and content
        and all(isinstance(message, dict) for message in content)
    )
    if not isinstance(content, str) and not is_chat:
        got = ", ".join(sorted({**fields, **contents})) or repr(entry)[:40]
        raise ConfigError(
            f"each line must hold one of {', '.join(PROMPT_NAMES)}, got {got} at {source}; write "
            f'{{"prompt": "..."}}'
        )
    id_name = next((name for name in ID_NAMES if name in fields), "id")
    row_id = fields.pop(id_name, number)
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise ConfigError(
            f"{id_name} must be a string or an integer, got {row_id!r} at {source}; leave it out "
            "for the line's number"
        )
    reserved = sorted(set(fields) & set(RESULT_NAMES))
    if reserved:
        names = ", ".join(RESULT_NAMES)
        raise ConfigError(
            f"extra fields must not be names of results ({names}), got {reserved[0]} at {source}; "
            "rename it"
        )
    for name, check in ROW_SETTINGS.items():
        if fields.get(name) is not None:
            check(name, fields[name], f" at {source}")
    row = Row(row_id, content, fields, source, num_turns)
    try:
        _encoded(row)
    # an unpaired surrogate, or a Python object
    except (UnicodeEncodeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"each line must be JSON in UTF-8, got {error} at {source}; repair it"
        ) from None
    return row


# Errors for missing chat templates, and errors of templates for unsupported messages.
_TEMPLATE_ERRORS = (
    TemplateError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def token_ids_of(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    is_chat: bool,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a row.

    Args:
        row: the row; messages pass through the chat template.
        tokenizer: tokenizer of the target.
        is_chat: whether to apply the chat template even to a text.
        template_options: arguments of the chat template.
            None for its defaults.

    Raises:
        ConfigError: the row has no tokens, or the chat template does not fit its messages.
    """
    encoded: Any
    if isinstance(row.content, str) and not is_chat:
        encoded = tokenizer(row.content)
    else:
        messages = (
            [{"role": "user", "content": row.content}]
            if isinstance(row.content, str)
            else row.content
        )
        try:
            options = {
                **(template_options or {}),
                "add_generation_prompt": True,
                "return_dict": True,
            }
            encoded = tokenizer.apply_chat_template(messages, **options)
        except _TEMPLATE_ERRORS as error:
            raise ConfigError(
                "the tokenizer must have a chat template that fits the messages, got "
                f"{type(error).__name__} ({error}) at {row.source}; check their roles, or give "
                "prompts as plain text"
            ) from error
    if not encoded["input_ids"]:
        raise ConfigError(
            f"each prompt must have at least one token, got none at {row.source}; leave the row out"
        )
    return list(encoded["input_ids"])


def encode_rows(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, is_chat: bool
) -> list[list[int]]:
    """Encode each row.

    Raises:
        ConfigError: a row has no tokens, or does not fit the chat template; the error's notes name
            further rows.
    """
    problems, encoded = Problems(), []
    for row in rows:
        with problems:
            encoded.append(token_ids_of(row, tokenizer, is_chat))
    problems.check()
    return encoded


def check_settings(rows: Sequence[Row], do_sample: bool, hint: str) -> None:
    """Check that rows have no settings for sampling if decoding is greedy.

    Raises:
        ConfigError: a row has such a setting; the error's notes name further rows.
    """
    problems = Problems()
    for row in rows if not do_sample else ():
        for name in SAMPLING_SETTINGS:
            with problems:
                if name in row.settings:
                    raise ConfigError(
                        f"{name} of a prompt must come with sampling, got {row.settings[name]} "
                        "with greedy decoding at "
                        f"{row.source}; {hint}, or leave {name} out"
                    )
    problems.check()


def batches_of(
    rows: Sequence[Row], batch_size: int, tokenizer: PreTrainedTokenizerBase, is_chat: bool
) -> list[list[Row]]:
    """Group rows with equal settings into batches, longest rows first.

    Hence, a batch that is too large for the memory fails at the start.
    """
    batches: list[list[Row]] = []
    open_batches: dict[str, list[Row]] = {}  # settings -> batch with room
    pairs = zip(rows, map(len, encode_rows(rows, tokenizer, is_chat)), strict=True)
    for row, _ in sorted(pairs, key=lambda pair: -pair[1]):
        batch = open_batches.get(repr(row.settings))
        if batch is None or len(batch) == batch_size:
            batch = open_batches[repr(row.settings)] = []
            batches.append(batch)
        batch.append(row)
    return batches
