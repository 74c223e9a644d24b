"""Run the Python blocks of a page in order, as a reader would paste them.

    python -m tests.page_code docs/statistics.md

If an extra is missing, a block may raise a one-line error that names the extra. The line is
printed, and the next block runs.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from tests.support.pages import EXAMPLES, ROOT, blocks, extras_named_in

PAIR = ROOT / "examples" / "pair"
FROM_NOTHING = ("README.md", "docs/quickstart.md", "docs/recipes.md")
# Models on the Hub named by pages, and the bundled models that replace them.
STAND_INS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "draft",
    "Qwen/Qwen3-8B": "target",
    "Qwen/Qwen3-0.6B": "draft",
}
# Chat template for the bundled tokenizer, which has none.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# model cards leave the names of models open
CARDS = tuple(page for page in EXAMPLES if page.startswith("examples/hub/"))
# Blocks that need the reader's head or assistant, a server, or a library. Blocks that need a
# library run in `make test-integrations`.
NOT_RUN = (
    "adapter = hf_speculate.UnoAdapter(",
    "head = hf_speculate.load_drafter(",
    "from hf_speculate.tools.checks.layers",
    "from hf_speculate.options.gemma4",
    "from hf_speculate.tools.rollouts",
    "from langchain_huggingface",
    "from llama_index",
    "from lm_eval",
    "from openai",
    "from smolagents",
    "import outlines",
)


def names_of_the_example() -> dict[str, Any]:
    """Return the names that the quick start defines; other pages continue from them."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(PAIR / name) for name in ("target", "draft")
    )
    names = {
        "hf_speculate": hf_speculate,
        "tokenizer": tokenizer,
        "model": hf_speculate.enable(target),
        "draft": draft,
    }
    prompts = ["def main():\n", "class Stack:\n"]
    return {
        **names,
        "prompts": prompts,
        "inputs": tokenizer(prompts, return_tensors="pt", padding=True),
    }


def run_blocks(page: str) -> Iterator[str]:
    """Run a page's blocks in one namespace; yield the error of each block that lacks an extra."""
    names = {} if page in FROM_NOTHING else names_of_the_example()
    if page in CARDS:
        names = {"target_name": str(PAIR / "target"), "draft_name": str(PAIR / "draft")}
    for number, code in enumerate(blocks(page, "python")):
        if code.startswith(NOT_RUN):
            continue
        torch.manual_seed(0)
        for name, folder in STAND_INS.items():
            code = code.replace(f'"{name}"', f'"{(PAIR / folder).as_posix()}"')
        if "apply_chat_template" in code:
            names["tokenizer"].chat_template = TEMPLATE
        try:
            exec(compile(code, f"{page}, block {number}", "exec"), names)
        except hf_speculate.MissingExtraError as error:
            if "\n" in str(error) or not extras_named_in(str(error)):
                raise
            yield str(error)


if __name__ == "__main__":
    for page in sys.argv[1:]:
        for line in run_blocks(page):
            print(line)
