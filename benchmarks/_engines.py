"""How each engine decodes a batch, how its runs are timed, and how its output is checked first."""

import copy
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from _harness import alternate, ratios, spread, wait
from _library import DEFAULT_SCHEDULE
from _subjects import Inputs, Subject
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

import hf_speculate

# transformers' own default of 50 for top_k is turned off: it would be a warper that nobody asked for.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "sampling, top-p": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.9},
}
LOOKUP_TOKENS = 10
# A greedy text may leave plain decoding's where its two largest logits are nearer than rounding: what a forward of
# several rows and one of a single row were seen to differ by at most, on logits up to about 20.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
COUNTS = ("num_rounds", "num_batch_rounds", "num_drafted", "num_verified", "num_accepted", "num_emitted")
MAX_PASSES = 6  # over all batches, to compile what a way meets
STAGES = ("prefill_s", "draft_s", "score_s", "verify_s", "bookkeeping_s")


class Way(NamedTuple):
    """One engine with its settings."""

    engine: str  # "plain", "ours", "assisted", "lookup"
    num_assistant_tokens: int | None = None  # None: the engine's own default
    verifier: str | None = None  # None: the lossless one
    is_compiled: bool = False  # over a static cache

    @property
    def name(self) -> str:
        return self._eager_name + (", compiled" if self.is_compiled else "")

    @property
    def _eager_name(self) -> str:
        num = self.num_assistant_tokens
        match self.engine:
            case "plain":
                return "plain"
            case "lookup":
                return f"prompt lookup {LOOKUP_TOKENS}"
            case "assisted":
                return f"transformers, {'defaults' if num is None else f'K = {num}'}"
        schedule = DEFAULT_SCHEDULE if num is None else f"K = {num}"
        return f"ours, {schedule}" + (f", {self.verifier}" if self.verifier else "")


PLAIN = Way("plain")
OURS = Way("ours")
PLAIN_COMPILED = Way("plain", is_compiled=True)


class Outcome(NamedTuple):
    """What one call gave."""

    sequences: Tensor  # [B, T]
    decode_s: float  # all but the target's first forward; what a draft takes to read the prompt counts on every side
    rounds_s: float  # after the target's first forward
    stats: hf_speculate.SpeculationStats


class Runner:
    """Decodes with any way: one subject, one mode.

    Args:
        subject: the models.
        mode: a key of `MODES`.
        max_new_tokens: N.
        cache: `speculation_cache` of ours.
    """

    def __init__(self, subject: Subject, mode: str, max_new_tokens: int, cache: str = "auto"):
        self.subject, self.mode, self.max_new_tokens, self.cache = subject, mode, max_new_tokens, cache
        self._drafts: dict[int | None, PreTrainedModel] = {}

    def run(self, way: Way, inputs: Inputs, seed: int = 0, **options: Any) -> Outcome:
        """Decode `inputs`; `options` go on to `generate()`."""
        subject, stats = self.subject, hf_speculate.SpeculationStats()
        options = {"max_new_tokens": self.max_new_tokens, **MODES[self.mode], **options}
        if way.is_compiled:
            options |= {"cache_implementation": "static", "compile_config": compile_config(subject.device)}
        torch.manual_seed(seed)
        subject.clock.reset()
        began = time.perf_counter()
        match way.engine:
            case "plain":
                output = subject.target.generate(**inputs, **options)
            case "ours":
                options.update(seed=seed, speculation_cache=self.cache, verifier=way.verifier, speculation_stats=stats)
                options.update(schedule_of(way))
                output = hf_speculate.generate(subject.target, **inputs, assistant_model=subject.draft, **options)
            case "assisted":
                options["assistant_model"] = self._assistant(way.num_assistant_tokens)
                output = _row_by_row(subject.target, inputs, options)
            case _:
                output = _row_by_row(subject.target, inputs, {**options, "prompt_lookup_num_tokens": LOOKUP_TOKENS})
        wait()
        ended, clock = time.perf_counter(), subject.clock
        return Outcome(output, ended - began - clock.prefill_s, ended - (clock.prefill_end or began), stats)

    def ran_compiled(self, way: Way, outcome: Outcome) -> bool:
        """Whether a compiled way's call really ran compiled, all of its rounds."""
        if way.engine == "ours":
            return set(outcome.stats.compiled) == {"target", "draft"} and not outcome.stats.fallbacks
        return getattr(self.subject.target, "_compiled_call", None) is not None  # what transformers compiled

    def _assistant(self, num_assistant_tokens: int | None) -> PreTrainedModel:
        """The draft's weights with a generation config of its own, into which transformers may write."""
        if num_assistant_tokens not in self._drafts:
            draft = copy.copy(self.subject.draft)
            draft.generation_config = copy.deepcopy(draft.generation_config)
            if num_assistant_tokens is not None:
                draft.generation_config.update(
                    num_assistant_tokens=num_assistant_tokens,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                )
            self._drafts[num_assistant_tokens] = draft
        return self._drafts[num_assistant_tokens]


