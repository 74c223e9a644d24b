"""Commands with a draft head in place of a draft model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hf_speculate.tools.cli.loading import names_head
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.cli.options import Models
from tests.draft.heads.designs import EAGLE3, make_weights, write_speculators

PAIR = Path(__file__).parents[3] / "examples" / "pair"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
PROMPT = "def main():\n"
NUM_NEW = 10
COMMON = ["-n", str(NUM_NEW), "--dtype", "float64", "--device", "cpu"]
DESIGN = replace(
    EAGLE3, hidden_size=64, target_hidden_size=192, vocab_size=4096, has_embeddings=True, aux_layers=(2, 8, 13)
)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return str(write_speculators(tmp_path_factory.mktemp("head") / "eagle", DESIGN, make_weights(DESIGN)))


def test_a_head_is_timed_without_transformers_own_methods(head, tmp_path):
    prompts, result = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text(PROMPT)
    words = ["bench", TARGET, str(prompts), "-d", head, "-k", "2", "-v", "greedy", "--thresholds", "", *COMMON]
    assert main([*words, "--output", str(result)]) == 0
    found = json.loads(result.read_text())
    assert [method["name"] for method in found["methods"]] == ["plain, greedy", "greedy, K = 2"]
    assert found["settings"]["left_out"] == {}


def test_whether_a_head_fits_is_said_from_its_config(head, capsys):
    assert main(["check", TARGET, "-d", head]) == 0
    out = capsys.readouterr().out
    assert f"ok: eagle as a draft head for {TARGET}" in out
    assert "reads hidden states of layers: 2, 8, 13" in out
    assert main(["check", DRAFT, "-d", head, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["level"]) == (False, "does not fit")
    assert report["problems"] == ["it reads the states of layers [2, 8, 13], and the target has layers 0 to 1"]
    assert report["spec"]["kind"] == "eagle3"


def test_heads_are_told_from_models(head, tmp_path):
    assert names_head(Models(TARGET, head))
    for draft in (None, DRAFT, TARGET, str(tmp_path / "nothing")):
        assert not names_head(Models(TARGET, draft))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "num_mtp_layers": 1}))
    assert names_head(Models(str(tmp_path), str(tmp_path)))  # MTP layers of the target itself


def test_a_file_is_decoded_and_settings_are_found_with_a_head(head, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": PROMPT}))
    assert main(["batch", TARGET, str(prompts), "-o", str(output), "-d", head, "-k", "2", *COMMON]) == 0
    assert "of drafted tokens accepted" in " ".join(capsys.readouterr().err.split())
    assert main(["tune", TARGET, str(prompts), "-d", head, "-k", "2", "-v", "greedy", *COMMON]) in (0, 1)
    assert "greedy, K = 2" in capsys.readouterr().out


def test_an_unknown_kind_of_head_is_not_supported_and_a_missing_target_is_wrong_use(head, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"speculators_model_type": "medusa"}')
    assert main(["check", TARGET, "-d", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["level"]) == (False, "not supported")
    assert "medusa" in report["reason"]
    assert main(["check", "no/such-model", "-d", head]) == 2
    assert "target must be a folder with a config.json" in capsys.readouterr().err
