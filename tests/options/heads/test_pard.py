"""Compare PARD drafts, computed in one forward over slots, with the model's cacheless forward."""

import json

import pytest
import torch

from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.types import SampleStrategy
from tests.options.heads.designs import VOCAB_SIZE
from tests.options.heads.rounds import Rounds, random_texts, target_of
from tests.support.tiny import make_model

K = 4
PARD_TOKEN = VOCAB_SIZE - 1
TOLERANCE = 1e-5  # Qwen 2 computes its norms in float32


def write_pard(folder, kind="qwen2"):
    """Write a folder as AMD does, and return its model."""
    model = make_model(kind, seed=7, vocab_size=VOCAB_SIZE)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pard_token": PARD_TOKEN}))
    return model


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 8, VOCAB_SIZE - 4])
def test_drafts_equal_a_plain_forward(vocab_size, tmp_path):
    target, model = target_of(vocab_size=vocab_size), write_pard(tmp_path)
    head = load_drafter(tmp_path, target)
    assert head.hidden_layers == ()
    rounds = Rounds(head, target, random_texts([7, 3, 1], seed=1, vocab_size=VOCAB_SIZE - 4))
    for number, accepted in enumerate([(2, 0, 4), (4, 1, 3), (0, None), (1, None)]):
        draft = rounds.draft(K, SampleStrategy.RANDOM, seeds=range(len(rounds.texts)))
        for row, text in enumerate(rounds.texts):
            logits = model(torch.tensor([text + [PARD_TOKEN] * (K - 1)])).logits[0, -K:]
            # The logits are padded, or cut.
            expected = torch.nn.functional.pad(
                logits, (0, vocab_size - VOCAB_SIZE), value=-torch.inf
            )
            torch.testing.assert_close(draft.token_logits[row], expected, rtol=0, atol=TOLERANCE)
        rounds.accept(draft, accepted, seed=number)
        if number == 1:
            rounds.rows([2, 0])


def test_unsupported_pard_drafts_are_named(tmp_path):
    target = target_of()
    write_pard(tmp_path / "window", "mistral_window")
    with pytest.raises(UnsupportedModelError, match="got a PARD draft of model_type 'mistral'"):
        load_drafter(tmp_path / "window", target)
    write_pard(tmp_path / "qwen2")
    with pytest.raises(ConfigError, match="aux_layers must be left out for a PARD draft"):
        load_drafter(tmp_path / "qwen2", target, aux_layers=[1])
