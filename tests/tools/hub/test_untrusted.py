"""A `generation_config.json` from anywhere chooses among what is registered, and runs and imports nothing."""

import json
import math
import sys

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.config import FIELD_NAMES
from hf_speculate.errors import ConfigError
from tests.tiny import make_model, noisy_copy, ragged_prompts

TRAP = "hf_speculate_trap"  # a module that can be imported while a test runs, and must not be
HUGE = 10**400  # past every float
OTHERS = [{"_target_": f"{TRAP}.make"}, [f"{TRAP}:make", 3], {}, math.nan, -math.inf, HUGE, -1, True]
HOSTILE = [f"{TRAP}:make", f"{TRAP}.make", TRAP, "__import__('os').abort()", "../greedy", "GREEDY", "", *OTHERS]
ALLOWED = {"seed": [HUGE, -1], "max_matching_ngram_size": [HUGE]}  # hostile as they look, values of their fields


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A pair whose configs set nothing of ours, beside a module that must not be imported."""
    (tmp_path / f"{TRAP}.py").write_text("def make(*args, **kwargs):\n    raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = hf_speculate.enable(make_model("llama"))
    pair = target, noisy_copy(target)
    for model in pair:
        model.generation_config = GenerationConfig(pad_token_id=0)
    yield pair
    assert TRAP not in sys.modules


def call(target, draft, fields_from=None, **options):
    options |= {"assistant_model": draft, "max_new_tokens": 4, "fields_from": fields_from}
    return hf_speculate.generate(target, **ragged_prompts(1, seed=1), **options)


def from_repository(target, draft, path, **options):
    """As with a model that was downloaded with this file."""
    target.generation_config = GenerationConfig.from_pretrained(path.parent)
    return call(target, draft, **options)


def from_draft(target, draft, path, **options):
    """As with a draft model that was downloaded with this file."""
    draft.generation_config = GenerationConfig.from_pretrained(path.parent)
    return call(target, draft, **options)


SOURCES = [from_repository, from_draft, call]


def saved(folder, **fields):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"pad_token_id": 0, **fields}))
    return path


@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_value_of_a_field_is_refused_before_a_model_runs(models, tmp_path, source):
    for model in models:
        model.register_forward_pre_hook(lambda *args: pytest.fail("a model ran before the refusal"))
    for name in FIELD_NAMES:
        for value in HOSTILE if source is call else OTHERS[:3]:
            if value not in ALLOWED.get(name, []):
                with pytest.raises(ConfigError, match=rf"^{name} must (be|make) "):
                    source(*models, saved(tmp_path, **{name: value}))
                for model in models:
                    model.generation_config = GenerationConfig(pad_token_id=0)


@pytest.mark.parametrize("content", ["[1, 2]", "null", "{", "", "\x00", "[" * 100_000], ids=range(6))
def test_a_file_without_an_object_is_refused(models, tmp_path, content):
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^fields_from must be a JSON object"):
        call(*models, path)


@pytest.mark.parametrize("name", ["assistant_model", "custom_generate", "logits_processor", "tokenizer"])
def test_a_config_brings_no_model_and_no_code(models, tmp_path, name):
    """These are arguments, and none is read from a config; some transformers refuses there."""
    path = saved(tmp_path, **{name: f"{TRAP}:make"})
    plain = models[0].generate(**ragged_prompts(1, seed=1), max_new_tokens=4)
    for source in SOURCES:
        try:
            assert torch.equal(source(*models, path, num_assistant_tokens=2), plain)
        except ValueError as error:
            assert source is not call
            assert f"`{name}` is not a valid argument of `GenerationConfig`" in str(error)
