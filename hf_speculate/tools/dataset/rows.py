"""Reads the rows of a data set, each a prompt with its id."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_speculate.errors import ConfigError

PROMPT_NAMES = ("messages", "prompt", "text", "turns")
ID_NAMES = ("id", "question_id")
RESULT_NAMES = ("finish_reason", "id", "num_tokens", "text")  # a row's other fields go on beside these


@dataclass(frozen=True)
class Row:
    """One prompt.

    Args:
        key: the id as text, by which rows are told apart.
        id: as it was given; the number of the line, from 1, where there was none.
        content: text, or chat messages.
        others: the fields that its result carries on.
        place: where it stands, for errors.
        num_turns: turns that were given, of which this is the first.
    """

    key: str
    id: str | int
    content: str | list[dict[str, Any]]
    others: dict[str, Any]
    place: str
    num_turns: int = 1

    @classmethod
    def of(cls, content: str | list[dict[str, Any]], number: int = 1, place: str = "the prompt") -> "Row":
        """A prompt that no data set holds.

        Args:
            content: text, or chat messages.
            number: its id.
            place: for errors.
        """
        return cls(str(number), number, content, {}, place)

    @property
    def category(self) -> str:
        """Of a benchmark's question; empty elsewhere."""
        return str(self.others.get("category", ""))


def read_rows(prompts: str | Path | Iterable[str | Mapping[str, Any]]) -> list[Row]:
    """The rows of a file with one JSON value a line, or of such values.

    A value is a string, or an object with one of "prompt" or "text" (text), "messages" (a chat) and "turns" (a list of
    which the first is the prompt, as in Spec-Bench's `question.jsonl`), and perhaps with "id" or "question_id".

    Raises:
        ConfigError: there is no file, no row in it, a value is no prompt, or two rows have one id.
    """
    if isinstance(prompts, str | Path):
        entries = _lines_of(Path(prompts))
    else:
        entries = ((number, entry, f"prompt {number}") for number, entry in enumerate(prompts, 1))
    rows: list[Row] = []
    places: dict[str, str] = {}
    for number, entry, place in entries:
        row = _row_of(entry, number, place)
        if row.key in places:
            raise ConfigError(
                f"ids must differ, got {row.key!r} at {places[row.key]} and at {place}; give each prompt an id of its "
                "own, or none of them"
            )
        places[row.key] = place
        rows.append(row)
    if not rows:
        raise ConfigError("there must be one prompt at least, got none; write one JSON object a line")
    return rows


def digest_of(rows: Sequence[Row]) -> str:
    """A digest of what the rows say, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{_json(row)}\n".encode())
    return digest.hexdigest()


def _json(row: Row) -> str:
    return json.dumps([row.id, row.content, row.others], ensure_ascii=False, sort_keys=True)


def _lines_of(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Number, value and place of every line that is not blank."""
    if not path.is_file():
        raise ConfigError(f"the file of prompts must exist, got {path}; write one JSON object a line into it")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path.name}:{number}"
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8")), place
            except UnicodeDecodeError:
                raise ConfigError(f"each line must be UTF-8, got other bytes at {place}; save the file so") from None
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"each line must be JSON, got {error.msg} at {place}; write one object a line"
                ) from None


def _row_of(entry: Any, number: int, place: str) -> Row:
    fields: dict[str, Any] = {"prompt": entry} if isinstance(entry, str) else {}
    if isinstance(entry, Mapping):
        fields = dict(entry)
    given = [name for name in PROMPT_NAMES if fields.get(name) is not None]
    content: Any = fields[given[0]] if len(given) == 1 else None
    num_turns = 1
    if given == ["turns"] and isinstance(content, list) and content:
        content, num_turns = content[0], len(content)
    is_chat = isinstance(content, list) and content and all(isinstance(message, dict) for message in content)
    if not isinstance(content, str) and not is_chat:
        raise ConfigError(
            f"each line must hold one of {', '.join(PROMPT_NAMES)}, "
            f"got {', '.join(sorted(fields)) or repr(entry)[:40]} "
            f'at {place}; write {{"prompt": "..."}}, say'
        )
    id_name = next((name for name in ID_NAMES if name in fields), None)
    own_id = number if id_name is None else fields[id_name]
    if isinstance(own_id, bool) or not isinstance(own_id, str | int):
        raise ConfigError(
            f"{id_name} must be a text or a whole number, got {own_id!r} at {place}; leave it out for the line's number"
        )
    others = {name: value for name, value in fields.items() if name not in (id_name, *PROMPT_NAMES)}
    taken = sorted(set(others) & set(RESULT_NAMES))
    if taken:
        raise ConfigError(
            f"other fields must not be named as those of a result ({', '.join(RESULT_NAMES)}), got {taken[0]} at "
            f"{place}; rename it"
        )
    row = Row(str(own_id), own_id, content, others, place, num_turns)
    try:
        _json(row).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"each line must be Unicode text, got half a surrogate pair at {place}; mend it") from None
    except TypeError as error:
        raise ConfigError(f"each value must be one that JSON knows, got {error} at {place}; convert it") from None
    return row
