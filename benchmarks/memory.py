"""Compare peak memory with that of plain decoding plus the weights and cache of the draft.

    python benchmarks/memory.py

A peak is the size of the weights plus the maximum of all other memory during a call. On a CPU,
torch's profiler reports every block that is allocated or freed. On a GPU, the allocator records its
maximum.
"""

import argparse
import gc
from typing import Any

import torch
from _costs import measure_costs
from _engines import DEFAULT, PLAIN_METHOD, Runner, Timings, check, ours, warm_up
from _harness import Cells, Results, add_common_arguments, markdown, parse_common
from _library import CACHES
from _pictures import Panel, draw
from _subjects import DTYPES, SHAPES, Subject, load_pair, load_shape
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

NAME = "memory"
ALLOWED = 1.05
Row = dict[str, Any]


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of parameters and buffers, counting tied weights once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in model.parameters()
    }
    storages |= {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in model.buffers()
    }
    return sum(storages.values())


def cache_bytes(model: PreTrainedModel, batch_size: int, num_tokens: int) -> int:
    """Return the bytes of keys and values for `num_tokens` tokens in all layers."""
    config = model.config
    head_width = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_width
    return batch_size * num_tokens * per_token * model.dtype.itemsize


def peak_bytes(call: Any, device: torch.device) -> int:
    """Return the peak memory of `call`, minus the memory in use before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    current = peak = 0
    for event in sorted(_allocations(profiler), key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def _allocations(profiler: Any) -> list[Any]:
    """Return one event per block, with positive bytes if allocated and negative if freed."""
    return [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]


def measure(subject: Subject, batch_size: int, args: argparse.Namespace) -> list[Row]:
    """Measure one cell, and return a row for every method of hf_speculate."""
    runner = Runner(subject, "greedy", args.max_new_tokens, args.cache)
    our_methods = [DEFAULT, ours(args.num_assistant_tokens)]
    batch = subject.batches(batch_size, batch_size, args.prompt_len)[0]
    warm_up(runner, [PLAIN_METHOD, *our_methods], batch, args.max_new_tokens)
    checked = check(runner, our_methods, batch)
    timings = Timings()
    timings.add(runner, [PLAIN_METHOD, *our_methods], batch, 1)
    costs = measure_costs(
        subject, batch, args.max_new_tokens, timings.plain_step_s(args.max_new_tokens)
    )
    peaks = {
        method.name: peak_bytes(lambda method=method: runner(method, batch), subject.device)
        for method in (PLAIN_METHOD, *our_methods)
    }
    plain_bytes = peaks[PLAIN_METHOD.name]
    target_bytes, draft_bytes = weight_bytes(subject.target), weight_bytes(subject.draft)
    draft_cache = cache_bytes(
        subject.draft, batch_size, batch.input_ids.shape[1] + args.max_new_tokens
    )
    allowed = target_bytes + plain_bytes + draft_bytes + draft_cache
    rows = []
    for method in our_methods:
        row = {
            "subject": subject.name,
            "dtype": subject.dtype,
            "batch_size": batch_size,
            "checked": checked,
        }
        row |= timings.summary(method) | costs.report(timings.counts[method.name], batch_size)
        row["efficiency"] = row["decode_over_plain"] / row["expected"]
        row |= {"prompt_len": batch.input_ids.shape[1], "plain_bytes": target_bytes + plain_bytes}
        row |= {"draft_bytes": draft_bytes, "draft_cache_bytes": draft_cache}
        row |= {"ours_bytes": target_bytes + draft_bytes + peaks[method.name]}
        row["over_allowed"] = row["ours_bytes"] / allowed
        row["over_allowed_without_weights"] = peaks[method.name] / (plain_bytes + draft_cache)
        rows.append(row)
    return rows


def _mb(name: str) -> Any:
    return lambda row: f"{row[name] / 1e6:.1f}"


COLUMNS = {
    "pair": lambda row: row["subject"],
    "dtype": lambda row: row["dtype"],
    "rows": lambda row: row["batch_size"],
    "prompt": lambda row: row["prompt_len"],
    "method": lambda row: row["method"],
    "plain, MB": _mb("plain_bytes"),
    "draft's weights, MB": _mb("draft_bytes"),
    "draft's cache, MB": _mb("draft_cache_bytes"),
    "ours, MB": _mb("ours_bytes"),
    "ours over the three": lambda row: row["over_allowed"],
    "the same without weights": lambda row: row["over_allowed_without_weights"],
    "verified acceptance rate": lambda row: row["verified_acceptance_rate"],
    "c": lambda row: row["c"],
    "v": lambda row: row["v"],
    "efficiency (one run)": lambda row: row["efficiency"],
}


def table(content: dict[str, Any]) -> str:
    """Format all rows."""
    return markdown(COLUMNS, content["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=1, limit_s=300.0)
    parser.add_argument("--subjects", nargs="+", choices=["pair", *SHAPES])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument("--acceptance", type=float, default=0.8, help="of random pairs")
    parser.add_argument("--layers", type=int, help="of a random target, to shrink it")
    parser.add_argument("--draft-layers", type=int, help="of a random draft, to shrink it")
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--cache", choices=CACHES, default="auto")
    args = parse_common(parser)
    on_gpu = args.device.type == "cuda"
    args.subjects = args.subjects or (["pair", "llama-8b"] if on_gpu else ["pair"])
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    walk, results, pair = (
        Cells([(n, b) for n in args.subjects for b in args.batch_sizes], args.limit_s, "cells"),
        Results(NAME, args),
        None,
    )
    for name, batch_size in walk:
        if pair is None or pair.name != name:
            pair = None
            if name == "pair":
                pair = load_pair(args.dtype, args.device)
            else:
                pair = load_shape(
                    name, args.dtype, args.device, args.acceptance, args.layers, args.draft_layers
                )
        results.add(measure(pair, batch_size, args))
    args.left_out = walk.left_out
    path, rows = results.write(), results.rows
    print(table({"rows": rows}))
    labels = [f"{row['subject']}, {row['batch_size']} rows, {row['method']}" for row in rows]
    series = {
        "peak": [(label, row["over_allowed"]) for label, row in zip(labels, rows, strict=True)]
    }
    draw(
        path.with_suffix(".png"),
        [Panel("Peak over plain's, draft and its cache", "ratio", series, ALLOWED)],
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
