"""Each fault of transformers' assisted generation has a test named for it, which would find it here."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.integrations import sdpa_attention

import hf_speculate
from hf_speculate import SpeculationStats
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings
from hf_speculate.generation import decoding_method as speculation
from hf_speculate.types import Kept, SampleStrategy
from tests.cases import ACCEPTED_ALL, assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.draft.test_suffix_index import MAX_GROWTH, markov_text
from tests.generation.test_ownership import prefilled
from tests.generation.test_stop_strings import CHARACTERS, tokenizer  # noqa: F401  # a fixture
from tests.tiny import make_law_model, make_model, noisy_copy, ragged_prompts

TESTS = Path(__file__).parents[1]
HERE = "generation/test_faults_of_transformers.py"

# Where the test named for each fault lies, with what transformers 5.23 does.
FAULTS = {
    "a": (HERE, "a prefilled past_key_values is fed the whole prompt again"),
    "b": (HERE, "criteria and stop strings are looked at when a block ends, so text runs on"),
    "c": (HERE, "stop_strings with an assistant raise"),
    "d": ("generation/test_vocabularies.py", "a vocabulary padded to another size raises under sampling"),
    "e": ("generation/test_vocabularies.py", "another tokenizer under sampling replaces layers of the draft model"),
    "f": ("draft/test_from_candidate_generator.py", "an argmax that is handed over with logits biases the text"),
    "g": (HERE, "num_assistant_tokens is ignored, and a threshold of None turns into 0.4"),
    "h": ("generation/test_pipeline.py", "a pipeline whose draft has another EOS, PAD or BOS raises"),
    "i": (HERE, "the heuristic schedule writes into the draft model's config"),
    "j": (HERE, "batches, several sequences, static caches and compiling raise"),
    "k": (HERE, "every round is a whole generate() of the draft model"),
    "l": (HERE, "lookup scans the whole text each round, for 2 tokens, and takes the left-most match"),
    "m": (HERE, "verification copies keys and values to all query heads"),
}

NUM_NEW = 24
SEEDS = range(3)
SHORT, LONG = 256, 16_384  # tokens of a text that is copied from


@pytest.mark.parametrize("letter", FAULTS)
def test_every_fault_has_a_test_where_the_index_says(letter):
    path, _ = FAULTS[letter]
    functions = [node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert any(name.startswith(f"test_fault_{letter}_") for name in functions)


def test_the_index_knows_every_test_of_a_fault():
    found = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_fault_"):
                found.add((node.name.split("_")[2], path.relative_to(TESTS).as_posix()))
    assert found == {(letter, path) for letter, (path, _) in FAULTS.items()}


def test_the_oldest_transformers_meets_every_fault():
    """`make test-oldest` runs the files that the index names."""
    makefile = (TESTS.parent / "Makefile").read_text().replace("\\\n", " ")
    (words,) = re.findall(r"^OLDEST_TESTS := (.*)$", makefile, re.M)
    tested = [TESTS.parent / word for word in words.split()]
    assert all(path.exists() for path in tested)
    for path, _ in FAULTS.values():
        assert any((TESTS / path).is_relative_to(one) for one in tested), path


def own_pair(noise=0.05, **options):
    """As `tests.cases.pair`, for a test that changes them."""
    target = hf_speculate.enable(make_model("llama", **options))
    return target, noisy_copy(target, noise)


def watch_forwards(model, seen):
    """Note the number of tokens that every forward of the model is fed."""

    def note(module, args, kwargs):
        seen.append(kwargs["input_ids"].shape[1])

    return model.register_forward_pre_hook(note, with_kwargs=True)


@each_value(batch_size=[1, 3], seed=SEEDS)
def test_fault_a_a_prefilled_cache_is_not_fed_again(seed, batch_size):
    target, draft = pair("llama", seed=seed)
    inputs = ragged_prompts(batch_size, seed=seed, min_len=6)
    held = {name: value[:, :-2] for name, value in inputs.items()}
    caches = [prefilled(target, held["input_ids"], held["attention_mask"]) for _ in range(2)]
    plain = target.generate(**inputs, past_key_values=caches[0], max_new_tokens=12)
    fed = []
    handle = watch_forwards(target, fed)
    ours = target.generate(
        **inputs, past_key_values=caches[1], max_new_tokens=12, assistant_model=draft, num_assistant_tokens=4
    )
    handle.remove()
    assert_equal_ids(plain, ours)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=12), ours)
    assert fed[0] == 2
    assert max(fed) == 5


class StopAfter(StoppingCriteria):
    """A user's own criterion: ends every row at a length, and keeps the lengths that it was asked about."""

    def __init__(self, length):
        self.length = length
        self.asked = []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@hf_speculate.register_row_wise
