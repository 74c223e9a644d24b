"""The examples run as their pages say, and say what they claim."""

import ast
import io
import os
import re
import signal
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# The row of a script on the page: its name and its extra, "-" where there is none.
ROWS = dict(
    re.findall(r"^\| `([^`]+)` \| `?([^`\s]+)`? \|", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M)
)
MEAN = r"mean acceptance length:? (\d+\.\d\d)"


def test_the_page_names_every_example_and_no_other():
    assert {path.name for path in EXAMPLES.glob("*.py")} <= set(ROWS)
    assert [name for name in ROWS if not (EXAMPLES / name).exists()] == []
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert set(ROWS.values()) - {"-"} <= set(config["options.extras_require"])


def test_every_script_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in source:  # else a module that scripts share
            docstring = ast.get_docstring(ast.parse(source)) or ""
            assert re.search(rf"^    (\w.* )?(examples/)?{path.name}", docstring, re.M), path.name


@pytest.mark.parametrize(("script", "library"), [("grammar.py", "xgrammar"), ("prometheus.py", "prometheus_client")])
def test_a_missing_library_is_named_with_the_extra_of_the_page(script, library, run, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)  # an import of it fails
    with pytest.raises(SystemExit) as raised:
        run(script)
    assert raised.value.code == f'{library} is not installed; run: pip install ".[{ROWS[script]}]"'


FEW = ("--max-new-tokens", "8", "--num-assistant-tokens", "3")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["quickstart.py", "--tiny"], ["class Stack:\n    def push(self, item):\n"]),
        (["hub_config.py"], [f"{place}: verifier=typical, " for place in ("saved", "loaded", "custom_generate")]),
        (["whisper.py"], ["ids equal plain decoding's: True"]),
        (["custom_drafter.py", "--max-new-tokens", "24"], ["texts equal plain decoding's: True"]),
        pytest.param(
            ["prometheus.py", "--num-prompts", "1", "--max-new-tokens", "8"],
            ['speculation_emitted_tokens_total{model="bundled"} 7.0'],
            marks=pytest.mark.slow,
        ),
        pytest.param(["custom_verifier.py", *FEW], ["greedy ", "top_k "], marks=pytest.mark.slow),
        pytest.param(["grammar.py", *FEW], ["lock step ", "rollback "], marks=pytest.mark.slow),
        pytest.param(["chat.py", "--tiny", "--max-new-tokens", "8"], ["mean acceptance"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value[0] if value[0].endswith(".py") else "",
)
def test_a_script_prints_what_it_claims(command, shown, run, registry, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a function that sorts\nand its test\n"))
    printed = run(*command)
    assert all(words in printed for words in shown)
    lengths = [float(number) for number in re.findall(MEAN, printed)]
    assert not lengths or (min(lengths) >= 1 and max(lengths) > 1)


@pytest.mark.slow
def test_the_batch_is_interrupted_and_goes_on():
    result = subprocess.run([sys.executable, EXAMPLES / "batch.py"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "interrupted" in lines
    assert {"2 were there already", "3 were there already"} & set(lines)
    assert [line.split(" (")[0] for line in lines if line.endswith(" tokens)")] == ["1", "stack", "3", "4", "5"]


@pytest.mark.slow
def test_processes_of_torchrun_get_one_text():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, EXAMPLES / "tensor_parallel.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "processes: 2, all with one text: True" in result.stdout
    assert "rows as plain generate() has them: 3 of 3" in result.stdout
    assert float(re.search(MEAN, result.stdout)[1]) >= 1


@pytest.mark.slow
def test_the_server_that_the_page_starts_answers_and_stops():
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    command = [sys.executable, "examples/serve.py", "--tiny", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        line = next((line for line in process.stderr if "serving target on" in line), "")
        address = re.search(r"http://\S+/v1", line)[0]
        body = {"messages": [{"role": "user", "content": "a stack"}], "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{address}/chat/completions", json=body, timeout=120, trust_env=False).json()
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[1]
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["speculation"]["rounds"] > 0
    assert process.returncode == 0
    assert rest.splitlines()[-1] == "stopped"  # no traceback
