"""Run the calls of `tests/compatibility_rows.py`.

`python -m tests.compatibility` writes `docs/compatibility.md`.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)

import hf_speculate
from hf_speculate.config import FIELD_NAMES
from hf_speculate.draft.assistant_model import AssistantModel
from hf_speculate.errors import SpeculateError, UnsupportedModelError
from hf_speculate.generation.validate_models import check_models
from hf_speculate.models.quirks import QUIRKS, TESTED_TYPES, Limit
from hf_speculate.options.heads.mtp_checkpoint import SERVED_TARGETS
from tests.compatibility_rows import ARGUMENTS, FIELDS, OWN_FIELDS, Call, Row
from tests.random_calls import READER_NAMES, Case, target_of
from tests.random_calls import prompts_of as prompts_of_case
from tests.support.tiny import MORE_FAMILIES, TINY_FAMILIES, make_model, noisy_copy, ragged_prompts
from tests.support.tiny_configs import RECURRENT_FAMILIES, UNSUPPORTED_RECURRENT, unsupported_config
from tests.support.tiny_encoders import make_llava, make_qwen2_vl, make_qwen3_5_vl, picture_prompts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
COMMAND = "python -m tests.compatibility"
NUM_NEW = 10
WHERE = ("keyword", "passed config", "model's config")

CONFIG_FIELDS = tuple(name for name in vars(GenerationConfig()) if not name.startswith("_"))
SIGNATURE = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "kwargs"}
# Arguments that plain decoding does not get. A config never contains the statistics of an output.
_OURS = {*FIELD_NAMES, "assistant_model", "assistant_early_exit"}
_IN_CONFIGS = {*CONFIG_FIELDS, *FIELD_NAMES} - {"speculation_stats"}

INTRODUCTION = """\
# Compatibility

Every argument and field of `generate()`, for an enabled model with a draft source
(`assistant_model`, `assistant_early_exit`, `prompt_lookup_num_tokens`, `drafter` or
`candidate_generator`). Without a draft source it decodes as transformers does, except with
`verifier="coupled"` and `do_sample=True`. [What is supported](supported.md) is the short version.

- *supported*: the text equals plain decoding's, or, with sampling, has its distribution.
- *not supported*: raises the error in the last column, before the first forward of the decoder. If
  the draft source comes from `enable()`, the call decodes plainly and warns once instead.
- *no effect*: changes nothing, as in plain decoding.
"""
MODELS = """\
## Model families

Greedy text is plain decoding's in float64 (MPT's in float32), with left-padded rows too. Other
models run if their cache and modules follow the same protocols; `check_pair` reads it from
configs.

- *preallocated, or dynamic*: keys and values; `speculation_cache` chooses.
- *dynamic*: keys and values in transformers' own cache, for the reason in
  `SpeculationStats.fallbacks`.
- *hybrid*: recurrent or convolution states, beside keys and values or alone. Verification projects
  all tokens at once and reads them one by one, so the states after each token are those of plain
  decoding.

Models with recurrent layers are not supported if they are compiled, spread over devices or split
by tensor parallelism. Neither are layers with an index of the attended tokens
(`indexed_attention`, in Qwen4-Exp and GLM-5-Next). Inkling 2 is compared with plain decoding in
float32, because its router stays in float32.
"""

TYPES = """\
## Model types

