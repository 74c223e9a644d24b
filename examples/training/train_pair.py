"""Train the small model pair in `examples/pair` on the sources of the Python standard library.

    cd examples && python -m training.train_pair    # every stage, about an hour on two cores
    cd examples && python -m training.train_pair --stage measure

The last stage, measure, measures the committed pair again and rewrites its README. Stages run in
this order: data, tokenizer, target, prompts, draft, choose, measure. An interrupted stage resumes
from its last checkpoint in the work folder; delete the folder to start from scratch.
"""

import argparse
import os
import platform
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from training.pair.corpus import list_sources, read_source, stdlib_root, write_sources
from training.pair.distill import BATCH_SIZE, DraftTraining, start_draft
from training.pair.evaluate import (
    acceptance_record,
    loss_record,
    machine_record,
    timing_record,
    write_sample,
)
from training.pair.pretrain import PHASES, TargetTraining
from training.pair.prompts import build_prompts, read_prompts, write_prompts
from training.pair.report import pair_bounds, render
from training.pair.selftext import ROW_LEN, load_self_text, write_self_text
from training.pair.shapes import DRAFT_SHAPES
from training.pair.store import (
    load_model,
    load_tokenizer,
    read_results,
    save_model,
    save_tokenizer,
    write_section,
)
from training.pair.timing import CONTEXT_LEN, NUM_REPEATS
from training.pair.tokens import encode_texts, load_stream, train_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Run(NamedTuple):
    """Folders and budgets of a run."""

    work_dir: Path  # caches and checkpoints
    pair_dir: Path  # folder of the pair, its README and its measurements
    prompts_path: Path
    target_minutes: float
    text_minutes: float
    draft_minutes: float  # per candidate
    drafts: list[str]  # candidates, keys of DRAFT_SHAPES
    seed: int
    device: str

    @property
    def results_path(self) -> Path:
        """File of the measurements."""
        return self.pair_dir / "measurements.json"


def data_stage(run: Run) -> None:
    """List the training and held-out files."""
    sources = list_sources(stdlib_root())
    write_sources(run.pair_dir / "sources.json", sources)
    print(f"{len(sources.training)} training files, {len(sources.held_out)} held out")


def tokenizer_stage(run: Run) -> None:
    """Train the tokenizer and encode the training files once."""
    root = stdlib_root()
    texts = [read_source(root, name) for name in list_sources(root).training]
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, run.work_dir / "tokenizer")
    stream = encode_texts(tokenizer, texts)
    np.save(run.work_dir / "training.npy", stream)
    print(
        f"{len(stream)} training tokens, {sum(map(len, texts)) / len(stream):.2f} characters each"
    )


def target_stage(run: Run) -> None:
    """Train and save the target."""
    training = TargetTraining(run.work_dir / "target.pt", run.target_minutes, run.seed, run.device)
    target = training.run(load_stream(run.work_dir / "training.npy"))
    save_model(target.cpu(), load_tokenizer(run.work_dir / "tokenizer"), run.pair_dir / "target")
    record = {
        "num_steps": training.progress.num_steps,
        "num_tokens": training.progress.num_tokens,
        "minutes": training.progress.spent_s / 60,
        "first_layers": PHASES[0].num_layers,
        "device": machine_record(run.device)["device"],
        "python": platform.python_version(),
        "seed": run.seed,
    }
    write_section(run.results_path, "target_training", record)


def prompts_stage(run: Run) -> None:
    """Build the held-out prompts."""
    prompts = build_prompts(stdlib_root(), load_tokenizer(run.pair_dir / "target"))
    write_prompts(run.prompts_path, prompts)
    print(f"{len(prompts)} prompts")


def draft_stage(run: Run) -> None:
    """Let the target write text, then distil every candidate."""
    target = load_model(run.pair_dir / "target", torch.float32, run.device)
    text_dir = run.work_dir / "self-text"
    if not (text_dir / "complete").is_file():
        write_self_text(
            target, load_stream(run.work_dir / "training.npy"), text_dir, run.text_minutes, run.seed
        )
        (text_dir / "complete").touch()
    rows = load_self_text(text_dir)
    candidates = {}
    for name in run.drafts:
        draft = start_draft(DRAFT_SHAPES[name], target, run.seed)
        training = DraftTraining(
            draft, target, run.work_dir / f"draft-{name}.pt", run.draft_minutes
        )
        draft = training.run(rows, run.seed)
        save_model(
            draft.cpu(), load_tokenizer(run.pair_dir / "target"), run.work_dir / f"draft-{name}"
        )
        num_tokens = training.num_steps * BATCH_SIZE * (ROW_LEN - 1)
        minutes = training.budget.spent_s / 60
        candidates[name] = {
            "num_steps": training.num_steps,
            "num_tokens": num_tokens,
            "minutes": minutes,
        }
    record = {"num_self_tokens": rows.ids.numel(), "candidates": candidates, "seed": run.seed}
    write_section(run.results_path, "draft_training", record)


