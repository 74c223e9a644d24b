"""Test repositories for the Hub: their files, the upload, and limits on downloaded configs."""

import json
import math
import re
import runpy
import sys
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from huggingface_hub import HfApi
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.config import FIELD_NAMES, PLAIN_NAMES
from hf_speculate.errors import ConfigError
from hf_speculate.tools.hub.repository import (
    CARD_MARK,
    REQUIREMENTS,
    function_source,
    model_card,
    save_config,
)
from tests.support.tiny import make_model, noisy_copy, ragged_prompts

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "hub"
COMMON = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
FIELDS = {
    "greedy": COMMON | {"verifier": "greedy"},
    "rejection": COMMON | {"verifier": "rejection"},
    "typical": COMMON
    | {"verifier": "typical", "posterior_alpha": 0.3, "posterior_threshold": 0.09},
    "coupled": {"verifier": "coupled"},
}
FILES = {
    "README.md",
    "generation_config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
}


def files_in(folder: Path) -> dict[str, str]:
    files = [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


@pytest.mark.parametrize("name", FIELDS)
def test_examples_equal_the_written_files(name, tmp_path):
    save_config(None, tmp_path / name, repo_id=f"examples/hub/{name}", **FIELDS[name])
    ours, shown = files_in(tmp_path / name), files_in(EXAMPLES / name)
    assert set(ours) == set(shown) == FILES
    configs = [json.loads(files.pop("generation_config.json")) for files in (ours, shown)]
    assert configs[0] | {"transformers_version": ""} == configs[1] | {"transformers_version": ""}
    assert ours == shown, "write the folders of examples/hub again with save_config"


def test_card_explains_every_field():
    card = model_card(dict.fromkeys(PLAIN_NAMES, 1) | {"verifier": "typical"}, "x")
    meanings = dict(re.findall(r"^\| `(\w+)` \| `.*` \| (.*) \|$", card, re.M))
    assert [name for name in PLAIN_NAMES if len(meanings[name]) < 10] == []


def test_generate_file_without_the_library_says_how_to_install():
    code = function_source({}).replace("import hf_speculate\n", "import hf_speculate_missing\n")
    with pytest.raises(ImportError, match="hf_speculate is not installed; run pip install"):
        exec(compile(code, "generate.py", "exec"), {})


def test_requirements_equal_those_of_the_package():
    """Compare with the folder of top_k, which has its own code."""
    package = ConfigParser()
    package.read(ROOT / "setup.cfg")
    needed = {line.partition(",")[0] for line in package["options"]["install_requires"].split()}
    text = (EXAMPLES / "top_k" / "custom_generate" / "requirements.txt").read_text()
    name, *others = [line for line in text.splitlines() if not line.startswith("#")]
    assert name == f"hf_speculate>={hf_speculate.__version__}"
    assert len(others) == 2 and set(others) <= needed
    assert text == REQUIREMENTS


def test_settings_of_a_model_are_saved_and_unchanged(tmp_path):
    settings = GenerationConfig(eos_token_id=5, num_assistant_tokens=4)
    before = settings.to_dict()
    save_config(
        SimpleNamespace(generation_config=settings),
        tmp_path,
        verifier="typical",
        posterior_threshold=0.2,
    )
    assert settings.to_dict() == before
    fields = {"num_assistant_tokens": 4, "verifier": "typical", "posterior_threshold": 0.2}
    assert runpy.run_path(str(tmp_path / "custom_generate" / "generate.py"))["FIELDS"] == fields
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in ("eos_token_id", *fields)} == {
        "eos_token_id": 5,
        **fields,
    }


def test_upload_holds_written_files_of_the_last_save_only(tmp_path):
    api, saved = (
        create_autospec(HfApi),
        {"push_to_hub": True, "repo_id": "someone/rule", "private": True},
    )
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


def test_card_of_the_user_is_neither_changed_nor_uploaded(tmp_path):
    ours = model_card({"verifier": "coupled"}, "twice").replace(CARD_MARK, "").encode()
    for card in (b"\xff\xfe no text\r\n", ours):
        api = create_autospec(HfApi)
        (tmp_path / "README.md").write_bytes(card)
        save_config(
            None, tmp_path, push_to_hub=True, repo_id="someone/rule", api=api, verifier="coupled"
        )
        assert (tmp_path / "README.md").read_bytes() == card
        assert set(api.upload_folder.call_args.kwargs["allow_patterns"]) == FILES - {"README.md"}


