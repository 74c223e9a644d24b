"""Test that `check_pair` and `check_target` predict `generate()` from configs and tokenizers."""

import json

import pytest
import torch
from transformers import (
    GenerationConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MiniMaxConfig,
    MixtralConfig,
    RwkvConfig,
    ViTConfig,
)

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.tools.bench.results import draft_cost
from hf_speculate.tools.checks.cost_model import (
    ModelSize,
    estimate_gains,
    expected_speedup,
    size_of,
)
from hf_speculate.tools.checks.pair import vocabulary_overlap
from hf_speculate.tools.checks.sources import meta_model
from hf_speculate.tools.checks.target import check_target
from hf_speculate.tools.cli.main import main
from tests.options.gemma4.models import make_assistant, make_target
from tests.support.recurrent_cases import recurrent_states
from tests.support.tiny import make_config, make_model
from tests.support.tiny_encoders import make_bart
from tests.support.tiny_families import make_family
from tests.support.tiny_tokenizers import letters_tokenizer

LETTERS, OTHERS = ([chr(first + token) for token in range(64)] for first in (ord("0"), 300))
SMALL = {"hidden_size": 16, "intermediate_size": 24}
HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8}
HUGE = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256, **HEADS
)


def texts_of(report, level):
    return " ".join(finding.text for finding in report.findings if finding.level == level)


def check(target, draft, words=LETTERS):
    tokenizers = letters_tokenizer(LETTERS), letters_tokenizer(words)
    return hf_speculate.check_pair(
        target, draft, target_tokenizer=tokenizers[0], draft_tokenizer=tokenizers[1]
    )


def _save(folder, config, *, words=LETTERS, eos_token_id=2, chat_template=None):
    """Save a repository of small files, as from a download without weights."""
    config.save_pretrained(folder)
    tokenizer = letters_tokenizer(words)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=eos_token_id).save_pretrained(folder)
    return str(folder)


def test_fitting_pair_passes_as_models_configs_and_paths(tmp_path, capsys):
    configs = make_config("llama"), make_config("llama", **SMALL)
    models = make_model("llama"), make_model("llama", **SMALL)
    folders = [
        _save(tmp_path / name, config)
        for name, config in zip(("target", "draft"), configs, strict=True)
    ]
    for report in check(*configs), check(*models), hf_speculate.check_pair(*folders):
        assert (report.level, report.findings, report.ok) == ("ok", (), True)
        assert report.overlap.share == 1
        assert report.target_params == sum(weight.numel() for weight in models[0].parameters())
        assert report.draft_params == sum(weight.numel() for weight in models[1].parameters())
        # A step reads one row of each embedding table.
        embeddings = [model.get_input_embeddings().weight.numel() for model in models]
        num_read = [report.target_params - embeddings[0], report.draft_params - embeddings[1]]
        assert report.size_ratio == draft_cost(*models) == pytest.approx(num_read[1] / num_read[0])
    assert main(["check", folders[0], "--draft", folders[1]]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert main(["check", folders[0]]) == 0
    shown = str(check_target(folders[0]))
    assert capsys.readouterr().out == f"{shown}\n"
    assert (
        shown.startswith(f"ok: {folders[0]} as a target\n  target: 0.0")
        and "prompt lookup drafts" in shown
    )
    stranger = _save(tmp_path / "other", configs[0], words=OTHERS)
    assert main(["check", folders[0], "-d", stranger, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["level"], answer["overlap"]["share"], len(answer["gains"])) == (
        "does not fit",
        0,
        4,
    )


def test_target_without_a_language_modelling_head_is_refused():
    with pytest.raises(
        hf_speculate.UnsupportedModelError, match="target must have a language modelling head"
    ):
        hf_speculate.check_pair(ViTConfig(), HUGE)


def test_check_of_70_billion_parameters_takes_no_memory():
    before = HUGE.to_dict()
    report = hf_speculate.check_pair(HUGE, LlamaConfig(vocab_size=128256, num_hidden_layers=2))
    assert HUGE.to_dict() == before
    assert report.target_params == pytest.approx(70.55e9, rel=1e-3)
    assert "no tokenizer was found for target and draft" in texts_of(report, "warning")
    assert next(meta_model("target", HUGE).parameters()).is_meta


def test_models_refused_by_generate_get_its_message():
    rwkv = RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)
    minimax = MiniMaxConfig(vocab_size=64, num_attention_heads=4, num_local_experts=2, **SMALL)
    for config, words in (
        (rwkv, "RwkvForCausalLM has recurrent state"),
        (minimax, "keep its states"),
    ):
        for report in (check(make_config("llama"), config), check(config, make_config("llama"))):
            assert (report.level, report.ok) == ("not supported", False)
            assert words in texts_of(report, "not supported")
            assert str(report).startswith("not supported: ")
        report = check_target(config)
        assert not report.ok and [words in finding.text for finding in report.findings] == [True]


def test_recurrent_models_pass_with_their_states_counted():
    model, small = make_model("qwen3_5"), make_model("llama")
    kv_cache = model(torch.tensor([[1, 2, 3]]), use_cache=True)[CACHE_NAME]
    states = [state for layer in recurrent_states(kv_cache) for state in layer.values()]
    size = f"{sum(state.nbytes for state in states) / 2**20:.3g} MiB a row"
    for report, role in ((check(model, small), "target"), (check(small, model), "draft")):
        assert report.ok
        text = texts_of(report, "ok")
        assert f"the {role} has recurrent layers" in text and size in text
    assert texts_of(check_target(model), "ok").startswith("the target has recurrent layers")
    sizes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 2,
        "num_hidden_layers": 2,
    }
    mtp = Glm4MoeConfig(num_nextn_predict_layers=1, vocab_size=64, **SMALL, **sizes)
    assert "pass use_mtp=True" in texts_of(check_target(mtp), "ok")


