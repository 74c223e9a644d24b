"""Measure an 8B target with a 1B draft and attention on a CUDA device, and run the `gpu` tests.

    python benchmarks/gpu.py --out FOLDER            # seven minutes at most
    python benchmarks/gpu.py --out FOLDER --dry-run  # tiny models on the CPU, no figures

The most important parts run first: the tests; decoding with one and eight rows, eagerly and from
graphs, with a profile of the rounds; attention alone; compiled decoding. Each part runs in a
process forked from this one. The main process imports torch but never touches the device, so a part
that crashes or times out does not affect the others. `FOLDER/<part>.json` is written after every
cell, and `FOLDER/tables.md` at the end.

An oracle fixes the texts so that 0.8 of the drafted tokens are accepted. Tokens per second are
given for the whole call and for the call without the prefill. The share of the bound is the time to
read the weights for all forwards of a call, at the bandwidth of a copy, divided by the time after
the prefill.

The exit status is 1 if a check failed or a part did not finish. The script needs no network, and
the library need not be installed.
"""

import argparse
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# With this setting, torch detects a device without initialising the driver, which forked processes
# must not share.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import transformers
from _gpu_page import tables
from _harness import ROOT, copy_rate, provenance
from _subjects import Oracle, random_pair
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.models.folded_attention import (
    folded_attention,
    folding,
    is_chosen,
)
from hf_speculate.models.foreign_code import KNOWN_PACKAGES
from tests.support.tiny import make_model, noisy_copy

KNOWN_PACKAGES.update(("_subjects", "__main__"))  # the oracle's hooks treat tokens independently

ACCEPTANCE, REPEATS, LIMIT_S = 0.8, 2, 420.0
DRY_FACTOR = 4.0  # factor for the time limit of dry runs
COMPILED = {"cache_implementation": "static"}
GRAPHS = {"speculation_graphs": "on"}  # models with hooks do not run from graphs by default
PLAIN, PLAIN_COMPILED = "plain", "plain, compiled"
LEARNING_CALLS = 2  # number of calls with the default schedule before timing
CONSTANT = {"num_assistant_tokens_schedule": "constant"}
OURS: dict[str, dict[str, Any]] = {
    "ours, default": {},
    "ours, K = 5": {"num_assistant_tokens": 5, **CONSTANT},
    "ours, K = 3": {"num_assistant_tokens": 3, **CONSTANT},
}
METHODS = {PLAIN: {}} | {f"{name}, graphs": options | GRAPHS for name, options in OURS.items()}
COMPILED_METHODS = {PLAIN_COMPILED: COMPILED}
COMPILED_METHODS |= {f"{name}, compiled": options | COMPILED for name, options in OURS.items()}
COMPILE_NEEDS_S = 60.0
NUM_HEADS, NUM_KV_HEADS, WIDTH = 32, 8, 128
# These patterns group kernels in the profile by name; all others count as small kernels.
KINDS = {
    "attention": re.compile(r"flash|fmha|attention|attend|sdpa", re.I),
    "weights": re.compile(r"gemm|gemv|cutlass|cublas|nvjet|wgmma|splitk|triton_tem|_mm", re.I),
}
SMALL, IDLE = "small kernels", "idle"
BARE = ROOT / "benchmarks" / "bare"  # hides packages that a GPU machine may lack
_OUTCOME = re.compile(r"^\[gw\d+\] \[ *\d+%\] (\w+) ", re.M)


class Sizes(NamedTuple):
    """Sizes of prompts, texts and states."""

    device: torch.device = torch.device("cuda", 0)
    prompt_len: int = 512
    num_new: int = 256
    batch_sizes: tuple[int, ...] = (1, 8)
    num_keys: tuple[int, ...] = (576, 2048, 8192, 32_768)
    query_lens: tuple[int, ...] = (1, 6, 16)
    is_dry: bool = False


DRY = Sizes(torch.device("cpu"), 32, 6, (1, 2), (64,), (1, 6), True)


