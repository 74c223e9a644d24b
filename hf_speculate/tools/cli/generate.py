"""`hf-speculate generate`: decode prompts, and write tokens as they come."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import TextStreamer

from hf_speculate.errors import ConfigError
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.cli import options
from hf_speculate.tools.cli.console import answer, notes
from hf_speculate.tools.cli.loading import Pair, load_pair
from hf_speculate.tools.cli.prompts import read_prompts
from hf_speculate.tools.dataset.encoding import token_ids_of
from hf_speculate.tools.dataset.rows import Row


def generate(
    target: options.Target,
    prompt: Annotated[str | None, typer.Argument(help="What the model reads; unset, with --chat: ask for it.")] = None,
    draft: options.Draft = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Prompts: .jsonl, one a line, or a text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts through the tokenizer's chat template.")] = False,
    lookup: options.Lookup = None,
    verifier: options.Verifier = None,
    num_assistant_tokens: options.NumAssistantTokens = None,
    max_new_tokens: options.MaxNewTokens = 256,
    sample: options.Sample = False,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    settings: options.Settings = None,
) -> None:
    """Decode a prompt, the prompts of a file, or a chat; tokens appear as they come."""
    fields = options.fields_from(lookup, verifier, num_assistant_tokens, seed, settings)
    arguments = options.decoding_from(max_new_tokens, sample, temperature) | fields
    prompts = _prompts(prompt, file, chat)
    log = notes()
    pair = load_pair(target, draft, dtype, device, log)
    if prompts is None:
        _talk(pair, arguments, log)
        return
    for number, (row, token_ids) in enumerate(zip(prompts, token_ids_of(prompts, pair.tokenizer, chat), strict=True)):
        if number:
            answer("")
        if len(prompts) > 1:
            log.print(f"prompt {row.key}:", style="bold")
        _decode(pair, token_ids, arguments, log)


def _prompts(prompt: str | None, file: Path | None, chat: bool) -> list[Row] | None:
    """What is to be decoded; None: a chat with whoever types."""
    if (prompt is None) == (file is None) and not (chat and prompt is None):
        raise ConfigError("there must be a prompt, --file or --chat, got none or two of them; give one")
    if file is not None:
        return read_prompts(file)
    return None if prompt is None else [Row.of(prompt)]


def _talk(pair: Pair, arguments: dict[str, Any], log: Console) -> None:
    """Answer lines of the standard input, until it ends."""
    messages: list[dict[str, Any]] = []
    while True:
        if sys.stdin.isatty():
            log.print("> ", end="", style="bold")
        line = sys.stdin.readline()
        if not line:
            return
        messages.append({"role": "user", "content": line.rstrip("\n")})
        [token_ids] = token_ids_of([Row.of(messages, source="the chat")], pair.tokenizer, is_chat=True)
        messages.append({"role": "assistant", "content": _decode(pair, token_ids, arguments, log)})


def _decode(pair: Pair, token_ids: list[int], arguments: dict[str, Any], log: Console) -> str:
    """Decode one prompt, write the answer as it comes and a line on how it went; returns the answer."""
    input_ids = torch.tensor([token_ids], device=pair.target.device)
    stats = SpeculationStats()
    begin = time.perf_counter()
    output: Any = pair.target.generate(  # type: ignore[operator]
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True),
        speculation_stats=stats,
        **pair.arguments,
        **arguments,
    )
    seconds = time.perf_counter() - begin
    new_ids = output[0, len(token_ids) :]
    log.print(_line(len(new_ids), seconds, stats), style="dim")
    return str(pair.tokenizer.decode(new_ids, skip_special_tokens=True))


def _line(num_tokens: int, seconds: float, stats: SpeculationStats) -> str:
    line = f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} a second"
    if not stats.num_rounds:
        return f"{line}, without drafts"
    return f"{line}; {stats.mean_acceptance_length:.2f} a round, {stats.acceptance_rate:.0%} of the drafts accepted"
