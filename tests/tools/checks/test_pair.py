"""`check_pair` says what `generate()` would, from configs and tokenizers alone."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    MiniMaxConfig,
    MixtralConfig,
    RwkvConfig,
    ViTConfig,
)

import hf_speculate
from hf_speculate.models.language_model import cache_name
from hf_speculate.tools.checks.cost_model import ModelSize, estimate_gains, expected_speedup, size_of
from hf_speculate.tools.checks.pair import vocabulary_overlap
from hf_speculate.tools.checks.sources import meta_model
from hf_speculate.tools.cli.main import main
from tests.recurrent_cases import recurrent_states
from tests.tiny import make_config, make_model
from tests.tools.checks.tokenizers import word_tokenizer

SMALL = {"hidden_size": 16, "intermediate_size": 24}
HUGE = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
)


def _texts(report, level):
    return [finding.text for finding in report.findings if finding.level == level]


def _check(target, draft, words=None, draft_words=None):
    return hf_speculate.check_pair(
        target, draft, target_tokenizer=word_tokenizer(64, words), draft_tokenizer=word_tokenizer(64, draft_words)
    )


def _num_read(model):
    """Parameters that a step reads: all but the input embedding, of which it reads one row."""
    return sum(one.numel() for one in model.parameters()) - model.get_input_embeddings().weight.numel()


def _save(folder, config, *, words=None, eos_token_id=2, chat_template=None):
    """A repository of small files, as a download without weights leaves it."""
    config.save_pretrained(folder)
    tokenizer = word_tokenizer(64, words)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=eos_token_id).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    return (_save(tmp_path / "target", make_config("llama")), _save(tmp_path / "draft", make_config("llama", **SMALL)))


def test_a_fitting_pair_is_ok_as_models_configs_and_paths(folders):
    target, draft = make_config("llama"), make_config("llama", **SMALL)
    models = make_model("llama"), make_model("llama", **SMALL)
    reports = [_check(target, draft), _check(*models), hf_speculate.check_pair(*folders)]
    for report in reports:
        assert (report.level, report.findings, report.ok) == ("ok", (), True)
        assert report.overlap.share == 1
        assert report.target_params == sum(one.numel() for one in models[0].parameters())
        assert report.draft_params == sum(one.numel() for one in models[1].parameters())
        assert report.size_ratio == pytest.approx(_num_read(models[1]) / _num_read(models[0]))


def test_a_model_of_70_billion_parameters_takes_no_memory_and_its_config_stays():
    before = HUGE.to_dict()
    report = hf_speculate.check_pair(HUGE, LlamaConfig(vocab_size=128256, num_hidden_layers=2))
    assert HUGE.to_dict() == before
    assert report.target_params == pytest.approx(70.55e9, rel=1e-3)
    assert "no tokenizer was found for target and draft" in _texts(report, "warning")[0]
    assert next(meta_model("target", HUGE).parameters()).is_meta


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2),
            "RwkvForCausalLM with recurrent state outside a",
        ),
        (
            MiniMaxConfig(vocab_size=64, num_attention_heads=4, num_local_experts=2, **SMALL),
            "does not keep its states in the cache",
        ),
    ],
)
@pytest.mark.parametrize("is_draft", [False, True])
def test_models_that_generate_refuses_are_refused_in_its_words(config, words, is_draft):
    pair = [make_config("llama"), config] if is_draft else [config, make_config("llama")]
    report = _check(*pair)
    assert report.level == "not supported"
    assert not report.ok
    (text,) = [text for text in _texts(report, "not supported") if words in text]
    assert "leave assistant_model out" in text
    assert str(report).startswith("not supported: ")


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba"])
def test_models_with_recurrent_layers_are_ok_and_their_states_are_counted(kind):
    model, other = make_model(kind), make_model("llama")
    kv_cache = DynamicCache(config=model.config)
    model(torch.tensor([[1, 2, 3]]), use_cache=True, **{cache_name(model): kv_cache})
    states = [state for layer in recurrent_states(kv_cache) for state in layer.values()]
    size = f"{sum(state.numel() * state.element_size() for state in states) / 2**20:.3g} MiB a row"
    for report, role in ((_check(model, other), "target"), (_check(other, model), "draft")):
        assert report.ok
        (text,) = _texts(report, "ok")
        assert f"the {role} has recurrent layers" in text
        assert size in text


def test_other_tables_and_other_tokens_are_said():
    report = _check(make_config("llama"), make_config("llama", vocab_size=72))
    assert any("vocabularies padded to 64 and 72" in text for text in _texts(report, "warning"))
    report = _check(make_config("llama"), make_config("llama"), draft_words=[f"v{token}" for token in range(64)])
    assert report.level == "does not fit"
    assert report.overlap.share == 0
    assert "assistant_tokenizer must share at least 10%" in _texts(report, "does not fit")[0]
    half = [f"{'w' if token < 32 else 'v'}{token}" for token in range(64)]
    warnings = _texts(_check(make_config("llama"), make_config("llama", **SMALL), draft_words=half), "warning")
    assert "different tokenizers: 32 of the target's 64 tokens can be drafted; pass tokenizer=" in warnings[0]
    swapped = [f"w{token}" for token in [0, 1, 3, 2, *range(4, 64)]]
    overlap = vocabulary_overlap(word_tokenizer(64), word_tokenizer(64, swapped))
    assert (overlap.num_shared, overlap.num_same_id, overlap.share, overlap.is_same) == (64, 62, 1.0, False)
    shorter = vocabulary_overlap(word_tokenizer(64), word_tokenizer(48))
    assert (shorter.num_shared, shorter.share, shorter.is_same) == (48, 0.75, False)


def test_tables_that_are_no_padding_are_refused_where_no_tokenizer_tells():
    near, far = (
        hf_speculate.check_pair(make_config("llama"), make_config("llama", vocab_size=num)) for num in (72, 64 + 1025)
    )
    assert any("vocabularies of 64 and 72 tokens count as padding" in text for text in _texts(near, "warning"))
    assert any("differ by more than padding; pass both tokenizers" in text for text in _texts(far, "does not fit"))


def test_ends_templates_lengths_and_ropes_are_warned_of(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = _save(tmp_path / "target", make_config("llama", rope_parameters=rope), chat_template="{{ messages }}")
    draft = _save(tmp_path / "draft", make_config("llama", **SMALL, max_position_embeddings=64), eos_token_id=[3, 4])
    report = hf_speculate.check_pair(target, draft)
    assert (report.level, report.ok) == ("warning", True)
    warnings = " ".join(_texts(report, "warning"))
    for words in (
        "EOS token ids differ: 2 in the target, 3, 4 in the draft",
        "chat templates differ",
        "context is 64 tokens, the target's 512",
    ):
        assert words in warnings
    assert "more than 512 tokens are not supported: the target has dynamic rotary" in warnings


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_memory_is_that_of_the_weights_and_of_the_cache(kind):
    model = make_model(kind, dtype=torch.float32)
    report = hf_speculate.check_pair(model, model)
    ids = torch.ones(1, 7, dtype=torch.int64)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    assert report.target_memory.dtype == "float32"
    assert report.target_memory.weight_bytes == sum(one.nbytes for one in model.parameters())
    assert report.target_memory.kv_bytes_per_token * 7 == sum(state.nbytes for state in states)


def test_memory_follows_the_dtype_of_loading():
    configs = make_config("llama", dtype="bfloat16"), make_config("llama", dtype="bfloat16")
    half, whole = (hf_speculate.check_pair(*configs, dtype=dtype).target_memory for dtype in (None, "float32"))
    assert (half.dtype, whole.dtype) == ("bfloat16", "float32")
    assert (2 * half.weight_bytes, 2 * half.kv_bytes_per_token) == whole[1:]


def test_a_tied_embedding_is_read_as_the_output_embedding():
    tied = size_of(meta_model("target", make_config("llama", tie_word_embeddings=True)), make_config("llama"), 2)
    assert tied.num_lookup_bytes == 0
    assert tied.num_read_bytes() == tied.num_bytes


def test_quantised_and_routed_models_are_weighed_as_they_are_loaded():
    moe = MixtralConfig(
        vocab_size=64,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=512,
        num_attention_heads=4,
        num_local_experts=8,
    )
    size = size_of(meta_model("target", moe), moe, 2)
    assert (size.num_experts, size.num_chosen) == (8, 2)
    assert size.num_expert_bytes == 2 * 2 * 8 * 3 * 64 * 512
    assert size.num_lookup_bytes == 2 * 64 * 64
    read = size.num_bytes - size.num_lookup_bytes
    assert size.num_read_bytes(1) == pytest.approx(read - size.num_expert_bytes * 6 / 8)
    assert size.num_read_bytes(1) < size.num_read_bytes(5) < read
    quantised = make_config("llama", quantization_config={"quant_method": "gptq", "bits": 4}, dtype="bfloat16")
    report = _check(moe, quantised)
    plain = _check(moe, make_config("llama", dtype="bfloat16"))
    assert report.size_ratio == pytest.approx(plain.size_ratio / 4)
    assert any("2 of 8 experts" in text for text in _texts(report, "warning"))
    assert any("the draft is quantised (gptq)" in text for text in _texts(report, "warning"))


def test_a_draft_as_large_as_its_target_is_warned_of():
    report = _check(make_config("llama"), make_config("llama"))
    assert "never calls it" in _texts(report, "warning")[0]
    assert all((gain.num_draft_tokens, gain.speedup) == (0, 1.0) for gain in report.gains)


def test_gains_are_the_best_of_the_cost_model():
    a, k, c, v = 0.8, 5, 0.1, 1.25
    assert expected_speedup(a, k, c, v) == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (k * c + v)))
    assert expected_speedup(1.0, 4, 0.0) == 5
    gains = estimate_gains(ModelSize(100, 200), ModelSize(10, 20))
    assert [gain.acceptance_probability for gain in gains] == [0.6, 0.7, 0.8, 0.9]
    for gain in gains:
        rates = [expected_speedup(gain.acceptance_probability, num, 0.1) for num in range(11)]
        assert gain.speedup == pytest.approx(max(rates))
        assert rates[gain.num_draft_tokens] == pytest.approx(max(rates))
    routed = estimate_gains(ModelSize(100, 200, 0, 160, 8, 2), ModelSize(4, 8))
    assert all(one.speedup < other.speedup for one, other in zip(routed, gains, strict=True))


@pytest.mark.parametrize("wrong", ["no/such-model", 5])
def test_what_is_no_model_is_said(wrong):
    with pytest.raises(hf_speculate.ConfigError, match="draft must be a"):
        hf_speculate.check_pair(make_config("llama"), wrong)


def test_a_config_without_a_language_model_is_said():
    with pytest.raises(hf_speculate.UnsupportedModelError, match="target must have a language modelling head"):
        hf_speculate.check_pair(ViTConfig(), make_config("llama"))


def test_the_command_answers_in_text_json_and_status(folders, tmp_path, capsys):
    assert main(["check", folders[0], "--draft", folders[1]]) == 0
    assert capsys.readouterr().out == f"{hf_speculate.check_pair(*folders)}\n"
    stranger = _save(tmp_path / "other", make_config("llama"), words=[f"v{token}" for token in range(64)])
    assert main(["check", folders[0], "-d", stranger, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["level"] == "does not fit"
    assert answer["overlap"]["share"] == 0
    assert {finding["level"] for finding in answer["findings"]} == {"does not fit", "warning"}
    assert len(answer["gains"]) == 4
    assert main(["check", folders[0], "-d", "no/such-model"]) == 2
    assert "draft must be a folder" in capsys.readouterr().err
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "medusa"}')
    assert main(["check", folders[0], "-d", str(unknown)]) == 1
    assert capsys.readouterr().out.startswith(f"not supported: {unknown} as a draft for {folders[0]}")
    assert main([]) == 2
    assert "Usage: hf-speculate" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_runs_as_a_module(folders):
    command = [sys.executable, "-m", "hf_speculate.tools.cli.main", "check", folders[0], "-d", folders[1]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.split(":")[0]) == (0, "ok"), result.stderr
