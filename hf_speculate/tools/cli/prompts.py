"""Reads prompts from files."""

import sys
from pathlib import Path

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.rows import Row, read_json_lines, read_rows

STDIN = Path("-")


def read_json_prompts(path: Path) -> list[Row]:
    """Read a file with one JSON value per line, or such lines of the standard input; see `read_rows`."""
    if path != STDIN:
        return read_rows(path)
    return read_rows([value for _, value, _ in read_json_lines(sys.stdin.buffer, "standard input")])


def read_prompts(path: Path, *, by_line: bool = False) -> list[Row]:
    """Read the prompts of a file: JSON lines if it is `.jsonl` or `-` (the standard input), else text.

    Text is one prompt, or with `by_line` one prompt per line that is not blank.
    """
    if path.suffix == ".jsonl" or path == STDIN:
        return read_json_prompts(path)
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts must be UTF-8, got other bytes in {path} ({error}); save it as UTF-8") from error
    texts = enumerate(content.split("\n") if by_line else [content], 1)
    found = [Row.of(text, number, f"{path.name}:{number}") for number, text in texts if text.strip()]
    if not found:
        raise ConfigError(f"the file of prompts must hold at least one, got none in {path}; write one prompt per line")
    return found