def test_different_vocabulary_sizes_and_tokens_are_reported():
    report = check(make_config("llama"), make_config("llama", vocab_size=72))
    assert "vocabularies padded to 64 and 72" in texts_of(report, "warning")
    report = check(make_config("llama"), make_config("llama"), LETTERS[:32] + OTHERS[32:])
    assert "different tokenizers: 32 of the target's 64 tokens can be drafted" in texts_of(
        report, "warning"
    )
    assert "never calls it" in texts_of(report, "warning")  # a draft as large as its target
    assert all((gain.num_draft_tokens, gain.speedup) == (0, 1.0) for gain in report.gains)
    swapped = [LETTERS[token] for token in (0, 1, 3, 2, *range(4, 64))]
    overlap = vocabulary_overlap(letters_tokenizer(LETTERS), letters_tokenizer(swapped))
    assert (overlap.num_shared, overlap.num_same_id, overlap.share, overlap.is_same) == (
        64,
        62,
        1.0,
        False,
    )
    report = hf_speculate.check_pair(
        make_config("llama"), make_config("llama", vocab_size=64 + 1025)
    )
    assert "differ by more than padding; pass both tokenizers" in texts_of(report, "does not fit")


def test_different_eos_template_length_or_rope_warns(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = _save(
        tmp_path / "target",
        make_config("llama", rope_parameters=rope),
        chat_template="{{ messages }}",
    )
    draft = _save(
        tmp_path / "draft",
        make_config("llama", **SMALL, max_position_embeddings=64),
        eos_token_id=[3, 4],
    )
    report = hf_speculate.check_pair(target, draft)
    assert (report.level, report.ok) == ("warning", True)
    for words in (
        "EOS token ids differ: 2 in",
        "chat templates differ",
        "context is 64 tokens",
        "has dynamic rotary",
    ):
        assert words in texts_of(report, "warning")


SHORT = 64
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": SHORT,
}


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        (
            "llama",
            make_config("gpt2", n_positions=SHORT),
            "is 64 tokens, and the target's is 512: longer rows decode",
        ),
        (
            "bloom",
            make_config("mpt", max_seq_len=SHORT),
            "is 64 tokens, and the target's has no bound",
        ),
        (
            "llama",
            make_model("llama", max_position_embeddings=SHORT, rope_parameters=YARN).config,
            "",
        ),
        (
            "llama",
            make_family("trocr", max_position_embeddings=SHORT).config,
            "is 64 tokens, padding included, and",
        ),
        (
            "bart",
            make_bart(max_position_embeddings=SHORT),
            "the draft's encoder reads 64 tokens at most",
        ),
    ],
)
def test_report_says_where_a_shorter_context_ends_drafts(target, draft, words):
    report = check(make_bart() if target == "bart" else make_config(target), draft)
    warnings = texts_of(report, "warning")
    assert words in warnings
    assert ("context" in warnings) == bool(words)


