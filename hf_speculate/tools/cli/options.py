"""The options that decoding commands share, and what `generate()` is told because of them."""

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from hf_speculate.config import PLAIN_NAMES
from hf_speculate.errors import ConfigError

Target = Annotated[str, typer.Argument(help="Name or path of the model that decodes.")]
Draft = Annotated[str | None, typer.Option("--draft", "-d", help="Name or path of the draft model.")]
Lookup = Annotated[int | None, typer.Option("--lookup", help="Tokens copied a round from where the text stood before.")]
Verifier = Annotated[str | None, typer.Option("--verifier", "-v", help="Which drafted tokens stay.")]
NumAssistantTokens = Annotated[
    int | None, typer.Option("--num-assistant-tokens", "-k", help="Tokens drafted in every round; unset: adaptive.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens of the answer at most.")]
Sample = Annotated[bool, typer.Option("--sample", "--do-sample", help="Draw tokens, instead of taking the likeliest.")]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="Of the law that is drawn from.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Repeats what was drawn.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16, float32 or float64.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, ...; auto: a GPU if there is one; map: all of them.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other field as name=value, with a JSON value; may be given several times."),
]


def fields_from(
    lookup: int | None,
    verifier: str | None,
    num_assistant_tokens: int | None,
    seed: int | None,
    settings: Sequence[str] | None,
) -> dict[str, Any]:
    """Fields of `SpeculationConfig`, those that were given.

    Raises:
        ConfigError: a setting is not `name=value`, or names no field that text can set.
    """
    fields: dict[str, Any] = {
        "prompt_lookup_num_tokens": lookup,
        "verifier": verifier,
        "num_assistant_tokens": num_assistant_tokens,
        "seed": seed,
    }
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or name not in PLAIN_NAMES:
            raise ConfigError(
                f"--set must be name=value with a name among {', '.join(PLAIN_NAMES)}, got {setting!r}; "
                "see the README's table of settings"
            )
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value  # a bare word, as in typical_correction=sample
    return {name: value for name, value in fields.items() if value is not None}


def decoding_from(max_new_tokens: int, sample: bool, temperature: float | None) -> dict[str, Any]:
    """Arguments of transformers' own that say how tokens are chosen.

    Raises:
        ConfigError: no token is asked for, or there is a temperature that is none, or with which nothing is drawn.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {max_new_tokens}; leave it out for the default")
    if temperature is not None and not sample:
        raise ConfigError(f"--temperature must come with --sample, got {temperature} alone; add --sample")
    if temperature is not None and not 0 < temperature < math.inf:
        raise ConfigError(
            f"--temperature must be above 0 and finite, got {temperature}; leave --sample out for the likeliest tokens"
        )
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
    return arguments if temperature is None else arguments | {"temperature": temperature}
