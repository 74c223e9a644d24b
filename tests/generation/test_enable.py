"""Test that `enable()` changes `generate()` of one object and nothing else."""

import ast
import copy
import functools
import inspect
import io
import pickle
import pydoc
import re
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM

import hf_speculate
from hf_speculate import compat as private_names
from hf_speculate.config import FIELD_NAMES
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value
from tests.support.tiny import make_model, noisy_copy, ragged_prompts

HUB = Path(__file__).parents[2] / "examples" / "hub" / "typical"


@pytest.fixture
def models():
    target = make_model("llama")
    return target, noisy_copy(target, 0.05, seed=1)


def test_enable_changes_one_object_only(models):
    target, draft = models
    for _ in range(2):  # enabling twice is harmless
        assert hf_speculate.enable(target) is target
        assert hf_speculate.is_enabled(target)
    assert not hf_speculate.is_enabled(draft)
    assert isinstance(target, LlamaForCausalLM)
    assert type(target).__name__ == "LlamaForCausalLM"
    assert LlamaForCausalLM.generate is GenerationMixin.generate
    assert type(hf_speculate.enable(draft)) is type(target)
    for _ in range(2):
        assert type(hf_speculate.disable(target)) is LlamaForCausalLM


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "top_k": 5}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}],
)
def test_enabled_model_without_a_draft_equals_plain_bitwise(models, options):
    target, _ = models
    inputs = ragged_prompts(1, seed=1)
    texts = []
    for change in (hf_speculate.disable, hf_speculate.enable):
        change(target)
        torch.manual_seed(4)
        texts.append(target.generate(**inputs, max_new_tokens=12, **options))
    assert_equal_ids(*texts)


class Mine(hf_speculate.SpeculativeGenerationMixin, LlamaForCausalLM):
    """User class with the mixin."""


def test_custom_class_with_the_mixin_drafts(models):
    target, draft = models
    target.__class__ = Mine
    assert hf_speculate.is_enabled(target)
    assert (
        assert_decodes_as_plain(
            target, draft, ragged_prompts(2, seed=3), max_new_tokens=9
        ).num_rounds
        > 0
    )


class WithItsOwn(Mine):
    """User class whose `generate` inspects the arguments passed to the mixin."""

    def generate(self, *args, **kwargs):
        """Document the override with a text of its own."""
        return super().generate(*args, **kwargs)


class Derived(WithItsOwn):
    """Class with an inherited `generate`."""


class NamesTheFirst(LlamaForCausalLM):
    """Class that names one argument and forwards all, as Granite Speech and Kyutai STT do."""

    def generate(self, ids, *args, **kwargs):
        return super().generate(ids, *args, **kwargs)


@each_value(family=[LlamaForCausalLM, NamesTheFirst], num_places=[2, 1, 7])
def test_positional_arguments_of_any_generate_are_kept(models, num_places, family):
    target, draft = models
    target.__class__ = family
    config, stats = (
        GenerationConfig(max_new_tokens=7, pad_token_id=0),
        hf_speculate.SpeculationStats(),
    )
    args = (ragged_prompts(1, seed=1)["input_ids"], config, None, None, None, None, draft)[
        :num_places
    ]
    kwargs = {"generation_config": config} if num_places == 1 else {}
    plain = target.generate(*args[:6], **kwargs)
    assert_equal_ids(plain, hf_speculate.enable(target).generate(*args[:6], **kwargs))
    kwargs |= {"assistant_model": draft} if num_places < 7 else {}
    for generate in (target.generate, functools.partial(hf_speculate.generate, target)):
        assert_equal_ids(
            plain, generate(*args, **kwargs, num_assistant_tokens=5, speculation_stats=stats)
        )
        assert stats.num_rounds > 0


