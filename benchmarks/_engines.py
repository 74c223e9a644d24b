"""Decoding methods for the benchmarks of `generate()`, with timings and checks."""

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
import transformers
from _harness import speedups
from _library import DEFAULT_SCHEDULE
from _subjects import Subject
from packaging.version import Version
from transformers import CompileConfig

from hf_speculate.tools.bench.decoding import Batch, Decoder, Run, measure, of_equal_texts
from hf_speculate.tools.bench.methods import OURS, PLAIN, TRANSFORMERS, Method
from hf_speculate.tools.bench.quality import TextCheck
from hf_speculate.tools.bench.results import spread

# The default top_k of 50 in transformers is turned off, because the user did not ask for it.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"temperature": 1.0, "top_k": 0},
    "sampling, top-p": {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
}
MODES = tuple(SAMPLING)
LOOKUP_TOKENS = 10
ASSISTS_COMPILED = Version(transformers.__version__) >= Version("5.24")
COUNTS = (
    "num_rounds",
    "num_batch_rounds",
    "num_drafted",
    "num_verified",
    "num_accepted",
    "num_emitted",
)
MAX_PASSES = 6  # maximum passes over all batches, to compile all shapes
STAGES = ("prefill_s", "draft_s", "score_s", "verify_s", "bookkeeping_s")


def ours(
    draft_len: int | None = None, verifier: str | None = None, is_compiled: bool = False
) -> Method:
    """Return the decoding method of this library.

    Args:
        draft_len: constant draft length.
            None for the default schedule.
        verifier: name of a verifier.
            None for the default one.
        is_compiled: whether to compile with a static cache.
    """
    schedule = {
        "num_assistant_tokens_schedule": DEFAULT_SCHEDULE if draft_len is None else "constant"
    }
    fields = schedule | ({} if draft_len is None else {"num_assistant_tokens": draft_len})
    name = f"ours, {DEFAULT_SCHEDULE if draft_len is None else f'K = {draft_len}'}"
    if verifier is not None:
        name, fields = f"{name}, {verifier}", fields | {"verifier": verifier}
    method = Method(name, OURS, fields, is_lossy=verifier == "typical")
    return compiled(method) if is_compiled else method


def assisted(draft_len: int | None = None, is_compiled: bool = False) -> Method:
    """Return assisted generation in transformers, with its defaults or a constant draft length.

    If compiled, the target runs with a static cache, which transformers accepts for one row since
    5.24. The draft runs eagerly.
    """
    fields = (
        {}
        if draft_len is None
        else {"num_assistant_tokens": draft_len, "num_assistant_tokens_schedule": "constant"}
    )
    method = Method(
        f"transformers, {'defaults' if draft_len is None else f'K = {draft_len}'}",
        TRANSFORMERS,
        fields,
    )
    return compiled(method) if is_compiled else method


def compiled(method: Method) -> Method:
    """Return the method with a static cache; the runner adds a compile config for its device."""
    return replace(
        method, name=f"{method.name}, compiled", options={"cache_implementation": "static"}
    )


def is_compiled(method: Method) -> bool:
    return "cache_implementation" in method.options


PLAIN_METHOD = Method("plain", PLAIN)
DEFAULT = ours()
PLAIN_COMPILED = compiled(PLAIN_METHOD)
LOOKUP = Method(
    f"prompt lookup {LOOKUP_TOKENS}", TRANSFORMERS, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
)


class Runner:
    """Decoder that runs all methods for a subject and mode.

    Args:
        subject: the models.
        mode: one of `MODES`.
        max_new_tokens: N.
        cache: `speculation_cache` for our methods.
    """

    def __init__(self, subject: Subject, mode: str, max_new_tokens: int, cache: str = "auto"):
        self.subject, self.mode, self.max_new_tokens, self.cache = (
            subject,
            mode,
            max_new_tokens,
            cache,
        )
        self.do_sample = mode != "greedy"
        arguments = {"max_new_tokens": max_new_tokens, **SAMPLING[mode]}
        self.decoder = Decoder(subject.target, {"assistant_model": subject.draft}, arguments)

    def __call__(
        self, method: Method, batch: Batch, seed: int = 0, max_new_tokens: int | None = None
    ) -> Run:
        """Decode a batch and wait for the device."""
        fields = (
            {"speculation_cache": self.cache, **method.fields}
            if method.engine == OURS
            else method.fields
        )
        options = dict(method.options)
        if is_compiled(method):
            options["compile_config"] = compile_config(self.subject.device)
        self.subject.clock.reset()
        as_asked = replace(method, fields=fields, options=options, do_sample=self.do_sample)
        return self.decoder(as_asked, batch, seed, max_new_tokens)

    def ran_compiled(self, method: Method, run: Run) -> bool:
        """Whether all rounds in a call of a compiled method ran compiled."""
        if run.stats is not None:
            return set(run.stats.compiled) == {"target", "draft"} and not run.stats.fallbacks
        # transformers sets the attribute.
        return getattr(self.decoder.target, "_compiled_call", None) is not None


