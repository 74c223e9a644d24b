"""Test the precedence of settings in real calls to `generate()`."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_speculate
from hf_speculate.config import PLAIN_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.generation.config_sources import read_config
from hf_speculate.stats import SpeculationStats
from hf_speculate.verify import register_verifier
from tests.support.forced_texts import PureForcedGrammar, TextMachine, pieces
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.verify.test_verifiers import KeepNothing

SOURCES = ("keyword", "passed", "model", "draft")  # highest precedence first
# Each setting has one value per source and, last, its default. Neighbouring values differ.
VALUES = {
    "posterior_threshold": (0.11, 0.12, 0.13, 0.14, 0.09),
    "posterior_alpha": (0.41, 0.42, 0.43, 0.44, 0.3),
    "entropy_epsilon": (0.01, 0.02, 0.03, 0.04, 0.0),
    "typical_correction": ("sample", "argmax", "sample", "argmax", "sample"),
    "relax_only_inside": ((1, 2), (3, 4), (5, 6), (7, 8), None),
    "draft_sampling": ("sample", "argmax", "sample", "argmax", "sample"),
    "num_assistant_tokens": (2, 3, 4, 6, None),
    "num_assistant_tokens_schedule": (
        "heuristic",
        "constant",
        "heuristic_transient",
        "heuristic",
        None,
    ),
    "assistant_confidence_threshold": (0.1, 0.2, 0.3, 0.4, None),
    "prompt_lookup_num_tokens": (5, 6, 7, 8, None),
    "grammar_draft": (False, True, False, True, None),
    "max_matching_ngram_size": (2, 3, 4, 5, None),
    "verifier": ("rejection", "seeing", "rejection", "seeing", "rejection"),
    "verifier_backend": ("auto", "torch", "auto", "torch", "auto"),
    "speculation_cache": ("auto", "dynamic", "auto", "dynamic", "auto"),
    "speculation_graphs": ("off", "on", "off", "on", "auto"),
    "speculation_hooks": ("plain", "trusted", "plain", "trusted", "check"),
    "seed": (1, 2, 3, 4, None),
}


class Pair:
    """Enabled model and an identical draft.

    Every drafted token is verified and accepted.
    """

    def __init__(self):
        self.target = hf_speculate.enable(make_model("llama"))
        self.draft = noisy_copy(self.target, 0.0)

    def generate(self, **options) -> SpeculationStats:
        options = {"max_new_tokens": 24, "speculation_stats": SpeculationStats(), **options}
        hf_speculate.generate(
            self.target, **ragged_prompts(1, seed=1), assistant_model=self.draft, **options
        )
        return options["speculation_stats"]

    def generate_from(self, sources: dict[str, dict], **options) -> SpeculationStats:
        """Run one call with fields set in the named sources."""
        for model, source in ((self.target, "model"), (self.draft, "draft")):
            model.generation_config = GenerationConfig(pad_token_id=0, **sources.get(source, {}))
        options.update(sources.get("keyword", {}))
        if "passed" in sources:
            options["generation_config"] = GenerationConfig(**sources["passed"])
        return self.generate(**options)


@pytest.fixture
def models() -> Pair:
    return Pair()


def longest_draft(stats: SpeculationStats) -> int:
    """Return the longest draft of a call that accepts all drafts."""
    assert stats.num_accepted == stats.num_verified > 0
    return len(stats.verified_per_position)


@pytest.fixture
def seen(registry):
    """Collect the settings of calls whose verifier, "seeing" or "rejection", accepts nothing."""
    configs: list[SpeculationConfig] = []

    def factory(config):
        configs.append(config)
        return KeepNothing()

    register_verifier("seeing", factory, lossless=False)
    register_verifier("rejection", factory, lossless=False, replace=True)
    return configs


@pytest.mark.fallback("no graphs", "because a draft model as large as its target")
@pytest.mark.parametrize("strongest", range(len(SOURCES) + 1))
def test_fields_come_from_the_strongest_source(models, seen, strongest):
    assert set(VALUES) == set(PLAIN_NAMES)
    assert all(
        value != later for values in VALUES.values() for value, later in itertools.pairwise(values)
    )
    places = [strength for strength in range(len(SOURCES)) if strength >= strongest]
    sources = {
        SOURCES[strength]: {name: values[strength] for name, values in VALUES.items()}
        for strength in places
    }
    grammar = {"logits_processor": [PureForcedGrammar(TextMachine(64), 0)], "tokenizer": pieces(64)}
    models.generate_from(sources, do_sample=True, max_new_tokens=3, **grammar)
    expected = {name: values[strongest] for name, values in VALUES.items()}
    assert expected in [{name: getattr(config, name) for name in VALUES} for config in seen]


HEURISTIC, TWO = {"num_assistant_tokens_schedule": "heuristic"}, {"num_assistant_tokens": 2}
# every draft has one token
STRICT = {"assistant_confidence_threshold": 1.0, "num_assistant_tokens": 5}


@pytest.mark.parametrize(
    ("sources", "longest"),
    [
        ({"keyword": HEURISTIC, "model": TWO}, 7),  # drafts of 2, 4 and 6 tokens, with room for 7
        ({"model": HEURISTIC | TWO}, 7),
        *(
            ({"keyword": TWO, weaker: HEURISTIC | {"num_assistant_tokens": 7}}, 2)
            for weaker in SOURCES[1:]
        ),
        ({"keyword": {"num_assistant_tokens_schedule": "constant"}}, 5),
        ({"keyword": HEURISTIC}, 8),
        *(({weaker: STRICT}, 1) for weaker in SOURCES[1:]),
        *(
            ({weaker: STRICT, "keyword": {"assistant_confidence_threshold": None}}, 5)
            for weaker in SOURCES[1:]
        ),
        (
            {
                "model": STRICT,
                "passed": {"assistant_confidence_threshold": 0.0, "num_assistant_tokens": 5},
            },
            5,
        ),
    ],
    ids=str,
)
def test_schedules_and_thresholds_yield_to_stronger_counts(models, sources, longest):
    stats = models.generate_from(sources)
    configs = [models.target.generation_config, models.draft.generation_config]
    assert longest_draft(stats) == longest
    for source, config in zip(("model", "draft"), configs, strict=True):
        assert (
            config.to_dict()
            == GenerationConfig(pad_token_id=0, **sources.get(source, {})).to_dict()
        )


@pytest.mark.parametrize("owner", ["target", "draft"])
def test_fields_saved_with_a_model_apply_after_loading(models, seen, tmp_path, owner):
    model = getattr(models, owner)
    saved = {"verifier": "seeing", "num_assistant_tokens": 3, "relax_only_inside": [3, 5]}
    model.generation_config = GenerationConfig(pad_token_id=0, **saved)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    setattr(models, owner, hf_speculate.enable(loaded))
    models.generate(max_new_tokens=3)
    assert {name: getattr(seen[-1], name) for name in saved} == saved


def test_repository_fields_rank_between_call_and_model(models, tmp_path):
    fields = {"num_assistant_tokens": 3, "verifier": "typical", "do_sample": True, "unknown": 1}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    models.target.generation_config = GenerationConfig(
        pad_token_id=0, num_assistant_tokens=7, verifier="rejection"
    )
    passed = {"generation_config": GenerationConfig(num_assistant_tokens=4)}
    for source, options, longest in (
        (path, {}, 3),
        (fields, passed, 4),
        (fields, {"num_assistant_tokens": 2}, 2),
    ):
        stats = models.generate(fields_from=source, **options)
        assert (stats.verifier, longest_draft(stats)) == ("typical", longest)


def test_read_config_keeps_the_stronger_of_seed_and_generator():
    seed, generator = {"seed": 3}, {"generator": torch.Generator()}
    assert read_config([generator, seed]) == SpeculationConfig(**generator)
    assert read_config([seed, generator]) == SpeculationConfig(**seed)


def test_read_config_validates_chosen_values_only():
    assert read_config([{"posterior_alpha": 0.5}, {"posterior_alpha": -1}]).posterior_alpha == 0.5
    with pytest.raises(ConfigError, match="posterior_alpha must be"):
        read_config([{}, {"posterior_alpha": -1}])


WRONG = [
    *({"posterior_threshold": value} for value in (True, "0.1")),
    *({"seed": value} for value in (1.0, [1, 2.0])),
    *({"relax_only_inside": value} for value in ((1,), (1, 1), (1, -2), (1, True), {1, 2}, "12")),
    *({"num_assistant_tokens": True}, {"assistant_confidence_threshold": float("nan")}),
    *({"speculation_callback": "print"}, {"generator": 3}, {"candidate_generator": 3}),
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_values_of_another_type_are_refused(fields):
    (name,) = fields
    with pytest.raises(ConfigError, match=f"{name} must be"):
        SpeculationConfig(**fields)


def test_numpy_integers_decode_as_ints(models):
    options = {"assistant_model": models.draft, "do_sample": True, "max_new_tokens": 8}
    texts = [
        models.target.generate(
            **ragged_prompts(1, seed=1), **options, seed=integer(3), num_assistant_tokens=integer(2)
        )
        for integer in (int, np.int64)
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["coupled", "typical", "mine"])
def test_resolve_fills_in_sampling_defaults_only(name):
    config = SpeculationConfig(verifier=name, seed=3, num_assistant_tokens=4)
    greedy = "greedy" if name == "coupled" else name
    for do_sample, verifier, correction in ((True, name, "sample"), (False, greedy, "argmax")):
        assert config.resolve(do_sample) == replace(
            config, verifier=verifier, typical_correction=correction
        )
    assert config == SpeculationConfig(verifier=name, seed=3, num_assistant_tokens=4)
    for correction, do_sample in (("argmax", True), ("sample", False)):
        assert (
            SpeculationConfig(typical_correction=correction).resolve(do_sample).typical_correction
            == correction
        )
