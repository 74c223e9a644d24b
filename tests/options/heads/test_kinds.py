"""Test recognised and refused folders, their configs, and whether head and target match."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.options.heads.layers import Rotary, read_layer_config, windows_of
from hf_speculate.options.heads.load import check_head, load_drafter
from hf_speculate.options.heads.recognise import is_head, recognise
from hf_speculate.options.heads.target_ids import target_ids
from hf_speculate.options.heads.weight_files import read_names, read_weights
from tests.options.heads.designs import (
    DFLASH,
    DFLASH2,
    EAGLE3,
    make_weights,
    write_original,
    write_speculators,
    write_z_lab,
)
from tests.options.heads.rounds import target_of
from tests.support.tiny import make_config


@pytest.mark.parametrize(
    ("config", "names", "kind"),
    [
        ({"block_size": 16, "mask_token_id": 3, "target_layer_ids": [1]}, [], "dflash"),
        ({"dflash_config": {"selector_rank": 4}}, [], "dflash2"),
        ({"dflash_config": {"projector_type": "dflash2"}}, [], "dflash2"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, [], "dflash2"),
        ({"selector_top_k": 4, "model_type": "qwen3"}, [], "dflash2"),
        ({"draft_vocab_size": 8, "architectures": ["LlamaForCausalLM"]}, [], "eagle3"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            ["fc.weight", "midlayer.hidden_norm.weight", "d2t"],
            "eagle3",
        ),
    ],
)
def test_folders_that_name_no_kind_are_recognised(config, names, kind):
    assert recognise(config, lambda: set(names), "deepseek_v3").kind == kind
    assert is_head(config) or names  # only by its config


@pytest.mark.parametrize(
    ("config", "names", "got"),
    [
        ({"speculators_model_type": "eagle"}, set(), "the speculators model type 'eagle'"),
        ({"draft_vocab_size": 8, "kv_lora_rank": 4}, set(), "latent attention"),
        ({"draft_vocab_size": 8, "num_experts": 4}, set(), "a draft with experts"),
        ({"draft_vocab_size": 8, "quantization_config": {"bits": 4}}, set(), "a quantised head"),
        ({"dflash_config": {"projector_type": "new"}}, set(), "projector_type 'new'"),
        ({"dflash_config": {"draft_ffn_type": "moe"}}, set(), "a draft with experts"),
        ({"dflash_config": {"projector_type": "domino"}}, set(), "projector_type 'domino'"),
        ({"dflash_config": {"fusion_mode": "flare"}}, set(), "fusion_mode 'flare'"),
        (
            {"dflash_config": {"selector_rank": 4, "draft_ffn_type": "moe"}},
            set(),
            "a draft with experts",
        ),
        ({"speculators_model_type": "xpress"}, set(), "the speculators model type 'xpress'"),
        (
            {"model_type": "llama", "medusa_num_heads": 4},
            set(),
            "model_type 'llama' with architectures None",
        ),
        (
            {"architectures": ["Qwen3DSparkModel"]},
            set(),
            "a DSpark head outside the speculators format",
        ),
        (
            {"model_type": "llama"},
            {"fc.weight", "layers.0.self_attn.q_proj.weight"},
            "an EAGLE-1 or EAGLE-2 head",
        ),
        (
            {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0},
            set(),
            "model_type 'deepseek_v3'",
        ),
    ],
)
def test_unsupported_head_error_lists_supported_kinds(config, names, got):
    with pytest.raises(
        UnsupportedModelError, match=r"must be of a served kind .*EAGLE-3.*PARD"
    ) as caught:
        recognise(config, lambda: names, "deepseek_v3")
    assert got in str(caught.value)
    # The folder is not mistaken for a draft model.
    assert is_head(config) or config.get("model_type") in ("llama", "deepseek_v3")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"hidden_size": 32}, "it reads states of width 24, and the target's are 32"),
        (
            {"vocab_size": 1057},
            "its vocabulary has 32 tokens, and the target's 1057, more than 1,024 apart",
        ),
        (
            {"num_hidden_layers": 4},
            "it reads the states of layers [5], and the target has layers 0 to 4",
        ),
        (
            {"max_position_embeddings": 600},
            "its context is 512 tokens, and the target's is 600: longer rows decode plainly",
        ),
    ],
)
def test_mismatch_is_found_from_configs_only(changes, problem, tmp_path):
    folder = write_speculators(tmp_path / "head", EAGLE3, make_weights(EAGLE3))
    (folder / "model.safetensors").unlink()
    (tmp_path / "target").mkdir()
    fields = {"vocab_size": EAGLE3.vocab_size, "hidden_size": 24, "num_hidden_layers": 6, **changes}
    make_config("llama", **fields).save_pretrained(tmp_path / "target")
    fit = check_head(folder, tmp_path / "target")
    assert fit.problems == (() if problem is None or "context" in problem else (problem,))
    assert fit.notes == ((problem,) if "context" in (problem or "") else ())
    assert (fit.spec.kind, fit.spec.hidden_layers) == ("eagle3", EAGLE3.aux_layers)


def test_guessed_layers_are_noted(tmp_path):
    folder = write_z_lab(tmp_path, DFLASH, {}, dflash_config={"mask_token_id": 3})
    assert (
        "names no target_layer_ids, so it is taken to read layers [2, 4]"
        in check_head(folder, target_of().config).notes[0]
    )


@pytest.mark.parametrize(
    ("weights", "fields", "message"),
    [
        (
            {"fc.weight_scale": torch.ones(1)},
            {},
            r"quantised weights \(fc\.weight_scale in float32\)",
        ),
        (
            {"fc.weight": torch.ones(24, 72, dtype=torch.int8)},
            {},
            r"quantised weights \(fc\.weight in int8\)",
        ),
        (
            {"d2t": torch.zeros(12, dtype=torch.int64) - 1},
            {},
            "d2t in .*model.safetensors must hold offsets",
        ),
        (
            {"t2d": torch.ones(32, dtype=torch.bool)},
            {},
            "t2d in .*model.safetensors must mark the 12 ids",
        ),
        (
            {"candidate_selector.successor_codebook": torch.ones(1)},
            {},
            r"left over candidate_selector\.successor",
        ),
        ({"lilicorr.logit_scale": torch.ones(1)}, {}, r"left over lilicorr\.logit_scale"),
        (
            {"lm_head.weight": None},
            {},
            r"lm_head\.weight in .* must have a row for each of the 12 tokens",
        ),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": [1, 3]},
            "must read as many target states as fc.weight joins, 3 of",
        ),
        ({}, {"target_hidden_size": 48}, r"must fit its target, got .*it reads states of width 48"),
    ],
)
def test_mismatched_weights_and_configs_are_named(weights, fields, message, tmp_path):
    weights = {
        name: one for name, one in (make_weights(EAGLE3) | weights).items() if one is not None
    }
    folder = write_speculators(tmp_path, EAGLE3, weights, **fields)
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        load_drafter(folder, target_of())


NO_LAYERS = {"dflash_config": {"mask_token_id": 3, "block_size": 5}}


@pytest.mark.parametrize(
    ("write", "fields", "message"),
    [
        (write_z_lab, NO_LAYERS, "target_layer_ids must be set for a DFlash 2 head"),
        (
            write_speculators,
            {"aux_hidden_state_layer_ids": None},
            "aux_hidden_state_layer_ids must be set for a DFlash 2",
        ),
        (write_z_lab, {"block_size": None}, "block_size must be set for a DFlash 2 head"),
        (write_speculators, {"mask_token_id": None}, "mask_token_id must be set"),
        (
            write_speculators,
            {"conv_kernel_size": 6},
            "conv_kernel_size must be an int of at least 1 and at most 5, got 6",
        ),
        (
            write_speculators,
            {"conv_kernel_size": 0},
            "conv_kernel_size must be an int of at least 1",
        ),
        (
            write_speculators,
            {"conv_group_size": 5},
            "conv_group_size of .* must divide its width of 24, got 5",
        ),
        (
            write_speculators,
            {"selector_rank": 0},
            "selector_rank must be an int of at least 1, got 0",
        ),
        (
            write_speculators,
            {"selector_rank": 4},
            r"of another shape candidate_selector\.hidden_projection",
        ),
        (
            write_speculators,
            {"selector_top_k": 33},
            "selector_top_k must be an int of at least 1 and at most 32, got 33",
        ),
        (
            write_speculators,
            {"sample_from_anchor": True},
            "a DFlash 2 head with sample_from_anchor",
        ),
        (write_speculators, {"draft_vocab_size": 12}, "a DFlash 2 head with draft_vocab_size 12"),
        (write_speculators, {"draft_ffn_type": "moe"}, "a draft with experts"),
        (write_z_lab, {"add_swa_attention_sink_bias": True}, "a DFlash head with attention sinks"),
        (write_z_lab, {"quantization_config": {"bits": 4}}, "a quantised head"),
    ],
)
def test_invalid_dflash_2_fields_are_named(write, fields, message, tmp_path):
    folder = write(tmp_path, DFLASH2, make_weights(DFLASH2), **fields)
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        load_drafter(folder, target_of())


def test_dflash_2_has_one_block_size(tmp_path):
    design = DFLASH2.with_options(block_size=4)
    folder = write_z_lab(tmp_path, design, make_weights(design))
    with pytest.raises(
        ConfigError, match=r"block_size must be the same in config\.json of .*, got 5 and 4"
    ):
        load_drafter(folder, target_of())
    assert load_drafter(
        write_z_lab(tmp_path, design, make_weights(design), block_size=None), target_of()
    )


@pytest.mark.parametrize(("fields", "scale"), [({}, 1.0), ({"input_embedding_scale": 4.0}, 4.0)])
def test_dflash_2_embeds_without_the_target_scale(fields, scale, tmp_path):
    design = DFLASH2.with_options(**fields)
    head = load_drafter(write_z_lab(tmp_path, design, make_weights(design)), target_of())
    assert head.network.options.embedding_scale == scale


def test_dflash_2_layers_missing_in_the_config_may_be_passed(tmp_path):
    fields = {"aux_hidden_state_layer_ids": None}
    folder = write_speculators(tmp_path, DFLASH2, make_weights(DFLASH2), **fields)
    assert load_drafter(folder, target_of(), aux_layers=[2, 4, 6]).hidden_layers == (2, 4, 6)


IDS = torch.tensor(EAGLE3.draft_ids)
OPEN = torch.tensor([0, 2, 3, 5, 7, 8, 9, 11, 12, 13, 14, 15])  # offsets of 0, 3, 5, 8, ... or ids


def marks(ids):
    return torch.zeros(EAGLE3.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)


@pytest.mark.parametrize(
    ("d2t", "t2d", "expected"),
    [
        (IDS - torch.arange(12), None, IDS),
        (IDS, None, IDS),  # as offsets, they would exceed the vocabulary
        (IDS, marks(IDS), IDS),
        (torch.arange(12), None, torch.arange(12)),
        (torch.zeros(12, dtype=torch.int64), None, torch.arange(12)),
        (torch.arange(12), marks(torch.arange(12) * 2), torch.arange(12) * 2),
        (OPEN, marks(OPEN), OPEN),
        (OPEN, marks(OPEN + torch.arange(12)), OPEN + torch.arange(12)),
        (
            OPEN,
            None,
            (
                r"d2t in .*model\.safetensors must come with t2d if it rises at every one of 12 "
                "columns"
            ),
        ),
        (
            IDS.flip(0),
            None,
            (
                r"d2t in .*model\.safetensors must hold offsets that give increasing ids below 32, "
                "or these"
            ),
        ),
        (IDS[:0], None, r"d2t in .*model\.safetensors must hold offsets"),
    ],
)
def test_d2t_may_hold_offsets_or_ids(d2t, t2d, expected, tmp_path):
    weights = {
        name: one for name, one in make_weights(EAGLE3).items() if name not in ("d2t", "t2d")
    }
    weights |= {"d2t": d2t.clone()} | ({} if t2d is None else {"t2d": t2d})
    folder = write_speculators(tmp_path, EAGLE3, weights)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            load_drafter(folder, target_of())
    else:
        assert (
            load_drafter(folder, target_of()).network.vocabulary.target_ids.tolist()
            == expected.tolist()
        )


def test_long_d2t_without_neighbours_holds_ids():
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(0))[:200].sort().values
    assert target_ids(ids, None, 1000, Path("weights")).tolist() == ids.tolist()


def test_folders_without_config_or_weights_are_named(tmp_path):
    for source, content in (
        (tmp_path, None),
        ("nobody/nothing-here", None),
        (tmp_path, "[1, 2]"),
        (tmp_path, "{"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(
            ConfigError, match=r"must be a folder or a Hub repository with a config\.json, got"
        ):
            load_drafter(source, target_of())
    write_speculators(tmp_path, EAGLE3, make_weights(EAGLE3))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        UnsupportedModelError, match=r"must hold one of model\.safetensors, .*pytorch_model\.bin"
    ):
        load_drafter(tmp_path, target_of())


REVISION = "0" * 40


@pytest.mark.parametrize("is_repository", [False, True])
def test_head_in_a_subfolder_is_loaded(is_repository, tmp_path, monkeypatch):
    """Load from a folder, or from a cached repository."""
    root, source = tmp_path, str(tmp_path)
    if is_repository:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        root, source = tmp_path / "models--some--heads" / "snapshots" / REVISION, "some/heads"
        (tmp_path / "models--some--heads" / "refs").mkdir(parents=True)
        (tmp_path / "models--some--heads" / "refs" / "main").write_text(REVISION)
    write_speculators(root, DFLASH, make_weights(DFLASH))
    write_speculators(root / "heads" / "eagle", EAGLE3, make_weights(EAGLE3))
    head = load_drafter(source, target_of(), subfolder="heads/eagle")
    assert (head.spec.kind, head.spec.name) == ("eagle3", "eagle")
    assert check_head(source, target_of().config, subfolder="heads/eagle").spec == head.spec
    assert load_drafter(source, target_of()).spec.kind == "dflash"
    for subfolder in ("heads", "eagle"):
        with pytest.raises(ConfigError, match=rf"with a config\.json, got '{source}/{subfolder}'"):
            load_drafter(source, target_of(), subfolder=subfolder)


@pytest.mark.parametrize("subfolder", ["/heads", "../heads"])
def test_subfolder_outside_the_folder_is_refused(subfolder, tmp_path):
    with pytest.raises(
        ConfigError,
        match=f"subfolder must be a path below the folder of the head, got '{subfolder}'",
    ):
        load_drafter(tmp_path, target_of(), subfolder=subfolder)


def test_context_follows_the_scaled_config_or_the_caller(tmp_path):
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    folder = write_speculators(tmp_path, EAGLE3, make_weights(EAGLE3))
    config = json.loads((folder / "config.json").read_text())
    for layer_fields, num_tokens in (
        ({}, 512),
        (scaled, 1024),
        ({"max_position_embeddings": None}, None),
    ):
        changed = {
            **config,
            "transformer_layer_config": {**config["transformer_layer_config"], **layer_fields},
        }
        (folder / "config.json").write_text(json.dumps(changed))
        assert load_drafter(folder, target_of()).spec.max_position_embeddings == num_tokens
    assert load_drafter(folder, target_of(), context_len=96).spec.max_position_embeddings == 96
    with pytest.raises(ConfigError, match="context_len must be an int of at least 1, got 0"):
        load_drafter(folder, target_of(), context_len=0)


def test_repr_of_a_head_names_its_kind(tmp_path):
    folder = write_speculators(tmp_path / "my-head", EAGLE3, make_weights(EAGLE3))
    head = load_drafter(folder, target_of(), dtype=torch.bfloat16, aux_layers=[2, 4, 6])
    parts = (
        "my-head: eagle3",
        "layers 2, 4, 6 (before the final norm)",
        "12 of 32 tokens",
        "bfloat16 on cpu",
        "K 4",
    )
    assert all(words in repr(head) for words in parts)


def test_pickled_file_cannot_run_code(tmp_path):
    folder = write_original(
        tmp_path, EAGLE3, make_weights(EAGLE3), saving={"safe_serialization": False}
    )
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        load_drafter(folder, target_of())


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts of reads come from Linux")
@pytest.mark.parametrize("is_old", [False, True])
def test_single_weight_of_a_pickled_file_is_read_alone(is_old, tmp_path):
    """Include files from torch before 1.6, which cannot be memory-mapped."""
    weights = {"small": torch.arange(9), "large": torch.zeros(1 << 23)}
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not is_old)

    def num_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    before = num_read()
    read = read_weights(tmp_path, lambda name: name == "small")
    assert (num_read() - before < 1 << 22) != is_old
    assert read_names(tmp_path) == weights.keys()
    torch.testing.assert_close(read, {"small": torch.arange(9)})


FIELDS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def test_windows_follow_the_layer_types():
    types = {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 7,
    }
    assert windows_of(read_layer_config({**FIELDS, **types, "num_hidden_layers": 2})) == (7, None)
    config = read_layer_config({**FIELDS, "sliding_window": 7})
    assert (windows_of(config), config.num_key_value_heads, config.head_dim) == ((None,), 4, 8)


BY_LAYER = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 9.0}}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 500.0, "rope_scaling": LLAMA3}, {**LLAMA3, "rope_theta": 500.0}),
        ({"rope_theta": 500.0, "rope_parameters": LLAMA3}, {**LLAMA3, "rope_theta": 500.0}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_parameters": BY_LAYER}, {"rope_type": "default", "rope_theta": 500.0}),
    ],
    ids=["scaling", "parameters without theta", "none", "parameters by layer"],
)
def test_rotary_embeddings_equal_transformers(fields, rope):
    config = read_layer_config({**FIELDS, "max_position_embeddings": 512, **fields})
    positions = torch.arange(200)[None]
    expected = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=32, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope
        )
    )(torch.empty(0), positions)
    found = Rotary(config, torch.device("cpu"))(positions, torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs, rtol=0, atol=0)
