"""A `generation_config.json` from anywhere chooses among what is registered, and runs and imports nothing."""

import json
import math
import sys
from functools import cache

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.config import FIELD_NAMES
from hf_speculate.errors import ConfigError
from tests.tiny import make_model, noisy_copy, ragged_prompts

TRAP = "hf_speculate_trap"  # a module that can be imported while a test runs, and must not be
NAMES = [
    f"{TRAP}:make",
    f"{TRAP}.make",
    TRAP,
    "os.system",
    "builtins:eval",
    "__import__('os').abort()",
    "../greedy",
    "",
]
HUGE = 10**400  # past every float
OTHERS = [
    {"_target_": f"{TRAP}.make"},
    [f"{TRAP}:make", 3],
    {},
    [],
    math.nan,
    -math.inf,
    math.inf,
    HUGE,
    -1,
    True,
    False,
]
HOSTILE = [*NAMES, *OTHERS]
HELD_BY_JSON = {  # hostile as they look, these are values of their fields
    "seed": [HUGE, -1],
    "max_matching_ngram_size": [HUGE],
}
OBJECTS = {
    "candidate_generator": "a CandidateGenerator or make one",
    "generator": "a torch.Generator",
    "speculation_callback": "called after every round",
    "speculation_stats": "a SpeculationStats",
    "suffix_store": "a SuffixStore",
}
REGISTERED = "verifier must be one of block, coupled, greedy, rejection, typical, got "


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """Makes the module importable, and looks afterwards whether it was."""
    (tmp_path / f"{TRAP}.py").write_text("def make(*args, **kwargs):\n    raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    assert TRAP not in sys.modules


@cache
def blocked_pair():
    """A pair whose forwards fail the test."""
    target = hf_speculate.enable(make_model("llama"))
    pair = target, noisy_copy(target)

    def fail(*args):
        raise AssertionError("a model ran before the refusal")

    for model in pair:
        model.register_forward_pre_hook(fail)
    return pair


@pytest.fixture
def models(trap):
    """The blocked pair, with configs that set nothing of ours."""
    for model in blocked_pair():
        model.generation_config = GenerationConfig(pad_token_id=0)
    return blocked_pair()


def from_repository(target, draft, path, **options):
    """As with a model that was downloaded with this file."""
    target.generation_config = GenerationConfig.from_pretrained(path.parent)
    return target.generate(**ragged_prompts(1, seed=1), assistant_model=draft, max_new_tokens=4, **options)


def from_draft(target, draft, path, **options):
    """As with a draft model that was downloaded with this file."""
    draft.generation_config = GenerationConfig.from_pretrained(path.parent)
    return target.generate(**ragged_prompts(1, seed=1), assistant_model=draft, max_new_tokens=4, **options)


def from_file(target, draft, path, **options):
    """As from a repository's `custom_generate`, by the file's name."""
    return hf_speculate.generate(
        target, **ragged_prompts(1, seed=1), assistant_model=draft, max_new_tokens=4, fields_from=path, **options
    )


def from_content(target, draft, path, **options):
    """As from a repository's `custom_generate`, by the file's content."""
    return from_file(target, draft, json.loads(path.read_text()), **options)


WAYS = [from_repository, from_draft, from_file, from_content]


def saved(folder, **fields):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"pad_token_id": 0, **fields}))
    return path


@pytest.mark.parametrize(("way", "do_sample"), [(from_file, False), *((way, True) for way in WAYS)])
def test_a_verifier_is_found_by_its_registered_name_only(models, tmp_path, way, do_sample):
    for value in [*HOSTILE, "GREEDY", " greedy", "hf_speculate.verify.greedy"]:
        with pytest.raises(ConfigError) as raised:
            way(*models, saved(tmp_path, verifier=value), do_sample=do_sample)
        assert str(raised.value).startswith(REGISTERED)
        assert "register your own with hf_speculate.register_verifier" in str(raised.value)


@pytest.mark.parametrize(("way", "values"), [(from_file, HOSTILE), *((way, OTHERS[:4]) for way in WAYS)])
@pytest.mark.parametrize("name", FIELD_NAMES)
def test_a_value_that_is_none_of_the_fields_is_refused(models, tmp_path, way, values, name):
    for value in values:
        if value in HELD_BY_JSON.get(name, []):
            continue
        with pytest.raises(ConfigError, match=rf"^{name} must (be|make) "):
            way(*models, saved(tmp_path, **{name: value}))


@pytest.mark.parametrize(("name", "kind"), OBJECTS.items())
def test_objects_never_come_from_json(models, tmp_path, name, kind):
    for value in NAMES:
        with pytest.raises(ConfigError, match=f"^{name} must be {kind}, got str; pass "):
            from_repository(*models, saved(tmp_path, **{name: value}))


@pytest.mark.parametrize("value", ["os.system", {"a": 1}, [2], math.nan, HUGE, -1, True, 1.5])
def test_an_early_exit_is_a_number_of_layers(models, tmp_path, value):
    target, _ = models
    target.generation_config = GenerationConfig.from_pretrained(saved(tmp_path, assistant_early_exit=value).parent)
    with pytest.raises(ConfigError, match=r"^assistant_early_exit must be in"):
        target.generate(**ragged_prompts(1, seed=1), max_new_tokens=4)


@pytest.mark.parametrize("content", ["[1, 2]", '"verifier"', "3", "null", "{", "", "\x00", "[" * 100_000], ids=range(8))
def test_a_file_without_an_object_is_refused(models, tmp_path, content):
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^fields_from must be a JSON object"):
        from_file(*models, path)


@pytest.mark.parametrize("name", ["assistant_model", "custom_generate", "logits_processor", "tokenizer"])
def test_a_config_brings_no_model_and_no_code(trap, tmp_path, name):
    """These are arguments, and none is read from a config; some transformers refuses there."""
    target = hf_speculate.enable(make_model("llama"))
    draft = noisy_copy(target)
    plain = target.generate(**ragged_prompts(1, seed=1), max_new_tokens=4)
    path = saved(tmp_path, **{name: f"{TRAP}:make"})
    for way in WAYS:
        try:
            assert torch.equal(way(target, draft, path, num_assistant_tokens=2), plain)
        except ValueError as error:
            assert way in (from_repository, from_draft)
            assert f"`{name}` is not a valid argument of `GenerationConfig`" in str(error)
    assert torch.equal(from_file(target, None, path), plain)