class Report:
    """JSON file of a part.

    Args:
        path: path of the file.
        sizes: sizes for the run.
        end_s: time on the monotonic clock after which no further cell begins.
        commit: revision to record on a machine without git.
    """

    def __init__(self, path: Path, sizes: Sizes, end_s: float, commit: str):
        self.path, self.sizes, self.end_s = path, sizes, end_s
        environment = provenance() | ({"commit": commit} if commit else {})
        lists: dict[str, list[Any]] = {"cells": [], "checks": [], "left_out": []}
        self.content: dict[str, Any] = {"environment": environment, "part": path.stem, **lists}
        self.content |= {"is_dry_run": sizes.is_dry, "is_finished": False}

    @property
    def remaining_s(self) -> float:
        return self.end_s - time.monotonic()

    def attempt(self, name: str, run: Callable[[], dict[str, Any]], needs_s: float = 3.0) -> None:
        """Run a cell and keep its values, unless too little time is left.

        An error in the cell counts as a failed check.
        """
        if self.remaining_s < needs_s:
            self.content["left_out"].append(name)
        else:
            try:
                self.content["cells"].append({"name": name, **run()})
            except Exception as error:  # noqa: BLE001, later cells still run
                traceback.print_exc()
                self.check(f"{name}: runs", False, f"{type(error).__name__}: {error}"[:500])
                free(self.sizes)
        self.write()

    def check(self, name: str, is_right: bool, seen: Any) -> None:
        self.content["checks"].append({"name": name, "is_right": is_right, "seen": seen})
        if not is_right:
            print(f"WRONG: {name}: {seen}", flush=True)

    def write(self) -> None:
        """Replace the file atomically."""
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.content, indent=1, default=str) + "\n", encoding="utf-8")
        scratch.replace(self.path)


def free(sizes: Sizes) -> None:
    """Free the memory of a failed cell, and raise if the device is lost."""
    gc.collect()
    if not sizes.is_dry:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def seconds_of(run: Callable[[], object], sizes: Sizes) -> float:
    """Time a run until the device has finished, in seconds."""
    if not sizes.is_dry:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if not sizes.is_dry:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


