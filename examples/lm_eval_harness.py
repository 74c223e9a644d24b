"""Run an lm-evaluation-harness task on an enabled model, with a draft and by plain decoding.

    pip install lm-eval
    python examples/lm_eval_harness.py

The harness only needs an enabled model. Tasks that compare log-probabilities run as before; tasks
that generate text (`generate_until`) use the draft.
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

if importlib.util.find_spec("lm_eval") is None:
    raise SystemExit("lm_eval is not installed; run: pip install lm-eval")

from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

EXAMPLES = Path(__file__).resolve().parent
PAIR = EXAMPLES / "pair"


def code_task(folder: Path, num_prompts: int) -> ConfigurableTask:
    """Make a task that continues code up to the next empty line.

    Only the texts matter here; the score does not, because there is no reference.
    """
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:num_prompts]
    documents = [{"prompt": json.loads(line)["turns"][0]} for line in lines]
    path = folder / "prompts.json"
    path.write_text("\n".join(json.dumps(document) for document in documents), encoding="utf-8")
    config = {
        "task": "continue_code",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(folder)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 48, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return ConfigurableTask(config=config)


def answers(model: HFLM, task: ConfigurableTask) -> list[str]:
    """Answer a task; the harness cuts the texts at the stop strings."""
    result = simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
    return [sample["filtered_resps"][0] for sample in result["samples"]["continue_code"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the bundled pair.")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target")
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft")
    calls: list[hf_speculate.SpeculationStats] = []
    hf_speculate.enable(target, draft, speculation_stats=calls.append)
    model = HFLM(pretrained=target, tokenizer=tokenizer, batch_size=args.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        task = code_task(Path(folder), args.num_prompts)
        drafted = answers(model, task)
        stats = sum(calls[1:], start=calls[0])
        with hf_speculate.plain(target):
            plain = answers(model, task)
    print(*plain[:2], sep="\n---\n")
    print(f"\nanswers equal plain decoding's: {plain == drafted}")
    print(stats)


if __name__ == "__main__":
    main()
