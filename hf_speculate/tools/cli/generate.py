"""`hf-speculate generate` and `chat`: decode prompts and print tokens as they are generated."""

import json
import re
import sys
import time
from typing import Any

import torch
from transformers import TextStreamer

from hf_speculate.errors import ConfigError, counted
from hf_speculate.models.context import context_len
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.cli.arguments import arguments_of, read_input, read_input_line, read_prompts
from hf_speculate.tools.cli.console import (
    INTERRUPTED,
    OK,
    answer,
    error_line,
    note,
    notes,
    write_json,
)
from hf_speculate.tools.cli.loading import Pair, load_pair, with_named_target
from hf_speculate.tools.cli.options import ChatInTerminal, Generate
from hf_speculate.tools.dataset.rows import Row, check_settings, encode_rows, token_ids_of

_EXITS = ("/exit", "/quit", "/bye")
_COMMAND = re.compile(r"/[a-z?]+", re.IGNORECASE)  # with a leading space, it is sent to the model
_COMMANDS = (
    "/clear starts over, /exit or Ctrl-D ends the chat, Ctrl-C ends an answer, /help shows this "
    "line"
)


class _Printer(TextStreamer):
    """Streamer that keeps a copy of the printed text."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.printed = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.printed += text
        super().on_finalized_text(text, stream_end=stream_end)


def run(options: Generate) -> int:
    arguments, prompts, is_silent = arguments_of(options), _prompts(options), options.as_json
    check_settings(prompts, options.sample, "add --sample")
    pair = load_pair(with_named_target(options))
    all_ids = encode_rows(prompts, pair.tokenizer, options.chat)
    results: list[dict[str, Any]] = []
    try:
        for row, token_ids in zip(prompts, all_ids, strict=True):
            if results and not is_silent:
                answer("")
            if len(prompts) > 1 and not is_silent:
                note(f"prompt {row.key}:", style="bold")
            seeded = {"seed": seed} if (seed := row.extras.get("seed")) is not None else {}
            row_arguments = arguments | row.settings | seeded
            fields, line = _decode(
                pair, token_ids, row_arguments, None if is_silent else _Printer(pair.tokenizer)
            )
            results.append({"id": row.id, **fields})
            if is_silent:
                answer(json.dumps(results[-1]))
            note(line)
    except KeyboardInterrupt:
        where = "" if options.output is None else f", written to {options.output}"
        note(
            f"\ninterrupted: {len(results)} of {len(prompts)} prompts are finished{where}", style=""
        )
    if options.output is not None:
        write_json(options.output, {"results": results})
    return OK if len(results) == len(prompts) else INTERRUPTED


def run_chat(options: ChatInTerminal) -> int:
    arguments = arguments_of(options)
    pair = load_pair(with_named_target(options))
    if pair.tokenizer.chat_template is None:
        raise ConfigError(
            "the tokenizer must have a chat template to chat, got none; use generate for plain text"
        )
    start = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(start)
    while True:
        try:
            line = _line()
        except ConfigError as error:  # the line is not UTF-8
            _note_failed_turn(error)
            continue
        command = "" if line is None else line.rstrip()
        if line is None or command in _EXITS:
            return OK
        if command == "/clear":
            messages = list(start)
            continue
        if _COMMAND.fullmatch(command):
            note(
                _COMMANDS if command == "/help" else f"no such command: {command}; {_COMMANDS}",
                style="",
            )
            continue
        printer = _Printer(pair.tokenizer)
        try:
            messages = _answer(
                pair, [*messages, {"role": "user", "content": line}], arguments, printer
            )
        except Exception as error:  # noqa: BLE001  # models raise errors of any type
            if printer.printed:
                answer("")
            _note_failed_turn(error)


def _note_failed_turn(error: Exception) -> None:
    note(
        f"{error_line(error)}; the turn is left out, /clear starts over, /exit ends the chat",
        style="",
    )


def _answer(
    pair: Pair, messages: list[dict[str, str]], arguments: dict[str, Any], printer: _Printer
) -> list[dict[str, str]]:
    """Print the answer to the last message; return the messages including the answer."""
    token_ids = token_ids_of(Row(1, messages, source="the chat"), pair.tokenizer, is_chat=True)
    max_new_tokens, context = arguments["max_new_tokens"], context_len(pair.target.config)
    max_answer_len = max_new_tokens if context is None else context - len(token_ids)
    if max_answer_len < 1:
        raise ConfigError(
            f"the conversation must have fewer tokens than the model's context of {context}, got "
            f"{len(token_ids)}"
        )
    try:
        fields, line = _decode(
            pair,
            token_ids,
            arguments | {"max_new_tokens": min(max_new_tokens, max_answer_len)},
            printer,
        )
        note(line)
        if max_answer_len < max_new_tokens and fields["num_tokens"] == max_answer_len:
            note(
                f"the answer was cut, because the model's context of {context} tokens is full; "
                "/clear starts over"
            )
    except KeyboardInterrupt:
        note("\ninterrupted; /exit ends the chat")
    return [*messages, {"role": "assistant", "content": printer.printed}]


def _line() -> str | None:
    """Read the next line; None at the end of the input."""
    if sys.stdin.isatty():
        notes().print("> ", end="", style="bold")
    return read_input_line()


def _prompts(options: Generate) -> list[Row]:
    prompt = options.prompt
    if options.file is not None:
        if prompt is not None:
            raise ConfigError("there must be one prompt or --file, got both; leave one out")
        return read_prompts(options.file)
    if prompt in (None, "-"):
        prompt = "" if prompt is None and sys.stdin.isatty() else read_input()
    if not prompt:
        raise ConfigError(
            "there must be a prompt, got none; write one, pipe it in, or name a --file"
        )
    return [Row(1, prompt)]


def _decode(
    pair: Pair, token_ids: list[int], arguments: dict[str, Any], printer: _Printer | None
) -> tuple[dict[str, Any], str]:
    """Decode one prompt; return text and speed, as values and as a line."""
    input_ids = torch.tensor([token_ids], device=pair.target.device)  # [1, T]
    stats = SpeculationStats()
    begin = time.perf_counter()
    output: Any = pair.target.generate(  # type: ignore[operator]
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=printer,
        speculation_stats=stats,
        **pair.arguments,
        **arguments,
    )
    seconds = time.perf_counter() - begin
    new_ids = output[0, len(token_ids) :]
    num_tokens, text = len(new_ids), str(pair.tokenizer.decode(new_ids, skip_special_tokens=True))
    fields = {"text": text, "num_tokens": num_tokens, "seconds": seconds}
    line = f"{counted(num_tokens, 'token')} in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s"
    if not stats.num_drafted:
        return fields, f"{line}, nothing was drafted"
    length, rate = stats.mean_acceptance_length, stats.acceptance_rate
    line = f"{line}; mean acceptance length {length:.2f}, {rate:.0%} of drafted tokens accepted"
    return fields | {"mean_acceptance_length": length, "acceptance_rate": rate}, line
