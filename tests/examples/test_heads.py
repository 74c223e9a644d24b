"""The EAGLE-3 head of the examples: its training sees what it will do when it drafts, and what it learnt."""

from pathlib import Path

import pytest
import torch

import hf_speculate
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.types import SampleStrategy
from tests.cases import assert_equal_ids
from tests.draft.heads.designs import EAGLE3, make_weights, write_speculators
from tests.draft.heads.rounds import Rounds, random_texts, states_of, target_of
from tests.tiny import make_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_BYTES = 8_000_000
MIN_LENGTH = 3.0  # mean acceptance length at K = 5
NUM_STEPS = 4
TOLERANCE = 1e-9


def test_a_rollout_gives_the_logits_of_drafts(import_example, tmp_path):
    rollout, target = import_example("heads.rollout").rollout, target_of()
    head = load_drafter(write_speculators(tmp_path, EAGLE3, make_weights(EAGLE3)), target)
    for text in random_texts([5, 9], seed=3):
        draft = Rounds(head, target, [text]).draft(NUM_STEPS, SampleStrategy.RANDOM)
        ids = torch.tensor([text + draft.token_ids[0].tolist()])
        states = states_of(target, text[:-1], EAGLE3.aux_layers)
        states = torch.nn.functional.pad(states, (0, 0, 0, NUM_STEPS))[None]  # those after the newest are not read
        found = rollout(head.network, target.get_input_embeddings().weight, ids, states, NUM_STEPS)
        for step, logits in enumerate(found):
            expected = draft.token_logits[0, step, list(EAGLE3.draft_ids)]
            torch.testing.assert_close(logits[0, len(text) - 2], expected, rtol=0, atol=TOLERANCE)


@pytest.fixture
def training(import_example, tmp_path):
    """Makes trainings of one head, which share their folder."""
    train, rows = import_example("heads.train"), import_example("heads.rows")
    target = make_model(
        "llama", dtype=torch.float32, vocab_size=64, hidden_size=16, num_hidden_layers=14, tie_word_embeddings=True
    )
    ids = torch.randint(64, (rows.BATCH_SIZE, 12), generator=torch.Generator().manual_seed(0))
    batches = [rows.read_rows(target, ids)] * 2
    settings = train.Settings(draft_vocab_size=32, intermediate_size=16)

    def make(minutes):
        network = train.new_head(target, train.frequent_ids(batches, 64, 32), settings, seed=0)
        return train.HeadTraining(network, target, batches, settings, 0, minutes, tmp_path)

    make.save = lambda network, folder: train.save_head(network, target, settings, folder)
    make.target = target
    return make


def test_training_goes_on_where_it_was_and_saves_what_load_drafter_reads(training, tmp_path):
    first = training(minutes=0.02)
    first.run()
    before = first.lowest
    second = training(minutes=first.budget.spent_s / 60 + 0.02)
    assert second.num_steps == first.num_steps > 0
    network = second.run()
    assert second.num_steps > first.num_steps
    assert second.lowest < before
    training.save(network, tmp_path / "head")
    head = load_drafter(tmp_path / "head", training.target)
    assert head.spec.kind == "eagle3"
    assert head.spec.draft_vocab_size == 32
    saved = network.lm_head.weight.to(torch.bfloat16).float()
    assert torch.equal(head.network.lm_head.weight, saved)


def test_the_saved_head_drafts_long_greedy_texts(import_example):
    measure, models = import_example("heads.measure"), import_example("models")
    files = list(models.EAGLE3.iterdir())
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    target = measure.load_model(models.PAIR / "target", torch.float32, "cpu")
    head, stats = load_drafter(models.EAGLE3, target), hf_speculate.SpeculationStats()
    tokenizer = measure.load_tokenizer(models.PAIR / "target")
    inputs = tokenizer(models.read_questions(measure.PROMPTS, 8), return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
    options = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant", "speculation_stats": stats}
    ours = hf_speculate.generate(target, **inputs, assistant_model=head, max_new_tokens=48, do_sample=False, **options)
    assert_equal_ids(plain, ours)
    assert stats.mean_acceptance_length > MIN_LENGTH
