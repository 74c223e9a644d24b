"""Classify the first difference between two greedy sequences as a near-tie or an error.

The order of summation in a kernel depends on the shape of the forward, and so do the last bits of
the logits. Hence two tokens with nearly equal logits may swap ranks. This noise is small compared
with the logits and shrinks with a wider dtype. A gap within the noise measured at the position is a
near-tie; a larger gap is an error.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_speculate.compat import CACHE_NAME
from hf_speculate.engine.step_weights import step_weights
from hf_speculate.generation.defaults import plain as without_drafts
from hf_speculate.generation.generate import generate

_MIN_ULPS = 4  # units in the last place: two logits, each rounded twice
_MAX_ULPS = 64  # largest noise accepted without confirmation in float64
_NOISE_MARGIN = 2.0  # the noise is a single sample, and each of the two logits has its own
# relative, in float64, since many models compute norms and softmax in float32 even there
_EXACT_TOLERANCE = 1e-4
_EXACT_BYTES = 2**31  # largest copy in float64
_SOURCES = ("assistant_model", "drafter", "prompt_lookup_num_tokens", "max_matching_ngram_size")


@dataclass(frozen=True)
class ParityRow:
    """The comparison of the two outputs for one prompt.

    All fields except `index` and `verdict` describe the first difference, and are empty without
    one.
    """

    index: int = 0  #: index of the prompt, over all calls
    verdict: str = "equal"  #: "equal", "tie" or "bug"
    position: int | None = None  #: number of new tokens before the difference
    plain_id: int | None = None  #: plain decoding's token
    speculative_id: int | None = None  #: speculative decoding's token
    #: the target's largest logit minus the second largest, in its own dtype
    top_gap: float | None = None
    exact_top_gap: float | None = None  #: the same in float64, if it was computed
    #: score of the plain token minus that of the other token, after all logits processors
    gap: float | None = None
    #: change of the two logits between forwards over one or several rows, and one or K+1 tokens
    noise: float | None = None
    bound: float | None = None  #: the largest gap that rounding explains
    reason: str = ""  #: reason for the verdict

    def __str__(self) -> str:
        if self.verdict == "equal":
            return f"row {self.index}: equal"
        numbers = {
            "gap": self.gap,
            "bound": self.bound,
            "noise": self.noise,
            "top gap": self.top_gap,
        }
        numbers["top gap in float64"] = self.exact_top_gap
        details = "".join(
            f", {name} {value:.3g}" for name, value in numbers.items() if value is not None
        )
        ids = f"plain {self.plain_id}, speculative {self.speculative_id}"
        place = f"row {self.index}, position {self.position}"
        return f"{place}: {self.verdict}, {ids}{details}; {self.reason}"


class _LogitNoise(NamedTuple):
    """Noise of the logits in one dtype, see `ParityRow`."""

    top_gap: float
    noise: float
    magnitude: float  # magnitude of the largest finite logit


def _noise_in(logits: Tensor, chosen: tuple[int, int]) -> _LogitNoise:
    """Compare the first row of logits [N, V] float64 with the rows from other forwards."""
    at_chosen = logits[:, list(chosen)]  # [N, 2]
    noise = (at_chosen[0] - at_chosen[1:]).abs().max()
    top = logits[0].topk(2).values
    return _LogitNoise(
        float(top[0] - top[1]), float(noise), float(logits[0][logits[0].isfinite()].abs().max())
    )


class DifferenceCheck:
    """Check of a row's first difference.

    It decides whether rounding explains the difference between the plain and the speculative
    sequence.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    @cached_property
    def _exact(self) -> PreTrainedModel | None:
        """The model in float64: itself or a copy.

        None for a large, quantised or distributed model.
        """
        model = self.model
        if model.dtype == torch.float64:
            return model
        num_bytes = 8 * sum(parameter.numel() for parameter in model.parameters())
        is_plain = not step_weights(model).is_quantised and not hasattr(model, "hf_device_map")
        if num_bytes > _EXACT_BYTES or not is_plain or model.device.type not in ("cpu", "cuda"):
            return None
        return copy.deepcopy(model).to(torch.float64)  # type: ignore[arg-type,no-any-return]

    def __call__(
        self,
        chosen: tuple[int, int],
        gap: float,
        position: int,
        logits_of: Callable[[PreTrainedModel], Tensor],
    ) -> ParityRow:
        """Classify two different tokens at the same position in a row.

        Args:
            chosen: the token ids from the plain and the speculative run.
            gap: score of the plain token minus the other token's, in the plain run.
            position: number of new tokens before the difference.
            logits_of: runs a model and returns logits [N, V] float64. The first row comes from a
                forward over one token of one row.
        """
        exactly = None if self._exact is None else _noise_in(logits_of(self._exact), chosen)
        measured = _noise_in(logits_of(self.model), chosen)
        is_confirmed = exactly is not None and exactly.noise <= _EXACT_TOLERANCE * exactly.magnitude
        # scores are float32 at best
        eps = max(torch.finfo(dtype).eps for dtype in (self.model.dtype, torch.float32))
        ulp = eps * measured.magnitude
        # Large noise only counts as rounding if float64 confirms it.
        noise = measured.noise if is_confirmed else min(measured.noise, _MAX_ULPS * ulp)
        bound = max(_MIN_ULPS * ulp, _NOISE_MARGIN * noise)
        verdict, reason = "tie", "the gap is within rounding"
        if exactly is not None and not is_confirmed:
            verdict = "bug"
            reason = (
                "in float64 too, a forward over several tokens gives other logits than one over one"
            )
        elif not gap <= bound:  # NaN is not a tie
            verdict, reason = "bug", "the gap is larger than rounding explains"
        return ParityRow(
            verdict=verdict,
            position=position,
            plain_id=chosen[0],
            speculative_id=chosen[1],
            top_gap=measured.top_gap,
            exact_top_gap=None if exactly is None else exactly.top_gap,
            gap=gap,
            noise=measured.noise,
            bound=bound,
            reason=reason,
        )


