"""Compare greedy speculative decoding with plain greedy decoding, row by row."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.config import DEFAULT_ASSISTANT_TOKENS, FIELD_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError, UnsupportedModelError, counted
from hf_speculate.generation.config_sources import setting
from hf_speculate.generation.defaults import plain as without_drafts
from hf_speculate.generation.generate import generate
from hf_speculate.models.recurrent_layers import reads_prompts_in_chunks
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.checks.near_ties import (
    DifferenceCheck,
    GapRecorder,
    ParityRow,
    logits_after_text,
    logits_in_call,
)
from hf_speculate.verify.base import is_lossless

Prompts = str | Tensor | Mapping[str, Tensor] | Sequence[str | Tensor | Mapping[str, Tensor]]
_SPECULATIVE = {*FIELD_NAMES, "assistant_model"}  # arguments used only in the speculative call
_REFUSED = [
    "assistant_model",
    "cache",
    "do_sample",
    "num_return_sequences",
    "past_key_values",
    "return_dict_in_generate",
    "streamer",
]


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`; `print` shows it as text."""

    rows: tuple[ParityRow, ...]  #: one per prompt
    dtype: str  #: dtype of the target, without "torch."
    num_drafted: int  #: number of verified draft tokens, over all rows

    @property
    def ok(self) -> bool:
        """Whether tokens were drafted and every difference is a tie."""
        return self.num_drafted > 0 and all(row.verdict != "bug" for row in self.rows)

    def __str__(self) -> str:
        counts = {
            name: sum(row.verdict == name for row in self.rows) for name in ("equal", "tie", "bug")
        }
        rows = counted(len(self.rows), "row")
        line = f"{counts['equal']} of {rows} equal plain greedy decoding in {self.dtype}"
        lines = [f"{line}, {counts['tie']} differ at a near-tie, {counts['bug']} by a bug"]
        if self.num_drafted == 0:
            lines.append("nothing was drafted, so nothing was compared: set num_assistant_tokens")
        lines += [f"  {row}" for row in self.rows if row.verdict != "equal"]
        return "\n".join(lines)


def check_parity(
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    prompts: Prompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 64,
    **generate_kwargs: Any,
) -> ParityReport:
    """Decode greedily with and without speculation, and classify each row's first difference.

    At a difference, the target runs again on the common prefix, over one token and over several as
    in a verification. It runs in its own dtype and, if a copy takes less than 2 GiB, in float64.
    The row is a "tie" if the gap between the two tokens is within the noise between these forwards;
    this includes a wrong token whose logit is that close. Otherwise, the row is a "bug" in this
    library, the verifier or the model. Tokens after the first difference are not compared. For a
    target with an encoder or with image inputs, the whole call is repeated instead.

    Args:
        model: the target, enabled or not, with or without a PEFT wrapper. Neither model is changed.
        assistant: the draft model.
            None with `prompt_lookup_num_tokens` or `drafter`.
        prompts: the input of one call, or a sequence of inputs. An input consists of token ids [T]
            or [B, T] int64, or is a mapping of tensors with `input_ids` and other model inputs such
            as `attention_mask`, `pixel_values` or `decoder_input_ids`. Batches for a decoder are
            left-padded. Strings need the tokenizer and form one batch.
        tokenizer: encodes strings. Without a padding token, each string is decoded on its own.
        max_new_tokens: maximum number of new tokens per row.
        **generate_kwargs: other arguments of both `generate()` calls, and fields of
            `SpeculationConfig`. Unless `num_assistant_tokens` or its schedule is given, every round
            drafts 5 tokens.

    Raises:
        ConfigError: an argument cannot be used in the comparison.
        UnsupportedModelError: the target's main input is not token ids (Whisper); see also
            `generate`.
        UnsupportedGenerationError: see `generate`.
    """
    model = unwrapped(model)
    _check_arguments(model, assistant, generate_kwargs)
    options = {
        "verifier": "greedy",
        **generate_kwargs,
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
    }
    if (
        assistant is not None or options.get("drafter")
    ) and "num_assistant_tokens_schedule" not in options:
        options.setdefault("num_assistant_tokens", DEFAULT_ASSISTANT_TOKENS)
    options["assistant_model"] = assistant
    stats = options.pop("speculation_stats", None) or SpeculationStats()
    num_drafted = 0
    rows: list[ParityRow] = []
    check = DifferenceCheck(model)
    for inputs in _calls(prompts, tokenizer, model.device):
        for row in _compared(check, inputs, options, stats):
            rows.append(replace(row, index=len(rows)))
        num_drafted += stats.num_verified
    return ParityReport(tuple(rows), str(model.dtype).removeprefix("torch."), num_drafted)