class Setting:
    """Pair of models with an oracle.

    It also holds the memory bandwidth of the device.
    """

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        if sizes.is_dry:
            target = make_model("llama", dtype=torch.float32)
            self.target, self.draft = target, noisy_copy(target, 0.1)
        else:
            self.target, self.draft = random_pair("llama-8b", "bfloat16", sizes.device)
        self.oracle = Oracle(self.target, self.draft, ACCEPTANCE)
        self.bytes_per_s = copy_rate(sizes.device, 3)

    def inputs(self, batch_size: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(batch_size)
        ids = torch.randint(64, (batch_size, self.sizes.prompt_len), generator=generator)
        return {name: ids_.to(self.sizes.device) for name, ids_ in prompts(ids).items()}

    def decode(
        self, options: dict[str, Any], is_plain: bool, batch_size: int, stats: Any, **others: Any
    ) -> Tensor:
        """Decode and return token ids [B, T + N]."""
        arguments = {
            **self.inputs(batch_size),
            **options,
            "max_new_tokens": self.sizes.num_new,
            **others,
        }
        if is_plain:
            return self.target.generate(**arguments)
        return hf_speculate.generate(
            self.target, assistant_model=self.draft, speculation_stats=stats, **arguments
        )

    def prompt_s(self, batch_size: int, is_plain: bool) -> float:
        """Return the duration of the prefill in seconds."""
        inputs, models = (
            self.inputs(batch_size),
            [self.target] if is_plain else [self.target, self.draft],
        )
        seconds = []
        for _ in range(3):
            with torch.no_grad():
                runs = [
                    lambda model=model: model(**inputs, use_cache=True, logits_to_keep=1)
                    for model in models
                ]
                seconds.append(sum(seconds_of(run, self.sizes) for run in runs))
        return min(seconds)

    def weights_s(self, stats: Any, is_plain: bool) -> float:
        """Return how long all forwards after the prefill take to read the weights, in seconds."""
        num_forwards, num_steps = self.sizes.num_new - 1, 0
        if not is_plain:
            num_forwards = sum(stats.rounds_by_draft_len.values())
            num_steps = sum(
                num_tokens * num_rounds
                for num_tokens, num_rounds in stats.rounds_by_draft_len.items()
            )
        num_bytes = num_forwards * read_bytes(self.target) + num_steps * read_bytes(self.draft)
        return num_bytes / self.bytes_per_s


def prompts(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def read_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that a forward reads.

    The embedding table counts only if the output matrix shares it.
    """
    tables = {id(model.get_input_embeddings().weight)} - {id(model.get_output_embeddings().weight)}
    return sum(weight.nbytes for weight in model.parameters() if id(weight) not in tables)


def measure(
    report: Report, setting: Setting, method: str, options: dict[str, Any], batch_size: int
) -> dict[str, Any]:
    """Measure a method with a first call that is checked, calls to adapt, and timed calls."""
    sizes, name = setting.sizes, f"{method}, B={batch_size}"
    is_plain, stats = method.startswith(PLAIN), hf_speculate.SpeculationStats()
    if not sizes.is_dry:
        torch.cuda.reset_peak_memory_stats()
    texts: list[Tensor] = []
    run = lambda: texts.append(setting.decode(options, is_plain, batch_size, stats))  # noqa: E731
    first_s = seconds_of(run, sizes)
    expected = setting.oracle.text(setting.inputs(batch_size)["input_ids"], sizes.num_new)
    is_right = torch.equal(texts[0].cpu(), expected)
    report.check(
        f"{name}: the text is the oracle's", is_right, int((texts[0].cpu() != expected).sum())
    )
    ran = stats.compiled if "compiled" in method else stats.graphed
    if not (is_plain or sizes.is_dry):
        report.check(
            f"{name}: no forward runs eagerly", ran == ["target", "draft"], stats.fallbacks
        )
    for _ in range(LEARNING_CALLS if "default" in method else 0):
        run()
    timed = []
    for _ in range(REPEATS):
        call_s = seconds_of(run, sizes)
        timed.append((call_s, setting.weights_s(stats, is_plain)))
    prompt_s, num_tokens = setting.prompt_s(batch_size, is_plain), batch_size * sizes.num_new
    after_s = [max(call_s - prompt_s, 1e-9) for call_s, _ in timed]
    values = {
        "what": "end to end",
        "method": method,
        "batch_size": batch_size,
        "is_right": is_right,
        "tokens_per_s": sorted(num_tokens / call_s for call_s, _ in timed),
        "tokens_per_s_after_prompt": sorted(
            (num_tokens - batch_size) / spent_s for spent_s in after_s
        ),
        "share_of_bound": median(
            weights_s / spent_s for (_, weights_s), spent_s in zip(timed, after_s, strict=True)
        ),
        "first_s": first_s,
        "prompt_s": prompt_s,
        "peak_gb": 0.0 if sizes.is_dry else torch.cuda.max_memory_allocated() / 1e9,
        "num_rounds": stats.num_batch_rounds,
        "acceptance_rate": stats.acceptance_rate if stats.num_drafted else None,
        "rounds_by_draft_len": stats.rounds_by_draft_len,
        "fallbacks": stats.fallbacks,
    }
    whole, after = median(values["tokens_per_s"]), median(values["tokens_per_s_after_prompt"])
    rates = f"{whole:7.0f} tokens/s, after the prompt {after:7.0f}"
    print(
        f"{name:32} {rates}, {values['share_of_bound']:4.0%} of the bound, first call "
        f"{first_s:.1f} s",
        flush=True,
    )
    return values


def take_apart(setting: Setting, options: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Return the device time of a round after the prefill in milliseconds, by kind of kernel."""
    sizes, stats = setting.sizes, hf_speculate.SpeculationStats()
    if sizes.is_dry:
        setting.decode(options, False, batch_size, stats)
        return {"what": "round", "batch_size": batch_size, "ms": {SMALL: 0.0, IDLE: 0.0}}
    profiler, begun = profile(activities=[ProfilerActivity.CUDA]), list[Any]()

    def begin(report: Any) -> None:
        if not begun:
            torch.cuda.synchronize()
            profiler.start()
            begun.append(report)

    setting.decode(options, False, batch_size, stats)  # captures the graphs
    setting.decode(options, False, batch_size, stats, speculation_callback=begin)
    torch.cuda.synchronize()
    profiler.stop()
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]
    spent_ns, counts = Counter[str](), Counter[str]()
    busy_ns = last_ns = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        kind = next((kind for kind, names in KINDS.items() if names.search(event.name())), SMALL)
        end_ns = event.start_ns() + event.duration_ns()
        spent_ns[kind] += event.duration_ns()
        counts[event.name()[:90]] += event.duration_ns()
        busy_ns += max(end_ns - max(event.start_ns(), last_ns), 0)
        last_ns = max(last_ns, end_ns)
    spent_ns[IDLE] = last_ns - min(event.start_ns() for event in events) - busy_ns
    num_rounds = max(stats.num_batch_rounds - 1, 1)
    ms = {kind: spent / 1e6 / num_rounds for kind, spent in spent_ns.items()}
    print(
        " ".join(f"{kind} {spent:.2f} ms," for kind, spent in ms.items()),
        f"B={batch_size}",
        flush=True,
    )
    kernels = [(name, spent / 1e6) for name, spent in counts.most_common(24)]
    values = {"what": "round", "batch_size": batch_size, "num_rounds": num_rounds, "ms": ms}
    return values | {"kernels_a_round": len(events) / num_rounds, "kernels_ms": kernels}


def decode_all(report: Report) -> None:
    """Time plain decoding and hf_speculate with graphs, and profile the rounds of hf_speculate."""
    setting = Setting(report.sizes)
    report.content["gb_per_s"] = setting.bytes_per_s / 1e9
    for batch_size in report.sizes.batch_sizes:
        for method, options in METHODS.items():
            cell = f"{method}, B={batch_size}"
            run = partial(measure, report, setting, method, options, batch_size)
            report.attempt(cell, run)
    for batch_size in report.sizes.batch_sizes:
        run = partial(take_apart, setting, METHODS["ours, K = 5, graphs"], batch_size)
        report.attempt(f"a round, B={batch_size}", run)


def decode_compiled(report: Report) -> None:
    """Time the compiled methods; each batch size is compiled separately."""
    setting = Setting(report.sizes)
    needs_s = 0.0 if report.sizes.is_dry else COMPILE_NEEDS_S
    for batch_size in report.sizes.batch_sizes:
        for method, options in COMPILED_METHODS.items():
            cell = f"{method}, B={batch_size}"
            run = partial(measure, report, setting, method, options, batch_size)
            report.attempt(cell, run, needs_s)


def attention(report: Report) -> None:
    """Time attention of a few queries over many keys, from a graph.

    It compares our kernel with a mask with the backends in torch.
    """
    sizes = report.sizes
    is_chosen([sizes.device])
    report.content["gb_per_s"] = bytes_per_s = copy_rate(sizes.device, 3)
    for num_keys in sizes.num_keys:
        for batch_size in sizes.batch_sizes:
            for num_query in sizes.query_lens:
                shape = batch_size, num_query, num_keys
                run = partial(attend, sizes, *shape, bytes_per_s)
                report.attempt(f"attention {shape}", run)


def attend(
    sizes: Sizes, batch_size: int, num_query: int, num_keys: int, bytes_per_s: float
) -> dict[str, Any]:
    """Return the microseconds for the attention of one layer."""
    dtype = torch.float32 if sizes.is_dry else torch.bfloat16
    query = torch.randn(batch_size, NUM_HEADS, num_query, WIDTH, device=sizes.device, dtype=dtype)
    states = [
        torch.randn(batch_size, NUM_KV_HEADS, num_keys, WIDTH, device=sizes.device, dtype=dtype)
        for _ in "kv"
    ]
    positions = torch.arange(num_keys - num_query, num_keys, device=sizes.device)[:, None]
    is_hidden = torch.arange(num_keys, device=sizes.device) > positions  # [Q, T]
    mask = torch.zeros(is_hidden.shape, device=sizes.device, dtype=dtype).masked_fill_(
        is_hidden, -torch.inf
    )
    mask = mask.expand(batch_size, 1, -1, -1)
    module, groups = nn.Module(), NUM_HEADS // NUM_KV_HEADS
    module.num_key_value_groups = groups
    repeated_states = [state.repeat_interleave(groups, 1) for state in states]

    def ours() -> Tensor:
        with folding():
            return folded_attention(module, query, *states, mask)[0]

    def torch_backend(backend: SDPBackend, mask: Tensor | None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel([SDPBackend.MATH if sizes.is_dry else backend]):
                return scaled_dot_product_attention(query, *repeated_states, attn_mask=mask)

        return run

    runs = {
        "ours": ours,
        "memory-efficient, masked": torch_backend(SDPBackend.EFFICIENT_ATTENTION, mask),
        "flash, no mask": torch_backend(SDPBackend.FLASH_ATTENTION, None),
    }
    us = {name: 1e6 * graphed_s(run, sizes) for name, run in runs.items()}
    bound_us = 1e6 * 2 * states[0].nbytes / bytes_per_s
    shown = ", ".join(f"{name} {spent:.1f} us" for name, spent in us.items())
    print(
        f"B={batch_size} Q={num_query} T={num_keys}: {shown}, bound {bound_us:.1f} us", flush=True
    )
    values = {
        "what": "attention",
        "batch_size": batch_size,
        "num_query": num_query,
        "num_keys": num_keys,
    }
    return values | {"us": us, "bound_us": bound_us}


def graphed_s(run: Callable[[], Tensor], sizes: Sizes, times: int = 20) -> float:
    """Return the duration of one run in seconds, averaged over several launches in a graph."""
    if sizes.is_dry:
        return seconds_of(run, sizes)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    graph.replay()
    return min(seconds_of(graph.replay, sizes) for _ in range(3)) / times


def tests(report: Report) -> None:
    """Run the tests marked `gpu` from their own files; other files import more packages."""
    report.attempt("tests marked gpu", lambda: run_tests(report))


def run_tests(report: Report) -> dict[str, Any]:
    """Run tests and count outcomes; a late run is stopped, and its finished tests count."""
    is_dry = report.sizes.is_dry
    texts = {path: path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = [str(path.relative_to(ROOT)) for path, text in texts.items() if "mark.gpu" in text]
    workers = min(8, os.cpu_count() or 1)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-m",
        "gpu",
        "-n",
        str(workers),
        "--dist",
        "worksteal",
    ]
    command += ["-p", "no:cacheprovider", "-p", "_instant_failures", *files]
    folders = [str(BARE)] * is_dry + [
        str(ROOT / "benchmarks"),
        str(ROOT),
        os.environ.get("PYTHONPATH", ""),
    ]
    command += ["-p", "no:hypothesispytest"] * is_dry  # hypothesis is hidden in dry runs
    path = report.path.with_suffix(".log")
    with path.open("w", encoding="utf-8") as log, suppress(subprocess.TimeoutExpired):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(folders)}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=max(report.remaining_s - 3.0, 1.0),
            **streams,
        )
    output = path.read_text(encoding="utf-8")
    outcomes = Counter(_OUTCOME.findall(output))
    is_right = (
        outcomes["SKIPPED" if is_dry else "PASSED"] > 0
        and not outcomes["FAILED"] + outcomes["ERROR"]
    )
    report.check(
        "tests marked gpu: none fails", is_right, output[-4000:] if not is_right else dict(outcomes)
    )
    print(f"tests marked gpu: {dict(outcomes)}", flush=True)
    return {"what": "tests", "outcomes": outcomes}


