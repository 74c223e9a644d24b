"""Decode with a tensor-parallel target and a complete draft model in each process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Every process runs this script and gets the same text: drafts, seeds and clocks are broadcast from
rank 0. On GPUs, each process uses the device with the index of its local rank.
"""

import importlib.util
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import hf_speculate

PAIR = Path(__file__).resolve().parent / "pair"
PROMPTS = ["def main():\n", "class Stack:\n", "import os\n\n"]
OPTIONS = {"max_new_tokens": 32, "do_sample": False}


def main() -> None:
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit(
            "no process of torchrun; run: torchrun --nproc-per-node 2 examples/tensor_parallel.py"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise SystemExit('accelerate is not installed; run: pip install ".[ranks]"')
    distributed_config = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
    target = AutoModelForCausalLM.from_pretrained(
        PAIR / "target", dtype=torch.float32, distributed_config=distributed_config
    )
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft", dtype=torch.float32).to(
        target.device
    )
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(target.device)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}

    hf_speculate.enable(target)
    plain = target.generate(**inputs, **OPTIONS)
    stats = hf_speculate.SpeculationStats()
    output = target.generate(**inputs, **OPTIONS, assistant_model=draft, speculation_stats=stats)

    texts: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(texts, tokenizer.batch_decode(output, skip_special_tokens=True))
    if dist.get_rank() == 0:
        print("\n\n".join(texts[0]))
        print(f"\n{stats}\n")
        print(
            f"processes: {len(texts)}, all with one text: "
            f"{all(rank_texts == texts[0] for rank_texts in texts)}"
        )
        print(
            f"rows as plain generate() has them: {int((plain == output).all(1).sum())} of "
            f"{len(PROMPTS)}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
