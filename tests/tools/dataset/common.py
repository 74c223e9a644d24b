"""Provide a tiny pair in folders, prompts for a data set, and the expected results."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tests.support.tiny import cheaper_copy, make_model
from tests.support.tiny_tokenizers import letters_tokenizer

# One letter for each of the 64 ids.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"
PAD, EOS = "a", ","
NUM_NEW = 12


def save_pair(folder: Path, noise: float = 0.05) -> tuple[str, str]:
    """Save a float64 target and its draft; many texts end with an EOS id. Return their folders."""
    target = make_model("llama")
    target.generation_config = GenerationConfig(
        eos_token_id=LETTERS.index(EOS), pad_token_id=0, do_sample=False
    )
    tokenizer = letters_tokenizer(LETTERS, pad_token=PAD, eos_token=EOS)
    for name, model in (("target", target), ("draft", cheaper_copy(target, noise))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def prompts(num: int, seed: int = 0) -> list[str]:
    """Return texts of 3 to 14 letters without padding or EOS."""
    chance = random.Random(seed)
    return ["".join(chance.choices(LETTERS[1:-1], k=chance.randint(3, 14))) for _ in range(num)]


def write_prompts(path: Path, texts: list[str]) -> list[str]:
    """Write a file of prompts with ids p0, p1, ... and return the ids."""
    ids = [f"p{index}" for index in range(len(texts))]
    lines = [json.dumps({"id": key, "prompt": text}) for key, text in zip(ids, texts, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return ids


def batch_words(folder: Path, output: Path, *more: str) -> list[str]:
    """Return a command that decodes `prompts.jsonl` next to `output` with the pair in a folder."""
    words = [
        "batch",
        str(folder / "target"),
        str(output.parent / "prompts.jsonl"),
        "-o",
        str(output),
    ]
    return [
        *words,
        "-d",
        str(folder / "draft"),
        "-n",
        str(NUM_NEW),
        "-b",
        "4",
        "--device",
        "cpu",
        *more,
    ]


def results_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of the output by id; each id must occur once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    results = {line["id"]: line for line in lines}
    assert len(results) == len(lines)
    return results


def ends_of(line: dict[str, Any]) -> tuple[str, int, str]:
    """Return the fields that are compared with `plain_results`."""
    return line["text"], line["num_tokens"], line["finish_reason"]


def texts_in(path: Path) -> dict[str, str]:
    """Return the texts of the output by id."""
    return {key: line["text"] for key, line in results_in(path).items()}


def begun_in(output: Path, rank: int = 0) -> list[list[str]]:
    """Return the ids in every batch that a rank began, without a line that is being written."""
    path = output.with_name(f"{output.name}.run") / f"begun-{rank}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["ids"] for line in lines]


def plain_results(target: PreTrainedModel | Path, texts: list[str]) -> list[tuple[str, int, str]]:
    """Return text, number of tokens and finish reason from plain greedy decoding, row by row."""
    if isinstance(target, Path):
        target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    eos, results = LETTERS.index(EOS), []
    for text in texts:
        ids = torch.tensor([[LETTERS.index(letter) for letter in text]])
        new = target.generate(ids, max_new_tokens=NUM_NEW, eos_token_id=eos, pad_token_id=0)[
            0, ids.shape[1] :
        ]
        shown = "".join(LETTERS[token_id] for token_id in new.tolist() if token_id not in (0, eos))
        results.append((shown, len(new), "stop" if int(new[-1]) == eos else "length"))
    return results
