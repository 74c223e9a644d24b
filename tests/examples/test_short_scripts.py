"""The short examples run as their pages say, and say what they claim."""

import ast
import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def mean_acceptance_length(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"mean acceptance length (\d+\.\d\d)", printed)]


def test_the_page_names_every_example_and_no_other():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([^`]+)` \|", page, re.M))
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts <= named
    assert [name for name in named if not (EXAMPLES / name).exists()] == []


def test_every_script_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' not in source:
            continue  # a module that scripts share
        docstring = ast.get_docstring(ast.parse(source)) or ""
        assert re.search(rf"^    (\w.* )?(examples/)?{path.name}", docstring, re.M), path.name


def test_quickstart_decodes_a_batch_with_drafts(run):
    printed = run("quickstart.py", "--tiny")
    assert "class Stack:\n    def push(self, item):\n" in printed
    assert float(re.search(r"^mean acceptance length: (\S+) ", printed, re.M)[1]) > 1


def test_hub_config_picks_up_what_was_saved(run):
    printed = run("hub_config.py")
    assert "saved: verifier=typical, num_assistant_tokens=4" in printed
    assert "loaded: verifier=typical, " in printed
    assert "custom_generate: verifier=typical, " in printed
    assert min(mean_acceptance_length(printed)) > 1


def test_whisper_hears_what_it_hears_without_a_draft(run):
    printed = run("whisper.py")
    assert "ids equal plain decoding's: True" in printed
    assert min(mean_acceptance_length(printed)) > 1
    sounds = re.findall(r"^sound \d: \[(.*)\]$", printed, re.M)
    assert len(set(sounds)) == 2  # the text depends on what was read
    assert all(len(set(ids.split(", "))) > 8 for ids in sounds)