def test_help_names_class_arguments_and_speculation_fields(models):
    model = hf_speculate.enable(models[0])
    parameters, plain = (
        inspect.signature(each).parameters for each in (model.generate, LlamaForCausalLM.generate)
    )
    assert list(parameters) == [*list(plain)[1:-1], *FIELD_NAMES, "kwargs"]
    assert (
        parameters["posterior_threshold"].default
        == hf_speculate.SpeculationConfig().posterior_threshold
    )
    text = pydoc.render_doc(model.generate, renderer=pydoc.plaintext)
    assert "Generates sequences of token ids for models" in text  # defined in transformers
    assert "posterior_threshold: epsilon of typical acceptance, in (0, 1)." in text
    assert "SpeculationConfig" in dir(hf_speculate)
    for family, names in (
        (NamesTheFirst, ["ids", "args", *FIELD_NAMES, "kwargs"]),
        (Derived, ["args", "kwargs"]),
    ):
        model.__class__ = family
        assert list(inspect.signature(hf_speculate.enable(model).generate).parameters) == names
    assert inspect.getdoc(model.generate) == "Document the override with a text of its own."


def test_saved_enabled_model_is_byte_equal_to_a_plain_one(models, tmp_path):
    target, _ = models
    target.save_pretrained(tmp_path / "plain")
    hf_speculate.enable(target).save_pretrained(tmp_path / "enabled")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (
            tmp_path / "enabled" / name
        ).read_bytes()


def by_torch(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIERS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": by_torch,
}


class Forwarding(torch.nn.Module):
    """Wrapper that looks up missing attributes on its model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        return (
            self._modules[name] if name in self._modules else getattr(self._modules["model"], name)
        )


def with_lora(model):
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval().to(torch.float64)


def with_offloading_hook(model):
    """Add accelerate's hook, which binds a `forward` to the object."""
    return add_hook_to_module(model, AlignDevicesHook(io_same_device=True))


WRAPPERS = {
    "none": lambda model: model,
    "PEFT": with_lora,
    "DataParallel": torch.nn.DataParallel,
    "any": Forwarding,
    "accelerate": with_offloading_hook,
}
UNPICKLED = ("accelerate",)  # its hooks are closures


def inner_of(wrapped):
    return next(module for module in wrapped.modules() if isinstance(module, LlamaForCausalLM))


@pytest.mark.parametrize(
    ("wrapper", "copier"),
    [
        (name, copier)
        for name in WRAPPERS
        for copier in COPIERS
        if name not in UNPICKLED or "copy" in copier
    ],
)
def test_copies_and_pickles_stay_enabled(models, wrapper, copier):
    target, draft = models
    wrapped = WRAPPERS[wrapper](hf_speculate.enable(target))
    copied = COPIERS[copier](wrapped)
    assert type(copied) is type(wrapped)
    assert copied is not wrapped
    inner, is_shared = inner_of(copied), copier == "copy"
    assert (inner.lm_head.weight is target.lm_head.weight) == is_shared
    assert is_shared or inner is not target
    assert (
        assert_decodes_as_plain(
            inner, draft, ragged_prompts(1, seed=1), max_new_tokens=6
        ).num_rounds
        > 0
    )
    hf_speculate.disable(inner)
    assert hf_speculate.is_enabled(target) == (inner is not target)


@pytest.mark.parametrize("copier", COPIERS)
def test_copies_of_a_reclassed_model_stay_enabled(models, copier):
    target = hf_speculate.enable(models[0])
    # Libraries that shard a model create such a class.
    target.__class__ = type("LlamaForCausalLM", (type(target),), {})
    copied = COPIERS[copier](target)
    assert hf_speculate.is_enabled(copied)
    # A pickle cannot find that class by name.
    assert (type(copied) is type(target)) == (copier in ("copy", "deepcopy"))


def test_deprecated_transformers_fields_warn(models):
    target, _ = models
    target.generation_config = GenerationConfig.from_model_config(target.config)
    target.generation_config.verifier = "typical"
    with pytest.warns(UserWarning, match="transformers will drop verifier when it is saved"):
        hf_speculate.enable(target)


@pytest.mark.parametrize(
    ("config", "addition"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "a learned prompt"),
        (
            LoraConfig(
                task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3]
            ),
            "an activated LoRA",
        ),
    ],
)
def test_wrapper_changing_each_forward_is_refused(config, addition, models):
    target, draft = models
    wrapped = get_peft_model(target, config)
    with pytest.raises(
        hf_speculate.UnsupportedModelError, match=f"got PeftModelForCausalLM with {addition}"
    ):
        hf_speculate.generate(wrapped, **ragged_prompts(1, seed=4), assistant_model=draft)