def compile_config(device: torch.device) -> CompileConfig:
    """The choice of transformers on a GPU; on a CPU it compiles only when told to, and there are no graphs."""
    config = CompileConfig() if device.type == "cuda" else CompileConfig(mode="default")
    config._compile_all_devices = True
    return config


def schedule_of(way: Way) -> dict[str, Any]:
    """Every call names its schedule."""
    if way.num_assistant_tokens is None:
        return {"num_assistant_tokens_schedule": DEFAULT_SCHEDULE}
    return {"num_assistant_tokens": way.num_assistant_tokens, "num_assistant_tokens_schedule": "constant"}


def _row_by_row(target: PreTrainedModel, inputs: Inputs, options: dict[str, Any]) -> Tensor:
    """Loop over the rows: transformers' speculation takes one row; gives the last row's ids."""
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        row = ids[mask.bool()][None]
        output = target.generate(row, attention_mask=torch.ones_like(row), **options)
    return output


@dataclass
class Timings:
    """Seconds and counts of every way, over as many inputs as were added."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    decode_s: dict[str, list[float]] = field(default_factory=dict)
    rounds_s: dict[str, list[float]] = field(default_factory=dict)
    forward_s: dict[str, list[float]] = field(default_factory=dict)  # within rounds_s; only where profiled
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    decode_sum_s: Counter[str] = field(default_factory=Counter)  # of each input's median, as counts are sums too
    num_inputs: int = 0
    fell_back: set[str] = field(default_factory=set)  # compiled ways of which some call ran eagerly

    def add(self, runner: Runner, ways: list[Way], inputs: Inputs, repeats: int, description: str = "") -> None:
        """Run every way `repeats` times, in turn."""

        def timed(way: Way) -> None:
            outcome = runner.run(way, inputs)
            self.decode_s.setdefault(way.name, []).append(outcome.decode_s)
            self.rounds_s.setdefault(way.name, []).append(outcome.rounds_s)
            self.forward_s.setdefault(way.name, []).append(runner.subject.clock.forward_s)
            if way.is_compiled and not runner.ran_compiled(way, outcome):
                self.fell_back.add(way.name)
            if way.engine == "ours":
                counts = {name: getattr(outcome.stats, name) for name in (*COUNTS, *STAGES)}
                self.counts.setdefault(way.name, Counter()).update(counts)

        calls = {way.name: lambda way=way: timed(way) for way in ways}
        for name, values in alternate(calls, repeats, description).items():
            self.seconds.setdefault(name, []).extend(values)
            self.decode_sum_s[name] += median(self.decode_s[name][-repeats:])
        self.num_inputs += 1

    def plain_step_s(self, max_new_tokens: int) -> float:
        """Plain decoding's time per token after the first."""
        return self.decode_sum_s[PLAIN.name] / self.num_inputs / (max_new_tokens - 1)

    def summary(self, way: Way) -> dict[str, Any]:
        """What every benchmark reports of a way."""
        name, plain = way.name, PLAIN.name
        found: dict[str, Any] = {"way": name, "engine": way.engine, "num_assistant_tokens": way.num_assistant_tokens}
        found["verifier"], found["seconds"] = way.verifier, spread(self.seconds[name])
        found["is_compiled"], found["fell_back"] = way.is_compiled, name in self.fell_back
        found["over_plain"] = ratios(self.seconds[plain], self.seconds[name])
        found["decode_over_plain"] = self.decode_sum_s[plain] / self.decode_sum_s[name]
        if name in self.counts:
            found["counts"] = {key: self.counts[name][key] for key in (*COUNTS, *STAGES)}
        return found


def warm_up(runner: Runner, ways: list[Way], inputs: Inputs, num_tokens: int = 12) -> None:
    """Let everything allocate and compile."""
    for way in ways:
        runner.run(way, inputs, max_new_tokens=num_tokens)


