"""Compare this library with transformers' assisted generation, economize and flashspec.

    python benchmarks/beside_others.py            # installs and measures; needs a package index
    python benchmarks/beside_others.py --page     # writes docs/beside-others.md from the JSON

Each peer has an environment under `build/beside` with the newest transformers that it supports;
this library and transformers run in the current environment. Every cell runs in a new process on
one thread, next to plain decoding, and the libraries take turns. All times are CPU times.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from _harness import (
    RESULTS,
    ROOT,
    parse_common,
    read_results,
    spread,
    write_between,
    write_results,
)
from _subjects import PAIR, read_prompts
from tqdm import tqdm
from transformers import AutoTokenizer

sys.path.append(str(ROOT / "examples"))

from models import SMOLLM2, model_folder

NAME = "beside_others"
PAGE = ROOT / "docs" / "beside-others.md"
WORKER = ROOT / "benchmarks" / "_beside_worker.py"
LIBRARIES = ("transformers", "hf_speculate", "economize", "flashspec")
TRANSFORMERS = ("5.24.0", "5.23.0", "5.22.2", "5.21.1", "5.20.2")  # tried with each peer, in order
PROBES = {"economize": "qwen3_next", "flashspec": "llama"}  # a type that the peer names
LENGTHS, DRAFT_LEN = ["default", "3", "5", "8"], "5"
TASKS = {1: "edit code", 4: "fill a form", 5: "question"}  # tasks in examples/tasks.jsonl
LONG = 6000
PROCESS_LIMIT_S = 600
PARTS = ("pair", "lookup", "long", "texts")  # each in separate processes
_MIXED = ["linear_attention", "full_attention"]
_ATTENTION = """llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi
phi3 gpt2 gpt_neox gptj opt bloom falcon mpt olmo2 olmo3 olmoe cohere2 granite starcoder2 stablelm
smollm3 glm4 nemotron deepseek_v3 gpt_oss minimax"""
TYPES: dict[str, dict[str, Any]] = {name: {} for name in _ATTENTION.split()} | {
    "gemma3_text": {"sliding_window_pattern": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "qwen3_next": {"layer_types": _MIXED},
    "qwen3_5_text": {"layer_types": _MIXED},
    "granitemoehybrid": {"layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
}
Job = dict[str, Any]


def call_worker(python: str, library: str, jobs: list[Job]) -> list[dict[str, Any]]:
    """Run jobs in one new process; jobs after a crash or the time limit are errors too."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [python, str(WORKER), library],
                input="".join(json.dumps(job) + "\n" for job in jobs),
                stdout=output,
                stderr=errors,
                env=os.environ | own,
                text=True,
                timeout=PROCESS_LIMIT_S,
                check=False,
            )
        output.seek(0)
        errors.seek(0)
        results = [json.loads(line) for line in output]
        reason = ([line.strip() for line in errors if line.strip()] or ["no result"])[-1]
    return results + [{"error": reason}] * (len(jobs) - len(results))


def install(peer: str, jobs: list[Job]) -> dict[str, Any]:
    """Make the environment of a peer, once, with the newest transformers that can run all `jobs`.

    Returns:
        The versions, and the error of each newer transformers.
    """
    folder, failed = ROOT / "build" / "beside" / peer, {}
    python, record = str(folder / "bin" / "python"), folder / "versions.json"
    if record.exists():
        return {"python": python, **json.loads(record.read_text(encoding="utf-8"))}
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-U", peer]
    torch_version = torch.__version__.partition("+")[0]
    for version in TRANSFORMERS:
        wanted = [f"torch=={torch_version}", f"transformers=={version}"]
        subprocess.run([*pip, *wanted], check=True)
        errors = [r["error"] for r in call_worker(python, peer, jobs) if "error" in r]
        if not errors:
            break
        failed[version] = errors[0]
    show = f"import importlib.metadata as m; print(m.version('{peer}'))"
    done = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True)
    versions = {"version": done.stdout.strip(), "transformers": version, "failed_with": failed}
    record.write_text(json.dumps(versions), encoding="utf-8")
    return {"python": python, **versions}


