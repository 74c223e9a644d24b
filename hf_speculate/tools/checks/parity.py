"""Compares greedy speculative decoding with plain decoding, row by row."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.config import DEFAULT_ASSISTANT_TOKENS, FIELD_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.generation.mixin import generate
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.checks.evidence import Parting, Place, exact_copy, judge
from hf_speculate.tools.checks.replay import Replay
from hf_speculate.verify.base import is_lossless

Prompts = str | Tensor | Mapping[str, Tensor] | Sequence[str | Tensor | Mapping[str, Tensor]]
_REFUSED = ("past_key_values", "return_dict_in_generate", "streamer", "num_return_sequences", "assistant_model")


@dataclass(frozen=True)
class ParityRow:
    """How one prompt's two texts compare.

    Args:
        index: of the prompt, over all calls.
        verdict: "equal", "tie" or "bug".
        position: new tokens before the first difference; None: there is none.
        plain_id, speculative_id: the tokens there; None: there is no difference.
        top_gap: the target's largest logit over the second there, in its own dtype.
        exact_top_gap: the same in float64; None: not computed.
        gap: the plain token's score over the speculative one's, after all logits processors.
        noise: what the two logits move by between forwards of one row and of the batch, of one token and of K+1.
        bound: the largest gap that rounding explains.
        reason: of the verdict.
    """

    index: int
    verdict: str = "equal"
    position: int | None = None
    plain_id: int | None = None
    speculative_id: int | None = None
    top_gap: float | None = None
    exact_top_gap: float | None = None
    gap: float | None = None
    noise: float | None = None
    bound: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found.

    Args:
        rows: one per prompt.
        dtype: the target's, without "torch.".
        num_drafted: drafted tokens that were judged, over all rows.
    """

    rows: tuple[ParityRow, ...]
    dtype: str
    num_drafted: int

    @property
    def ok(self) -> bool:
        """Whether something was drafted, and no row differs for another reason than a tie."""
        return self.num_drafted > 0 and all(row.verdict != "bug" for row in self.rows)

    def __str__(self) -> str:
        counts = {name: sum(row.verdict == name for row in self.rows) for name in ("equal", "tie", "bug")}
        line = f"{counts['equal']} of {len(self.rows)} rows equal plain greedy decoding in {self.dtype}"
        lines = [f"{line}, {counts['tie']} part at a tie, {counts['bug']} by a bug"]
        if self.num_drafted == 0:
            lines.append("nothing was drafted, so that nothing was compared: set num_assistant_tokens")
        if counts["equal"] < len(self.rows):
            names = ("row", "at", "plain", "ours", "verdict", "gap", "bound", "noise", "top gap", "in float64")
            lines.append("".join(f"{name:>11}" for name in names))
        for row in self.rows:
            if row.verdict != "equal":
                ids = (row.index, row.position, row.plain_id, row.speculative_id, row.verdict)
                numbers = (row.gap, row.bound, row.noise, row.top_gap, row.exact_top_gap)
                cells = [*("-" if one is None else str(one) for one in ids)]
                cells += ["-" if one is None else f"{one:.3g}" for one in numbers]
                lines.append("".join(f"{cell:>11}" for cell in cells) + f"  {row.reason}")
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
    """Decode greedily with and without speculation, and explain every first difference.

    Where a row's two texts part, the target is run again on what they share, token by token and as a verification
    would, in its own dtype and, where a copy is below 2 GiB, in float64. If both tokens lie within the noise between
    the two the row is a "tie": rounding chose. Otherwise it is a "bug", of this library, a verifier or the model. A
    wrong token whose logit happens to be that close passes for a tie. What follows the first difference is not judged.
    A target with an encoder, or that reads images, is run again by decoding the plain text anew with all that the call
    passed, once token by token and once with drafts.

    Args:
        model: the target, enabled or not; it and the assistant are left as they are.
        assistant: the draft model; None with `prompt_lookup_num_tokens` or `drafter`.
        prompts: one call or a sequence of them: token ids [T] or [B, T] int64, or a mapping of tensors with
            `input_ids` and what else the model reads: `attention_mask`, `pixel_values`, `decoder_input_ids`. Text of
            decoders is padded on the left. Strings need the tokenizer; all of them make one batch.
        tokenizer: encodes strings; where it has no padding token each string is decoded alone.
        max_new_tokens: tokens of each row at most.
        **generate_kwargs: anything else for both `generate()` calls, and the fields of `SpeculationConfig`. Where
            neither `num_assistant_tokens` nor its schedule is given, 5 tokens are drafted in every round.

    Raises:
        ConfigError: an argument does not go with the comparison.
        UnsupportedModelError: the target reads something else than token ids in the first place, as Whisper does; and
            see `generate`.
        UnsupportedGenerationError: see `generate`.
    """
    _check_arguments(model, assistant, generate_kwargs)
    options = {"verifier": "greedy", **generate_kwargs, "do_sample": False, "max_new_tokens": max_new_tokens}
    if (assistant is not None or options.get("drafter")) and "num_assistant_tokens_schedule" not in options:
        options.setdefault("num_assistant_tokens", DEFAULT_ASSISTANT_TOKENS)
    stats = options.pop("speculation_stats", None) or SpeculationStats()
    num_drafted = 0
    rows: list[ParityRow] = []
    exact: list[PreTrainedModel | None] = []  # made at the first difference
    for inputs in _calls(prompts, tokenizer, model.device):
        for difference in _differences(model, assistant, inputs, options, stats):
            if difference is not None and difference.is_choice and not exact:
                exact.append(exact_copy(model))
            rows.append(_row(len(rows), difference, model, exact))
        num_drafted += stats.num_verified
    return ParityReport(tuple(rows), str(model.dtype).removeprefix("torch."), num_drafted)