def compile_all(runner: Runner, ways: list[Way], batches: list[Inputs]) -> dict[str, float]:
    """Compile every shape that compiled ways will meet; the seconds that it took by way, disk caches at work.

    Each way decodes all batches until a pass is no faster than half the one before: adaptive lengths vary by the clock.
    What the fastest pass took is decoding, and not counted.
    """
    compile_s = {}
    if any(way.is_compiled for way in ways):
        torch.compiler.reset()  # what other batch sizes compiled would make this one's sizes vary
    for way in ways:
        if not way.is_compiled:
            continue
        seconds: list[float] = []
        while len(seconds) < 2 or (seconds[-1] < seconds[-2] / 2 and len(seconds) < MAX_PASSES):
            begin = time.perf_counter()
            for inputs in batches:
                runner.run(way, inputs)
            seconds.append(time.perf_counter() - begin)
        compile_s[way.name] = sum(seconds) - len(seconds) * min(seconds)
    return compile_s


def check(runner: Runner, ways: list[Way], inputs: Inputs, **options: Any) -> str:
    """Hold ours to plain decoding before anything is timed; says what was found, stops the run where it fails.

    Greedy ids must be plain's, up to near-ties. Sampled ids of `coupled` must be those it gives without an assistant;
    of the other verifiers, whose laws are tested elsewhere, ids must be in range and as many. Plain decoding that runs
    compiled is held to the same.
    """
    options = {"max_new_tokens": runner.max_new_tokens, **options}
    num_equal = num_rows = 0
    for way in ways:
        if way.engine != "ours" and way != PLAIN_COMPILED:
            continue
        ours = runner.run(way, inputs, **options).sequences
        width = inputs["input_ids"].shape[1] + options["max_new_tokens"]
        is_in_range = bool(((ours >= 0) & (ours < runner.subject.target.config.vocab_size)).all())
        if ours.shape[1] != width or not is_in_range:
            raise SystemExit(f"{way.name}: ids out of range or of another length than {width}")
        is_coupled = MODES[runner.mode]["do_sample"] and way.verifier == "coupled"
        if is_coupled:
            plain = hf_speculate.generate(
                runner.subject.target, **inputs, **MODES[runner.mode], **options, verifier="coupled", seed=0
            )
        elif MODES[runner.mode]["do_sample"] or way.verifier not in (None, "greedy"):
            continue
        else:
            plain = runner.run(PLAIN, inputs, **options).sequences
        num_rows += len(ours)
        num_equal += sum(_rows_agree(runner, way, plain, ours, inputs))
    return f"{num_equal} of {num_rows} rows equal" if num_rows else "ids in range"


def _rows_agree(runner: Runner, way: Way, plain: Tensor, ours: Tensor, inputs: Inputs) -> list[bool]:
    """Whether each row is plain's; stops where one is not, unless its first difference is at a near-tie."""
    equal = (plain == ours).all(1).tolist()
    if all(equal) or (way.verifier == "coupled" and runner.subject.dtype != "float32"):
        return equal  # in half precision the race of sampled tokens has ties that logits alone do not show
    begin = inputs["input_ids"].shape[1]
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": plain.shape[1] - begin}
    logits: Any = runner.run(PLAIN, inputs, **options, do_sample=False).sequences  # the output object
    for row, is_equal in enumerate(equal):
        if is_equal:
            continue
        place = int((plain[row] != ours[row]).nonzero()[0])
        top = logits.logits[place - begin][row].float().topk(2).values
        gap = float(top[0] - top[1])
        if way.verifier == "coupled" or gap > NEAR_TIE[runner.subject.dtype]:
            raise SystemExit(f"{way.name}: row {row} leaves plain decoding at column {place}, logit gap {gap:.3g}")
    return equal


def faster_dtype(make: Any, dtypes: list[str], batch_size: int, num_tokens: int = 24) -> str:
    """The dtype in which plain decoding is faster.

    Args:
        make: gives the subject of a dtype.
        dtypes: to choose among.
        batch_size: B.
        num_tokens: decoded to tell.
    """
    seconds = {}
    for dtype in dtypes if len(dtypes) > 1 else []:
        subject = make(dtype)
        runner, inputs = Runner(subject, "greedy", num_tokens), subject.inputs(batch_size, batch_size)[0]
        warm_up(runner, [PLAIN], inputs)
        seconds[dtype] = min(runner.run(PLAIN, inputs).decode_s for _ in range(3))
    return min(seconds, key=seconds.__getitem__) if seconds else dtypes[0]