def make_jobs(num_new: int) -> dict[str, dict[str, Job]]:
    """Return the jobs of each process, by name of the cell."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    prompts = list(chain.from_iterable(zip(*read_prompts().values(), strict=False)))
    ids = tokenizer(prompts)["input_ids"]
    lines = (ROOT / "examples" / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = {task["question_id"]: task["turns"][0] for task in map(json.loads, lines)}
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    common = {"limit_s": 150, "lengths": LENGTHS}
    common |= {"target": str(PAIR / "target"), "draft": str(PAIR / "draft")}
    smollm2 = model_folder(SMOLLM2)
    chat = AutoTokenizer.from_pretrained(smollm2).apply_chat_template
    alone, long_row = [[row] for row in ids], list(chain.from_iterable(ids * 9))[:LONG]
    jobs: dict[str, dict[str, Job]] = {part: {} for part in PARTS}
    settings = {"max_new_tokens": num_new, "pad_token_id": 0, "do_sample": False}
    for mode, how in (("greedy", {}), ("sampled", sampling)):
        pair = {**common, "settings": settings | how}
        jobs["pair"] |= {
            f"one row, {mode}": {**pair, "kind": "speed", "batches": alone[:3]},
            f"eight rows, {mode}": {**pair, "kind": "speed", "batches": [ids[:8]]},
            f"outside, {mode}": {
                **pair,
                "kind": "outside",
                "lengths": [DRAFT_LEN],
                "batches": alone[:3],
            },
        }
    common["settings"] = settings
    for number, task in TASKS.items():
        text = chat([{"role": "user", "content": tasks[number]}], add_generation_prompt=True)
        models = {"target": str(smollm2), "draft": None, "batches": [[text["input_ids"]]]}
        job = {**common, **models, "kind": "speed", "lengths": ["default", "3", "8"]}
        jobs["lookup"][f"lookup, {task}"] = job
    jobs["long"]["long"] = {**common, "kind": "memory", "batches": [[long_row]]}
    texts = {**common, "kind": "texts", "lengths": ["default", DRAFT_LEN]}
    nucleus = sampling | {"top_p": 1e-6}
    jobs["texts"] = {
        "texts, one row": {**texts, "batches": alone[:16]},
        "texts, ragged": {**texts, "batches": [ids[:8], ids[8:16]]},
        "top-p": {**texts, "batches": alone[:2], "changes": nucleus},
    }
    loop = [5, 17, 33, 9, 41] * 4
    for name, fields in (TYPES | {"bart": {}}).items():
        tiny = {**texts, "model_type": name, "fields": fields, "lengths": ["default"]}
        for rows, batch in (("one row", [loop]), ("ragged", [loop, loop[:11], loop[2:9]])):
            jobs["texts"][f"type {name}, {rows}"] = {**tiny, "batches": [batch]}
    return jobs


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cells of all libraries and return a row for each."""
    jobs = make_jobs(args.max_new_tokens)
    args.peers = {
        peer: install(
            peer, [jobs["pair"]["one row, greedy"], jobs["texts"][f"type {name}, one row"]]
        )
        for peer, name in PROBES.items()
    }
    pythons = {peer: versions.pop("python") for peer, versions in args.peers.items()}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    parts = [part for part in args.parts for _ in range(1 if part == "texts" else args.repeats)]
    for number, part in enumerate(tqdm(parts, desc="processes of each library", disable=None)):
        for library in LIBRARIES if number % 2 == 0 else LIBRARIES[::-1]:
            python = pythons.get(library, sys.executable)
            results = call_worker(python, library, list(jobs[part].values()))
            for name, result in zip(jobs[part], results, strict=True):
                found.setdefault((name, library), []).append(result)
    path = args.results / f"{NAME}.json"
    earlier = read_results(NAME, args.results)["rows"] if path.exists() else []
    kept = [row for row in earlier if (row["cell"], row["library"]) not in found]
    return kept + [
        {"cell": name, "library": library, **summary(results)}
        for (name, library), results in found.items()
    ]


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of a cell's processes: spreads of figures and sums of equal texts."""
    errors = [result for result in results if "error" in result]
    if errors:
        return errors[0]
    joined: dict[str, Any] = {}
    for key, value in results[0].items():
        values = [result[key] for result in results]
        if key == "equal":
            joined[key] = [sum(counts) for counts in zip(*values, strict=True)]
        elif key == "times_plain":
            joined[key] = {name: spread(ratios[name] for ratios in values) for name in value}
        else:
            joined[key] = spread(values)
    return joined


