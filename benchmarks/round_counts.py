"""Count operators, synchronisations and cuDNN plans per round on a simulated CUDA device.

    python benchmarks/round_counts.py

Forwards of the models are excluded. The decoding loops of hf_speculate and transformers run on a
tiny bfloat16 pair with K = 5. Nothing is timed. A round begins with the forward of the target. The
first round reads the prompt and is excluded. Operators in the draft's nested `generate()` are
counted.
"""

import argparse
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _harness import RESULTS, markdown, write_results
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.models.foreign_code import KNOWN_PACKAGES
from tests.support.fake_cuda import FakeCuda
from tests.support.tiny import make_model, noisy_copy

# The hooks in this file count forwards or treat each token independently.
KNOWN_PACKAGES.add(__name__.partition(".")[0])

NAME = "round_counts"
K, NUM_NEW, PROMPT = 5, 14, list(range(3, 12)) * 2
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9},
}
LOOKUP = {"prompt_lookup_num_tokens": K}
CONSTANT = {"num_assistant_tokens": K, "num_assistant_tokens_schedule": "constant"}
NOTES = f"""\
Operators other than views, waits of the host for the device, and plans built by cuDNN attention, a
round at B = 1 and K = {K}: the median, and the maximum in brackets. The models' forwards are left
out, except their plans.
"""
COLUMNS = {
    "method": lambda row: row["method"],
    "mode": lambda row: row["mode"],
    **{
        name: lambda row, name=name: f"{row[name]['median']:g} ({row[name]['max']})"
        for name in ("operators", "waits", "plans")
    },
}


def table(content: dict[str, Any]) -> str:
    """Format all rows, and explain the columns."""
    return f"{NOTES}\n{markdown(COLUMNS, content['rows'])}"


def count(
    gpu: FakeCuda, target: PreTrainedModel, run: Callable[[], object]
) -> dict[str, dict[str, float]]:
    """Count events between the starts of two consecutive target forwards."""
    log, marks = gpu.log, []
    log.clear()
    log.plans.clear()

    def mark(*_: Any) -> None:
        marks.append((log.num_launches(), sum(map(len, log.waits.values())), len(log.plans)))

    hook = target.register_forward_pre_hook(mark)
    try:
        run()
    finally:
        hook.remove()
    # The first difference includes the prompt, and no forward follows the last one.
    rounds = [
        [end - begin for begin, end in zip(*pair, strict=True)] for pair in pairwise(marks[1:])
    ]
    columns = zip(("operators", "waits", "plans"), zip(*rounds, strict=True), strict=True)
    return {name: {"median": median(values), "max": max(values)} for name, values in columns}


def measure() -> list[dict[str, Any]]:
    """Count every method in every mode."""
    target = make_model("llama", dtype=torch.bfloat16)
    draft = noisy_copy(target, 0.1)
    draft.generation_config.update(**CONSTANT, assistant_confidence_threshold=0.0)
    rows = []
    with FakeCuda() as gpu:
        for model, stage in ((target, "target"), (draft, "draft")):
            gpu.watch(model.to("cuda:0"), stage)
        ids = torch.tensor([PROMPT], device="cuda:0")
        common = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": NUM_NEW,
        }
        for mode, options in MODES.items():
            for method, run in methods(target, draft, {**common, **options}).items():
                torch.manual_seed(0)
                rows.append({"method": method, "mode": mode, **count(gpu, target, run)})
                print(markdown(COLUMNS, rows[-1:]).splitlines()[-1], flush=True)
    return rows


def methods(
    target: PreTrainedModel, draft: PreTrainedModel, options: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    """Return the decoding methods by name."""
    seeded_options = {**options, "seed": 1} if options["do_sample"] else options
    return {
        "plain": lambda: target.generate(**options),
        "ours, draft model": lambda: hf_speculate.generate(
            target, **seeded_options, **CONSTANT, assistant_model=draft
        ),
        "transformers, draft model": lambda: target.generate(**options, assistant_model=draft),
        "ours, prompt lookup": lambda: hf_speculate.generate(target, **seeded_options, **LOOKUP),
        "transformers, prompt lookup": lambda: target.generate(**options, **LOOKUP),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    args = parser.parse_args()
    if "TRITON_INTERPRET" not in os.environ:  # Triton reads this variable at import
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"}
        )
    print(f"written to {write_results(NAME, args, measure(), args.results)}")


if __name__ == "__main__":
    main()
