"""Reads prompts from files of the kinds that people have."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_speculate.dataset.rows import read_rows
from hf_speculate.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        id: as the file gives it, or the line's number, from 1.
        content: text, or chat messages.
        category: of a benchmark's question; empty elsewhere.
        num_turns: turns that the file gives, of which this is the first.
    """

    id: str
    content: str | list[dict[str, Any]]
    category: str = ""
    num_turns: int = field(default=1, compare=False)

    def text(self, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool = False) -> str:
        """What the model reads: messages, and text in a chat, go through the tokenizer's template.

        Raises:
            ConfigError: the tokenizer has no chat template.
        """
        if isinstance(self.content, str) and not is_chat:
            return self.content
        messages = [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer must have a chat template for prompt {self.id}, got none; "
                "give the prompt as plain text, without --chat"
            )
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def read_prompts(path: Path, *, by_line: bool = False) -> list[Prompt]:
    """The prompts of a file: one a line in `.jsonl`, as `read_rows` takes them, the whole file in any other.

    Args:
        path: of the file.
        by_line: whether each line of a file that is no `.jsonl` is a prompt too.

    Raises:
        ConfigError: there is no file, no prompt in it, a line is no prompt, or two have one id.
    """
    if path.suffix == ".jsonl":
        rows = read_rows(path)
        return [Prompt(row.key, row.content, str(row.others.get("category", "")), row.num_turns) for row in rows]
    if not path.is_file():
        raise ConfigError(f"the file of prompts must exist, got {path}; write one prompt a line into a .jsonl file")
    content = path.read_text(encoding="utf-8")
    texts = list(enumerate(content.split("\n"), 1)) if by_line else [(1, content)]
    found = [Prompt(str(number), text) for number, text in texts if text.strip()]
    if not found:
        raise ConfigError(f"the file of prompts must hold one at least, got none in {path}; write one prompt a line")
    return found