def compile_config(device: torch.device) -> CompileConfig:
    """Return the default compile config of transformers on a GPU, and one without graphs on a CPU.

    transformers compiles on a CPU only on request.
    """
    config = CompileConfig() if device.type == "cuda" else CompileConfig(mode="default")
    config._compile_all_devices = True
    return config


@dataclass
class Timings:
    """Seconds and counts of all methods, by name.

    A batch counts if all exact greedy methods generated the same text. After a near-tie, a method
    may continue with a different text and different drafts, so the speeds are not comparable.
    `decode_s` excludes the first forward of the target, and `rounds_s` excludes everything before
    the first round.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    decode_s: dict[str, list[float]] = field(default_factory=dict)
    rounds_s: dict[str, list[float]] = field(default_factory=dict)
    # Forwards are part of `rounds_s` and are timed only while profiling.
    forward_s: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    # The medians of the batches are summed because counts are sums too.
    decode_sum_s: Counter[str] = field(default_factory=Counter)
    num_batches: int = 0  # batches with equal texts
    num_unequal: int = 0  # batches with different texts
    # Names of compiled methods that ran eagerly in at least one call.
    fell_back: set[str] = field(default_factory=set)

    def add(self, runner: Runner, methods: list[Method], batch: Batch, repeats: int) -> None:
        """Run the methods alternately, each `repeats` times."""
        # Each entry ends with the duration of the prefill and of all forwards, in seconds.
        steps: list[tuple[Method, Run, float, float]] = []

        def on_step(method: Method, run: Run) -> None:
            clock = runner.subject.clock
            steps.append((method, run, clock.prefill_s, clock.forward_s))
            if is_compiled(method) and not runner.ran_compiled(method, run):
                self.fell_back.add(method.name)

        measured = measure(methods, [batch], runner, repeats=repeats, is_warm=True, on_step=on_step)
        if measured.is_interrupted:
            raise KeyboardInterrupt
        if measured.left_out:
            raise SystemExit(f"methods of transformers failed: {measured.left_out}")
        if not runner.do_sample and not of_equal_texts(measured.runs, methods)[PLAIN_METHOD.name]:
            self.num_unequal += 1
            return
        for method, run, prefill_s, forward_s in steps:
            name = method.name
            self.seconds.setdefault(name, []).append(run.seconds)
            self.decode_s.setdefault(name, []).append(run.seconds - prefill_s)
            self.rounds_s.setdefault(name, []).append(run.seconds - run.first_token_s)
            self.forward_s.setdefault(name, []).append(forward_s)
            if run.stats is not None:
                counts = {key: getattr(run.stats, key) for key in (*COUNTS, *STAGES)}
                self.counts.setdefault(name, Counter()).update(counts)
        for method in methods:
            self.decode_sum_s[method.name] += median(self.decode_s[method.name][-repeats:])
        self.num_batches += 1

    def check_counted(self) -> None:
        """Raise SystemExit if no batch counts."""
        if not self.num_batches:
            raise SystemExit(
                f"texts must be equal in all exact methods, got {self.num_unequal} batches where "
                "they differ; measure "
                "in float32"
            )

    def plain_step_s(self, max_new_tokens: int) -> float:
        """Return the time per token of plain decoding after the first token."""
        self.check_counted()
        return self.decode_sum_s[PLAIN_METHOD.name] / self.num_batches / (max_new_tokens - 1)

    def summary(self, method: Method) -> dict[str, Any]:
        """Return the figures of a method that all benchmarks report."""
        self.check_counted()
        name, plain = method.name, PLAIN_METHOD.name
        output = {
            "method": name,
            "engine": method.engine,
            "num_assistant_tokens": method.num_assistant_tokens,
            "verifier": method.verifier or None,
            "seconds": spread(self.seconds[name]),
            "is_compiled": is_compiled(method),
            "fell_back": name in self.fell_back,
            "over_plain": speedups(self.seconds[plain], self.seconds[name]),
            "decode_over_plain": self.decode_sum_s[plain] / self.decode_sum_s[name],
            "num_batches": self.num_batches,
            "num_unequal": self.num_unequal,
        }
        if name in self.counts:
            output["counts"] = {key: self.counts[name][key] for key in (*COUNTS, *STAGES)}
        return output


def warm_up(runner: Runner, methods: list[Method], batch: Batch, num_tokens: int = 12) -> None:
    """Decode a few tokens with every method to allocate memory and compile code."""
    for method in methods:
        runner(method, batch, max_new_tokens=num_tokens)


def compile_all(runner: Runner, methods: list[Method], batches: list[Batch]) -> dict[str, float]:
    """Compile all shapes of the compiled methods; return how long each took, including caches.

    Each method decodes all batches until a pass takes more than half as long as the previous pass,
    because adaptive lengths vary. The fastest pass counts as decoding, not as compilation.
    """
    compile_s = {}
    if any(map(is_compiled, methods)):
        # Shapes compiled for other batch sizes would make the shapes for this batch size dynamic.
        torch.compiler.reset()
    for method in filter(is_compiled, methods):
        seconds: list[float] = []
        while len(seconds) < 2 or (seconds[-1] < seconds[-2] / 2 and len(seconds) < MAX_PASSES):
            begin = time.perf_counter()
            for batch in batches:
                runner(method, batch)
            seconds.append(time.perf_counter() - begin)
        compile_s[method.name] = sum(seconds) - len(seconds) * min(seconds)
    return compile_s


def check(
    runner: Runner, methods: list[Method], batch: Batch, max_new_tokens: int | None = None
) -> str:
    """Compare our methods, and compiled plain decoding, with plain decoding before they are timed.

    Greedy ids must be equal, up to near-ties; see `TextCheck`. In float32, sampled ids of `coupled`
    must equal those without a draft. In half precision, ties in noise plus logits would look like
    errors. The distributions of the other verifiers are tested elsewhere; here, the ids must be in
    range.

    Returns:
        The result in words.

    Raises:
        SystemExit: a check fails.
    """
    num_tokens = max_new_tokens or runner.max_new_tokens
    compare, num_equal, num_rows = TextCheck(runner.decoder), 0, 0
    vocab_size = runner.subject.target.config.vocab_size

    def checked(method: Method) -> Run:
        run = runner(method, batch, max_new_tokens=num_tokens)
        if any(
            len(ids) != num_tokens or not 0 <= min(ids) <= max(ids) < vocab_size
            for ids in run.texts
        ):
            raise SystemExit(f"{method.name}: ids out of range, or not {num_tokens} of them")
        return run

    for method in methods:
        if method.engine != OURS and not is_compiled(method):
            continue
        result = checked(method)
        if runner.do_sample and method.verifier == "coupled":
            plain = checked(
                Method("coupled, no draft", OURS, {"assistant_model": None, "verifier": "coupled"})
            ).texts
            equal = sum(
                token_ids == result_ids
                for token_ids, result_ids in zip(plain, result.texts, strict=True)
            )
            if equal < len(plain) and runner.subject.dtype == "float32":
                raise SystemExit(
                    f"{method.name}: {len(plain) - equal} rows differ from coupled sampling "
                    "without a draft"
                )
        elif runner.do_sample or method.is_lossy:
            continue
        else:
            compared = compare(method, [result], [checked(PLAIN_METHOD)])
            if compared.num_wrong:
                raise SystemExit(f"{method.name}: {compared}")
            equal = compared.num_equal
        num_rows, num_equal = num_rows + len(result.texts), num_equal + equal
    return f"{num_equal} of {num_rows} rows equal" if num_rows else "ids in range"


def faster_dtype(make: Any, dtypes: list[str], batch_size: int, num_tokens: int = 24) -> str:
    """Return the dtype with the fastest plain decoding.

    Args:
        make: returns the subject for a dtype.
        dtypes: dtypes to choose from.
        batch_size: B.
        num_tokens: number of tokens to decode.
    """
    seconds = {}
    for dtype in dtypes if len(dtypes) > 1 else []:
        subject = make(dtype)
        runner, batch, timings = (
            Runner(subject, "greedy", num_tokens),
            subject.batches(batch_size, batch_size)[0],
            Timings(),
        )
        warm_up(runner, [PLAIN_METHOD], batch)
        timings.add(runner, [PLAIN_METHOD], batch, 3)
        seconds[dtype] = min(timings.decode_s[PLAIN_METHOD.name])
    return min(seconds, key=seconds.__getitem__) if seconds else dtypes[0]