class Part(NamedTuple):
    """A part and its share of the time."""

    run: Callable[[Report], None]
    share: float


PARTS = {
    "tests": Part(tests, 0.35),
    "decoding": Part(decode_all, 0.5),
    "attention": Part(attention, 0.1),
    "compiled": Part(decode_compiled, 1.0),
}


def run_part(name: str, args: argparse.Namespace, end_s: float) -> int:
    """Run a part in this process, and return 1 if a check failed."""
    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit(
            "gpu.py needs a CUDA device, found none; pass --dry-run for tiny models on the CPU"
        )
    torch.manual_seed(0)
    report = Report(args.out / f"{name}.json", DRY if args.dry_run else Sizes(), end_s, args.commit)
    begin = time.monotonic()
    PARTS[name].run(report)
    report.content |= {"is_finished": True, "seconds": time.monotonic() - begin}
    report.write()
    return int(not all(check["is_right"] for check in report.content["checks"]))


def fork_part(name: str, args: argparse.Namespace, end_s: float) -> bool:
    """Run a part in a forked process, and return whether it succeeded.

    The process is killed a little after `end_s`.
    """
    print(f"== {name}: at most {end_s - time.monotonic():.0f} s", flush=True)
    process_id = os.fork()
    if not process_id:
        status = 1
        try:
            os.setsid()  # a new session, so that all its children can be killed with it
            status = run_part(name, args, end_s)
        except BaseException:  # noqa: BLE001, printed
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # A failed device or remaining compiler processes may block a normal exit.
        os._exit(status)
    done, status = 0, 0
    while not done and time.monotonic() < end_s + 5.0:
        done, status = os.waitpid(process_id, os.WNOHANG)
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)
    if not done:
        os.waitpid(process_id, 0)
        print(f"{name}: killed when its time was up", flush=True)
    return bool(done) and status == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="parts to run, with all the time",
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts together")
    parser.add_argument(
        "--commit", default="", help="revision to name in the results, where git is not at hand"
    )
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    limit_s = args.limit_s * (DRY_FACTOR if args.dry_run else 1.0)
    end_s = time.monotonic() + limit_s
    passed = []
    for name in [name for name in PARTS if name in args.only]:
        share = PARTS[name].share if len(args.only) > 1 else 1.0
        passed.append(fork_part(name, args, min(end_s, time.monotonic() + share * limit_s)))
    result_paths = [path for name in PARTS if (path := args.out / f"{name}.json").exists()]
    lines = tables(
        {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in result_paths}
    )
    (args.out / "tables.md").write_text("\n".join(lines).strip() + "\n", encoding="utf-8")
    print("\n".join(lines), flush=True)
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