class GapRecorder(LogitsProcessor):
    """Recorder of score gaps in a plain run.

    At each step, it records the best score minus the score of the token in `token_ids` [B, T]
    int64.
    """

    def __init__(self, token_ids: Tensor):
        self.token_ids = token_ids
        self.best_ids: list[Tensor] = []  # by step, each [B]
        self.gaps: list[Tensor] = []  # by step, each [B] float64

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = scores.max(-1)  # over [B, V]
        self.best_ids.append(best.indices)
        column = input_ids.shape[1]
        gaps = torch.full_like(best.values, torch.inf, dtype=torch.float64)
        if column < self.token_ids.shape[1]:
            gaps = (
                best.values.double()
                - scores.gather(-1, self.token_ids[:, column, None])[:, 0].double()
            )
        self.gaps.append(gaps)
        return scores


@torch.no_grad()
def logits_after_text(
    model: PreTrainedModel, *, token_ids: Tensor, block_len: int, num_rows: int
) -> Tensor:
    """Compute the logits after a text with three forwards of different shapes.

    Args:
        model: a decoder.
        token_ids: [T] int64, the text.
        block_len: number of tokens in the last forward, draft tokens plus one.
        num_rows: batch size of the second and third forwards.

    Returns:
        Logits [3, V] float64, from forwards over one token of one row, one token of `num_rows`
        rows, and `block_len` tokens of `num_rows` rows.
    """
    ids = token_ids[None].to(model.device)  # [1, T]
    forwards = (1, 1), (num_rows, 1), (num_rows, block_len)
    return torch.stack(
        [_last_logits(model, ids.expand(rows, -1), num_tokens) for rows, num_tokens in forwards]
    )


def _last_logits(model: PreTrainedModel, token_ids: Tensor, block_len: int) -> Tensor:
    """Return the first row's last logits [V] float64 after `token_ids` [B, T].

    The last `block_len` tokens are read in one forward, on the cache of the others.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    options = {CACHE_NAME: cache, "use_cache": True} | keep_logits(model, 1)
    num_before = max(token_ids.shape[1] - block_len, 0)
    if num_before:
        model(input_ids=token_ids[:, :num_before], **options)
    logits: Tensor = model(input_ids=token_ids[:, num_before:], **options).logits[0, -1].double()
    return logits


def keep_logits(model: PreTrainedModel, num: int) -> dict[str, Any]:
    """Return the arguments with which a forward computes only the last `num` logits.

    The result is empty for models without `logits_to_keep`.
    """
    return (
        {"logits_to_keep": num}
        if "logits_to_keep" in inspect.signature(model.forward).parameters
        else {}
    )


def logits_in_call(
    model: PreTrainedModel,
    *,
    options: Mapping[str, Any],
    speculation: Mapping[str, Any],
    token_ids: Tensor,
    row: int,
    position: int,
    block_len: int,
) -> Tensor:
    """Compute the logits at one position in a plain and in a speculative call of `generate()`.

    Args:
        model: any target, for example with an encoder or image inputs.
        options: arguments of both calls, such as encoder inputs or images.
        speculation: further arguments of the speculative call.
        token_ids: [B, T] int64, the tokens to force in both calls.
        row: index of the row.
        position: number of new tokens before the logits.
        block_len: number of tokens in a verification forward, draft tokens plus one.

    Returns:
        Logits [2, V] float64.
    """
    options = dict(options)
    if model.dtype == torch.float64:  # pixels and other float inputs
        reals = {
            name: option
            for name, option in options.items()
            if isinstance(option, Tensor) and option.is_floating_point()
        }
        options |= {name: option.double() for name, option in reals.items()}
    processors = LogitsProcessorList(
        [*(options.get("logits_processor") or []), _ForcedTokens(token_ids)]
    )
    options |= {
        "logits_processor": processors,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    drafting = {name: speculation[name] for name in _SOURCES if name in speculation}
    drafting |= {"verifier": "greedy", "num_assistant_tokens": max(block_len - 1, 1)}

    def logits(num_tokens: int, **more: Any) -> Tensor:
        output: Any = generate(
            model, **{**options, "max_new_tokens": position + num_tokens, **more}
        )
        top_logits: Tensor = output.logits[position][row].double()
        return top_logits  # [V]

    with without_drafts(model):
        plain_logits = logits(1)
    return torch.stack([plain_logits, logits(block_len, **drafting)])


class _ForcedTokens(LogitsProcessor):
    """Logits processor that forces given tokens.

    It is not registered as row-wise, so each call gets the scores of all rows, like `token_ids` [B,
    T] int64.
    """

    def __init__(self, token_ids: Tensor):
        self.token_ids = token_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        column = input_ids.shape[1]
        if column >= self.token_ids.shape[1]:
            return scores  # [B, V]
        return torch.full_like(scores, -torch.inf).scatter(1, self.token_ids[:, column, None], 0.0)
