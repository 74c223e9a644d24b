"""What a call asked of speculation: the fields, where they were set, whether they can hold."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.draft.state import DraftState
from hf_speculate.draft.suffix_store import SuffixStore
from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import check_callable, check_count, check_real, check_span, is_int
from hf_speculate.stats import SpeculationStats
from hf_speculate.triton_kernels.noise import row_seeds
from hf_speculate.types import RoundReport

MAX_ASSISTANT_TOKENS = 128
DEFAULT_ASSISTANT_TOKENS = 5  # of the schedules that start from a number
DEFAULT_MAX_ASSISTANT_TOKENS = 10  # of the adaptive one

_CHOICES = {
    "typical_correction": ("argmax", "sample"),
    "draft_sampling": ("argmax", "sample"),
    "num_assistant_tokens_schedule": ("adaptive", "constant", "heuristic", "heuristic_transient"),
    "verifier_backend": ("auto", "torch", "triton"),
    "speculation_cache": ("auto", "dynamic", "preallocated"),
}
_RUN_FACTOR = 0x3C6EF372FE94F82B  # odd, without structure: apart from what parts the rows
_GREEDY_AT_ZERO = ("rejection", "block", "coupled")  # verifiers of sampling that are greedy at temperature 0
_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class SpeculationConfig:
    """The speculative settings of one `generate()` call. `None` means that nobody set the field.

    Args:
        verifier: name of a registered verifier.
        posterior_threshold: typical acceptance's epsilon, in (0, 1).
        posterior_alpha: typical acceptance's delta, > 0.
        entropy_epsilon: added inside the logarithm of the entropy, >= 0.
        typical_correction: "argmax" or "sample", the token emitted at typical acceptance's first refusal; registered
            rules that are lossy may follow it too.
        relax_only_inside: ids (open, close) of the tokens around spans, thinking say; a lossy verifier decides there
            only, and the lossless one everywhere else. `None`: it decides everywhere.
        draft_sampling: "sample" or "argmax", how the draft proposes under `do_sample=True`.
        num_assistant_tokens: tokens drafted a round, 1..128; with "adaptive" the most of them. `None` is 10 there and
            5 elsewhere.
        num_assistant_tokens_schedule: how that number moves from round to round; `None` is "constant" where the number
            is set, "adaptive" where it is not.
        assistant_confidence_threshold: a row stops drafting after a token of lower draft probability, in [0, 1].
        prompt_lookup_num_tokens: tokens copied a round at most, 1..128, from where the text's end stood before; with
            an assistant, each row copies or asks it, whichever promises more. `None`: nothing is copied.
        max_matching_ngram_size: tokens of the text's end that are matched at most, >= 1; `None` is 64, which is also
            the most.
        suffix_store: texts of earlier calls to copy from too; this call's outputs are added to it.
        draft_state: what the draft model has read in earlier calls; this call's text takes its place.
        verifier_backend: "auto", "torch" or "triton", of the kernels that verify and draw; "auto" is Triton on a GPU.
        speculation_cache: "auto", "dynamic" or "preallocated", where key-value states are kept; "auto" preallocates
            where the model allows it and the cache is not the user's own.
        seed: an int, or one int per output row.
        generator: draws the seed where none is given.
        speculation_stats: filled in during the call.
        speculation_callback: called with a `RoundReport` after every round.
        candidate_generator: a transformers `CandidateGenerator` that drafts in place of a model, or what makes one
            from keywords; it decides how many tokens it drafts, up to `num_assistant_tokens`.
        drafter: makes a `Drafter` from the call's `DrafterRequest`, once for every decoding.

    Raises:
        ConfigError: a value is out of its range or not among the choices.
    """

    verifier: str | None = None
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    entropy_epsilon: float = 0.0
    typical_correction: str | None = None
    relax_only_inside: Sequence[int] | None = None
    draft_sampling: str = "sample"
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    suffix_store: SuffixStore | None = None
    draft_state: DraftState | None = None
    verifier_backend: str = "auto"
    speculation_cache: str = "auto"
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | None = None
    speculation_stats: SpeculationStats | None = None
    speculation_callback: Callable[[RoundReport], object] | None = None
    candidate_generator: CandidateGenerator | Callable[..., CandidateGenerator] | None = None
    drafter: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(
                    f"{name} must be one of {', '.join(choices)}, got {value!r}; leave it out for the default"
                )
        check_real("posterior_threshold", self.posterior_threshold, "in (0, 1)", lambda x: 0 < x < 1)
        check_real("posterior_alpha", self.posterior_alpha, "> 0 and finite", lambda x: 0 < x <= _LARGEST)
        check_real("entropy_epsilon", self.entropy_epsilon, ">= 0 and finite", lambda x: 0 <= x <= _LARGEST)
        if self.assistant_confidence_threshold is not None:
            check_real(
                "assistant_confidence_threshold",
                self.assistant_confidence_threshold,
                "in [0, 1]",
                lambda x: 0 <= x <= 1,
            )
        hint = "leave assistant_model out to decode without speculation"
        check_count("num_assistant_tokens", self.num_assistant_tokens, MAX_ASSISTANT_TOKENS, hint)
        self._check_lookup()
        self._check_randomness()
        self._check_candidate_generator()
        check_span("relax_only_inside", self.relax_only_inside)
        hint = "pass a class, a function or a functools.partial"
        check_callable("drafter", self.drafter, "make a Drafter when called with a DrafterRequest", hint)
        hint = "pass a function of one RoundReport"
        check_callable("speculation_callback", self.speculation_callback, "be called after every round", hint)

    def _check_lookup(self) -> None:
        num, most, store = self.prompt_lookup_num_tokens, self.max_matching_ngram_size, self.suffix_store
        check_count("prompt_lookup_num_tokens", num, MAX_ASSISTANT_TOKENS, "leave it out to copy none")
        if most is not None and not (is_int(most) and most >= 1):
            raise ConfigError(
                f"max_matching_ngram_size must be at least 1, got {most!r}; leave it out for the longest match"
            )
        if store is not None and not isinstance(store, SuffixStore):
            raise ConfigError(
                f"suffix_store must be a SuffixStore, got {type(store).__name__}; pass hf_speculate.SuffixStore()"
            )
        if store is not None and num is None:
            raise ConfigError(
                "suffix_store must come with prompt_lookup_num_tokens, got none; set prompt_lookup_num_tokens=10, say"
            )

        if self.draft_state is not None and not isinstance(self.draft_state, DraftState):
            raise ConfigError(
                f"draft_state must be a DraftState, got {type(self.draft_state).__name__}; "
                "pass hf_speculate.DraftState()"
            )

    def _check_randomness(self) -> None:
        seed = self.seed
        is_seed = seed is None or is_int(seed)
        if not is_seed and not (isinstance(seed, Sequence) and not isinstance(seed, str) and all(map(is_int, seed))):
            raise ConfigError(
                f"seed must be an int or one int per output row, got {seed!r}; leave it out for a drawn one"
            )
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise ConfigError(
                f"generator must be a torch.Generator, got {type(self.generator).__name__}; pass seed= for an int"
            )
        if seed is not None and self.generator is not None:
            raise ConfigError("seed and generator must not both be set, got both; a generator only draws the seed")
        if self.speculation_stats is not None and not isinstance(self.speculation_stats, SpeculationStats):
            raise ConfigError(
                f"speculation_stats must be a SpeculationStats, got {type(self.speculation_stats).__name__}; "
                "pass hf_speculate.SpeculationStats()"
            )

    def _check_candidate_generator(self) -> None:
        generator = self.candidate_generator
        if generator is None:
            return
        if not isinstance(generator, CandidateGenerator) and not callable(generator):
            raise ConfigError(
                f"candidate_generator must be a CandidateGenerator or make one, got {type(generator).__name__}; "
                "pass an instance, a class or a functools.partial of one"
            )
        if self.num_assistant_tokens_schedule not in (None, "constant"):
            raise ConfigError(
                "num_assistant_tokens_schedule must be 'constant' with candidate_generator, got "
                f"{self.num_assistant_tokens_schedule!r}; the generator decides how many tokens it drafts"
            )

    @property
    def schedule(self) -> str:
        """The schedule's name: a number of tokens alone means exactly that number, nothing means "adaptive"."""
        if self.candidate_generator is not None:
            return "generator"
        return self.num_assistant_tokens_schedule or ("adaptive" if self.num_assistant_tokens is None else "constant")

    @property
    def max_draft_tokens(self) -> int:
        """The largest K that the schedule may ask for."""
        return max(self.max_model_tokens, self.prompt_lookup_num_tokens or 0)

    @property
    def max_model_tokens(self) -> int:
        """The most tokens that a draft model is asked for."""
        match self.schedule:
            case "adaptive":
                return self.num_assistant_tokens or DEFAULT_MAX_ASSISTANT_TOKENS
            case "constant":
                return self.num_assistant_tokens or DEFAULT_ASSISTANT_TOKENS
            case "generator":
                return self.num_assistant_tokens or MAX_ASSISTANT_TOKENS
            case _:
                return MAX_ASSISTANT_TOKENS

    def for_lookup_alone(self) -> "SpeculationConfig":
        """The same settings where nothing but copies is drafted: `prompt_lookup_num_tokens` is the most of them."""
        return replace(
            self, num_assistant_tokens=self.prompt_lookup_num_tokens, num_assistant_tokens_schedule=self.schedule
        )

    def for_run(self, index: int) -> "SpeculationConfig":
        """The settings of one run among several of a call: each draws with seeds of its own.

        Args:
            index: 0 for the first run, which has the seeds that were asked for.
        """
        if self.seed is None or index == 0:
            return self
        seeds = self.seed if isinstance(self.seed, Sequence) else [self.seed]
        later = [int(row_seeds(int(value) + index * _RUN_FACTOR, 2)[1]) for value in seeds]
        return replace(self, seed=later if isinstance(self.seed, Sequence) else later[0])

    def row_seeds(self, batch_size: int, do_sample: bool) -> Tensor:
        """[B] int64; torch's generator is left alone where nothing is drawn.

        Args:
            batch_size: B, of the output.
            do_sample: whether the call samples.

        Raises:
            ConfigError: there is not one seed per row.
        """
        seed = self.seed
        needs_noise = do_sample or not (self.verifier == "greedy" or self.typical_correction == "argmax")
        if seed is None and not needs_noise:
            seed = 0
        if seed is None:
            device = "cpu" if self.generator is None else self.generator.device
            seed = int(torch.randint(2**62, (), generator=self.generator, device=device))
        if not isinstance(seed, Sequence):
            return row_seeds(int(seed), batch_size)
        if len(seed) != batch_size:
            raise ConfigError(
                f"seed must be an int or one int per output row, {batch_size} of them, got {len(seed)}; "
                "pass one int, from which every row gets its own"
            )
        return torch.cat([row_seeds(int(value), 1) for value in seed])

    def resolve(self, do_sample: bool) -> "SpeculationConfig":
        """The same settings with what depends on `do_sample` filled in.

        Raises:
            ConfigError: the verifier is greedy and the call samples.
        """
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


