"""Check an installed hf_speculate: its import, its command and one call with a draft.

    <environment>/bin/python -I tests/installed_wheel.py

`-I` keeps the checkout off the path. The environment needs the wheel's requirements, but no extras
and no network.
"""

import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_speculate

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
PROMPTS = [[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]]  # the first row is left-padded
NUM_NEW_TOKENS = 24


def check_version() -> None:
    folder = Path(hf_speculate.__file__).resolve().parent
    assert Path(sys.prefix).resolve() in folder.parents, (
        f"hf_speculate was imported from {folder}, not from {sys.prefix}"
    )
    assert version("hf-speculate") == hf_speculate.__version__


def check_command() -> None:
    program = Path(sysconfig.get_path("scripts"), "hf-speculate")
    shown = subprocess.run(
        [program, "--help"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    missing = [name for name in ("generate", "serve", "bench", "doctor") if name not in shown]
    assert not missing, f"hf-speculate --help shows no {missing}"


def check_generate() -> hf_speculate.SpeculationStats:
    """Compare a call with two rows with plain decoding; the draft is the first of two layers."""
    torch.manual_seed(0)
    target, draft = (
        LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=num)).double().eval()
        for num in (2, 1)
    )
    draft.load_state_dict(target.state_dict(), strict=False)
    ids = torch.tensor(PROMPTS)
    call = {"input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": NUM_NEW_TOKENS}
    call |= {"min_new_tokens": NUM_NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**call)
    stats = hf_speculate.SpeculationStats()
    hf_speculate.enable(target)
    drafted = target.generate(
        **call, assistant_model=draft, num_assistant_tokens=4, speculation_stats=stats
    )
    assert torch.equal(plain, drafted), f"{drafted.tolist()} is not {plain.tolist()}"
    assert stats.num_accepted > 0 and not stats.fallbacks, str(stats)
    return stats


if __name__ == "__main__":
    check_version()
    check_command()
    stats = check_generate()
    print(
        f"hf_speculate {hf_speculate.__version__} with Python {sys.version.split()[0]} and torch "
        f"{torch.__version__}: "
        f"texts equal plain decoding, {stats.num_accepted} of {stats.num_drafted} drafted tokens "
        "accepted"
    )
