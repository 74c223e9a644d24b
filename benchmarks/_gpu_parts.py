"""The parts of `on_gpu.py`."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from _gpu_device import Device, Models
from _harness import ROOT, copy_rate
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import hf_speculate
from hf_speculate.models.attention_backends import additive_mask, attend_masked, chooses_backend
from hf_speculate.models.folded_attention import folded_attention, folding, register_folded_attention
from hf_speculate.triton_kernels import (
    NoiseKeys,
    Stream,
    sample,
    split_key_attention,
    verify_greedy,
    verify_rejection,
)

K = 5
SHAPES = tuple(itertools.product((1, 8), (1, K + 1, 96)))  # B and query tokens of attention
NUM_HEADS, NUM_KV_HEADS, WIDTH, NUM_KEYS = 32, 8, 128, 2048
MANY_KEYS = (512, 1024, 2048, 4096, 8192, 16384)  # of verifications
ATTENTION_TOLERANCE = 2e-2  # of outputs of about 1 in bfloat16, whose step is 2^-8 there
# How far below the largest logit of another attention backend an emitted token may lie: two steps of bfloat16 at 16.
MAX_GAP = 0.25
# Our launches in a round of K = 5, at most: the tests count operators, of which some launch more than one kernel.
MOST_LAUNCHES = {("model", 1): 30, ("model", 8): 45, ("lookup", 1): 30, ("lookup", 8): 45}
TEST_RUNS = {"kernels": ["tests/triton_kernels", "-m", "not slow"], "marked gpu": ["tests", "-m", "gpu"]}
VOCAB_SIZES, BATCH_SIZES = (32_000, 128_256, 151_936), (1, 8, 32, 128)
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9, "seed": 1}
CONSTANT: dict[str, Any] = {"num_assistant_tokens": K, "num_assistant_tokens_schedule": "constant"}


def environment(report: Any, device: Device) -> None:
    """Part 1: attention against the math backend, the copy rate, and the tests that need a GPU."""
    register_folded_attention()
    module = nn.Module()
    module.num_key_value_groups = NUM_HEADS // NUM_KV_HEADS
    num_keys = 128 if device.is_dry else NUM_KEYS
    for batch_size, num_query in SHAPES:
        name = f"attention, B={batch_size}, Q={num_query}"
        tensors = _attention_inputs(batch_size, num_query, num_keys)
        query, key, value, mask = tensors
        report.check(f"{name}: the backend is chosen by us", chooses_backend(query, value), str(query.dtype))
        with folding():
            ours = folded_attention(module, query, key, value, mask)[0].transpose(1, 2)
        groups = NUM_HEADS // NUM_KV_HEADS
        wide = [one.repeat_interleave(groups, 1).float() for one in (key, value)]
        with nullcontext() if device.is_dry else sdpa_kernel(SDPBackend.MATH):
            expected = scaled_dot_product_attention(query.float(), *wide, attn_mask=mask.float())
        gap = float((ours.float() - expected).abs().max())
        report.check(f"{name}: close to math attention", gap < ATTENTION_TOLERANCE, gap)
    if device.is_dry:
        report.leave_out("copy rate and tests", "the device is simulated")
        return
    report.cell(what="copy rate", gb_per_s=copy_rate(torch.device("cuda:0")) / 1e9)
    for name, arguments in TEST_RUNS.items():
        if report.begins(name):
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
            report.check(f"tests, {name}", done.returncode == 0, done.stdout[-600:])


def exactness(report: Any, device: Device) -> None:
    """Part 2: each greedy token is one that math attention might choose too, as plain decoding's are."""
    drafters: dict[str, dict[str, Any]] = {"model": CONSTANT, "lookup": {"prompt_lookup_num_tokens": K}}
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "rejection, top_k=1": {"do_sample": True, "top_k": 1, "verifier": "rejection", "seed": 1},
        "typical": {"do_sample": False, "verifier": "typical"},
    }
    num_new, sizes = (4, (2,)) if device.is_dry else (64, (1, 8))
    settings = list(itertools.product((torch.bfloat16, torch.float16), (True, False)))
    for dtype, allows_cudnn in settings[:1] if device.is_dry else settings:
        models = device.small_pair(dtype)
        torch.backends.cuda.enable_cudnn_sdp(allows_cudnn)
        for (way, options), drafter, batch_size in itertools.product(ways.items(), drafters, sizes):
            name = f"{way}, {drafter}, {dtype}, B={batch_size}, cuDNN {'on' if allows_cudnn else 'off'}"
            if (way == "typical" and drafter == "lookup") or not report.begins(name):
                continue
            inputs = _prompts(models, batch_size)
            ours = _decode(models, inputs, drafter, **drafters[drafter], **options, max_new_tokens=num_new)
            gap = _gap(models, inputs, ours)
            report.check(f"{name}: largest gap to the argmax", way == "typical" or gap <= MAX_GAP, gap)
            if way == "greedy":
                plain = models.target.generate(**inputs, do_sample=False, max_new_tokens=num_new)
                report.cell(what=name, gap=gap, gap_of_plain=_gap(models, inputs, plain))
        torch.backends.cuda.enable_cudnn_sdp(True)


