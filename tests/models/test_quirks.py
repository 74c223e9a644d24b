"""Test that all model types in the table are tested, and that their limits are enforced."""

import re
from pathlib import Path

import pytest
import torch
import transformers

import hf_speculate
from hf_speculate import compat
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models import quirks
from hf_speculate.models.quirks import (
    QUIRKS,
    TESTED_TYPES,
    Limit,
    is_tested_type,
    may_compare_attention,
    model_types,
)
from tests.cases import assert_decodes_as_plain, assert_equal_ids
from tests.generation.test_caches import FLOAT32_TOLERANCE, assert_same_contents, cache_contents
from tests.random_calls import Case
from tests.random_search import run_case
from tests.support.tiny import (
    MORE_FAMILIES,
    TINY_FAMILIES,
    make_config,
    make_model,
    noisy_copy,
    ragged_prompts,
)
from tests.support.tiny_configs import RECURRENT_FAMILIES
from tests.support.tiny_encoders import (
    make_bart,
    make_llava,
    make_qwen2_vl,
    make_qwen3_5_vl,
    make_t5,
    make_whisper,
)
from tests.support.tiny_families import FAMILIES, make_family
from tests.support.tiny_readers import COLUMN_COUNTERS, ENCODERS, READERS, READINGS
from tests.support.tiny_wrappers import WRAPPERS

NUM_NEW = 20
# at least one type per limit, and one with a special mask
QUIRKY = ("ctrl", "imagegpt", "m2m_100", "trocr", "xglm")

# One class per refused type, made from its default config without weights.
REFUSED = (
    *("BltForCausalLM", "CpmAntForCausalLM", "FSMTForConditionalGeneration", "GitForCausalLM"),
    *(
        "GlmImageForConditionalGeneration",
        "IdeficsForVisionText2Text",
        "Kosmos2ForConditionalGeneration",
    ),
    *("Kosmos2_5ForConditionalGeneration", "ProphetNetForConditionalGeneration"),
    "Qwen2_5OmniTalkerForConditionalGeneration",
)
OWN_LOOPS = ("CsmForConditionalGeneration", "HiggsAudioV2ForConditionalGeneration")


def pair_of(name, **options):
    target = make_family(name, **options)
    return hf_speculate.enable(target), noisy_copy(target, 0.03)


def without_weights(class_name):
    """Make a model from the default config of the class, on the meta device."""
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        return model_class(model_class.config_class())