def test_peft_model_is_enabled_through_its_base(models):
    target, draft = models
    wrapped, inputs = with_lora(target), ragged_prompts(2, seed=4)
    ours = hf_speculate.generate(
        wrapped, **inputs, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=10
    )
    assert_equal_ids(wrapped.generate(**inputs, max_new_tokens=10), ours)
    assert not hf_speculate.is_enabled(wrapped)
    assert hf_speculate.enable(wrapped) is wrapped
    assert hf_speculate.is_enabled(wrapped)
    assert (
        assert_decodes_as_plain(
            wrapped, draft, ragged_prompts(2, seed=4), max_new_tokens=10
        ).num_rounds
        > 0
    )
    hf_speculate.disable(wrapped)
    assert not hf_speculate.is_enabled(wrapped)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_hub_repository_runs_through_custom_generate(models, is_enabled):
    target, draft = models
    if is_enabled:
        hf_speculate.enable(target)
    stats, inputs = hf_speculate.SpeculationStats(), ragged_prompts(1, seed=6)
    options = {
        "custom_generate": str(HUB),
        "trust_remote_code": True,
        "assistant_model": draft,
        "max_new_tokens": 8,
    }
    output = target.generate(**inputs, **options, speculation_stats=stats)
    assert output.shape[1] == inputs["input_ids"].shape[1] + 8
    assert (stats.verifier, stats.num_rounds > 0) == ("typical", True)


def test_generate_function_on_the_object_does_not_recurse(models):
    """Set a function on the object, as transformers does for `trust_remote_code`."""
    target, draft = models
    target.generate = lambda **kwargs: hf_speculate.generate(target, **kwargs)
    draft_options = {"assistant_model": draft, "num_assistant_tokens": 3}
    assert target.generate(**ragged_prompts(2), **draft_options, max_new_tokens=5).shape == (
        2,
        12 + 5,
    )


def test_missing_transformers_name_is_refused_by_enable():
    def missing(model):
        raise AttributeError

    model = make_model("llama")
    model.__class__ = type(
        "RenamedSince", (LlamaForCausalLM,), {"_default_compile_config": property(missing)}
    )
    with pytest.raises(
        hf_speculate.UnsupportedModelError,
        match=r"RenamedSince\._default_compile_config.*5\.17\.0 to",
    ):
        hf_speculate.enable(model)
    assert not hf_speculate.is_enabled(model)


CLASSES = {name: type(name, (LlamaForCausalLM,), {}) for name in ("First", "Second")}


def test_newer_transformers_warns_once_per_class(monkeypatch):
    models = [make_model("llama") for _ in range(3)]
    for model, name in zip(models, ("First", "First", "Second"), strict=True):
        model.__class__ = CLASSES[name]
    monkeypatch.setattr(private_names.transformers, "__version__", "5.99.1")
    with pytest.warns(UserWarning) as caught:
        for model in models:
            hf_speculate.enable(model)
    words = (
        r"5\.17\.0 to 5\.\d+\.\d+.* got 5\.99\.1; "
        r"the first speculative call compares (\w+) .*; install"
    )
    assert [re.search(words, str(warning.message))[1] for warning in caught] == ["First", "Second"]
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("version", ["5.16.0", private_names.transformers.__version__])
def test_supported_transformers_version_does_not_warn(monkeypatch, version):
    model = make_model("llama")
    model.__class__ = type("Another", (LlamaForCausalLM,), {})
    monkeypatch.setattr(private_names.transformers, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_speculate.enable(model)


def test_private_names_in_use_are_all_checked():
    read = {
        node.attr
        for node in ast.walk(ast.parse(Path(private_names.__file__).read_text()))
        if hasattr(node, "attr")
    }
    checked = (
        private_names._OF_MODELS,
        private_names._OF_CONFIGS,
        private_names._OF_GENERATION_CONFIGS,
    )
    of_python_and_torch = {
        "__name__",
        "__module__",
        "__version__",
        "_forward_pre_hooks",
        "_forward_hooks",
    }
    names = {name for name in read if name.startswith("_")} - of_python_and_torch
    assert names == set().union(*checked, private_names._OF_PREPARED_CONFIGS)