def test_unsavable_fields_are_refused_before_writing(tmp_path):
    for fields, message in (
        (
            {"verifier": "own_rule"},
            "verifier must be one of block, coupled, greedy, rejection, typical to be saved",
        ),
        ({"posterior_treshold": 0.1}, "fields must be among .*, got posterior_treshold"),
        (
            {"suffix_store": hf_speculate.SuffixStore()},
            "suffix_store must be a string, a number or a list to be saved",
        ),
    ):
        with pytest.raises(hf_speculate.ConfigError, match=message):
            save_config(None, tmp_path / "new", **fields)
        assert not (tmp_path / "new").exists()


TRAP = "hf_speculate_trap"  # a module that could be imported but must not be
HUGE = 10**400  # larger than any float
OTHERS = [
    {"_target_": f"{TRAP}.make"},
    [f"{TRAP}:make", 3],
    {},
    math.nan,
    -math.inf,
    HUGE,
    -1,
    True,
]
HOSTILE = [
    f"{TRAP}:make",
    f"{TRAP}.make",
    TRAP,
    "__import__('os').abort()",
    "../greedy",
    "GREEDY",
    "",
    *OTHERS,
]
# These values look hostile but are valid for their fields.
ALLOWED = {"seed": [HUGE, -1], "max_matching_ngram_size": [HUGE]}


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Return a pair next to a module that must not be imported."""
    (tmp_path / f"{TRAP}.py").write_text(
        "def make(*args, **kwargs):\n    raise SystemExit('ran')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    target = hf_speculate.enable(make_model("llama"))
    yield {"target": target, "draft": noisy_copy(target)}
    assert TRAP not in sys.modules


SOURCES = ("target", "draft", "fields_from")


def call(models, source, folder, content):
    """Run one call with a file that was downloaded with a model or separately."""
    path, options = (
        folder / "generation_config.json",
        {"assistant_model": models["draft"], "max_new_tokens": 4},
    )
    path.write_text(content)
    for name, model in models.items():
        own = GenerationConfig(pad_token_id=0)
        model.generation_config = (
            GenerationConfig.from_pretrained(folder) if name == source else own
        )
    options |= {"fields_from": path} if source == "fields_from" else {}
    return hf_speculate.generate(models["target"], **ragged_prompts(1, seed=1), **options)


@pytest.mark.parametrize("source", SOURCES)
def test_invalid_field_value_is_refused_before_a_model_runs(models, tmp_path, source):
    for model in models.values():
        model.register_forward_pre_hook(lambda *args: pytest.fail("a model ran before the refusal"))
    for name in FIELD_NAMES:
        for value in HOSTILE if source == "fields_from" else OTHERS[:3]:
            if value not in ALLOWED.get(name, []):
                with pytest.raises(ConfigError, match=rf"^{name} must (be|make) "):
                    call(models, source, tmp_path, json.dumps({"pad_token_id": 0, name: value}))


def test_file_without_an_object_is_refused(models, tmp_path):
    for content in ("[1, 2]", "{", "\x00", "[" * 100_000):
        with pytest.raises(ConfigError, match=r"^fields_from must be a JSON object"):
            call(models, "fields_from", tmp_path, content)


@pytest.mark.parametrize(
    "name", ["assistant_model", "custom_generate", "logits_processor", "tokenizer"]
)
def test_config_loads_no_model_and_no_code(models, tmp_path, name):
    """Put arguments in a config: none may be read from it, and transformers refuses some."""
    plain = models["target"].generate(**ragged_prompts(1, seed=1), max_new_tokens=4)
    content = json.dumps({"pad_token_id": 0, name: f"{TRAP}:make", "num_assistant_tokens": 2})
    for source in SOURCES:
        try:
            assert torch.equal(call(models, source, tmp_path, content), plain)
        except ValueError as error:
            assert source != "fields_from"
            assert f"`{name}` is not a valid argument of `GenerationConfig`" in str(error)
