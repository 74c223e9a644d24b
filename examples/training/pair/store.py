"""Save the pair in the format that `from_pretrained` reads."""

import json
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.pair.shapes import EOS_TOKEN_ID, PAD_TOKEN_ID

LOADING_KEYS = ("backend", "is_local", "local_files_only")
"""Keys on the loading of a tokenizer; they are no property of it."""


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a bfloat16 copy with its tokenizer and a generation config without sampling.

    The model loads as float32.
    """
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16).eval()
    copy.generation_config = GenerationConfig(
        bos_token_id=EOS_TOKEN_ID, eos_token_id=EOS_TOKEN_ID, pad_token_id=PAD_TOKEN_ID
    )
    copy.save_pretrained(folder)
    # CPUs decode faster in float32, and near-ties are rare.
    _update(folder / "config.json", dtype="float32")
    save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the tokenizer under the class name that every transformers version reads."""
    tokenizer.save_pretrained(folder)
    _update(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _update(path: Path, **values: str) -> None:
    """Set entries in a JSON file, and remove `LOADING_KEYS`."""
    entries = json.loads(path.read_text(encoding="utf-8")) | values
    entries = {key: value for key, value in entries.items() if key not in LOADING_KEYS}
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> LlamaForCausalLM:
    """Load a saved model in evaluation mode."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer saved with a model."""
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def read_results(path: Path) -> dict:
    """Return the sections written so far, or an empty record."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_section(path: Path, section: str, value: dict) -> dict:
    """Replace one section of the results and return the complete record."""
    results = read_results(path) | {section: value}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results