def test_memory_estimate_sums_weights_and_cache():
    model = make_model("mixtral", dtype=torch.float32)
    memory = hf_speculate.check_pair(model, model).target_memory
    layers = model(input_ids=torch.ones(1, 7, dtype=torch.int64), use_cache=True)[CACHE_NAME].layers
    assert (memory.dtype, memory.weight_bytes) == (
        "float32",
        sum(weight.nbytes for weight in model.parameters()),
    )
    assert memory.kv_bytes_per_token * 7 == sum(
        layer.keys.nbytes + layer.values.nbytes for layer in layers
    )
    half = hf_speculate.check_pair(model.config, model.config, dtype="bfloat16").target_memory
    assert (half.dtype, 2 * half.weight_bytes) == ("bfloat16", memory.weight_bytes)


def test_bytes_of_quantised_and_routed_models_are_exact():
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 512,
        "num_attention_heads": 4,
    }
    moe = MixtralConfig(vocab_size=64, num_local_experts=8, **sizes)
    size = size_of(meta_model("target", moe), 2)
    assert size.num_expert_bytes == 2 * 2 * 8 * 3 * 64 * 512
    assert size.num_lookup_bytes == 2 * 64 * 64
    read = size.num_bytes - size.num_lookup_bytes
    assert size.num_read_bytes(1) == pytest.approx(read - size.num_expert_bytes * 6 / 8)
    assert size.num_read_bytes(1) < size.num_read_bytes(5) < read
    tied = size_of(meta_model("target", make_config("llama", tie_word_embeddings=True)), 2)
    assert tied.num_lookup_bytes == 0
    report = check(
        moe,
        make_config(
            "llama", quantization_config={"quant_method": "gptq", "bits": 4}, dtype="bfloat16"
        ),
    )
    assert report.size_ratio == pytest.approx(
        check(moe, make_config("llama", dtype="bfloat16")).size_ratio / 4
    )
    assert "2 of 8 experts" in texts_of(report, "warning")
    assert "the draft is quantised (gptq)" in texts_of(report, "warning")


def test_expected_speedup_is_the_best_of_the_cost_model():
    assert expected_speedup(0.8, 5, 0.1, 1.25) == pytest.approx(
        (1 - 0.8**6) / (0.2 * (5 * 0.1 + 1.25))
    )
    gains = estimate_gains(ModelSize(100, 200), ModelSize(10, 20))
    # The draft costs the same here.
    routed = estimate_gains(ModelSize(100, 200, 0, 160, 8, 2), ModelSize(4, 8))
    assert all(gain.speedup < base.speedup for gain, base in zip(routed, gains, strict=True))
    for gain in gains:
        rates = [expected_speedup(gain.acceptance_probability, num, 0.1) for num in range(11)]
        assert (
            gain.speedup == pytest.approx(max(rates)) == pytest.approx(rates[gain.num_draft_tokens])
        )


def test_gemma_4_assistant_is_checked_against_target_states():
    target = make_target()
    report = hf_speculate.check_pair(
        target, make_assistant(target), target_tokenizer=letters_tokenizer(LETTERS)
    )
    assert report.ok
    assert "KV cache" in str(report.target_memory)
    assert "KV cache" not in str(report.draft_memory)  # a Gemma 4 assistant has no KV cache
    other = hf_speculate.check_pair(make_target(hidden_size=16), make_assistant(target))
    assert other.level == "does not fit"
    assert "it reads states of width 32, and the target's are 16" in texts_of(other, "does not fit")
