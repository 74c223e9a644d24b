"""`hf-speculate generate`: decode prompts, and write tokens as they come."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import TextStreamer

from hf_speculate.commands import options
from hf_speculate.commands.console import answer, notes
from hf_speculate.commands.loading import Pair, load_pair
from hf_speculate.commands.prompts import Prompt, read_prompts
from hf_speculate.errors import ConfigError
from hf_speculate.stats import SpeculationStats


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
    for number, one in enumerate(prompts or ()):
        if number:
            answer("")
        if len(prompts or ()) > 1:
            log.print(f"prompt {one.id}:", style="bold")
        _decode(pair, one.text(pair.tokenizer, is_chat=chat), arguments, log)
    if prompts is None:
        _talk(pair, arguments, log)


def _prompts(prompt: str | None, file: Path | None, chat: bool) -> list[Prompt] | None:
    """What is to be decoded; None: a chat with whoever types."""
    if (prompt is None) == (file is None) and not (chat and prompt is None):
        raise ConfigError("there must be a prompt, --file or --chat, got none or two of them; give one")
    if file is not None:
        return read_prompts(file)
    return None if prompt is None else [Prompt("1", prompt)]


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
        text = Prompt("chat", messages).text(pair.tokenizer)
        messages.append({"role": "assistant", "content": _decode(pair, text, arguments, log)})


def _decode(pair: Pair, text: str, arguments: dict[str, Any], log: Console) -> str:
    """Decode one text, write the answer as it comes and a line on how it went; returns the answer."""
    inputs = pair.tokenizer(text, return_tensors="pt").to(pair.target.device)
    stats = SpeculationStats()
    begin = time.perf_counter()
    output: Any = pair.target.generate(  # type: ignore[operator]
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        streamer=TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True),
        speculation_stats=stats,
        **pair.arguments,
        **arguments,
    )
    seconds = time.perf_counter() - begin
    new_ids = output[0, inputs["input_ids"].shape[1] :]
    log.print(_line(len(new_ids), seconds, stats), style="dim")
    return str(pair.tokenizer.decode(new_ids, skip_special_tokens=True))


def _line(num_tokens: int, seconds: float, stats: SpeculationStats) -> str:
    line = f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} a second"
    if not stats.num_rounds:
        return f"{line}, without drafts"
    return f"{line}; {stats.tokens_per_round:.2f} a round, {stats.acceptance:.0%} of the drafts accepted"
