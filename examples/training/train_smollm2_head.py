"""Train the draft head in `examples/smollm2_head` on text that SmolLM2-135M-Instruct writes.

    cd examples && python -m training.train_smollm2_head    # every stage, three hours on two cores
    cd examples && python -m training.train_smollm2_head --stage measure

Stages run in this order: text, train, measure. An interrupted stage resumes from its last state;
delete the work folder to start from scratch. `smollm2/seed_prompts.py` makes the questions for the
target; only the model is downloaded. With `--worker 0/2` and `--worker 1/2`, two processes write
the text, on one core each. `--questions FILE` sets the questions for the measure stage.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from models import HEAD, SMOLLM2, ModelUnavailableError, model_folder, read_questions
from smollm2_head.head import DraftHead
from training.pair.evaluate import cpu_name
from training.pair.store import write_section
from training.smollm2.measuring import measure
from training.smollm2.training import HeadTraining, frequent_ids, read_batches, start_head
from training.smollm2.writing import write_batches

EXAMPLES = Path(__file__).resolve().parents[1]
AUX_LAYERS = [15, 27]  # two of 30 layers, in addition to the last state
DRAFT_VOCAB_SIZE = 8192


def load_target() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    try:
        folder = model_folder()
    except ModelUnavailableError as error:
        raise SystemExit(f"{error}") from error
    target = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    return target.eval().requires_grad_(False), AutoTokenizer.from_pretrained(
        folder, local_files_only=True
    )


def text_stage(args: argparse.Namespace) -> None:
    """Let the target write the training text."""
    worker, num_workers = map(int, args.worker.split("/"))
    numbers = range(worker, args.batches, num_workers)
    write_batches(*load_target(), AUX_LAYERS, args.work_dir / "text", numbers, args.seed)


def train_stage(args: argparse.Namespace) -> None:
    """Fit and save the head."""
    target, _ = load_target()
    text = args.work_dir / "text"
    target_ids = frequent_ids(text, DRAFT_VOCAB_SIZE, target.config.vocab_size)
    head = start_head(target, AUX_LAYERS, target_ids, text, args.seed)
    training = HeadTraining(head, text, args.work_dir / "head.pt", args.minutes, args.seed)
    training.run()
    if training.rank:
        return
    head.save(args.head_dir, f"HuggingFaceTB/{SMOLLM2.model}")
    written = [rows.is_written for rows in read_batches(text)]
    facts = {
        "num_text_tokens": sum(is_written.numel() for is_written in written),
        "num_written_tokens": sum(int(is_written.sum()) for is_written in written),
        "num_steps": training.num_steps,
        "minutes": training.budget.spent_s / 60,
        "seed": args.seed,
        "ranks": training.num_ranks,
        "threads": torch.get_num_threads(),
        "device": f"{cpu_name()} (CPU)",
    }
    write_section(args.head_dir / "measurements.json", "training", facts)


def measure_stage(args: argparse.Namespace) -> None:
    """Measure the saved head on held-out questions."""
    target, tokenizer = load_target()
    questions = read_questions(args.questions, args.num_questions)
    head = DraftHead.load(args.head_dir, target)
    records = measure(
        target, head, tokenizer, questions, args.max_new_tokens, args.num_assistant_tokens
    )
    for record in records:
        ratio, rounds = record["ratio"], record.get("tokens_per_round", 0.0)
        print(
            f"{record['rows']} x {record['method']}: {record['tokens_per_s']:.1f} tokens/s, "
            f"{ratio['median']:.2f}x plain "
            f"({ratio['min']:.2f} to {ratio['max']:.2f}), mean acceptance length {rounds:.2f}, "
            f"{record['identical_rows']}/{record['num_rows']} rows identical to plain"
        )
    facts = {
        "questions": args.questions.name,
        "num_questions": len(questions),
        "max_new_tokens": args.max_new_tokens,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[1],
        "device": f"{cpu_name()} (CPU)",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "results": records,
    }
    write_section(args.head_dir / "measurements.json", args.section, facts)
    print(json.dumps(str(args.head_dir / "measurements.json")))


STAGES = {"text": text_stage, "train": train_stage, "measure": measure_stage}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=["all", *STAGES], default="all", help="stage to run")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=EXAMPLES.parent / "build" / "head",
        help="text, checkpoints",
    )
    parser.add_argument("--head-dir", type=Path, default=HEAD, help="where the head is saved")
    parser.add_argument(
        "--batches", type=int, default=60, help="of text, 64 rows of 512 tokens each"
    )
    parser.add_argument(
        "--worker", default="0/1", help="n/N: write every N-th batch from the n-th on"
    )
    parser.add_argument("--minutes", type=float, default=90.0, help="training time")
    parser.add_argument("--threads", type=int, help="of torch; unset: one a core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--questions",
        type=Path,
        default=EXAMPLES / "questions.jsonl",
        help="in Spec-Bench's format",
    )
    parser.add_argument("--num-questions", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument(
        "--num-assistant-tokens", type=int, default=5, help="maximal draft length of the head"
    )
    parser.add_argument(
        "--section", default="measurements", help="where the results go in measurements.json"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_flush_denormal(True)
    if args.threads:
        torch.set_num_threads(args.threads)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    for stage in STAGES if args.stage == "all" else [args.stage]:
        print(f"stage {stage}", flush=True)
        STAGES[stage](args)


if __name__ == "__main__":
    main()
