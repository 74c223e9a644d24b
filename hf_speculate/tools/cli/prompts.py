"""Reads prompts from files of the kinds that people have."""

from pathlib import Path

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.rows import Row, read_rows


def read_prompts(path: Path, *, by_line: bool = False) -> list[Row]:
    """The prompts of a file: one a line in `.jsonl`, as `read_rows` takes them, the whole file in any other.

    Args:
        path: of the file.
        by_line: whether each line of a file that is no `.jsonl` is a prompt too.

    Raises:
        ConfigError: there is no file, no prompt in it, a line is no prompt or not UTF-8, or two have one id.
    """
    if path.suffix == ".jsonl":
        return read_rows(path)
    if not path.is_file():
        raise ConfigError(f"the file of prompts must exist, got {path}; write one prompt a line into a .jsonl file")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"each line must be UTF-8, got other bytes at {path.name}:{number}; save the file as UTF-8"
        ) from None
    texts = list(enumerate(content.split("\n"), 1)) if by_line else [(1, content)]
    found = [Row.of(text, number, f"{path.name}:{number}") for number, text in texts if text.strip()]
    if not found:
        raise ConfigError(f"the file of prompts must hold one at least, got none in {path}; write one prompt a line")
    return found