Figure = tuple[float, str]  # value, of which more is better; text for the table


def short(error: str) -> Figure:
    return -1e9, f"error: {error.partition(': ')[2].replace('|', '/')[:60].strip()}"


def ratio(row: dict[str, Any], is_default: bool) -> Figure:
    """Return the speed with the default settings, or with the best constant draft length."""
    constant = {name: ratios for name, ratios in row["times_plain"].items() if name != "default"}
    best = max(constant, key=lambda name: constant[name]["median"], default="")
    ratios = row["times_plain"]["default"] if is_default else constant[best]
    shown = "{median:.2f} ({min:.2f} to {max:.2f})".format(**ratios)
    return round(ratios["median"], 2), shown + ("" if is_default else f", K = {best}")


def amount(row: dict[str, Any], key: str, digits: int) -> Figure:
    value = round(row[key]["median"], digits)
    return -value, f"{value:.{digits}f}"


def share(row: dict[str, Any]) -> Figure:
    num_equal, num_rows = row["equal"]
    return num_equal, f"{num_equal} of {num_rows}"


def types(rows: dict[str, dict[str, Any]], ending: str) -> Figure:
    """Count the model types for which every row has the same text as in plain decoding."""
    equal = [rows[f"type {name}, {ending}"].get("equal", [0, 1]) for name in TYPES]
    return (num := sum(a == b for a, b in equal)), f"{num} of {len(equal)}"


def table(content: dict[str, Any]) -> str:
    """Format all cells as Markdown; the best of each line is bold."""
    cells: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in LIBRARIES}
    for row in content["rows"]:
        cells[row["library"]][row["cell"]] = row
    lines: list[tuple[str, str, Callable[[dict[str, Any]], Figure]]] = []
    for cell in cells["hf_speculate"]:
        if cell.startswith(("one row", "eight rows", "lookup")):
            lines.append((f"{cell}, default", cell, lambda row: ratio(row, True)))
            lines.append((f"{cell}, best constant K", cell, lambda row: ratio(row, False)))
    lines += [
        ("prompt of 6,000 tokens", "long", lambda row: ratio(row, True)),
        ("the same, seconds", "long", lambda row: amount(row, "seconds", 1)),
        ("the same, peak memory, MB", "long", lambda row: amount(row, "mb", 0)),
        ("ms of a round outside layers, greedy", "outside, greedy", lambda r: amount(r, "ms", 1)),
        ("the same, sampled", "outside, sampled", lambda row: amount(row, "ms", 1)),
        ("texts equal to plain, one row", "texts, one row", share),
        ("texts equal to plain, eight ragged rows", "texts, ragged", share),
    ]
    shown = []
    for label, cell, figure in lines:
        rows = [cells[name][cell] for name in LIBRARIES]
        shown.append(
            (label, [short(row["error"]) if "error" in row else figure(row) for row in rows])
        )
    for ending in ("one row", "ragged"):
        shown.append((f"model types, {ending}", [types(cells[name], ending) for name in LIBRARIES]))
    text = [f"| | {' | '.join(LIBRARIES)} |", "|---" * (len(LIBRARIES) + 1) + "|"]
    for label, figures in shown:
        best = max(value for value, _ in figures)
        words = [f"**{word}**" if value == best else word for value, word in figures]
        text.append(f"| {label} | {' | '.join(words)} |")
    return "\n".join(text)


def versions(content: dict[str, Any]) -> str:
    """Describe date, versions and machine in a paragraph."""
    environment, peers = content["environment"], content["arguments"]["peers"]
    shown = ", ".join(
        f"{name} {peer['version']} with transformers {peer['transformers']}"
        for name, peer in peers.items()
    )
    return (
        f"Measured on {environment['date']}, commit {environment['commit']}, on one core of an "
        f"{environment['device']} with torch {environment['versions']['torch']}: hf_speculate and "
        f"transformers with transformers {environment['versions']['transformers']}, {shown}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true", help="write the page, measure nothing")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each library")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measure these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    args = parse_common(parser)
    if args.page:
        content = read_results(NAME, args.results)
        write_between(PAGE, "figures", f"{table(content)}\n\n{versions(content)}")
    else:
        print(f"written to {write_results(NAME, args, measure(args), args.results)}")


if __name__ == "__main__":
    main()
