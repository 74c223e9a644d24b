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
HOSTILE = [
    f"{TRAP}:make",
    f"{TRAP}.make",
    TRAP,
    "os.system",
    "__import__('os').abort()",
    "../greedy",
    "GREEDY",
    "",
    *OTHERS,
]
HELD_BY_JSON = {"seed": [HUGE, -1], "max_matching_ngram_size": [HUGE]}  # hostile as they look, values of their fields


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """Makes the module importable, and looks afterwards whether it was."""
    (tmp_path / f"{TRAP}.py").write_text("def make(*args, **kwargs):\n    raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    assert TRAP not in sys.modules


@pytest.fixture(scope="module")
def blocked_pair():
    """A pair whose forwards fail the test."""
    target = hf_speculate.enable(make_model("llama"))
    pair = target, noisy_copy(target)
    for model in pair:
        model.register_forward_pre_hook(lambda *args: pytest.fail("a model ran before the refusal"))
    return pair


@pytest.fixture
def models(trap, blocked_pair):
    """The blocked pair, with configs that set nothing of ours."""
    for model in blocked_pair:
        model.generation_config = GenerationConfig(pad_token_id=0)
    return blocked_pair


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


WAYS = [from_repository, from_draft, call]


def saved(folder, **fields):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"pad_token_id": 0, **fields}))
    return path


@pytest.mark.parametrize(("way", "values"), [(call, HOSTILE), *((way, OTHERS[:3]) for way in WAYS)])
@pytest.mark.parametrize("name", FIELD_NAMES)
def test_a_value_that_is_none_of_the_fields_is_refused(models, tmp_path, way, values, name):
    for value in values:
        if value not in HELD_BY_JSON.get(name, []):
            with pytest.raises(ConfigError, match=rf"^{name} must (be|make) "):
                way(*models, saved(tmp_path, **{name: value}))


@pytest.mark.parametrize("content", ["[1, 2]", "null", "{", "", "\x00", "[" * 100_000], ids=range(6))
def test_a_file_without_an_object_is_refused(models, tmp_path, content):
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^fields_from must be a JSON object"):
        call(*models, path)


@pytest.mark.parametrize("name", ["assistant_model", "custom_generate", "logits_processor", "tokenizer"])
def test_a_config_brings_no_model_and_no_code(trap, tmp_path, name):
    """These are arguments, and none is read from a config; some transformers refuses there."""
    target = hf_speculate.enable(make_model("llama"))
    draft, path = noisy_copy(target), saved(tmp_path, **{name: f"{TRAP}:make"})
    plain = target.generate(**ragged_prompts(1, seed=1), max_new_tokens=4)
    for way in WAYS:
        try:
            assert torch.equal(way(target, draft, path, num_assistant_tokens=2), plain)
        except ValueError as error:
            assert way in (from_repository, from_draft)
            assert f"`{name}` is not a valid argument of `GenerationConfig`" in str(error)
