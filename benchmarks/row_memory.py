"""Measure memory while many short rows pass through a batch, to find leaks of finished rows.

    python benchmarks/row_memory.py

10,000 rows of at most 8 tokens pass through eight places in the batch of a random two-layer model,
with a draft model or with recurrent states, in a few minutes each. The bundled target with its head
decodes a fifth as many rows. After every tenth of the rows, the script records the number of
objects tracked by Python's garbage collector and the memory of the process.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

from _harness import Results, add_common_arguments, markdown, parse_common
from throughput import HYBRID, MODELS, load_models
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt

NAME = "row_memory"
NUM_COUNTS = 10


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def small_models(models: str) -> tuple[Any, dict[str, Any]]:
    """Return two-layer models, in the format of `load_models`."""
    if models == "hybrid":
        sizes = HYBRID | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        }
        lookup = {"prompt_lookup_num_tokens": 4, "num_assistant_tokens_schedule": "constant"}
        return AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**sizes)).eval(), lookup
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=4096,
    )
    target, draft = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    return target, {"assistant_model": draft}


def measure(models: str, args: argparse.Namespace) -> dict[str, Any]:
    """Count objects and bytes after every tenth of the rows."""
    is_head = models == "head"
    target, draft_arguments = load_models(models, args.device) if is_head else small_models(models)
    num_rows = args.prompts // 5 if is_head else args.prompts
    options = {
        "do_sample": False,
        "eos_token_id": None,
        "num_assistant_tokens": 3,
        **draft_arguments,
    }
    rows = (
        RowPrompt(
            [1 + number % 4000, 2, 3 + number % 7], arguments={"max_new_tokens": 2 + number % 7}
        )
        for number in range(num_rows)
    )
    decoder = ContinuousDecoder(target, args.rows, options)
    num_finished, objects, num_bytes, per_count = 0, [], [], num_rows // NUM_COUNTS
    for results in decoder.decode(lambda: next(rows, None)):
        if any(result.error is not None for result in results):
            raise RuntimeError(f"rows must decode, got {results[0].error}")
        before, num_finished = num_finished, num_finished + len(results)
        if num_finished // per_count > before // per_count:
            gc.collect()
            objects.append(len(gc.get_objects()))
            num_bytes.append(resident_bytes())
    middle = len(objects) // 2
    return {
        "models": models,
        "rows": num_finished,
        "objects": objects,
        "bytes": num_bytes,
        "objects_gained": max(objects[middle:]) - max(objects[:middle]),
        "bytes_gained": max(num_bytes[middle:]) - max(num_bytes[:middle]),
    }


def table(results: dict[str, Any]) -> str:
    """Format the figures as a table."""
    columns = {
        "models": lambda row: row["models"],
        "rows": lambda row: row["rows"],
        "objects at the end": lambda row: row["objects"][-1],
        "more in the second half than in the first": lambda row: row["objects_gained"],
        "MiB at the end": lambda row: round(row["bytes"][-1] / 2**20),
        "more in the second half": lambda row: f"{row['bytes_gained'] / 2**20:.1f}",
    }
    return markdown(columns, results["rows"])


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=1, limit_s=1800)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=8, help="rows decoded at once")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    args = parse_common(parser)
    results = Results(NAME, args)
    for models in args.models:
        results.new = [*results.new, measure(models, args)]
        results.write()
    print(table({"rows": results.rows}))


if __name__ == "__main__":
    main()
