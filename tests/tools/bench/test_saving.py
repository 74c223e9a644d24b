"""Fields go into a folder's generation config beside what stands there, at once or not at all."""

import json
import os

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_speculate import ConfigError
from hf_speculate.tools.bench.saving import settings_in, write_fields
from tests.tools.bench.fakes import save_pair

FIELDS = {"verifier": "typical", "posterior_threshold": 0.2, "num_assistant_tokens": 5}


def test_other_entries_stay_and_what_was_tuned_before_goes(tmp_path):
    before = {
        "_from_model_config": True,
        "eos_token_id": 7,
        "temperature": 0.5,
        "draft_sampling": "argmax",
        "verifier": "block",
        "num_assistant_tokens_schedule": "adaptive",
    }
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(before))
    assert write_fields(tmp_path, FIELDS) == path
    kept = {name: before[name] for name in ("eos_token_id", "temperature", "draft_sampling")}
    assert json.loads(path.read_text()) == kept | FIELDS
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert (loaded.verifier, loaded.posterior_threshold, loaded.eos_token_id) == ("typical", 0.2, 7)
    assert [one.name for one in tmp_path.iterdir()] == ["generation_config.json"]


def test_a_model_folder_without_the_file_gets_one_that_says_what_the_model_did(tmp_path):
    target, _ = save_pair(tmp_path)
    folder = tmp_path / "target"
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    write_fields(folder, FIELDS)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.generation_config.eos_token_id == 9
    assert model.generation_config.verifier == "typical"
    assert "_from_model_config" not in json.loads((folder / "generation_config.json").read_text())


def test_a_crash_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": 7}')

    def crash(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        write_fields(tmp_path, FIELDS)
    assert path.read_text() == '{"eos_token_id": 7}'
    assert os.listdir(tmp_path) == ["generation_config.json"]


@pytest.mark.parametrize(("content", "message"), [("[]", "got list"), ("{", "got none")])
def test_a_file_that_is_no_object_is_said(content, message, tmp_path):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"must be a JSON object, {message}"):
        settings_in(tmp_path)


def test_a_folder_that_is_no_models_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"must hold a generation_config\.json or a model's config\.json"):
            write_fields(folder, FIELDS)
    assert list(tmp_path.iterdir()) == []
