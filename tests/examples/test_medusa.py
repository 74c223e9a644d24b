"""The Medusa example: heads that were trained by its script, used through `generate()`."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_speculate
from tests.cases import VERIFIERS, assert_equal_ids
from tests.tiny import make_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WEIGHTS = EXAMPLES / "medusa" / "heads.safetensors"
MAX_BYTES = 2_000_000
NUM_NEW = 40
K = 3


@pytest.fixture(scope="module")
def target(import_example):
    """The bundled target in float64."""
    store = import_example("pair_training.store")
    return hf_speculate.enable(store.load_model(EXAMPLES / "pair" / "target", torch.float64, "cpu"))


@pytest.fixture(scope="module")
def prompts(import_example):
    """The bundled prompts."""
    return import_example("pair_training.prompts").read_prompts(EXAMPLES / "prompts.jsonl")


@pytest.fixture(scope="module")
def encode(import_example):
    """Encodes prompts as one left-padded batch."""
    tokenizer = import_example("pair_training.store").load_tokenizer(EXAMPLES / "pair" / "target")
    return lambda texts: tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")


@pytest.fixture(scope="module")
def drafter(import_example, target):
    """Makes drafters over the committed heads."""
    heads = import_example("medusa.heads").MedusaHeads.load(WEIGHTS, target)
    return functools.partial(import_example("medusa.drafter").MedusaDrafter, heads)


def test_the_committed_heads_are_small():
    assert WEIGHTS.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("rows", [slice(1), slice(0, 40, 14)], ids=["one prompt", "a batch"])
def test_greedy_text_is_plain_and_guesses_are_kept(target, prompts, encode, drafter, rows):
    inputs, stats = encode(prompts[rows]), hf_speculate.SpeculationStats()
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    ours = target.generate(**inputs, **options, drafter=drafter, num_assistant_tokens=K, speculation_stats=stats)
    assert_equal_ids(target.generate(**inputs, **options), ours)
    assert stats.mean_acceptance_length > 1.3
    first, *_, last = stats.acceptance_rate_per_position
    assert first > 0.3
    assert last > 0


def test_sampled_text_is_the_seeds(target, prompts, encode, drafter):
    inputs, stats = encode(prompts[3:5]), hf_speculate.SpeculationStats()
    options = {"do_sample": True, "verifier": "coupled", "seed": 1, "max_new_tokens": 24, "temperature": 0.5}
    options["repetition_penalty"] = 1.05
    ours = target.generate(**inputs, **options, drafter=drafter, num_assistant_tokens=K, speculation_stats=stats)
    assert_equal_ids(target.generate(**inputs, **options), ours)
    assert stats.num_accepted > 0


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_verifier_judges_it_row_by_row(target, prompts, encode, drafter, verifier):
    inputs = encode(prompts[:2])
    options = {**VERIFIERS[verifier], "drafter": drafter, "num_assistant_tokens": K, "max_new_tokens": 10}
    stats = hf_speculate.SpeculationStats()
    both = target.generate(**inputs, **options, seed=[1, 2], speculation_stats=stats)
    alone = target.generate(**encode(prompts[1:2]), **options, seed=2)
    assert torch.equal(both[1, -10:], alone[0, -10:])
    assert stats.num_drafted > 0


def test_training_lowers_every_heads_loss(import_example):
    train, selftext = import_example("medusa.train"), import_example("pair_training.selftext")
    model = make_model("llama", dtype=torch.float32, seed=1)
    prefixes = torch.randint(1, 64, (8, 4), generator=torch.Generator().manual_seed(0))
    text = selftext.continue_rows(model, prefixes, 40, torch.ones(8, dtype=torch.bool))
    output = model.get_output_embeddings()

    def losses(num_steps: int) -> torch.Tensor:
        settings = train.Settings(num_heads=2, rank=16, num_steps=num_steps, learning_rate=0.02)
        heads = train.train_heads(model, text, settings)
        return train.head_losses(heads, output, text.ids, text.hidden.float())[0]

    assert (losses(40) < 0.8 * losses(0)).all()


def test_head_labels_are_the_tokens_after_the_next(import_example):
    """Heads that change nothing say of every place what the target says of the next token: one place too early."""
    train, heads = import_example("medusa.train"), import_example("medusa.heads").MedusaHeads(8, 2, 4)
    ids = torch.tensor([[5, 6, 7, 0, 1, 2]])
    states = torch.nn.functional.one_hot(ids[:, 2:], 8).float()  # of which the token after the next can be read
    states = torch.cat([states, states[:, :1]], dim=1)
    _, shares = train.head_losses(heads, torch.nn.Identity(), ids, states)
    assert shares.tolist() == [1.0, 0.0]


def test_saved_heads_come_back(import_example, tmp_path):
    kind = import_example("medusa.heads").MedusaHeads
    heads = kind(6, 3, 2)
    heads.up.data.normal_()
    heads.save(tmp_path / "heads.safetensors")
    loaded = kind.load(tmp_path / "heads.safetensors", torch.nn.Linear(1, 1, dtype=torch.float64))
    states = torch.randn(5, 6)
    assert loaded.num_heads == 3
    assert loaded(states.double()).dtype == torch.float64
    torch.testing.assert_close(loaded(states.double()).float(), heads(states), rtol=5e-3, atol=5e-3)  # float16 weights
    assert torch.equal(loaded(states.double(), 2), loaded(states.double())[:, :2])


@pytest.mark.slow
def test_the_script_compares_it_with_plain_decoding():
    arguments = ["--prompts", "2", "--max-new-tokens", "12", "--dtype", "float64"]
    command = [sys.executable, "-m", "medusa.run", *arguments]
    result = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^mean acceptance length (\S+)$", result.stdout, re.M)
    assert "2 of 2 rows equal plain greedy decoding in float64" in result.stdout