By `model_type` of the target's config, read from the library. Other types are compared with plain
decoding in their first speculative call, see [what is supported](supported.md#model-types).
"""
# Descriptions of the limits of model types.
LIMITS = {
    Limit.NOT_SUPPORTED: "not supported",
    Limit.ONLY_PREALLOCATED: "preallocated KV cache only",
    Limit.ONLY_DYNAMIC: "dynamic KV cache only",
    Limit.NO_ATTENTIONS_FROM_SDPA: "`output_attentions` with the eager attention only",
    Limit.NO_PADDED_DECODER_PROMPT: "no padding in a decoder prompt",
    Limit.CONTEXT_BY_COLUMNS: "the context is that of the longest row",
}


@cache
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """Return a plain model, an enabled copy with the same weights, and a draft model for them."""
    plain = make_model(family)
    return plain, hf_speculate.enable(make_model(family)), noisy_copy(plain)


@cache
def plain_text(family: str, batch_size: int) -> list[int]:
    """Return the new ids of the first row from plain greedy decoding."""
    prompts = prompts_of(batch_size)
    text = models(family)[0].generate(**prompts, max_new_tokens=NUM_NEW)
    return text[0, prompts["input_ids"].shape[1] :].tolist()


def prompts_of(batch_size: int) -> dict[str, Tensor]:
    """Return left-padded prompts, or an empty dict if the call has no prompt."""
    return ragged_prompts(batch_size, seed=1, min_len=6) if batch_size else {}


def keywords(call: Call) -> dict[str, Any]:
    """Return all keyword arguments of the call to `generate()` except the draft."""
    options = (
        call.options
        if not callable(call.options)
        else call.options(plain_text(call.family, call.rows))
    )
    sampling = {"do_sample": True, "verifier": "coupled", "seed": 5} if call.samples else {}
    return {**prompts_of(call.rows), "max_new_tokens": NUM_NEW, **sampling, **options}


@contextmanager
def placed(model: PreTrainedModel, given: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield the keywords of a call, with config fields in the given place; a None is left out."""
    fields = {
        name: value for name, value in given.items() if name in _IN_CONFIGS and value is not None
    }
    others = {name: value for name, value in given.items() if name not in _IN_CONFIGS}
    if where == "keyword":
        yield given
    elif where == "passed config":
        yield {**others, "generation_config": GenerationConfig(**fields)}
    else:
        merged = GenerationConfig(**{**model.generation_config.to_diff_dict(), **fields})
        with patch.object(model, "generation_config", merged):
            yield others


def decode(model: PreTrainedModel, given: dict[str, Any], where: str = "keyword") -> Tensor:
    """Return the ids that one call generates."""
    with placed(model, given, where) as arguments:
        torch.manual_seed(0)
        output = model.generate(**arguments)
    return getattr(output, "sequences", output)


def decode_plainly(call: Call, without: str | None = None) -> Tensor:
    """Decode without a draft: with transformers, or with `coupled` verification when sampling."""
    plain, enabled, _ = models(call.family)
    given = {name: value for name, value in keywords(call).items() if name != without}
    if call.samples:
        return decode(enabled, {**given, "assistant_model": None})
    return decode(plain, {name: value for name, value in given.items() if name not in _OURS})


def decode_with_draft(call: Call, where: str = "keyword", **more: Any) -> Tensor:
    """Decode with an enabled model and a draft; `more` holds further keyword arguments."""
    _, enabled, draft = models(call.family)
    return decode(
        enabled,
        {"assistant_model": draft, "num_assistant_tokens": 4, **keywords(call), **more},
        where,
    )


def refusal(call: Call, where: str = "keyword") -> str:
    """Return the error message that the call raises."""
    with streams(), pytest.raises(SpeculateError) as caught:
        decode_with_draft(call, where)
    return str(caught.value)


def streams() -> AbstractContextManager[object]:
    """Replace the CUDA streams of offloaded caches, because torch creates none without a driver."""
    try:
        torch.Stream()
    except RuntimeError:
        return patch("torch.Stream")
    return nullcontext()


def pinned_version() -> str:
    """Return the transformers version in constraints.txt, which the page describes."""
    (version,) = re.findall(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    return version


def render() -> str:
    """Render the documentation page, and run every unsupported call."""
    parts = [
        INTRODUCTION,
        f"Written by `{COMMAND}` with transformers {transformers.__version__}.\n",
        _section("Arguments", ARGUMENTS),
        _section("Fields of `GenerationConfig`", FIELDS),
        _section("Fields of hf_speculate", OWN_FIELDS),
        MODELS,
        _table(("model", "KV cache"), [(as_code(name), cache) for name, cache in family_rows()]),
        "Not supported:\n",
        _table(
            ("model", "message"),
            [(as_code(name), as_code(message)) for name, message in refused_rows()],
        ),
    ]
    return "\n".join([*parts, *_types()])


def _types() -> list[str]:
    limited = [
        (as_code(quirk.model_type), LIMITS[quirk.limit], quirk.reason)
        for quirk in QUIRKS
        if quirk.limit in LIMITS
    ]
    versions = {
        version: [name for name, since in TESTED_TYPES.items() if since == version]
        for version in dict.fromkeys(TESTED_TYPES.values())
    }
    lists = [
        f"- Since transformers {version}: {', '.join(map(as_code, names))}."
        for version, names in versions.items()
    ]
    served = ", ".join(map(as_code, SERVED_TARGETS))
    return [
        TYPES,
        _table(("model_type", "limit", "reason: its layers, or its forward"), limited),
        "Compared with plain decoding by the tests:\n",
        "\n".join(lists) + "\n",
        f"`use_mtp` loads the MTP layers of: {served}.\n",
    ]


def _section(title: str, rows: Sequence[Row]) -> str:
    cells = [
        (f"`{row.name}`" if " " not in row.name else row.name, row.state, _note(row))
        for row in rows
    ]
    return f"## {title}\n\n" + _table(("name", "state", "note, error or reason"), cells)


def _note(row: Row) -> str:
    if row.state != "not supported" or row.call is None:
        return row.note
    cause = row.note or as_code(f"{row.name}={keywords(row.call)[row.name]!r}")
    return f"{cause}: {as_code(refusal(row.call))}"


def as_code(text: str) -> str:
    """Format text as code in a table cell."""
    escaped = text.replace("|", "\\|")
    return f"`` {escaped} ``" if "`" in text else f"`{escaped}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


BUFFERS = "preallocated, or dynamic"
_WITH_PICTURES = (make_llava, make_qwen2_vl, make_qwen3_5_vl)


def family_rows() -> list[tuple[str, str]]:
    """Return every tested model class with the KV cache that it uses in a call."""
    rows = {
        _family_row(name)
        for name in (
            *TINY_FAMILIES,
            *MORE_FAMILIES,
            *RECURRENT_FAMILIES,
            "t5",
            "bart",
            "whisper",
            *READER_NAMES,
        )
    }
    for make in _WITH_PICTURES:
        target = make()
        rows.add((type(target).__name__, _cache_of(target, picture_prompts(target, 1))))
    return sorted(rows, key=lambda row: (row[0].lower(), row[1]))


def _family_row(name: str) -> tuple[str, str]:
    target, inputs = target_of(name)[0], prompts_of_case(Case(name))
    class_name = type(target).__name__
    return f"{class_name} with ALiBi" if name == "falcon_alibi" else class_name, _cache_of(
        target, inputs
    )


def _cache_of(target: PreTrainedModel, inputs: dict[str, Any]) -> str:
    """Return the default KV cache of a call, and the reason if it is not the preferred one."""
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 2, "prompt_lookup_num_tokens": 2, "speculation_stats": stats}
    hf_speculate.generate(target, **inputs, **options)
    if stats.cache == "dynamic":
        (text,) = (text for text in stats.fallbacks if text.startswith("target cache: "))
        return text.removeprefix("target cache: ")
    return BUFFERS if stats.cache == "preallocated" else stats.cache


def refused_rows() -> Iterator[tuple[str, str]]:
    """Return every model class with unsupported recurrent states and its error message."""
    for family in UNSUPPORTED_RECURRENT:
        model = AutoModelForCausalLM.from_config(unsupported_config(family))
        with pytest.raises(UnsupportedModelError) as caught:
            check_models([model], AssistantModel(model))
        yield type(model).__name__, str(caught.value)


if __name__ == "__main__":
    if transformers.__version__ != pinned_version():
        raise SystemExit(
            f"the page is for transformers {pinned_version()}, this is {transformers.__version__}"
        )
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
