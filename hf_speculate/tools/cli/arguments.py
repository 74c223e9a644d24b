"""Turns command-line options into arguments of `generate()`, and checks them before a model is loaded."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_speculate.config import PLAIN_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.methods import parse_draft_len
from hf_speculate.tools.cli.options import Generation, Speculation
from hf_speculate.tools.dataset.rows import ROW_SETTINGS
from hf_speculate.verify.base import check_verifier

_OWN_OPTIONS = {"do_sample", "max_new_tokens", "repetition_penalty", "temperature", "top_k", "top_p"}
# These change what `generate()` returns, or how many rows.
_OTHER_OUTPUT = {"num_return_sequences", "return_dict_in_generate", "transformers_version"}


class Decoding(NamedTuple):
    """Arguments of `generate()`.

    `sampling` holds those that only sampling reads, `options` others of `GenerationConfig`, and `fields` those of
    `SpeculationConfig`.
    """

    max_new_tokens: int
    do_sample: bool
    sampling: dict[str, Any]
    options: dict[str, Any]
    fields: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        own = {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample}
        return own | self.sampling | self.options | self.fields


def decoding_of(generation: Generation, speculation: Speculation | None = None, max_new_tokens: int = 256) -> Decoding:
    given = {name: value for name, value in vars(generation).items() if name in _OWN_OPTIONS and value is not None}
    for name, value in given.items():
        ROW_SETTINGS[name]._replace(hint="leave it out for the default")(_option(name), value)
    num = given.pop("max_new_tokens", max_new_tokens)
    penalty = {name: given.pop(name) for name in ("repetition_penalty",) if name in given}
    if given and not generation.sample:
        raise ConfigError(f"{_option(min(given))} must come with --sample, got it alone; add --sample")
    fields, options = _settings_of(generation.settings)
    if speculation is not None:
        lookup, num_tokens = speculation.lookup, speculation.num_assistant_tokens
        named = {"verifier": speculation.verifier, "prompt_lookup_num_tokens": lookup, "seed": generation.seed}
        fields = {name: value for name, value in named.items() if value is not None} | fields
        if num_tokens is not None:
            fields = parse_draft_len(num_tokens).fields | fields
        check_verifier(SpeculationConfig(**fields).resolve(generation.sample))
    return Decoding(num, generation.sample, given, penalty | options, fields)


def check_writable(path: Path | None) -> None:
    """Check before models are loaded that a file can be written."""
    if path is not None and path.is_dir():
        raise ConfigError(f"results must go into a file, got the folder {path}; name a file in it")
    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(f"the folder of {path} must exist, got none; create it, or name another file")


def _settings_of(settings: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `SpeculationConfig`, and of `GenerationConfig`, that `--set` names."""
    fields: dict[str, Any] = {}
    options: dict[str, Any] = {}
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith(("_", "output_"))}
    theirs -= _OWN_OPTIONS | _OTHER_OUTPUT
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        if name in _OWN_OPTIONS:
            raise ConfigError(f"--set must leave out what has an option, got {name}; use {_option(name)}")
        if not equals or name not in {*PLAIN_NAMES, *theirs}:
            raise ConfigError(
                "--set must be name=value with a plain field of SpeculationConfig or GenerationConfig, "
                f"got {setting!r}; see the table of settings in the documentation"
            )
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text  # a bare word, as in typical_correction=sample
        (fields if name in PLAIN_NAMES else options)[name] = value
    return fields, options


def _option(name: str) -> str:
    return "--sample" if name == "do_sample" else "--" + name.replace("_", "-")
