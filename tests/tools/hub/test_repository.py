"""Repositories for the Hub: what stands in them, what is uploaded, who picks it up."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.config import PLAIN_NAMES
from hf_speculate.tools.hub.repository import CARD_MARK, function_source, model_card, save_config

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "hub"
COMMON = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
FIELDS = {
    "greedy": COMMON | {"verifier": "greedy"},
    "rejection": COMMON | {"verifier": "rejection"},
    "typical": COMMON | {"verifier": "typical", "posterior_alpha": 0.3, "posterior_threshold": 0.09},
    "coupled": {"verifier": "coupled"},
}
FILES = {"README.md", "generation_config.json", "custom_generate/generate.py", "custom_generate/requirements.txt"}


def files_in(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FIELDS)
def test_the_examples_are_what_is_written(name, tmp_path):
    save_config(None, tmp_path / name, repo_id=f"examples/hub/{name}", **FIELDS[name])
    ours, shown = files_in(tmp_path / name), files_in(EXAMPLES / name)
    assert set(ours) == set(shown) == FILES
    configs = [json.loads(files.pop("generation_config.json")) for files in (ours, shown)]
    assert configs[0] | {"transformers_version": ""} == configs[1] | {"transformers_version": ""}
    assert ours == shown, "write the folders of examples/hub again with save_config"


def test_a_card_explains_every_field_and_its_file_says_how_to_install():
    card = model_card(dict.fromkeys(PLAIN_NAMES, 1) | {"verifier": "typical"}, "x")
    meanings = dict(re.findall(r"^\| `(\w+)` \| `.*` \| (.*) \|$", card, re.M))
    assert [name for name in PLAIN_NAMES if len(meanings[name]) < 10] == []
    code = function_source({}).replace("import hf_speculate\n", "import hf_speculate_missing\n")
    with pytest.raises(ImportError, match="hf_speculate is not installed; run pip install"):
        exec(compile(code, "generate.py", "exec"), {})


def test_settings_of_a_model_go_along_and_stay_as_they_are(tmp_path):
    settings = GenerationConfig(eos_token_id=5, num_assistant_tokens=4)
    before = settings.to_dict()
    save_config(SimpleNamespace(generation_config=settings), tmp_path, verifier="typical", posterior_threshold=0.2)
    assert settings.to_dict() == before
    fields = {"num_assistant_tokens": 4, "verifier": "typical", "posterior_threshold": 0.2}
    assert runpy.run_path(str(tmp_path / "custom_generate" / "generate.py"))["FIELDS"] == fields
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in ("eos_token_id", *fields)} == {"eos_token_id": 5, **fields}


def test_only_what_was_written_is_uploaded_and_a_second_save_replaces_it(tmp_path):
    api, saved = create_autospec(HfApi), {"push_to_hub": True, "repo_id": "someone/rule", "private": True}
    (tmp_path / "private.txt").write_text("not to be published")
    for fields in ({"verifier": "coupled"}, {"verifier": "typical", "num_assistant_tokens": 4}):
        save_config(None, tmp_path, **saved, api=api, **fields)
    save_config(None, tmp_path / "once", repo_id="someone/rule", **fields)
    api.create_repo.assert_called_with("someone/rule", private=True, exist_ok=True)
    uploaded = api.upload_folder.call_args.kwargs
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("someone/rule", str(tmp_path))
    assert set(uploaded["allow_patterns"]) == FILES
    assert {name: (tmp_path / name).read_text() for name in FILES} == files_in(tmp_path / "once")
    assert 'custom_generate="someone/rule"' in (tmp_path / "README.md").read_text()


def test_a_users_card_is_neither_changed_nor_uploaded(tmp_path):
    ours = model_card({"verifier": "coupled"}, "twice").replace(CARD_MARK, "").encode()
    for card in (b"\xff\xfe no text\r\n", ours):
        api = create_autospec(HfApi)
        (tmp_path / "README.md").write_bytes(card)
        save_config(None, tmp_path, push_to_hub=True, repo_id="someone/rule", api=api, verifier="coupled")
        assert (tmp_path / "README.md").read_bytes() == card
        assert set(api.upload_folder.call_args.kwargs["allow_patterns"]) == FILES - {"README.md"}


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    for fields, message in (
        ({"verifier": "own_rule"}, "verifier must be one of block, coupled, greedy, rejection, typical to be saved"),
        ({"posterior_treshold": 0.1}, "fields must be among .*, got posterior_treshold"),
        ({"suffix_store": hf_speculate.SuffixStore()}, "suffix_store must be a string, a number or a list to be saved"),
    ):
        with pytest.raises(hf_speculate.ConfigError, match=message):
            save_config(None, tmp_path / "new", **fields)
        assert not (tmp_path / "new").exists()