def _check_arguments(model: PreTrainedModel, assistant: object, kwargs: Mapping[str, Any]) -> None:
    if model.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"model must have input_ids as its main input, got {type(model).__name__} with "
            f"{model.main_input_name}; "
            "compare generate() with and without assistant_model yourself"
        )
    if assistant is None and all(
        kwargs.get(name) is None for name in ("prompt_lookup_num_tokens", "drafter")
    ):
        raise ConfigError(
            "assistant must be a model if neither prompt_lookup_num_tokens nor drafter is set, got "
            "None; pass one of "
            "the three, or nothing is drafted"
        )
    for config in (kwargs.get("generation_config"), model.generation_config):
        if getattr(config, "prompt_lookup_num_tokens", None) is not None:
            raise ConfigError(
                "prompt_lookup_num_tokens must be a keyword here, got it in a generation config, "
                "which plain decoding "
                "reads too; unset it there"
            )
    refused = [name for name in _REFUSED if kwargs.get(name) not in (None, False)]
    if refused:
        raise ConfigError(
            f"arguments must not include {', '.join(_REFUSED)}, got {', '.join(refused)}; leave "
            "them out: check_parity "
            "compares whole greedy calls"
        )
    verifier = kwargs.get("verifier")
    if verifier is not None and not is_lossless(SpeculationConfig(verifier=verifier)):
        raise ConfigError(f"verifier must be lossless, got {verifier!r}; leave it out")


def _calls(
    prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    several = [prompts] if isinstance(prompts, str | Tensor | Mapping) else list(prompts)
    texts = [prompt for prompt in several if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ConfigError(
            "tokenizer must be the target's for prompts that are strings, got None; pass it"
        )
    if tokenizer is not None and texts:
        for batch in [texts] if tokenizer.pad_token is not None else [[text] for text in texts]:
            yield dict(
                tokenizer(
                    batch, return_tensors="pt", padding=len(batch) > 1, padding_side="left"
                ).to(device)
            )
    for prompt in several:
        if isinstance(prompt, str):
            continue
        inputs: Any = (
            {"input_ids": torch.atleast_2d(prompt)} if isinstance(prompt, Tensor) else prompt
        )
        values = inputs if isinstance(inputs, Mapping) else {}
        if "input_ids" not in values or not all(
            isinstance(value, Tensor) for value in values.values()
        ):
            types = ", ".join(f"{name} ({type(value).__name__})" for name, value in values.items())
            raise ConfigError(
                "a prompt must be a string, or must hold input_ids as a tensor or in a mapping of "
                "tensors, got "
                f"{types or type(prompt).__name__}; wrap ids in torch.tensor, or tokenise with "
                'return_tensors="pt"'
            )
        yield {name: value.to(device) for name, value in values.items()}


def _compared(
    check: DifferenceCheck,
    inputs: dict[str, Tensor],
    options: dict[str, Any],
    stats: SpeculationStats,
) -> Iterator[ParityRow]:
    """Decode a batch with and without drafts, compare the rows, and fill `stats`."""
    model = check.model
    speculative: Any = generate(model, **{**options, **inputs, "speculation_stats": stats})
    recorder = GapRecorder(speculative)
    plain_options = {
        name: value for name, value in options.items() if name not in _SPECULATIVE
    } | inputs
    processors = LogitsProcessorList([*(options.get("logits_processor") or []), recorder])
    with without_drafts(model):
        plain: Any = generate(model, **{**plain_options, "logits_processor": processors})
    prompt_len, block_len = (
        plain.shape[1] - len(recorder.gaps),
        max(stats.rounds_by_draft_len, default=0) + 1,
    )
    num_both, pad = (
        min(plain.shape[1], speculative.shape[1]) - prompt_len,
        _pad_token_id(model, options),
    )
    passed = {*inputs, *(name for name, value in options.items() if isinstance(value, Tensor))}
    is_text = not model.config.is_encoder_decoder and passed <= {"input_ids", "attention_mask"}
    # otherwise, a forward over several tokens loses states
    is_text = is_text and reads_prompts_in_chunks(model)
    for row in range(len(speculative)):
        plain_ids, speculative_ids = (
            ids[row, prompt_len:].tolist() for ids in (plain, speculative)
        )
        pairs = enumerate(zip_longest(plain_ids, speculative_ids, fillvalue=pad))
        difference = next(((index, ids) for index, ids in pairs if ids[0] != ids[1]), None)
        if difference is None:
            yield ParityRow()
            continue
        position, chosen = difference
        if position >= num_both or int(recorder.best_ids[position][row]) != chosen[0]:
            yield ParityRow(
                verdict="bug",
                position=position,
                plain_id=chosen[0],
                speculative_id=chosen[1],
                reason="one of the outputs had ended before",
            )
            continue
        if is_text:
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) != 0
            new_ids = speculative[row, prompt_len : prompt_len + position]
            text = torch.cat([inputs["input_ids"][row][mask[row]], new_ids])
            logits_of = partial(logits_after_text, token_ids=text, num_rows=len(speculative))
        else:
            text = plain[:, : prompt_len + position]
            logits_of = partial(
                logits_in_call, options=plain_options, speculation=options, token_ids=text
            )
            logits_of = partial(logits_of, row=row, position=position)
        gap = float(recorder.gaps[position][row])
        yield check(chosen, gap, position, partial(logits_of, block_len=block_len))


def _pad_token_id(model: PreTrainedModel, options: Mapping[str, Any]) -> int:
    """Return the token id that pads finished rows; -1 if none is set."""
    values = (setting(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    value = next((value for value in values if value is not None), -1)
    return int(value[0] if isinstance(value, list | tuple) else value)
