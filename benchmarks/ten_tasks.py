"""Compare the default schedule with transformers' prompt lookup on ten tasks with SmolLM2.

    python benchmarks/ten_tasks.py [--max-new-tokens 64 128] [--repeats 5]

Every repeat is a new process. It decodes the tasks in `examples/tasks.jsonl` greedily in a shuffled
order, with one row in float32. The methods are plain decoding, prompt lookup in transformers with 5
and 10 tokens, and prompt lookup in hf_speculate with the default schedule and a constant length.
The order of the methods rotates from task to task. A task counts only if all texts are equal. The
ratio is the geometric mean over tasks of the medians over processes.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from _harness import ROOT, add_common_arguments, markdown, parse_common, spread, write_results
from _real_models import draft_arguments, load
from tqdm import tqdm

import hf_speculate

NAME = "ten_tasks"
PLAIN, PEERS = "plain", ("transformers, 5", "transformers, 10")
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    PEERS[0]: {"prompt_lookup_num_tokens": 5},
    PEERS[1]: {"prompt_lookup_num_tokens": 10},
    "ours, lookup": {"prompt_lookup_num_tokens": 10},
    "ours, lookup, K = 5": {
        "prompt_lookup_num_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
    },
    "ours, head with lookup": {},
}


def measure(max_new_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Decode every task with every method in this process, and compare the texts."""
    torch.set_num_threads(1)
    loaded = load("smollm2", "float32")
    model, tokenizer = loaded
    hf_speculate.enable(model)
    head = draft_arguments("lookup with head", "smollm2", loaded, "float32", load)
    methods = {**METHODS, "ours, head with lookup": head}
    lines = (ROOT / "examples" / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines]
    random.Random(seed).shuffle(tasks)
    names, rows = list(methods), []
    for number, task in enumerate(tasks):
        chat = [{"role": "user", "content": task["turns"][0]}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        seconds, texts = {}, {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in PEERS:
                hf_speculate.disable(model)
            begin = time.perf_counter()
            texts[name] = model.generate(
                **inputs,
                **methods[name],
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            seconds[name] = time.perf_counter() - begin
            if name in PEERS:
                hf_speculate.enable(model)
        is_equal = all(torch.equal(texts[PLAIN], text) for text in texts.values())
        label = f"{task['question_id']} {task['category']}"
        rows.append({"task": label, "seconds": seconds, "is_equal": is_equal})
    return rows


def table(content: dict[str, Any]) -> str:
    """Format the speed-up over plain decoding for each task, with geometric means, as Markdown."""
    columns = {"tokens": lambda row: row["max_new_tokens"], "task": lambda row: row["task"]}
    for name in METHODS:
        if name != PLAIN:
            columns[name] = lambda row, name=name: "{median:.2f} ({min:.2f} to {max:.2f})".format(
                **row["speed"][name]
            )
    lines = "\n".join(f"- {line.strip()}" for line in summary(content["rows"]))
    return f"{markdown(columns, content['rows'])}\n\n{lines}"


def speeds_of(
    rows: list[dict[str, Any]], num_tokens: int, kind: str = ""
) -> dict[str, list[float]]:
    """Return speed-ups of each method over plain decoding, for tasks with equal texts.

    Args:
        rows: rows of the results.
        num_tokens: number of new tokens.
        kind: kind of the tasks, "copying" or "plain"; empty for all tasks.
    """
    speeds = [
        row["speed"]
        for row in rows
        if row["max_new_tokens"] == num_tokens and row["is_equal"] and kind in row["task"]
    ]
    return {name: [speed[name]["median"] for speed in speeds] for name in METHODS}


def spreads_of(
    rows: list[dict[str, Any]], num_tokens: int, kind: str
) -> dict[str, tuple[float, float, float]]:
    """Return the median, slowest and fastest task for each method."""
    by_method = speeds_of(rows, num_tokens, kind)
    return {name: (median(speeds), min(speeds), max(speeds)) for name, speeds in by_method.items()}


def means_of(rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Return the geometric mean over tasks for each method, by number of new tokens."""
    return [
        (
            num_tokens,
            {name: geometric_mean(speeds) for name, speeds in speeds_of(rows, num_tokens).items()},
        )
        for num_tokens in sorted({row["max_new_tokens"] for row in rows})
    ]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return geometric means over tasks with equal texts, and our ratio to the better peer."""
    lines = []
    for num_tokens, means in means_of(rows):
        best = max(means[name] for name in PEERS)
        shown = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items() if name != PLAIN)
        min_ratio = min(
            row["speed"]["ours, lookup"]["median"]
            / max(row["speed"][name]["median"] for name in PEERS)
            for row in rows
            if row["max_new_tokens"] == num_tokens and row["is_equal"]
        )
        lines.append(f"{num_tokens} tokens: {shown}")
        lines.append(
            f"  ours, lookup over the better single peer {means['ours, lookup'] / best:.3f}; "
            f"least task over the better peer of that task {min_ratio:.3f}; "
            "head with lookup over lookup "
            f"{means['ours, head with lookup'] / means['ours, lookup']:.3f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5, limit_s=3600.0)
    parser.add_argument("--max-new-tokens", nargs="+", type=int, default=[64, 128])
    parser.add_argument(
        "--seed", type=int, help="measure in this process in this order, and print JSON"
    )
    args = parse_common(parser)
    if args.seed is not None:
        print(json.dumps(measure(args.max_new_tokens[0], args.seed)))
        return
    rows = []
    for max_new_tokens in args.max_new_tokens:
        speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        is_equal: dict[str, bool] = defaultdict(lambda: True)
        for seed in tqdm(
            range(args.repeats), desc=f"{max_new_tokens} tokens", leave=False, disable=None
        ):
            command = [sys.executable, str(Path(__file__)), "--seed", str(seed)]
            done = subprocess.run(
                [*command, "--max-new-tokens", str(max_new_tokens)],
                capture_output=True,
                text=True,
                check=True,
            )
            for row in json.loads(done.stdout.splitlines()[-1]):
                is_equal[row["task"]] &= row["is_equal"]
                for name, seconds in row["seconds"].items():
                    speeds[row["task"]][name].append(row["seconds"][PLAIN] / seconds)
        rows += [
            {
                "max_new_tokens": max_new_tokens,
                "task": task,
                "is_equal": is_equal[task],
                "speed": {name: spread(values) for name, values in speeds[task].items()},
            }
            for task in sorted(speeds, key=lambda task: int(task.split()[0]))
        ]
    path = write_results(NAME, args, rows, args.results)
    print(table({"rows": rows}))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