class DeclaredStopAfter(StopAfter):
    """The same, declared pure: it may be asked about a whole block at once."""


@each_value(batch_size=[1, 3], kind=[StopAfter, DeclaredStopAfter], num_new=[1, 4, 5])
def test_fault_b_criteria_stop_inside_a_block(num_new, kind, batch_size):
    """A draft that is always right fills blocks of nine tokens."""
    target, draft = pair("llama", ACCEPTED_ALL)
    inputs = ragged_prompts(batch_size, seed=3)
    end = inputs["input_ids"].shape[1] + num_new
    texts, stats = [], SpeculationStats()
    for own in ({}, {"assistant_model": draft, "num_assistant_tokens": 8, "speculation_stats": stats}):
        criterion = kind(end)
        criteria = StoppingCriteriaList([criterion])
        texts.append(target.generate(**inputs, max_new_tokens=NUM_NEW, stopping_criteria=criteria, **own))
    assert_equal_ids(*texts)
    assert texts[1].shape[1] == end
    if kind is StopAfter:
        assert criterion.asked == list(range(end - num_new + 1, end + 1))
    if num_new > 1:
        assert stats.rounds_by_draft_len == {8: 1}


@pytest.mark.parametrize("source", ["keyword", "passed config", "model's config"])
def test_fault_c_stop_strings_go_with_an_assistant(tokenizer, source):  # noqa: F811
    target, draft = own_pair()
    inputs = ragged_prompts(2, seed=4)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[0, inputs["input_ids"].shape[1] :].tolist()
    stops = [CHARACTERS[text[6]] + CHARACTERS[text[7]]]
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": text[9], "pad_token_id": 0}
    match source:
        case "keyword":
            options["stop_strings"] = stops
        case "passed config":
            options = {"generation_config": GenerationConfig(**options, stop_strings=stops)}
        case _:
            target.generation_config = GenerationConfig(stop_strings=stops)
    plain = target.generate(**inputs, **options, tokenizer=tokenizer)
    ours = target.generate(**inputs, **options, tokenizer=tokenizer, assistant_model=draft, num_assistant_tokens=5)
    assert_equal_ids(plain, ours)
    assert (ours[0, inputs["input_ids"].shape[1] + 8 :] == 0).all()  # padding after the stop string


def test_fault_g_as_many_tokens_are_drafted_as_asked_for():
    target, draft = own_pair(ACCEPTED_ALL)
    draft.generation_config.num_assistant_tokens = 20
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    for own in ({"num_assistant_tokens": 3}, {"generation_config": GenerationConfig(num_assistant_tokens=3)}):
        stats = SpeculationStats()
        options = {"max_new_tokens": 1 + 5 * 4, "assistant_model": draft, "speculation_stats": stats}
        target.generate(**ragged_prompts(1, seed=5), **options, **own)
        assert stats.rounds_by_draft_len == {3: 5}


@pytest.mark.parametrize("do_sample", [False, True])
def test_fault_g_a_threshold_of_none_stays_off(do_sample):
    """Every token of these models has a probability below 0.4."""
    target = hf_speculate.enable(make_law_model(64, sharpness=0.1))
    draft = noisy_copy(target, ACCEPTED_ALL)
    options = {
        "max_new_tokens": 21,
        "assistant_model": draft,
        "num_assistant_tokens": 4,
        "do_sample": do_sample,
        "verifier": "coupled" if do_sample else "greedy",
        "seed": 1,
    }
    num_drafted = {}
    for name, own, in_config in (
        ("nowhere", {}, None),
        ("off by None", {"assistant_confidence_threshold": None}, 0.4),
        ("off by 0", {"assistant_confidence_threshold": 0.0}, 0.4),
        ("on", {}, 0.4),
    ):
        draft.generation_config.assistant_confidence_threshold = in_config
        stats = SpeculationStats()
        target.generate(**ragged_prompts(1, seed=6), **options, **own, speculation_stats=stats)
        num_drafted[name] = stats.num_drafted / stats.num_rounds
    assert num_drafted == {"nowhere": 4.0, "off by None": 4.0, "off by 0": 4.0, "on": 1.0}


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_fault_i_one_request_does_not_change_the_next(schedule):
    target, draft = own_pair(ACCEPTED_ALL)
    configs = [one.generation_config.to_dict() for one in (target, draft)]
    options = {"max_new_tokens": 40, "num_assistant_tokens_schedule": schedule, "num_assistant_tokens": 3}
    rounds = []
    for _ in range(2):
        stats = assert_decodes_as_plain(target, draft, ragged_prompts(1, seed=7), **options)
        rounds.append(stats.rounds_by_draft_len)
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) > 2  # the schedule did move
    assert [one.generation_config.to_dict() for one in (target, draft)] == configs