# A field that is settled keeps its companion out of weaker sources.
_SHUTS_OUT = {"num_assistant_tokens": "num_assistant_tokens_schedule", "seed": "generator", "generator": "seed"}
FIELD_NAMES = tuple(field.name for field in fields(SpeculationConfig))
_OBJECTS = {
    "candidate_generator",
    "draft_state",
    "drafter",
    "generator",
    "speculation_callback",
    "speculation_stats",
    "suffix_store",
}
PLAIN_NAMES = tuple(sorted(set(FIELD_NAMES) - _OBJECTS))  # fields that a file or a command line can set


def read_config(sources: Iterable[Mapping[str, Any]]) -> SpeculationConfig:
    """Settle every field by the first source that sets it.

    A schedule that stands in a weaker source than `num_assistant_tokens` does not count: who asks for K tokens
    gets K.

    Args:
        sources: mappings of the fields that were set, the strongest first.

    Raises:
        ConfigError: as `SpeculationConfig`.
    """
    settled: dict[str, Any] = {}
    for source in sources:
        shut_out = {other for name, other in _SHUTS_OUT.items() if name in settled}
        for name in FIELD_NAMES:
            if name in source and name not in settled and name not in shut_out:
                settled[name] = source[name]
    unset = [name for name, value in settled.items() if value is None]
    for name in unset:  # an explicit None keeps weaker sources out, then means the default
        del settled[name]
    return SpeculationConfig(**settled)


def fields_of(config: object) -> dict[str, Any]:
    """The fields that a `GenerationConfig` sets; `None` counts as not set."""
    values = {name: getattr(config, name, None) for name in FIELD_NAMES}
    return {name: value for name, value in values.items() if value is not None}