def round_costs(report: Any, device: Device) -> None:
    """Part 3: waits, launches and cuDNN plans of a round besides the forwards."""
    models = device.small_pair(torch.bfloat16)
    modes = {"greedy": {"do_sample": False}, "top-p": SAMPLED}
    for (mode, options), drafter, batch_size in itertools.product(modes.items(), ("model", "lookup"), (1, 8)):
        name = f"{mode}, {drafter}, B={batch_size}"
        if (device.is_dry and (mode, batch_size) == ("top-p", 8)) or not report.begins(name):
            continue
        own = CONSTANT if drafter == "model" else {"prompt_lookup_num_tokens": K}
        inputs = _prompts(models, batch_size)
        arguments = {**own, **options, "max_new_tokens": 48}

        def call(callback: Callable[..., None]) -> Any:
            return _decode(models, inputs, drafter, **arguments, speculation_callback=callback)  # noqa: B023

        if not device.is_dry:
            call(lambda report: None)  # compiles kernels
        rounds = device.count_rounds(models, call)
        report.cell(what=name, rounds=[tuple(one) for one in rounds])
        steady = sorted(one.num_launches for one in rounds)
        report.check(f"{name}: no wait but for the verdict", not any(one.num_waits for one in rounds), len(rounds))
        report.check(f"{name}: no cuDNN plan", not any(one.num_plans for one in rounds), len(rounds))
        if mode == "greedy" and steady:
            typical = steady[len(steady) // 2]
            report.check(f"{name}: launches", typical <= MOST_LAUNCHES[drafter, batch_size], typical)


def attention_times(report: Any, device: Device) -> None:
    """Microseconds of a verification's attention: memory-efficient as it is called now, and with split keys."""
    groups = NUM_HEADS // NUM_KV_HEADS
    for batch_size in (1,) if device.is_dry else (1, 8):
        slower: list[int] = []
        for num_keys in (160,) if device.is_dry else MANY_KEYS:
            name = f"split keys, B={batch_size}, T={num_keys}"
            if not report.begins(name):
                return
            query, key, value, mask = _attention_inputs(batch_size, K + 1, num_keys)
            folded = query.reshape(batch_size, NUM_KV_HEADS, -1, WIDTH)
            rows = additive_mask(mask, groups, query.dtype)
            runs: dict[str, Callable[[], Tensor]] = {
                "memory-efficient": lambda: attend_masked(folded, key, value, rows, None),  # noqa: B023
                "split keys": lambda: split_key_attention(query, key, value, mask),  # noqa: B023
            }
            results = [run().reshape(query.shape).float() for run in runs.values()]
            gap = float((results[0] - results[1]).abs().max())
            report.check(f"{name}: close to memory-efficient attention", gap < ATTENTION_TOLERANCE, gap)
            us = {method: device.seconds(device.graphed(run), 200) * 1e6 for method, run in runs.items()}
            report.cell(what="attention", batch_size=batch_size, num_keys=num_keys, us=us)
            if us["split keys"] >= us["memory-efficient"]:
                slower.append(num_keys)
        faster_from = next((number for number in MANY_KEYS if number > max(slower, default=0)), None)
        report.cell(what="split_keys_from", batch_size=batch_size, num_keys=None if device.is_dry else faster_from)


def kernel_times(report: Any, device: Device) -> None:
    """Part 4: microseconds of attention, of a verification and of sampling, replayed from CUDA graphs."""
    attention_times(report, device)
    sizes = [(1, 64)] if device.is_dry else list(itertools.product(BATCH_SIZES, VOCAB_SIZES))
    for batch_size, vocab_size in sizes:
        if not report.begins(f"kernels, B={batch_size}, V={vocab_size}"):
            continue
        target = torch.randn(batch_size, K + 1, vocab_size, device="cuda:0", dtype=torch.bfloat16)
        draft = torch.randn(batch_size, K, vocab_size, device="cuda:0", dtype=torch.bfloat16)
        ids = draft.float().argmax(-1)
        numbers = torch.arange(batch_size, device="cuda:0")
        keys = NoiseKeys(numbers, numbers, numbers)
        runs: dict[str, Callable[[], object]] = {
            "greedy": lambda: verify_greedy(target, ids),  # noqa: B023
            "rejection": lambda: verify_rejection(target, ids, draft, keys=keys),  # noqa: B023
            "sample": lambda: sample(target[:, 0], keys=keys, stream=Stream.DRAFT),  # noqa: B023
        }
        num_rows = {"greedy": K + 1, "rejection": 2 * K + 1, "sample": 1}
        for name, run in runs.items():
            seconds = device.seconds(device.graphed(run), 50)
            num_bytes = batch_size * num_rows[name] * vocab_size * target.element_size()
            report.cell(
                what=name,
                batch_size=batch_size,
                vocab_size=vocab_size,
                us=seconds * 1e6,
                gb_per_s=num_bytes / seconds / 1e9,
            )


def end_to_end(report: Any, device: Device) -> None:
    """Part 5: tokens per second of every method; all texts must be plain decoding's, which the oracle fixes."""
    models = device.large_pair()
    num_new, repeats = (8, 1) if device.is_dry else (64, 3)
    stats = hf_speculate.SpeculationStats()
    models.draft.generation_config.update(**CONSTANT, assistant_confidence_threshold=0.0)
    compiled = {"cache_implementation": "static"}
    methods: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
        "plain": lambda inputs: models.target.generate(**inputs, max_new_tokens=num_new),
        "plain, compiled": lambda inputs: models.target.generate(**inputs, max_new_tokens=num_new, **compiled),
        "ours": lambda inputs: _decode(models, inputs, "model", **CONSTANT, max_new_tokens=num_new),
        "ours, compiled": lambda inputs: _decode(
            models, inputs, "model", **CONSTANT, max_new_tokens=num_new, **compiled
        ),
        "ours, graphs": lambda inputs: _decode(
            models,
            inputs,
            "model",
            **CONSTANT,
            max_new_tokens=num_new,
            speculation_graphs="on",
            speculation_stats=stats,
        ),
        "transformers' assisted": lambda inputs: models.target.generate(
            **inputs, assistant_model=models.draft, max_new_tokens=num_new
        ),
    }
    for batch_size in (1, 8):
        ids = torch.randint(64, (batch_size, 32 if device.is_dry else 512), device="cuda:0")
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = methods["plain"](inputs)
        for name, run in methods.items():
            cell = f"{name}, B={batch_size}"
            if "compiled" in name and device.is_dry:
                report.leave_out(cell, "the simulated device does not compile")
            elif not (name.startswith("transformers") and batch_size > 1) and report.begins(cell):
                ours = run(inputs)  # compiles, fills pools
                report.check(f"{cell}: the text is plain decoding's", bool(torch.equal(ours, expected)), ours.shape[1])
                if "graphs" in name:
                    report.check(f"{cell}: from graphs", len(stats.graphed) == 2, stats.fallbacks)
                seconds = [device.seconds(lambda: run(inputs), 1) for _ in range(repeats)]  # noqa: B023
                tokens = batch_size * num_new
                report.cell(what=cell, tokens_per_s=[tokens / one for one in sorted(seconds)])