@pytest.mark.parametrize(
    ("batch_size", "options"),
    [
        (3, {}),
        (2, {"num_return_sequences": 3, "do_sample": True, "verifier": "coupled", "seed": 3}),
        (2, {"cache_implementation": "static"}),
    ],
    ids=["batch", "several sequences", "static"],
)
def test_fault_j_batches_several_sequences_and_static_caches_are_decoded(batch_size, options):
    inputs = ragged_prompts(batch_size, seed=8)
    stats = assert_decodes_as_plain(*pair("llama"), inputs, max_new_tokens=NUM_NEW, **options)
    assert stats.num_accepted > 0
    assert not stats.fallbacks


@each_value(do_sample=[False, True], batch_size=[1, 3])
def test_fault_k_a_round_is_k_forwards_of_the_draft_and_no_generate(monkeypatch, batch_size, do_sample):
    target, draft = own_pair()
    generates = []
    plain = GenerationMixin.generate

    @functools.wraps(plain)
    def counted(self, *args, **kwargs):
        generates.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", counted)
    forwards, stats = [], SpeculationStats()
    watch_forwards(draft, forwards)
    options = {"max_new_tokens": NUM_NEW, "do_sample": do_sample, "num_assistant_tokens": 4, "seed": 2}
    target.generate(**ragged_prompts(batch_size, seed=9), assistant_model=draft, speculation_stats=stats, **options)
    assert generates == [target]
    assert stats.num_batch_rounds > 3
    assert len(forwards) == sum(num * count for num, count in stats.rounds_by_draft_len.items())
    if batch_size == 1:  # a round begins with the newest token, and with the last drafted one if all were accepted
        assert sum(width > 1 for width in forwards[1:]) <= stats.accepted_per_position[-1]


def lines_a_round(length):
    """Lines of the library that run per round of a drafter that copies, after a text of this length."""
    whole = markov_text(LONG + 300)
    drafter = SuffixDrafter(SuffixSettings(max_draft_tokens=10))
    drafter.draft(DraftRequest(torch.tensor([whole[:length]]), None, 10, SampleStrategy.GREEDY))
    folder, num_lines = str(Path(hf_speculate.__file__).parent), 0

    def count(frame, event, arg):
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(folder):
            return None
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for begin in range(LONG, LONG + 300, 3):
            kept = Kept(torch.tensor([whole[begin : begin + 3]]), torch.tensor([3], dtype=torch.int32))
            drafter.draft(DraftRequest(kept.token_ids, None, 10, SampleStrategy.GREEDY, kept=kept))
    finally:
        sys.settrace(before)
    return num_lines / 100


def test_fault_l_a_round_of_lookup_costs_the_same_after_any_text():
    assert lines_a_round(LONG) < MAX_GROWTH * lines_a_round(SHORT)


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ([7, 8, 1, 9, 7, 8, 2, 6, 7, 8], 2),  # the latest of two matches
        ([5, 6, 7, 8, 1, 9, 7, 8, 2, 4, 5, 6, 7, 8], 1),  # the longer of two, which is earlier
        ([3, 5, 6, 7, 8, 1, 9, 5, 6, 7, 8, 2, 3, 5, 6, 7, 8], 1),  # one of five tokens against one of four
    ],
)
def test_fault_l_the_latest_of_the_longest_matches_is_copied(text, copied):
    drafter = SuffixDrafter(SuffixSettings(max_draft_tokens=10))
    draft = drafter.draft(DraftRequest(torch.tensor([text]), None, 10, SampleStrategy.GREEDY))
    assert draft.token_ids[0, 0] == copied


@pytest.mark.parametrize("batch_size", [1, 3])
def test_fault_m_no_round_copies_keys_and_values_to_all_heads(monkeypatch, batch_size):
    target, draft = own_pair()
    fed, copied = [], []
    for one in (target, draft):
        watch_forwards(one, fed)
    repeat = sdpa_attention.repeat_kv

    def noted(states, num):
        copied.append(fed[-1])
        return repeat(states, num)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", noted)
    inputs = ragged_prompts(batch_size, seed=10, min_len=12, max_len=16)
    num_prompt = inputs["input_ids"].shape[1]
    options = {"assistant_model": draft, "num_assistant_tokens": 4, "max_new_tokens": NUM_NEW}
    ours = target.generate(**inputs, **options)
    assert 5 in fed
    assert set(copied) <= {num_prompt}  # the prompt, where copies are the faster way
    monkeypatch.setattr(speculation, "folded_attention_for", lambda models: torch.no_grad())
    assert_equal_ids(target.generate(**inputs, **options), ours)
    assert 5 in copied  # without folding, verification does copy
