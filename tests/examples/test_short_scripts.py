"""Test that the examples run as their pages say and print the expected lines."""

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

from tests.support.pages import extras_named_in, extras_of_scripts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ROWS = extras_of_scripts()
MEAN = r"mean acceptance length:? (\d+\.\d\d)"


def test_examples_are_listed_and_say_how_to_run_them():
    assert {path.name for path in EXAMPLES.glob("*.py")} <= set(ROWS)
    page = (EXAMPLES / "training" / "README.md").read_text(encoding="utf-8")
    for path in (EXAMPLES / "training").glob("[a-z]*.py"):  # modules of the package `training`
        assert f"`cd examples && python -m training.{path.stem}`" in page
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text(encoding="utf-8")  # a script, or a module that scripts share
        assert "__main__" not in source or re.search(
            rf"^    (\w.* )?(examples/)?{path.name}", source, re.M
        ), path.name
    assert [name for name in ROWS if not (EXAMPLES / name).exists()] == []
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert set().union(*ROWS.values()) <= set(config["options.extras_require"])


SERVE = ["serve.py", "--port", "0"]
PROGRAM = ["-m", "hf_speculate.tools.cli.main"]


@pytest.mark.parametrize(
    ("command", "library", "message"),
    [
        (["grammar.py"], "xgrammar", 'xgrammar is not installed; run: pip install ".[grammar]"'),
        (["lm_eval_harness.py"], "lm_eval", "lm_eval is not installed; run: pip install lm-eval"),
        (
            ["trl_rollouts.py"],
            "trl",
            "trl is not installed; run: pip install trl, or add --without-trainer",
        ),
        (
            ["prometheus.py"],
            "prometheus_client",
            'prometheus_client is not installed; run: pip install ".[metrics]"',
        ),
        (
            ["quickstart.py"],
            "accelerate",
            'got no accelerate; run: pip install ".[demo]", or add --tiny for the bundled',
        ),
        (
            ["pipeline.py"],
            "gguf",
            'got no gguf; run: pip install ".[demo]", or add --tiny for the bundled',
        ),
        (
            ["chat.py"],
            "gguf",
            'got no gguf; run: pip install ".[demo]", or add --tiny for the bundled',
        ),
        (SERVE, "gguf", 'got no gguf; run: pip install ".[demo]", or add --tiny for the bundled'),
        (SERVE, "uvicorn", 'pip install ".[serve]" in a clone of hf_speculate'),
        (
            ["demo.py"],
            "accelerate",
            'got no accelerate; run: pip install ".[demo]", or add --tiny for the bundled',
        ),
        (["models.py"], "accelerate", 'got no accelerate; run: pip install ".[demo]"'),
        (
            ["training/train_smollm2_head.py", "--stage", "text"],
            "accelerate",
            'got no accelerate; run: pip install ".[demo]"',
        ),
        (
            ["tensor_parallel.py"],
            "torchrun",
            "run: torchrun --nproc-per-node 2 examples/tensor_parallel.py",
        ),
    ],
)
def test_missing_library_error_names_the_extra_of_the_page(
    command, library, message, run, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_SPECULATE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setitem(sys.modules, library, None)  # importing it fails
    with pytest.raises(SystemExit) as raised:
        run(*command)
    assert message in raised.value.code
    assert "\n" not in raised.value.code
    assert extras_named_in(message) <= ROWS[re.sub("/.*", "/", command[0])]
    assert list(tmp_path.iterdir()) == []  # nothing was fetched


FEW = ("--max-new-tokens", "8", "--num-assistant-tokens", "3")
ROLLOUTS = [
    "epoch 3: tokens per target forward ",
    "greedy texts of the target equal plain decoding's: True",
]
SLOW = [
    (
        ["prometheus.py", "--num-prompts", "1", *FEW[:2]],
        ["hf_speculate_generated_tokens_total 7.0"],
    ),
    (["custom_verifier.py", *FEW], ["greedy ", "top_k "]),
    (["grammar.py", *FEW], ["lock step ", "rollback "]),
    (["chat.py", "--tiny", *FEW[:2]], ["mean acceptance"]),
    (["trl_rollouts.py", "--without-trainer"], ROLLOUTS),
    (
        ["offloaded.py", "--tiny", "--max-new-tokens", "16"],
        ["hf_speculate, draft model: ", "16 forwards loaded 0.4 GB"],
    ),
]


@pytest.mark.fallback("lock step, because of LogitsProcessor")  # from grammar.py
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["quickstart.py", "--tiny"], ["class Stack:\n    def push(self, item):\n"]),
        (
            ["hub_config.py"],
            [f"{when}: verifier=typical, " for when in ("saved", "loaded", "custom_generate")],
        ),
        (["whisper.py"], ["ids equal plain decoding's: True"]),
        (["custom_drafter.py", "--max-new-tokens", "24"], ["texts equal plain decoding's: True"]),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW),
    ],
    ids=lambda value: value[0] if value[0].endswith(".py") else "",
)
def test_script_prints_the_announced_lines(command, shown, run, registry, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a function that sorts\nand its test\n"))
    printed = run(*command)
    assert all(words in printed for words in shown)
    lengths = [float(number) for number in re.findall(MEAN, printed)]
    assert not lengths or (min(lengths) >= 1 and max(lengths) > 1)


def run_in_process(*words):
    command = [sys.executable, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return done.stdout


@pytest.mark.slow
def test_interrupted_batch_resumes():
    lines = run_in_process(EXAMPLES / "batch.py").splitlines()
    assert "interrupted" in lines
    assert {"2 were there already", "3 were there already"} & set(lines)
    assert [line.split(" (")[0] for line in lines if line.endswith(" tokens)")] == [
        "1",
        "stack",
        "3",
        "4",
        "5",
    ]


@pytest.mark.slow
def test_tensor_parallel_ranks_write_one_text():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    shared = run_in_process(*launcher, EXAMPLES / "tensor_parallel.py")
    assert "processes: 2, all with one text: True" in shared
    assert "rows as plain generate() has them: 3 of 3" in shared
    assert float(re.search(MEAN, shared)[1]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stop"),
    [
        (["examples/serve.py", "--tiny"], signal.SIGINT),
        (
            [*PROGRAM, "serve", "examples/pair/target", "--store", "STORE", "--no-page"],
            signal.SIGTERM,
        ),
    ],
)
def test_server_of_the_page_answers_and_stops(words, stop, tmp_path):
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    names = ["--allowed-host", "name.example"] if stop == signal.SIGTERM else []
    store = tmp_path / "store.safetensors"
    command = [
        sys.executable,
        *(str(store) if word == "STORE" else word for word in words),
        "--port",
        "0",
        *names,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        line = next((line for line in process.stderr if "target on http" in line), "")
        address = re.search(r"http://\S+/v1", line)[0]
        headers = {"Host": names[-1]} if names else {}
        body = {"prompt": "def stack", "max_tokens": 16, "temperature": 0}
        request = {"json": body, "headers": headers, "timeout": 120, "trust_env": False}
        answer = httpx.post(f"{address}/completions", **request).json()
        page = httpx.get(address.removesuffix("v1"), headers=headers, trust_env=False)
        process.send_signal(stop)
        stderr = process.communicate(timeout=30)[1]
    assert page.status_code == (404 if "--no-page" in words else 200)
    assert answer["choices"][0]["text"]
    assert answer["usage"]["speculation"]["rounds"] > 0
    assert process.returncode == 0
    remarks = stderr.splitlines()
    assert remarks[-1] == "stopped" or (
        remarks[-2] == "stopped" and "tokens of earlier outputs" in remarks[-1]
    )
    assert store.exists() is ("STORE" in words)