def compilation(report: Any, device: Device) -> None:
    """Part 6: seconds of a first compiled call, of one with another prompt length, and of a third."""
    models = device.small_pair(torch.bfloat16)
    options = {} if device.is_dry else {"cache_implementation": "static"}
    for length in (32, 96, 32):
        if report.begins(f"compiled call, {length} tokens"):
            ids = torch.randint(3, 60, (1, length), device="cuda:0")
            inputs, stats = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, hf_speculate.SpeculationStats()
            begin = time.perf_counter()
            _decode(models, inputs, "model", **CONSTANT, **options, max_new_tokens=8, speculation_stats=stats)
            report.cell(
                what="compiled call", prompt_len=length, seconds=time.perf_counter() - begin, compiled=stats.compiled
            )
            report.check(
                f"{length} tokens: what runs compiled", device.is_dry or len(stats.compiled) == 2, stats.compiled
            )


def _decode(models: Models, inputs: dict[str, Tensor], drafter: str, **options: Any) -> Tensor:
    if drafter == "model":
        options["assistant_model"] = models.draft
    ids: Tensor = hf_speculate.generate(models.target, **inputs, **options)
    return ids


def _prompts(models: Models, batch_size: int) -> dict[str, Tensor]:
    """Left-padded prompts in which a text stands twice, so that lookup drafts; every second one is shorter."""
    generator = torch.Generator().manual_seed(batch_size)
    most = min(models.target.config.vocab_size, 4096)
    texts = [torch.randint(3, most, (20 - 3 * (row % 2),), generator=generator).repeat(2) for row in range(batch_size)]
    ids = torch.stack([torch.cat([text.new_zeros(40 - len(text)), text]) for text in texts])
    return {"input_ids": ids.to("cuda:0"), "attention_mask": (ids > 0).long().to("cuda:0")}


