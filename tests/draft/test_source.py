"""Test the tables of draft sources, and a source that the library does not know."""

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_speculate
from hf_speculate.draft.source import SOURCES, VARIANTS, load_entry
from hf_speculate.errors import UnsupportedGenerationError
from tests.draft.repeat_source import Repeats
from tests.support.tiny import make_model, ragged_prompts

NUM_NEW = 24


class Model(hf_speculate.SpeculativeGenerationMixin, LlamaForCausalLM):
    draft_sources = SOURCES | {"repeats": "tests.draft.repeat_source"}


def test_outside_source_needs_one_file_and_one_entry():
    plain = make_model("llama")
    target = Model(plain.config).eval()
    target.load_state_dict(plain.state_dict())
    repeats, stats = Repeats(2), hf_speculate.SpeculationStats()
    call = {**ragged_prompts(3, seed=2), "do_sample": False, "max_new_tokens": NUM_NEW}
    expected = plain.generate(**call)
    drafted = {"repeats": repeats, "num_assistant_tokens": 3, "speculation_stats": stats}
    assert torch.equal(target.generate(**call, **drafted), expected)
    assert stats.num_drafted
    assert repeats.num_accepted == stats.num_accepted
    assert repeats.texts == expected[:, -NUM_NEW:].tolist()
    assert "drafter: the last tokens again" in stats.plan
    assert torch.equal(target.generate(**call, repeats=None), expected)
    with pytest.raises(
        UnsupportedGenerationError, match="got assistant_model and repeats; omit one of them"
    ):
        target.generate(**call, repeats=repeats, assistant_model=plain)
    with pytest.raises(
        UnsupportedGenerationError, match="leave repeats out to decode without speculation"
    ):
        target.generate(**call, repeats=repeats, num_beams=2)


@pytest.mark.parametrize("entry", [*SOURCES.values(), *VARIANTS.values()])
def test_table_entries_exist(entry):
    assert callable(load_entry(entry))