def choose_stage(run: Run) -> None:
    """Keep the candidate with the largest minimum of bound over goal across batch sizes."""
    tokenizer, prompts = load_tokenizer(run.pair_dir / "target"), read_prompts(run.prompts_path)
    target = load_model(run.pair_dir / "target", torch.float32, run.device)
    candidates = {}
    for name in run.drafts:
        draft = load_model(run.work_dir / f"draft-{name}", torch.float32, run.device)
        acceptance = {"float32": acceptance_record(target, draft, tokenizer, prompts, run.seed)}
        timings = {
            size: {"float32": record} for size, record in timing_record(target, draft).items()
        }
        candidates[name] = pair_bounds(acceptance, timings)
        print(name, candidates[name])
    worst = {
        name: min(record["bound"] / record["goal"] for record in bounds.values())
        for name, bounds in candidates.items()
    }
    chosen = max(worst, key=worst.get)
    shutil.rmtree(run.pair_dir / "draft", ignore_errors=True)
    shutil.copytree(run.work_dir / f"draft-{chosen}", run.pair_dir / "draft")
    write_section(run.results_path, "choice", {"draft": chosen, "candidates": candidates})
    print(f"chosen: {chosen}")


def measure_stage(run: Run) -> None:
    """Measure the saved pair and write its README."""
    tokenizer, prompts = load_tokenizer(run.pair_dir / "target"), read_prompts(run.prompts_path)
    acceptance, timings, facts = {}, {}, {}
    for name, dtype in DTYPES.items():
        target = load_model(run.pair_dir / "target", dtype, run.device)
        draft = load_model(run.pair_dir / "draft", dtype, run.device)
        for size, record in timing_record(target, draft).items():
            timings.setdefault(size, {})[name] = record
        acceptance[name] = acceptance_record(target, draft, tokenizer, prompts, run.seed)
        if name == "float32":
            facts["losses"] = loss_record(target, draft, tokenizer)
            facts["num_params"] = {
                "target": target.num_parameters(),
                "draft": draft.num_parameters(),
            }
            facts["sample"] = write_sample(target, tokenizer)
    files = [path for model in ("target", "draft") for path in (run.pair_dir / model).iterdir()]
    record = {
        "num_bytes": sum(path.stat().st_size for path in files),
        "num_prompts": len(prompts),
        **facts,
        "acceptance": acceptance,
        "context_len": CONTEXT_LEN,
        "num_repeats": NUM_REPEATS,
        "machine": machine_record(run.device),
        "timings": timings,
        "bounds": pair_bounds(acceptance, timings),
    }
    results = write_section(run.results_path, "pair", record)
    (run.pair_dir / "README.md").write_text(render(results), encoding="utf-8")
    print(f"wrote {run.pair_dir / 'README.md'}")


def readme_stage(run: Run) -> None:
    """Rewrite the README from the saved measurements."""
    (run.pair_dir / "README.md").write_text(
        render(read_results(run.results_path)), encoding="utf-8"
    )


STAGES = {
    "data": data_stage,
    "tokenizer": tokenizer_stage,
    "target": target_stage,
    "prompts": prompts_stage,
    "draft": draft_stage,
    "choose": choose_stage,
    "measure": measure_stage,
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stage", choices=["all", *STAGES, "readme"], default="all", help="stage to run"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=EXAMPLES.parent / "build" / "pair", help="caches"
    )
    parser.add_argument(
        "--pair-dir", type=Path, default=EXAMPLES / "pair", help="where the pair lies"
    )
    parser.add_argument(
        "--prompts", type=Path, default=EXAMPLES / "prompts.jsonl", help="the prompts' file"
    )
    parser.add_argument(
        "--target-minutes", type=float, default=40.0, help="training time of the target"
    )
    parser.add_argument(
        "--text-minutes", type=float, default=5.0, help="writing time of the target"
    )
    parser.add_argument(
        "--draft-minutes", type=float, default=10.0, help="training time of each draft candidate"
    )
    parser.add_argument(
        "--drafts", nargs="+", choices=[*DRAFT_SHAPES], default=[*DRAFT_SHAPES], help="candidates"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, windows and sampling")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train"
    )
    return parser.parse_args()


def main() -> None:
    """Run one stage or all of them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_flush_denormal(True)
    args = parse_arguments()
    run = Run(
        work_dir=args.work_dir,
        pair_dir=args.pair_dir,
        prompts_path=args.prompts,
        target_minutes=args.target_minutes,
        text_minutes=args.text_minutes,
        draft_minutes=args.draft_minutes,
        drafts=args.drafts,
        seed=args.seed,
        device=args.device,
    )
    run.work_dir.mkdir(parents=True, exist_ok=True)
    run.pair_dir.mkdir(parents=True, exist_ok=True)
    if args.stage == "readme":
        readme_stage(run)
        return
    for stage in STAGES if args.stage == "all" else [args.stage]:
        print(f"stage {stage}")
        STAGES[stage](run)


if __name__ == "__main__":
    main()