class _Difference(NamedTuple):
    """Where a row's texts part; `is_choice`: both had a token to choose, and plain decoding chose its best."""

    position: int
    is_choice: bool
    place: Parting


class _GapRecorder(LogitsProcessor):
    """Notes, step by step of a plain run, how far another text's tokens are from the best; changes nothing.

    Args:
        token_ids: [B, T] int64, the other text, with what the output holds before it.
    """

    def __init__(self, token_ids: Tensor):
        self.token_ids = token_ids
        self.prompt_len = 0  # columns of the output that were there before: with an encoder, the decoder's
        self.best_ids: list[Tensor] = []  # of [B]
        self.gaps: list[Tensor] = []  # of [B] float64

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See `LogitsProcessor`; `scores` are [B, V]."""
        column = input_ids.shape[1]
        if not self.gaps:
            self.prompt_len = column
        best = scores.max(-1)
        self.best_ids.append(best.indices)
        if column < self.token_ids.shape[1]:
            other = scores.gather(-1, self.token_ids[:, column, None])[:, 0]
            self.gaps.append(best.values.double() - other.double())
        else:
            self.gaps.append(torch.full_like(best.values, torch.inf, dtype=torch.float64))
        return scores


def _check_arguments(model: PreTrainedModel, assistant: object, kwargs: Mapping[str, Any]) -> None:
    if model.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"model must read input_ids in the first place, got {type(model).__name__}, which reads "
            f"{model.main_input_name}; compare generate() with assistant_model and without"
        )
    if assistant is None and all(kwargs.get(name) is None for name in ("prompt_lookup_num_tokens", "drafter")):
        raise ConfigError(
            "assistant must be a model where neither prompt_lookup_num_tokens nor drafter is set, got None: nothing "
            "would be drafted"
        )
    for config in (kwargs.get("generation_config"), model.generation_config):
        if getattr(config, "prompt_lookup_num_tokens", None) is not None:
            raise ConfigError(
                "prompt_lookup_num_tokens must be a keyword here, got it in a generation config, which plain decoding "
                "would read too; unset it there"
            )
    refused = sorted(name for name in _REFUSED if kwargs.get(name) is not None)
    if refused:
        raise ConfigError(
            f"check_parity's arguments must be without {', '.join(sorted(_REFUSED))}, got {', '.join(refused)}; "
            "leave them out"
        )
    if kwargs.get("do_sample"):
        raise ConfigError("do_sample must be False, for drawn texts differ anyway, got True; leave it out")
    verifier = kwargs.get("verifier")
    if verifier is not None and not is_lossless(SpeculationConfig(verifier=verifier)):
        raise ConfigError(f"verifier must be a lossless one, got {verifier!r}, whose texts may differ; leave it out")


def _calls(
    prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """The inputs of each `generate()` call."""
    several = [prompts] if isinstance(prompts, str | Tensor | Mapping) else list(prompts)
    texts = [prompt for prompt in several if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ConfigError("tokenizer must be given for prompts that are strings, got None; pass the target's")
    if tokenizer is not None and texts:
        batches = [texts] if tokenizer.pad_token is not None else [[text] for text in texts]
        for batch in batches:
            yield dict(tokenizer(batch, return_tensors="pt", padding=len(batch) > 1, padding_side="left").to(device))
    for prompt in several:
        if isinstance(prompt, Tensor):
            yield {"input_ids": (prompt if prompt.ndim == 2 else prompt[None]).to(device)}
        elif isinstance(prompt, Mapping):
            _check_mapping(prompt)
            yield {name: value.to(device) for name, value in prompt.items()}
        elif not isinstance(prompt, str):
            raise ConfigError(
                "prompts must be strings, tensors of token ids or mappings with input_ids, got "
                f"{type(prompt).__name__}; wrap lists of ids in torch.tensor"
            )


def _check_mapping(prompt: Mapping[str, Any]) -> None:
    if "input_ids" not in prompt:
        raise ConfigError(f"prompts that are mappings must hold input_ids, got {', '.join(sorted(prompt))}; add them")
    others = sorted(name for name, value in prompt.items() if not isinstance(value, Tensor))
    if others:
        raise ConfigError(f"prompts that are mappings must hold tensors, got others in {', '.join(others)}")


def _differences(
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    inputs: dict[str, Tensor],
    options: dict[str, Any],
    stats: SpeculationStats,
) -> Iterator[_Difference | None]:
    """Decode twice; for every row the first difference, or None. `stats` are those of the speculative call."""
    speculation = {"assistant_model": assistant, "speculation_stats": stats}
    ours: Any = generate(model, **{**options, **speculation, **inputs})
    recorder = _GapRecorder(ours)
    plain_options = {name: value for name, value in options.items() if name not in FIELD_NAMES} | inputs
    processors = LogitsProcessorList([*(options.get("logits_processor") or []), recorder])
    plain: Any = generate(model, **{**plain_options, "logits_processor": processors})
    prompt_len, block_len = recorder.prompt_len, max(stats.rounds_by_draft_len, default=0) + 1
    num_new, pad = max(plain.shape[1], ours.shape[1]) - prompt_len, _pad_token_id(model, options)
    for row in range(len(ours)):
        texts = [text[row, prompt_len:].tolist() for text in (plain, ours)]
        texts = [text + [pad] * (num_new - len(text)) for text in texts]
        position = next((place for place, (one, other) in enumerate(zip(*texts, strict=True)) if one != other), None)
        if position is None:
            yield None
            continue
        has_ended = [position >= text.shape[1] - prompt_len for text in (plain, ours)]
        is_choice = not any(has_ended) and int(recorder.best_ids[position][row]) == texts[0][position]
        gap = float(recorder.gaps[position][row]) if is_choice else torch.inf
        ids = texts[0][position], texts[1][position]
        place: Parting
        if _reads_text_alone(model, inputs, options):
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) != 0
            before = torch.cat([inputs["input_ids"][row][mask[row]], ours[row, prompt_len : prompt_len + position]])
            place = Place(before, *ids, gap, block_len, len(ours))
        else:
            before = plain[:, : prompt_len + position]
            fields = {**options, "assistant_model": assistant}
            place = Replay(plain_options, fields, before, row, position, *ids, gap, block_len)
        yield _Difference(position, is_choice, place)


def _reads_text_alone(model: PreTrainedModel, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> bool:
    """Whether forwards of a text are told all that the call was: no encoder's input, images or positions."""
    passed = {*inputs, *(name for name, value in options.items() if isinstance(value, Tensor))}
    return not model.config.is_encoder_decoder and passed <= {"input_ids", "attention_mask"}


def _pad_token_id(model: PreTrainedModel, options: Mapping[str, Any]) -> int:
    """What fills ended rows; -1, which no token is, where nothing does."""
    passed = [options, vars(options.get("generation_config") or model.generation_config)]
    for name in ("pad_token_id", "eos_token_id"):
        for fields in passed:
            value = fields.get(name)
            if value is not None:
                return int(value[0] if isinstance(value, list | tuple) else value)
    return -1


def _row(
    index: int, difference: _Difference | None, model: PreTrainedModel, exact: list[PreTrainedModel | None]
) -> ParityRow:
    if difference is None:
        return ParityRow(index)
    ids = difference.place.plain_id, difference.place.speculative_id
    if not difference.is_choice:
        return ParityRow(index, "bug", difference.position, *ids, reason="one of the texts had ended before")
    place = difference.place
    judged = judge(model, exact[0], place)
    return ParityRow(
        index,
        judged.verdict,
        difference.position,
        *ids,
        top_gap=judged.top_gap,
        exact_top_gap=judged.exact_top_gap,
        gap=place.gap,
        noise=judged.noise,
        bound=judged.bound,
        reason=judged.reason,
    )
