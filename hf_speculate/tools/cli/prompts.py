"""Reads prompts from files."""

import sys
from pathlib import Path
from typing import Literal

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.rows import Row, read_json_lines, read_rows


def read_prompts(path: Path, *, text_as: Literal["prompt", "lines"] | None = "prompt") -> list[Row]:
    """Read the prompts of a file: JSON lines if it is `.jsonl` or `-` (the standard input), else text.

    Text is one prompt, or "lines", each of which is one if it is not blank; with None all files hold JSON lines.
    """
    if str(path) == "-":
        return read_rows([value for _, value, _ in read_json_lines(sys.stdin.buffer, "standard input")])
    if path.suffix == ".jsonl" or text_as is None:
        return read_rows(path)
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts must be UTF-8, got other bytes in {path} ({error}); save it as UTF-8") from error
    texts = enumerate(content.split("\n") if text_as == "lines" else [content], 1)
    found = [Row.of(text, number, f"{path.name}:{number}") for number, text in texts if text.strip()]
    if not found:
        raise ConfigError(f"the file of prompts must hold at least one, got none in {path}; write one prompt per line")
    return found
