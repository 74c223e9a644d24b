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
    """A pair beside a module that must not be imported."""
    (tmp_path / f"{TRAP}.py").write_text("def make(*args, **kwargs):\n    raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = hf_speculate.enable(make_model("llama"))
    yield {"target": target, "draft": noisy_copy(target)}
    assert TRAP not in sys.modules


SOURCES = ("target", "draft", "fields_from")


def call(models, source, folder, content):
    """One call with a file that was downloaded with a model, or alone."""
    path, options = folder / "generation_config.json", {"assistant_model": models["draft"], "max_new_tokens": 4}
    path.write_text(content)
    for name, model in models.items():
        own = GenerationConfig(pad_token_id=0)
        model.generation_config = GenerationConfig.from_pretrained(folder) if name == source else own
    options |= {"fields_from": path} if source == "fields_from" else {}
    return hf_speculate.generate(models["target"], **ragged_prompts(1, seed=1), **options)


@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_value_of_a_field_is_refused_before_a_model_runs(models, tmp_path, source):
    for model in models.values():
        model.register_forward_pre_hook(lambda *args: pytest.fail("a model ran before the refusal"))
    for name in FIELD_NAMES:
        for value in HOSTILE if source == "fields_from" else OTHERS[:3]:
            if value not in ALLOWED.get(name, []):
                with pytest.raises(ConfigError, match=rf"^{name} must (be|make) "):
                    call(models, source, tmp_path, json.dumps({"pad_token_id": 0, name: value}))


def test_a_file_without_an_object_is_refused(models, tmp_path):
    for content in ("[1, 2]", "{", "\x00", "[" * 100_000):
        with pytest.raises(ConfigError, match=r"^fields_from must be a JSON object"):
            call(models, "fields_from", tmp_path, content)


@pytest.mark.parametrize("name", ["assistant_model", "custom_generate", "logits_processor", "tokenizer"])
def test_a_config_brings_no_model_and_no_code(models, tmp_path, name):
    """These are arguments, and none is read from a config; some transformers refuses there."""
    plain = models["target"].generate(**ragged_prompts(1, seed=1), max_new_tokens=4)
    content = json.dumps({"pad_token_id": 0, name: f"{TRAP}:make", "num_assistant_tokens": 2})
    for source in SOURCES:
        try:
            assert torch.equal(call(models, source, tmp_path, content), plain)
        except ValueError as error:
            assert source != "fields_from"
            assert f"`{name}` is not a valid argument of `GenerationConfig`" in str(error)
