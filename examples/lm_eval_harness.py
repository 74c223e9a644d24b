"""A task of lm-evaluation-harness, answered by an enabled model with a draft, and plainly.

    pip install lm-eval
    python examples/lm_eval_harness.py

`SpeculativeLM` is all that an evaluation of your own needs: pass one as `model` to `lm_eval.simple_evaluate`. Tasks
that compare log-probabilities run as before; those that generate text (`generate_until`) use the draft.
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

if importlib.util.find_spec("lm_eval") is None:
    raise SystemExit("lm_eval is not installed; run: pip install lm-eval")

from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

EXAMPLES = Path(__file__).resolve().parent
PAIR = EXAMPLES / "pair"


class SpeculativeLM(HFLM):
    """The harness's model of transformers, with options of `generate()` such as `assistant_model`."""

    def __init__(self, target: Any, options: dict[str, Any], **settings: Any) -> None:
        super().__init__(pretrained=hf_speculate.enable(target), **settings)
        self.options = options
        self.stats: list[hf_speculate.SpeculationStats] = []

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        # The harness's own criterion ends a batch when every row has met a stop string. generate() ends each row by
        # itself, inside a round too; the harness cuts the texts at the same strings in either case.
        self.stats.append(hf_speculate.SpeculationStats())
        kwargs |= self.options | {"stop_strings": stop or None, "tokenizer": self.tokenizer}
        return super()._model_generate(context, max_length, [], speculation_stats=self.stats[-1], **kwargs)


def code_task(folder: Path, num_prompts: int) -> ConfigurableTask:
    """Continue code up to the next empty line. The texts count here, not the score: there is no reference."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the bundled pair.")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target")
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft")
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        task = code_task(Path(folder), args.num_prompts)
        for name, options in (("plain", {}), ("with a draft", {"assistant_model": draft})):
            model = SpeculativeLM(target, options, tokenizer=tokenizer, batch_size=args.batch_size, device="cpu")
            result = simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
            answers[name] = [sample["filtered_resps"][0] for sample in result["samples"]["continue_code"]]
    print(*answers["plain"][:2], sep="\n---\n")
    print(f"\nanswers equal plain decoding's: {answers['plain'] == answers['with a draft']}")
    print(sum(model.stats[1:], start=model.stats[0]))


if __name__ == "__main__":
    main()
