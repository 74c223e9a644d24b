"""Repositories for the Hub: what stands in them, what is uploaded, who picks it up."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_speculate
from hf_speculate.config import PLAIN_NAMES
from hf_speculate.tools.hub.card import CARD_MARK, model_card
from hf_speculate.tools.hub.repository import function_source, save_config
from tests.tiny import ragged_prompts

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


class Api:
    """Stands in for `huggingface_hub.HfApi`: keeps what would go to the Hub."""

    def __init__(self):
        self.private, self.uploaded = {}, {}

    def create_repo(self, repo_id, *, private, exist_ok):
        self.private[repo_id] = private

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
        assert repo_id in self.private and commit_message
        self.uploaded[repo_id] = {name: (Path(folder_path) / name).read_text() for name in allow_patterns}


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


def test_a_models_folder_picks_the_fields_up_and_keeps_its_own(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(ROOT / "examples" / "pair" / "target", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.num_assistant_tokens = 4  # what a model sets already goes along
    before = model.generation_config.to_dict()
    save_config(model, folder, verifier="typical", posterior_threshold=0.2)
    assert model.generation_config.to_dict() == before
    fields = {"num_assistant_tokens": 4, "verifier": "typical", "posterior_threshold": 0.2}
    assert runpy.run_path(str(folder / "custom_generate" / "generate.py"))["FIELDS"] == fields
    loaded, stats = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(folder)), hf_speculate.SpeculationStats()
    assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id
    draft = AutoModelForCausalLM.from_pretrained(ROOT / "examples" / "pair" / "draft")
    loaded.generate(**ragged_prompts(2, seed=6), assistant_model=draft, max_new_tokens=12, speculation_stats=stats)
    assert (stats.verifier, max(stats.rounds_by_draft_len)) == ("typical", 4)


def test_only_what_was_written_is_uploaded_and_a_second_save_replaces_it(tmp_path):
    api, saved = Api(), {"push_to_hub": True, "repo_id": "someone/rule", "private": True}
    (tmp_path / "private.txt").write_text("not to be published")
    for fields in ({"verifier": "coupled"}, {"verifier": "typical", "num_assistant_tokens": 4}):
        save_config(None, tmp_path, **saved, api=api, **fields)
    save_config(None, tmp_path / "once", repo_id="someone/rule", **fields)
    assert api.private == {"someone/rule": True}
    assert api.uploaded["someone/rule"] == files_in(tmp_path / "once")
    assert set(api.uploaded["someone/rule"]) == FILES
    assert 'custom_generate="someone/rule"' in api.uploaded["someone/rule"]["README.md"]


@pytest.mark.parametrize(
    "card", [b"\xff\xfe no text\r\n", model_card({"verifier": "coupled"}, "twice").replace(CARD_MARK, "").encode()]
)
def test_a_users_card_is_neither_changed_nor_uploaded(card, tmp_path):
    api = Api()
    (tmp_path / "README.md").write_bytes(card)
    save_config(None, tmp_path, push_to_hub=True, repo_id="someone/rule", api=api, verifier="coupled")
    assert (tmp_path / "README.md").read_bytes() == card
    assert set(api.uploaded["someone/rule"]) == FILES - {"README.md"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verifier": "own_rule"}, "verifier must be one of block, coupled, greedy, rejection, typical to be saved"),
        ({"posterior_treshold": 0.1}, "fields must be among .*, got posterior_treshold"),
        ({"suffix_store": hf_speculate.SuffixStore()}, "suffix_store must be a string, a number or a list to be saved"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(fields, message, tmp_path):
    with pytest.raises(hf_speculate.ConfigError, match=message):
        save_config(None, tmp_path / "new", **fields)
    assert not (tmp_path / "new").exists()