def _gap(models: Models, inputs: dict[str, Tensor], output: Tensor) -> float:
    """How far below the largest logit the chosen tokens lie at most, in one forward with math attention."""
    prompt_len, eos = inputs["input_ids"].shape[1], models.target.generation_config.eos_token_id
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(output[:, prompt_len:])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        logits = models.target(input_ids=output, attention_mask=mask, position_ids=positions).logits.float()
    chosen = output[:, prompt_len:, None]
    logits = logits[:, prompt_len - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(-1, chosen)[..., 0]  # [B, N]
    if eos is not None:  # what follows an EOS token is padding
        is_end = torch.isin(chosen[..., 0], torch.tensor(eos, device=chosen.device))
        gaps = gaps.masked_fill((is_end.cumsum(1) - is_end.long()) > 0, 0.0)
    return float(gaps.max())


def _attention_inputs(batch_size: int, num_query: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and an additive causal mask, bottom-right aligned."""
    how: dict[str, Any] = {"device": "cuda:0", "dtype": torch.bfloat16}
    query = torch.randn(batch_size, NUM_HEADS, num_query, WIDTH, **how)
    key, value = (torch.randn(batch_size, NUM_KV_HEADS, num_keys, WIDTH, **how) for _ in range(2))
    places = torch.arange(num_keys - num_query, num_keys, device="cuda:0")[:, None]
    is_hidden = torch.arange(num_keys, device="cuda:0") > places  # [Q, T]
    mask = torch.zeros(num_query, num_keys, **how).masked_fill_(is_hidden, -torch.inf)
    return query, key, value, mask.expand(batch_size, 1, -1, -1)