def test_table_equals_the_tested_types():
    makers = (make_t5, make_bart, make_whisper, make_llava, make_qwen2_vl, make_qwen3_5_vl)
    readers = [make().target for make in (READINGS | READERS | ENCODERS).values()]
    readers += [wrapper.make().target for wrapper in WRAPPERS.values()]
    models = (
        [make() for make in (*makers, *COLUMN_COUNTERS.values())]
        + readers
        + [make_family("t5gemma")]
    )
    types = {name for model in models for name in model_types(model)}
    types |= {
        make_config(family).model_type
        for family in TINY_FAMILIES + MORE_FAMILIES + RECURRENT_FAMILIES
    } | set(FAMILIES)
    since = {
        name
        for name, version in TESTED_TYPES.items()
        if version == "5.17.0" or "hyperclovax" in COLUMN_COUNTERS
    }
    assert types == since


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize(
    "model_type",
    [name if name in QUIRKY else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_family_decodes_as_plain(model_type):
    assert run_case(Case(model_type, batch_size=3, padding="left", noise=0.03)).outcome == "equal"


def test_rows_without_padding_get_their_masks():
    inputs = {"input_ids": ragged_prompts(2, seed=2, min_len=6, max_len=6)["input_ids"]}
    stats = assert_decodes_as_plain(*pair_of("xglm"), inputs, max_new_tokens=NUM_NEW)
    assert stats.cache == "preallocated"
    assert "self-test" not in stats.plan


@pytest.mark.fallback("lock step")
def test_tokens_behind_a_padding_token_keep_their_positions():
    target, draft = pair_of("m2m_100", seed=5)
    for model in (target, draft):
        model.get_output_embeddings().weight[0] *= 3  # makes the padding id likely in the text
        model.generation_config.pad_token_id = 63
    inputs = ragged_prompts(3, seed=2)
    assert_decodes_as_plain(target, draft, inputs, max_new_tokens=NUM_NEW)
    assert (target.generate(**inputs, max_new_tokens=NUM_NEW) == 0).any()


COUNTED = [
    Case(name, batch_size=3, padding=padding)
    for name in COLUMN_COUNTERS
    for padding in ("left", "holes")
]
COUNTED += [
    Case("exaone4_5", padding="holes"),
    Case("t5gemma", batch_size=3, padding="left", decoder_prompt="holes"),
]


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_default_positions_count_columns(case):
    assert run_case(case).outcome == "equal"


NUM_COLUMNS = 24
TABLES_BY_COLUMNS = {
    "gpt_neo": lambda: make_model("gpt_neo", max_position_embeddings=NUM_COLUMNS),
    "imagegpt": lambda: make_family("imagegpt", n_positions=NUM_COLUMNS),
    # as in test_models.py
    "mpt": lambda: make_model("mpt", max_seq_len=NUM_COLUMNS, dtype=torch.float32),
}


@pytest.mark.fallback("lock step, because a row that has filled the")
@pytest.mark.parametrize("family", TABLES_BY_COLUMNS)
@pytest.mark.parametrize("keeps_rows", [False, True])
@pytest.mark.parametrize("num_columns", [NUM_COLUMNS, NUM_COLUMNS + 1])
def test_ragged_rows_reach_the_last_column_of_a_table(family, keeps_rows, num_columns):
    target = hf_speculate.enable(TABLES_BY_COLUMNS[family]())
    inputs = ragged_prompts(3, seed=5, min_len=2, max_len=8)
    options = {
        "max_new_tokens": num_columns - inputs["input_ids"].shape[1],
        "return_dict_in_generate": keeps_rows,
    }
    stats = assert_decodes_as_plain(
        target, noisy_copy(target), inputs, **options, num_assistant_tokens=3
    )
    assert stats.num_drafted > stats.num_accepted > 0
    # a full row leaves no room
    assert stats.lock_step == (keeps_rows and num_columns > NUM_COLUMNS)


@pytest.mark.parametrize("family", ["gpt_neo", "imagegpt"])
def test_padding_of_ended_rows_stays_within_the_table(family):
    target = hf_speculate.enable(TABLES_BY_COLUMNS[family]())
    prompt = torch.randint(1, 48, (2, 7), generator=torch.Generator().manual_seed(2))
    # one token and four full rounds
    options = {"max_new_tokens": NUM_COLUMNS - 7, "return_dict_in_generate": True}
    text = target.generate(prompt, **options).sequences[:, 7:]
    options["eos_token_id"] = end = int(text[0, 13])  # the first token of the last round
    assert int((text == end).sum()) == 1
    drafts = {"assistant_model": noisy_copy(target, 0.0), "num_assistant_tokens": 3}
    plain, ours = target.generate(prompt, **options), target.generate(prompt, **options, **drafts)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert_same_contents(
        *(cache_contents(output[compat.CACHE_NAME]) for output in (plain, ours)), FLOAT32_TOLERANCE
    )


@pytest.mark.parametrize("model_type", ["led", "nllb-moe"])
def test_ambiguous_padded_decoder_prompts_are_refused(model_type):
    prompts = ragged_prompts(3, seed=2, min_len=3, max_len=6)
    decoder = {f"decoder_{name}": value for name, value in prompts.items()}
    inputs = ragged_prompts(3, seed=1) | decoder
    with pytest.raises(
        UnsupportedModelError,
        match=r"decoder_attention_mask must be all ones for .*ForCond.* got masked tokens",
    ):
        hf_speculate.generate(
            make_family(model_type), **inputs, prompt_lookup_num_tokens=3, max_new_tokens=NUM_NEW
        )


def test_falcon_attentions_need_the_eager_implementation():
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_attentions": True}
    inputs = ragged_prompts(1, seed=1)
    with pytest.raises(
        UnsupportedModelError, match=r"must come with eager attention, because .* got 'sdpa'; load"
    ):
        hf_speculate.generate(make_model("falcon"), **inputs, **options, prompt_lookup_num_tokens=3)
    target = make_model("falcon", attn_implementation="eager")
    assert_decodes_as_plain(hf_speculate.enable(target), noisy_copy(target), inputs, **options)


@pytest.mark.parametrize("class_name", [*REFUSED, *OWN_LOOPS])
def test_unsupported_type_is_refused_by_name(class_name):
    types = {getattr(transformers, name).config_class.model_type for name in REFUSED}
    assert types == {quirk.model_type for quirk in QUIRKS if quirk.limit is Limit.NOT_SUPPORTED}
    with pytest.raises(UnsupportedModelError, match=f"got {class_name}"):
        hf_speculate.generate(
            without_weights(class_name),
            torch.tensor([[3, 4]]),
            prompt_lookup_num_tokens=3,
            max_new_tokens=4,
        )


def test_other_versions_and_outside_classes_count_as_untested(monkeypatch):
    model, own = make_model("llama"), make_model("llama")
    own.__class__ = type("Mine", (transformers.LlamaForCausalLM,), {})
    assert is_tested_type(model) and not is_tested_type(own)
    for version in ("5.16.3", "6.0.0.dev0"):
        monkeypatch.setattr(compat.transformers, "__version__", version)
        assert not is_tested_type(model)


def packages_with(pattern):
    """Return the packages of `transformers.models` whose code matches, and all packages."""
    root = Path(transformers.__file__).parent / "models"
    packages = {
        path.parent.name
        for path in root.glob("*/modeling_*.py")
        if re.search(pattern, path.read_text("utf-8"))
    }
    return packages, {path.name for path in root.iterdir()}


COMPARES = r"_attn_implementation\W+(?:\w+\W+){0,4}sdpa\b"
TABLES = [(quirks._MASK_BY_TYPE, "causal_mask_mapping := attention_mask", set())]
BY_COLUMNS = {quirk.model_type for quirk in QUIRKS if quirk.limit is Limit.CONTEXT_BY_COLUMNS}
READS_COLUMNS = r"self\.bias\[:, :, key_length - query_length|build_mpt_alibi_tensor"
TABLES += [(BY_COLUMNS | {"bark"}, READS_COLUMNS, set())]  # Bark has a separate loop
# these types are missing in the oldest version
TABLES += [(quirks._COMPARES_ATTENTION, COMPARES, {"gemma4", "gemma4_unified"})]


@pytest.mark.parametrize(
    ("table", "pattern", "later"),
    TABLES,
    ids=["masks by type", "tables by columns", "compares the attention"],
)
def test_tables_name_the_packages_of_this_version(table, pattern, later):
    packages, installed = packages_with(pattern)
    assert packages | (later & installed) == table & installed


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", False), ("gemma2", False), ("gemma4", True)]
)
def test_models_comparing_the_attention_name_are_recognised(family, expected):
    assert (
        any(may_compare_attention(type(module)) for module in make_model(family).modules())
        == expected
    )
