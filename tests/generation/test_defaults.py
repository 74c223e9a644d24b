"""Test the defaults set by `enable(model, ...)`: all calls use them, and the model is unchanged."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer

import hf_speculate
from hf_speculate import (
    ConfigError,
    SpeculationStats,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from tests.cases import assert_equal_ids
from tests.compatibility_rows import CHARACTERS
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_tokenizers import letters_tokenizer

N = {"max_new_tokens": 9}
K = {"num_assistant_tokens": 3}  # constant, because a draft as large as its target gains nothing


@pytest.fixture
def models():
    target = make_model("llama")
    return target, noisy_copy(target, 0.05, seed=1)


def drafted(model, inputs=None, **options):
    """Return the number of drafted tokens in a call, and its ids."""
    stats = SpeculationStats()
    output = model.generate(
        **(inputs or ragged_prompts(2)), **N, speculation_stats=stats, **options
    )
    return stats.num_drafted, output


def test_generate_called_by_a_library_drafts(models):
    target, draft = models
    plain = target.generate(**ragged_prompts(2), **N)
    calls = []
    hf_speculate.enable(target, draft, **K, speculation_stats=calls.append)
    for options in ({}, {"assistant_model": None, "num_assistant_tokens": None}):
        assert_equal_ids(plain, target.generate(**ragged_prompts(2), **N, **options))
        assert set(calls[-1].rounds_by_draft_len) <= {0, 1, 2, 3}
        assert calls[-1].num_accepted > 0
    assert len(calls) == 2
    assert calls[0] is not calls[1]


def test_stats_object_holds_the_newest_call(models):
    stats = SpeculationStats()
    target = hf_speculate.enable(models[0], prompt_lookup_num_tokens=4, speculation_stats=stats)
    target.generate(**ragged_prompts(2), **N)
    assert stats.num_rounds > 0
    target.generate(**ragged_prompts(2), **N, speculation_stats=SpeculationStats())
    assert stats.num_rounds > 0
    with hf_speculate.plain(target):
        target.generate(**ragged_prompts(2), **N)
    assert (stats.num_rounds, stats.has_draft_source) == (0, False)


def described(model):
    return (
        sorted(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_modules()],
        [name for name, _ in model.named_buffers()],
        repr(model),
        model.config.to_dict(),
        model.generation_config.to_dict(),
    )


def test_enabled_model_keeps_its_modules_and_files(models, tmp_path):
    target, draft = models
    target.save_pretrained(tmp_path / "plain")
    before = described(target)
    hf_speculate.enable(target, assistant_model=draft, **K)
    assert described(target) == before
    with pytest.warns(
        UserWarning, match="leaves out assistant_model, num_assistant_tokens, which enable"
    ):
        target.save_pretrained(tmp_path / "enabled")
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "enabled" / path.name).read_bytes()
    assert drafted(target)[0] > 0
    hf_speculate.disable(target)
    assert described(target) == before
    assert not any("speculate" in name for name in vars(target))


def test_call_outranks_defaults_and_defaults_outrank_the_model(models):
    target, draft = models
    target.generation_config.num_assistant_tokens = 2
    target.generation_config.verifier = "typical"
    hf_speculate.enable(target, assistant_model=draft, num_assistant_tokens=4)
    passed = GenerationConfig(num_assistant_tokens=6, pad_token_id=0)
    for options, max_num in (
        ({}, 4),
        ({"generation_config": passed}, 6),
        ({"generation_config": passed, "num_assistant_tokens": 1}, 1),
    ):
        stats = SpeculationStats()
        target.generate(**ragged_prompts(2), max_new_tokens=30, speculation_stats=stats, **options)
        assert max(stats.rounds_by_draft_len) == max_num
        assert stats.verifier == "typical"


def test_draft_source_of_the_call_replaces_the_enabled_one(models):
    target, draft = models
    hf_speculate.enable(target, prompt_lookup_num_tokens=4, **K)
    for options in (
        {"assistant_model": draft},
        {"generation_config": GenerationConfig(assistant_early_exit=1)},
    ):
        stats = SpeculationStats()
        target.generate(
            **ragged_prompts(2), **N, speculation_stats=stats, pad_token_id=0, **options
        )
        assert "lookup" not in stats.plan
        assert stats.num_drafted > 0


def test_settings_of_a_replaced_source_are_dropped(models):
    target, draft = models
    hf_speculate.enable(target, draft, draft_state=hf_speculate.DraftState(), use_mtp=False, **K)
    assert drafted(target, prompt_lookup_num_tokens=3)[0] >= 0
    assert drafted(target, use_mtp=False)[0] > 0
    hf_speculate.enable(
        target, prompt_lookup_num_tokens=3, suffix_store=hf_speculate.SuffixStore(), **K
    )
    assert drafted(target, assistant_model=draft)[0] > 0


@pytest.mark.fallback("plain decoding: ")
@pytest.mark.filterwarnings("ignore:a call decodes plainly")
def test_tokenizer_of_enable_serves_stop_strings_and_healing(models):
    target, draft = models
    tokenizer = letters_tokenizer(
        [*CHARACTERS], bos_token=CHARACTERS[1], eos_token=CHARACTERS[-1], pad_token=CHARACTERS[0]
    )
    calls = []
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": tokenizer}
    hf_speculate.enable(target, draft, **tokenizers, **K, speculation_stats=calls.append)
    stop = tokenizer.decode(drafted(target)[1][0, 14])
    expected = target.generate(**ragged_prompts(2), **N, stop_strings=[stop])
    options = {"stop_strings": [stop]}
    with hf_speculate.plain(target):
        assert_equal_ids(expected, target.generate(**ragged_prompts(2), **N, **options))
    assert_equal_ids(
        expected, target.generate(**ragged_prompts(2), **N, **options, use_cache=False)
    )
    assert_equal_ids(
        expected, target.generate(**ragged_prompts(2), **N, **options, prompt_lookup_num_tokens=3)
    )
    calls.clear()
    target.generate(**ragged_prompts(1), **N, token_healing=True)
    assert len(calls) == 1


def test_stats_callback_is_called_after_a_plain_call(models):
    target, _ = models
    events = []
    hf_speculate.enable(target, speculation_stats=lambda stats: events.append("stats"))
    target.generate(**ragged_prompts(1), **N, streamer=Events(events))
    assert events[-2:] == ["end", "stats"]
    with pytest.raises(ValueError):
        target.generate(**ragged_prompts(1), max_new_tokens=-1)
    assert events.count("stats") == 1


class Events(TextStreamer):
    """Streamer that records the end of a text."""

    def __init__(self, events):
        self.events = events

    def put(self, value):
        self.events.append("put")

    def end(self):
        self.events.append("end")


def test_plain_setting_decodes_without_a_draft_source(models):
    target, draft = models
    target.generation_config.prompt_lookup_num_tokens = 4
    hf_speculate.enable(target, assistant_model=draft, **K)
    expected = drafted(target)[1]
    with hf_speculate.plain(target):
        config = GenerationConfig(prompt_lookup_num_tokens=3, pad_token_id=0)
        for options in (
            {},
            {"assistant_model": draft, "verifier": "typical"},
            {"generation_config": config},
        ):
            num, ids = drafted(target, **options)
            assert num == 0
            assert_equal_ids(expected, ids)
        other = hf_speculate.enable(noisy_copy(target, 0.0, seed=1), draft, **K)
        assert drafted(other)[0] > 0
        in_thread = []
        thread = threading.Thread(target=lambda: in_thread.append(drafted(target)[0]))
        thread.start()
        thread.join()
        assert in_thread[0] > 0
    assert drafted(target)[0] > 0


class Pieces(TextStreamer):
    """Streamer that records what it receives."""

    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.pieces.append("end")


@pytest.mark.fallback("plain decoding: ")
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"use_cache": False}, {"is_late": True}])
def test_unsupported_call_decodes_plainly_with_one_warning(models, options, monkeypatch):
    target, draft = models
    inputs = ragged_prompts(1)
    # refused after transformers has passed the prompt to the streamer
    if options.pop("is_late", None):
        monkeypatch.setattr("hf_speculate.generation.inputs.check_prepared", refuse)
    before, after = (None, None) if "num_beams" in options else (Pieces(), Pieces())
    places = (inputs["input_ids"], GenerationConfig(pad_token_id=0, **N), *[None] * 5)
    mask = {"attention_mask": inputs["attention_mask"]}
    plain = target.generate(*places, before, **mask, **options)
    calls = []
    hf_speculate.enable(target, assistant_model=draft, **K, speculation_stats=calls.append)
    with pytest.warns(UserWarning, match="a call decodes plainly: ") as caught:
        for _ in range(2):
            assert_equal_ids(plain, target.generate(*places, after, **mask, **options))
    assert len([each for each in caught if "decodes plainly" in str(each.message)]) == 1
    if before is not None:
        assert after.pieces == 2 * before.pieces
    assert [call.has_draft_source for call in calls] == [False, False]
    assert all(call.fallbacks[0].startswith("plain decoding: ") for call in calls)
    assert calls[-1].headline == calls[-1].fallbacks[0]
    with pytest.raises(UnsupportedGenerationError):
        target.generate(**inputs, **N, **options, assistant_model=draft)


@pytest.mark.fallback("plain decoding: ")
def test_lossless_verifier_of_a_call_beside_default_spans_decodes_plainly(models):
    target, draft = models
    hf_speculate.enable(target, draft, **K, verifier="typical", relax_only_inside=[5, 6])
    with pytest.warns(UserWarning, match="a call decodes plainly: relax_only_inside"):
        assert drafted(target, verifier="rejection", do_sample=True)[0] == 0


def test_invalid_verifier_in_a_call_is_an_error_also_with_an_enabled_draft(models):
    target, draft = models
    hf_speculate.enable(target, draft, **K)
    for options in ({"verifier": "exact"}, {"verifier": "greedy", "do_sample": True}):
        with pytest.raises(ConfigError, match="verifier"):
            target.generate(**ragged_prompts(1), **N, **options)


@pytest.mark.fallback("plain decoding: ")
def test_seed_repeats_plain_texts_and_leaves_the_generator_of_torch(models):
    target, draft = models
    sampled = {**ragged_prompts(2), **N, "do_sample": True}
    torch.manual_seed(5)
    expected = target.generate(**sampled)
    calls = [lambda **seed: target.generate(**sampled, **seed)]
    hf_speculate.enable(target)
    assert_equal_ids(expected, calls[0](seed=5))
    hf_speculate.enable(target, draft, **K)
    calls.append(lambda **seed: target.generate(**sampled, **seed, use_cache=False))
    with hf_speculate.plain(target):
        assert_equal_ids(expected, calls[0](seed=5))
        assert_equal_ids(expected, calls[0](generation_config=GenerationConfig(seed=5)))
    assert_equal_ids(expected, calls[1](seed=5))
    with hf_speculate.plain(target):
        saved = {**sampled, "fields_from": {"seed": 5}}
        assert_equal_ids(expected, hf_speculate.generate(target, **saved))
    state = torch.get_rng_state()
    first, second = (calls[1](generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert_equal_ids(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def refuse(*args, **kwargs):
    raise UnsupportedGenerationError("it must not be so, got it; leave it out")


@pytest.mark.fallback("plain decoding: ")
def test_call_without_a_grammar_decodes_plainly(models):
    target, _ = models
    plain = target.generate(**ragged_prompts(2), **N)
    hf_speculate.enable(target, grammar_draft=True)
    with pytest.warns(
        UserWarning, match="a call decodes plainly: grammar_draft must be left out unless"
    ):
        assert_equal_ids(plain, target.generate(**ragged_prompts(2), **N))


def test_copies_share_the_draft_and_pickles_leave_it_out(models):
    target, draft = models
    hf_speculate.enable(target, assistant_model=draft, **K)
    for copier in (copy.copy, copy.deepcopy):
        copied = copier(target)
        assert drafted(copied)[0] > 0
        assert list(copied.named_modules())[1][0] == list(target.named_modules())[1][0]
    with pytest.warns(UserWarning, match="a pickle of the model leaves out assistant_model"):
        copied = pickle.loads(pickle.dumps(target))
    assert hf_speculate.is_enabled(copied)
    assert drafted(copied)[0] == 0
    # a second call without arguments keeps the defaults
    assert drafted(hf_speculate.enable(target))[0] > 0
    hf_speculate.disable(target)
    assert drafted(hf_speculate.enable(target))[0] == 0


def test_peft_model_drafts_with_the_defaults_of_its_base(models):
    target, draft = models
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    wrapped = get_peft_model(target, config).eval().to(torch.float64)
    calls = []
    hf_speculate.enable(wrapped, draft, **K, speculation_stats=calls.append)
    ids = wrapped.generate(**ragged_prompts(2), **N)
    assert calls[0].num_drafted > 0
    with hf_speculate.plain(wrapped):
        assert_equal_ids(wrapped.generate(**ragged_prompts(2), **N), ids)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"prompt_lookup_num_token": 3}, ConfigError, "did you mean prompt_lookup_num_tokens"),
        ({"prompt_lookup_num_tokens": 0}, ConfigError, "prompt_lookup_num_tokens must be in 1"),
        ({"verifier": "tipical"}, ConfigError, "tipical"),
        (
            {"drafter": dict, "assistant_early_exit": 1},
            UnsupportedGenerationError,
            "pass one draft source",
        ),
        ({"max_new_tokens": 3}, ConfigError, "arguments of enable"),
        (
            {"prompt_lookup_num_tokens": 3, "seed": [1, 2]},
            ConfigError,
            "seed must be one number in enable",
        ),
        (
            {"prompt_lookup_num_tokens": 3, "verifier": "greedy"},
            ConfigError,
            "got 'greedy', which is the default",
        ),
        ({"assistant_model": "no/such folder"}, ConfigError, "which does not load"),
    ],
)
def test_invalid_defaults_are_refused_by_enable(models, values, error, words):
    target, _ = models
    with pytest.raises(error, match=words):
        hf_speculate.enable(target, **values)
    assert not hf_speculate.is_enabled(target)


def test_draft_of_another_vocabulary_is_refused_by_enable(models):
    target, _ = models
    other = make_model("llama", vocab_size=5000)
    with pytest.raises(UnsupportedModelError, match="must have the target's vocabulary"):
        hf_speculate.enable(target, other)


def test_path_as_a_target_is_refused(models, tmp_path):
    with pytest.raises(
        UnsupportedModelError, match=r"load it first.*from_pretrained\('some/model'\)"
    ):
        hf_speculate.enable("some/model", prompt_lookup_num_tokens=3)


def test_settings_are_saved_beside_the_model(models, tmp_path):
    target, draft = models
    draft.save_pretrained(tmp_path / "draft")
    hf_speculate.enable(
        target, tmp_path / "draft", verifier="typical", **K, speculation_stats=SpeculationStats()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target.save_pretrained(tmp_path / "target")
    before = target.generation_config.to_dict()
    hf_speculate.save_settings(target, tmp_path / "target")
    assert target.generation_config.to_dict() == before
    loaded = hf_speculate.enable(
        AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    )
    stats = SpeculationStats()
    loaded.generate(**ragged_prompts(2), **N, speculation_stats=stats)
    assert (stats.verifier, stats.num_drafted > 0) == ("typical", True)
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        hf_speculate.enable(loaded, num_assistant_tokens=2, **options)
        stats = SpeculationStats()
        loaded.generate(**ragged_prompts(2), **N, speculation_stats=stats)
        assert ("lookup" in stats.plan) == bool(options)
    hf_speculate.save_settings(loaded, tmp_path / "other")
    assert (
        "speculation_assistant" not in (tmp_path / "other" / "generation_config.json").read_text()
    )
    loaded.generation_config.speculation_assistant = "no/such"
    with pytest.raises(ConfigError, match="got 'no/such', which does not load"):
        hf_speculate.enable(loaded, verifier="block")
    with pytest.raises(ConfigError, match="draft or fields to save, got none"):
        hf_speculate.save_settings(hf_speculate.disable(target), tmp_path / "nothing")
    hf_speculate.enable(target, drafter=lambda setup: None)
    with pytest.raises(ConfigError, match="drafter must be a string, a number or a list"):
        hf_speculate.save_settings(target, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_one_folder_is_loaded_once_for_all_calls(models, tmp_path, monkeypatch):
    target, draft = models
    draft.save_pretrained(tmp_path)
    loads = []
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **kwargs: loads.append(args) or original(*args, **kwargs),
    )
    hf_speculate.enable(target, str(tmp_path), **K)
    for _ in range(2):
        assert drafted(target)[0] > 0
    assert len(loads) == 1
