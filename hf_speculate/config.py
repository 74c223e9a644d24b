"""Settings for speculative decoding: fields, checks and derived values."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import (
    Check,
    function,
    instance,
    integer,
    is_int,
    is_list,
    one_of,
    real,
)
from hf_speculate.kernels.noise import row_seeds
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import RoundReport

MAX_ASSISTANT_TOKENS = 128
DEFAULT_ASSISTANT_TOKENS = 5  # default for all schedules except "adaptive"
DEFAULT_MAX_ASSISTANT_TOKENS = 10  # default for "adaptive"
# Default for an offloaded target with one row. Its weights are loaded for every forward, so more
# tokens take no longer.
OFFLOADED_MAX_ASSISTANT_TOKENS = 32

# This number is odd and irregular, so the seeds of later runs differ from the seeds of other rows.
_RUN_FACTOR = 0x3C6EF372FE94F82B
# Sampling verifiers that are greedy at temperature 0.
_GREEDY_AT_ZERO = ("rejection", "block", "coupled")
_LARGEST = sys.float_info.max


def _is_draft_len(value: Any) -> bool:
    if is_int(value):
        return bool(0 <= value <= MAX_ASSISTANT_TOKENS)
    return (
        is_list(value, lambda num: is_int(num) and 0 <= num <= MAX_ASSISTANT_TOKENS)
        and len(value) > 0
    )


def _is_span(value: Any) -> bool:
    return (
        is_list(value, lambda token_id: is_int(token_id) and token_id >= 0)
        and len(value) == 2
        and value[0] != value[1]
    )


_CHECKS: dict[str, Check] = {
    "typical_correction": one_of("argmax", "sample"),
    "draft_sampling": one_of("argmax", "sample"),
    "num_assistant_tokens_schedule": one_of(
        "adaptive", "constant", "heuristic", aliases=("heuristic_transient",)
    ),
    "verifier_backend": one_of("auto", "torch", "triton"),
    "speculation_cache": one_of("auto", "dynamic", "preallocated"),
    "speculation_graphs": one_of("auto", "on", "off"),
    "speculation_hooks": one_of("check", "trusted", "plain"),
    "posterior_threshold": real("in (0, 1)", lambda x: 0 < x < 1),
    "posterior_alpha": real("> 0 and finite", lambda x: 0 < x <= _LARGEST),
    "entropy_epsilon": real(">= 0 and finite", lambda x: 0 <= x <= _LARGEST),
    "assistant_confidence_threshold": real("in [0, 1]", lambda x: 0 <= x <= 1),
    "num_assistant_tokens": Check(
        f"be in 0..{MAX_ASSISTANT_TOKENS}, or a list of one number in 0..{MAX_ASSISTANT_TOKENS} "
        "per output row",
        _is_draft_len,
    ),
    "prompt_lookup_num_tokens": integer(
        f"in 1..{MAX_ASSISTANT_TOKENS}", 1, MAX_ASSISTANT_TOKENS, "leave it out to copy none"
    ),
    "grammar_draft": Check(
        "be True or False", lambda value: isinstance(value, bool), "leave it out for the default"
    ),
    "max_matching_ngram_size": integer(
        "at least 1", 1, torch.inf, "leave it out for the longest match"
    ),
    "relax_only_inside": Check(
        "be two different token ids, one that opens a span and one that closes it",
        _is_span,
        "pass those of <think> and </think>, for example",
    ),
    "seed": Check(
        "be an int or one int per output row",
        lambda value: is_int(value) or is_list(value, is_int),
        "leave it out for a random one",
    ),
    "generator": instance("torch.Generator", torch.Generator, "pass seed= for an int"),
    "speculation_stats": Check(
        "be a SpeculationStats, or be called with one when a call has ended",
        lambda value: isinstance(value, SpeculationStats) or callable(value),
        "pass hf_speculate.SpeculationStats()",
        shows_type=True,
    ),
    "candidate_generator": Check(
        "be a CandidateGenerator or make one",
        lambda value: isinstance(value, CandidateGenerator) or callable(value),
        "pass an instance, a class or a functools.partial of one",
        shows_type=True,
    ),
    "drafter": function(
        "make a Drafter when called with a DrafterSetup",
        "pass a class, a function or a functools.partial",
    ),
    "speculation_callback": function(
        "be called after every round", "pass a function of one RoundReport"
    ),
}


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings for speculative decoding in one call to `generate()`.

    `None` means that a field is not set.

    Args:
        verifier: name of a registered verifier.
        posterior_threshold: epsilon of typical acceptance, in (0, 1).
        posterior_alpha: delta of typical acceptance, > 0.
        typical_correction: "argmax" or "sample", how typical acceptance chooses the token after the
            accepted tokens. Custom lossy verifiers may also use this field.
        relax_only_inside: token ids (open, close) that enclose spans, such as the thoughts of a
            thinking model. A lossy verifier applies only inside the spans, and a lossless verifier
            applies elsewhere. `None` applies the verifier everywhere.
        draft_sampling: "sample" or "argmax", how the draft chooses tokens with `do_sample=True`.
        num_assistant_tokens: number of tokens to draft per round, 0..128; the maximum number with
            "adaptive". `None` means 10 with "adaptive" (32 for a draft model and one row of an
            offloaded target) and 5 otherwise. With 0, nothing is drafted, not even by prompt
            lookup. A list of one number per output row, 0..128, limits the drafts of each row in
            every round, including prompt lookup; a row with 0 uses plain decoding.
        num_assistant_tokens_schedule: how the draft length changes between rounds. `None` means
            "constant" if `num_assistant_tokens` is set, and "adaptive" otherwise.
        assistant_confidence_threshold: in [0, 1]; a row stops drafting after a token with a lower
            draft probability.
        prompt_lookup_num_tokens: maximum number of tokens to copy per round from earlier text,
            1..128. With an assistant, each row uses the source with the higher throughput estimate.
            `None` disables prompt lookup.
        grammar_draft: whether to first draft the text forced by a logits processor with
            `forced_text()`; requires `tokenizer`. `None` drafts it if a processor offers it and the
            call has a draft source. `True` requires no other source.
        max_matching_ngram_size: maximum number of last tokens to search for in earlier text, >= 1.
            `None` and larger numbers mean 64.
        suffix_store: a `SuffixStore` with texts from earlier calls, which prompt lookup also
            searches. The outputs of this call are added to it.
        draft_state: a `DraftState` with the draft model's KV cache from earlier calls. This call
            replaces its content.
        seed: an int, or one int per output row.
        generator: generator that draws the seed if no seed is given.
        speculation_stats: object that is filled in during the call, or a function that is called
            with the statistics of each call at its end.
        speculation_callback: function that is called with a `RoundReport` after every round.
        candidate_generator: a `CandidateGenerator` from transformers to use instead of a draft
            model, or a function that makes one from keywords. It chooses the draft length, up to
            `num_assistant_tokens`.
        drafter: function that makes a `Drafter` from the call's `DrafterSetup`, once per call.
        entropy_epsilon: advanced; added inside the logarithm of the entropy, >= 0.
        verifier_backend: advanced; "auto", "torch" or "triton", the kernels for verification and
            sampling. "auto" uses Triton on a GPU if it agrees with torch.
        speculation_cache: advanced; "auto", "dynamic" or "preallocated", the kind of KV cache.
            "auto" preallocates if the model supports it and no cache was passed.
        speculation_graphs: advanced; "auto", "on" or "off", whether draft steps and verifications
            on a CUDA device run from CUDA graphs of the eager forwards. "auto" uses graphs if a
            trial on the model finds them correct and faster, and in long calls even graphs of code
            compiled by Inductor. It uses none for models with forward hooks, or for KV buffers of
            more than an eighth of the device's memory.
        speculation_hooks: "check", "trusted" or "plain", for a target that has forward hooks, or
            forwards or modules from unknown packages. "check" compares verifications with plain
            decoding once, and falls back to plain decoding if they differ. "trusted" drafts
            without a comparison. "plain" uses plain decoding without a comparison.

    Raises:
        ConfigError: a value is out of range or is not one of the allowed values.
    """

    verifier: str | None = None
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    entropy_epsilon: float = 0.0
    typical_correction: str | None = None
    relax_only_inside: Sequence[int] | None = None
    draft_sampling: str = "sample"
    num_assistant_tokens: int | Sequence[int] | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    prompt_lookup_num_tokens: int | None = None
    grammar_draft: bool | None = None
    max_matching_ngram_size: int | None = None
    suffix_store: Any = None
    draft_state: Any = None
    verifier_backend: str = "auto"
    speculation_cache: str = "auto"
    speculation_graphs: str = "auto"
    speculation_hooks: str = "check"
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | None = None
    speculation_stats: SpeculationStats | Callable[[SpeculationStats], object] | None = None
    speculation_callback: Callable[[RoundReport], object] | None = None
    candidate_generator: CandidateGenerator | Callable[..., CandidateGenerator] | None = None
    drafter: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _CHECKS and not (value is None and entry.default is None):
                _CHECKS[entry.name](entry.name, value)
        if self.suffix_store is not None and self.prompt_lookup_num_tokens is None:
            raise ConfigError(
                "suffix_store must come with prompt_lookup_num_tokens, got none; set it to 10, for "
                "example"
            )
        if self.seed is not None and self.generator is not None:
            raise ConfigError(
                "seed and generator must not both be set, got both; a generator only draws the seed"
            )
        constant_for = {
            "a number of num_assistant_tokens per row": isinstance(
                self.num_assistant_tokens, Sequence
            ),
            "candidate_generator": self.candidate_generator is not None,
        }
        for constant, is_set in constant_for.items():
            if is_set and self.num_assistant_tokens_schedule not in (None, "constant"):
                raise ConfigError(
                    f"num_assistant_tokens_schedule must be 'constant' with {constant}, got "
                    f"{self.num_assistant_tokens_schedule!r}; leave it out, or leave {constant} out"
                )

    @property
    def schedule(self) -> str:
        """Name of the schedule; "generator" if a candidate generator chooses the draft length."""
        if self.candidate_generator is not None:
            return "generator"
        # In transformers, this name resets the draft length for every call, as is always done here.
        if self.num_assistant_tokens_schedule == "heuristic_transient":
            return "heuristic"
        return self.num_assistant_tokens_schedule or (
            "adaptive" if self.num_assistant_tokens is None else "constant"
        )

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft length K of a round."""
        return max(self.max_model_tokens, self.prompt_lookup_num_tokens or 0)

    @property
    def max_model_tokens(self) -> int:
        """Maximum number of tokens that a model drafts per round."""
        if self.schedule == "heuristic":
            return MAX_ASSISTANT_TOKENS
        default = {"adaptive": DEFAULT_MAX_ASSISTANT_TOKENS, "constant": DEFAULT_ASSISTANT_TOKENS}
        return self._max_assistant_tokens or default.get(self.schedule, MAX_ASSISTANT_TOKENS)

    @property
    def first_tokens(self) -> int:
        """Draft length of the first round."""
        return self._max_assistant_tokens or DEFAULT_ASSISTANT_TOKENS

    @property
    def _max_assistant_tokens(self) -> int | None:
        """`num_assistant_tokens`, or the largest number if it is a list.

        The maximum of a list is at least 1, because `draft_limits` handles rows with 0.
        """
        limit = self.num_assistant_tokens
        if limit is None:
            return None
        return max(1, *limit) if isinstance(limit, Sequence) else max(1, limit)

    def for_run(self, index: int) -> "SpeculationConfig":
        """Return the settings for one run of a call that decodes in several runs.

        Run 0 uses the call's seeds; each later run derives its own seeds from them.
        """
        if self.seed is None or index == 0:
            return self
        seeds = self.seed if isinstance(self.seed, Sequence) else [self.seed]
        later = [int(row_seeds(int(value) + index * _RUN_FACTOR, 2)[1]) for value in seeds]
        return replace(self, seed=later if isinstance(self.seed, Sequence) else later[0])

    def row_seeds(self, batch_size: int, do_sample: bool) -> Tensor:
        """Return the seeds [B] int64 for the output rows.

        torch's generator is used only if noise is needed.
        """
        seed = self.seed
        needs_noise = do_sample or not (
            self.verifier == "greedy" or self.typical_correction == "argmax"
        )
        if seed is None and not needs_noise:
            seed = 0
        if seed is None:
            device = "cpu" if self.generator is None else self.generator.device
            seed = int(torch.randint(2**62, (), generator=self.generator, device=device))
        if not isinstance(seed, Sequence):
            return row_seeds(int(seed), batch_size)
        _check_one_per_row(
            "seed", seed, batch_size, "pass one int, from which every row gets its own"
        )
        return torch.cat([row_seeds(int(value), 1) for value in seed])

    def draft_limits(self, batch_size: int) -> list[int]:
        """Return the maximum draft lengths [B] for the output rows."""
        limits = self.num_assistant_tokens
        if not isinstance(limits, Sequence):
            return [0 if limits == 0 else MAX_ASSISTANT_TOKENS] * batch_size
        _check_one_per_row("num_assistant_tokens", limits, batch_size, "pass one int for all rows")
        return [int(limit) for limit in limits]

    def resolve(self, do_sample: bool) -> "SpeculationConfig":
        """Return the settings with the defaults for `do_sample` filled in."""
        if do_sample and self.verifier == "greedy":
            raise ConfigError(
                "verifier must be a sampling one with do_sample=True, got 'greedy'; "
                "set do_sample=False, or leave verifier out"
            )
        verifier = "rejection" if self.verifier is None else self.verifier
        if not do_sample and verifier in _GREEDY_AT_ZERO:
            verifier = "greedy"
        correction = self.typical_correction or ("sample" if do_sample else "argmax")
        return replace(self, verifier=verifier, typical_correction=correction)


def _check_one_per_row(name: str, values: Sequence[int], batch_size: int, hint: str) -> None:
    if len(values) != batch_size:
        raise ConfigError(
            f"{name} must be an int or one int per output row, {batch_size} of them, got "
            f"{len(values)}; {hint}"
        )


FIELD_NAMES = tuple(field.name for field in fields(SpeculationConfig))
_OBJECTS = {"candidate_generator", "draft_state", "drafter", "generator", "speculation_callback"}
_OBJECTS |= {"speculation_stats", "suffix_store"}
# Fields with plain values, which files and command lines can set.
PLAIN_NAMES = tuple(sorted(set(FIELD_NAMES) - _OBJECTS))
