"""Reads prompts from files of the kinds that people have."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

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
    """The prompts of a file: one a line in `.jsonl`, the whole file in any other.

    A line is a string, or an object with "prompt" or "text" (text), "messages" (a chat) or "turns" (a list of which
    the first is the prompt, as in Spec-Bench's `question.jsonl`), and perhaps "id" or "question_id", and "category".

    Args:
        path: of the file.
        by_line: whether each line of a file that is no `.jsonl` is a prompt too.

    Raises:
        ConfigError: there is no file, no prompt in it, or a line is no prompt.
    """
    if not path.is_file():
        raise ConfigError(f"the file of prompts must exist, got {path}; write one prompt a line into a .jsonl file")
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl" and by_line:
        texts = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
        found = [Prompt(str(number), line) for number, line in texts]
    elif path.suffix != ".jsonl":
        found = [Prompt("1", content)] if content.strip() else []
    else:
        lines = [line for line in content.splitlines() if line.strip()]
        found = [_prompt_of(line, f"{path.name}:{number}", str(number)) for number, line in enumerate(lines, 1)]
    if not found:
        raise ConfigError(f"the file of prompts must hold one at least, got none in {path}; write one prompt a line")
    return found


def _prompt_of(line: str, place: str, number: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"each line must be JSON, got {error.msg} at {place}; write one object a line") from None
    if isinstance(entry, str):
        return Prompt(number, entry)
    fields = entry if isinstance(entry, dict) else {}
    turns = fields.get("turns")
    content: Any = fields.get("prompt") or fields.get("text") or fields.get("messages")
    num_turns = 1
    if content is None and isinstance(turns, list) and turns:
        content, num_turns = turns[0], len(turns)
    is_chat = isinstance(content, list) and all(isinstance(message, dict) for message in content)
    if not isinstance(content, str) and not is_chat:
        raise ConfigError(
            f"each line must hold one of messages, prompt, text, turns, got {sorted(fields) or line[:40]!r} "
            f'at {place}; write {{"prompt": "..."}}, say'
        )
    own_id = next((fields[name] for name in ("id", "question_id") if name in fields), number)
    return Prompt(str(own_id), content, str(fields.get("category", "")), num_turns)
