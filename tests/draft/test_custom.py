"""Drafters that callers bring: what they are told, what may come back, and that the text stays the target's."""

import functools

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate import DrafterSetup
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.custom import CustomDrafter
from hf_speculate.errors import ConfigError, ShapeError, UnsupportedGenerationError
from hf_speculate.triton_kernels import Draws
from hf_speculate.types import DraftOut, SampleStrategy, Stream
from tests.cases import assert_equal_ids, each_value, pair
from tests.draft.heads.rounds import states_of
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.generation.test_law import SIGNIFICANCE, draw, joint_law, p_value
from tests.tiny import PAD_TOKEN_ID, make_law_model, make_model, ragged_prompts

NUM_NEW = 24
NUM_DRAWS = 8_000  # of 512 texts
NUM_DRAWN = 3  # tokens of each: the prompt's forward gives the first, a round the others
VOCAB_SIZE = 64
STATE_TOLERANCE = 1e-9  # float64; forwards over one token and over several round differently
SOFTMAX_TOLERANCE = 1e-5  # of Gemma 2, which takes its softmax in float32
MISTAKEN = 1e-12  # what the negative control stays below
COUPLED = {"do_sample": True, "verifier": "coupled", "seed": 5}


class Watcher:
    """Follows each row, holds every state that it is told to a plain forward, and drafts what comes next with slips."""

    def __init__(self, target, request: DrafterSetup, num_cached: int = 0, layers: tuple[int, ...] = (-1,)):
        self.target, self.request, self.num_cached, self.hidden_layers = target, request, num_cached, layers
        self.pads = [] if request is None else list(request.num_pads)
        self.texts: list[list[int]] = []
        self.told: list[list[int]] = []  # per call, how many tokens each row gained

    def draft(self, request):
        query_token_ids, num_draft_tokens, kept = request.query_token_ids, request.num_draft_tokens, request.kept
        assert request.kv_cache is None
        counts = kept.num_emitted.tolist()
        assert kept.hidden_states.shape[:2] == kept.token_ids.shape == (len(counts), max(counts))
        if not self.told:
            self.texts = [row[pad:] for row, pad in zip(query_token_ids.tolist(), self.pads, strict=True)]
            assert counts == [len(text) - 1 - self.num_cached for text in self.texts]
        else:
            for text, ids, count in zip(self.texts, kept.token_ids.tolist(), counts, strict=True):
                assert ids[count:] == [-1] * (len(ids) - count)
                text += ids[:count]
        for row, (text, count) in enumerate(zip(self.texts, counts, strict=True)):
            num_known = min(query_token_ids.shape[1], len(text))
            assert query_token_ids[row, -num_known:].tolist() == text[-num_known:]
            states = self.project_states(states_of(self.target, text, self.hidden_layers))
            states = states[len(text) - 1 - count : -1]  # of the tokens before those that it gained
            tolerance = SOFTMAX_TOLERANCE if self.target.config.model_type == "gemma2" else STATE_TOLERANCE
            torch.testing.assert_close(kept.hidden_states[row, :count], states, rtol=0, atol=tolerance)
        self.told.append(counts)
        drafts = [self.continued(row, text, num_draft_tokens) for row, text in enumerate(self.texts)]
        return DraftOut(torch.tensor(drafts), torch.full((len(drafts),), num_draft_tokens), None, None)

    def rows(self, indices):
        self.pads = [self.pads[row] for row in indices]
        self.texts = [self.texts[row] for row in indices] if self.told else []

    def project_states(self, states):
        return states.roll(1, dims=-1)

    def continued(self, row: int, text: list[int], num: int) -> list[int]:
        """What greedy decoding goes on with, wrong at every fourth place or so."""
        text, ids = list(text), []
        for _ in range(num):
            best = int(self.target(torch.tensor([text])).logits[0, -1].argmax())
            ids.append((best + 1) % VOCAB_SIZE if (len(text) + row) % 4 == 0 else best)
            text.append(best)
        return ids


def watched(target, **options):
    """What makes `Watcher`s, and the list of those that were made."""
    made: list[Watcher] = []

    def factory(request: DrafterSetup) -> Watcher:
        made.append(Watcher(target, request, **options))
        return made[-1]

    return factory, made


def followed(target, inputs, num_draft_tokens=4, num_cached=0, layers=(-1,), cache="auto", **options):
    """The `Watcher` of a call, whose text must be that of plain decoding, the call's output and its statistics."""
    factory, made = watched(target, num_cached=num_cached, layers=layers)
    stats, passed = hf_speculate.SpeculationStats(), options.pop("past_key_values", None)
    own = {"drafter": factory, "speculation_stats": stats, "speculation_cache": cache, "past_key_values": passed}
    options = {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, **options}
    ours = target.generate(**inputs, **options, **own, num_assistant_tokens=num_draft_tokens)
    assert_equal_ids(target.generate(**inputs, **options).sequences, ours.sequences)
    (watcher,) = made
    return watcher, ours, stats


@pytest.mark.parametrize(
    ("kind", "batch_size", "cache", "layers"),
    [
        ("llama", 1, "preallocated", (-1,)),
        ("llama", 3, "preallocated", (0, 1, 2, -1)),  # 2: before the final norm
        ("llama", 3, "dynamic", (1,)),
        ("gpt2", 3, "preallocated", (-1,)),
        ("mistral_window", 3, "preallocated", (-1,)),
        ("mistral_window", 3, "dynamic", (-1,)),
        ("gemma2", 3, "auto", (-1,)),
    ],
)
def test_a_reader_is_told_every_state_and_greedy_text_is_plain(kind, batch_size, cache, layers):
    inputs = ragged_prompts(batch_size, seed=3)
    watcher, _, stats = followed(pair(kind)[0], inputs, cache=cache, layers=layers)
    assert 0.5 < stats.verified_acceptance_rate < 1
    assert sum(watcher.told[0]) == int(inputs["attention_mask"].sum())
    if batch_size > 1:
        assert any(len(set(counts)) > 1 for counts in watcher.told[1:])


def own_id(text, row: int, begin: int) -> int:
    """A token that one row of new tokens [B, N] has from its place `begin` on for the first time, and no other row."""
    others = {token for place, ids in enumerate(text.tolist()) if place != row for token in ids}
    ids = text[row].tolist()
    return next(token for token in ids[begin:] if token not in others and token not in ids[:begin])


@each_value(ends=[(), (3, 9), (0, 3)], options=[{}, COUPLED, {"prefill_chunk_size": 5}])
def test_states_of_plain_steps_are_told_too(scripted, options, ends):
    target, _ = pair("llama")
    inputs, eos = ragged_prompts(3, seed=4), None
    if ends:
        text = target.generate(**inputs, **options, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
        eos = [own_id(text, row, begin) for row, begin in zip((0, 2), ends, strict=True)]
    factory, made = watched(target)
    stats = hf_speculate.SpeculationStats()
    options = {**options, "max_new_tokens": NUM_NEW, "eos_token_id": eos, "pad_token_id": PAD_TOKEN_ID}
    ours = target.generate(**inputs, **options, drafter=factory, speculation_stats=stats)
    assert_equal_ids(target.generate(**inputs, **options), ours)
    assert not ends or (ours[:, -1] == PAD_TOKEN_ID).sum() == 2
    assert stats.rounds_by_draft_len[0] > 2
    assert max(max(counts) for counts in made[0].told[1:]) > 3
    assert len(made[0].told[0]) == (2 if 0 in ends else 3)


def test_rows_that_have_ended_and_stay_gain_nothing():
    target, _ = pair("llama")
    inputs = ragged_prompts(3, seed=4)
    eos = own_id(target.generate(**inputs, max_new_tokens=NUM_NEW)[:, -NUM_NEW:], 1, 3)
    watcher, ours, _ = followed(target, inputs, eos_token_id=eos, pad_token_id=PAD_TOKEN_ID)
    assert 0 in watcher.told[-1]
    assert ours.hidden_states is None
    assert ours.past_key_values.get_seq_length() == ours.sequences.shape[1] - 1


def test_rows_in_lock_step():
    processors = [lambda ids, scores: scores + (ids[:, -1:] % 3)]
    watcher, _, stats = followed(pair("llama")[0], ragged_prompts(3, seed=4), logits_processor=processors)
    assert stats.lock_step
    assert all(len(set(counts)) == 1 for counts in watcher.told[1:])


@pytest.mark.parametrize("num_cached", [1, 4])
def test_of_a_passed_cache_there_are_no_states(num_cached):
    target, _ = pair("llama")
    inputs, cache = ragged_prompts(1, seed=3, min_len=8), DynamicCache()
    target(inputs["input_ids"][:, :num_cached], past_key_values=cache)
    watcher, _, _ = followed(target, inputs, num_cached=num_cached, past_key_values=cache)
    assert watcher.told[0] == [inputs["input_ids"].shape[1] - num_cached]


class Repeats:
    """Drafts the newest token again; the least that a drafter needs."""

    def __init__(self, request: DrafterSetup):
        self.request = request

    def draft(self, request):
        query_token_ids, num_draft_tokens = request.query_token_ids, request.num_draft_tokens
        ids = query_token_ids[:, -1:].expand(-1, num_draft_tokens)
        return DraftOut(ids, torch.full((len(ids),), num_draft_tokens, dtype=torch.int32), None, None)

    def rows(self, indices):
        pass


@pytest.fixture
def reader():
    """A class of drafters that keep what they are told in `seen`."""

    class Reader(Repeats):
        hidden_layers, seen = (-1,), []

        def draft(self, request):
            self.seen.append(request.kept)
            return super().draft(request)

    return Reader


@each_value(batch_size=[1, 3], num_ids=[0, 2, 12])
def test_of_embeddings_it_is_told_of_the_tokens_that_have_ids(num_ids, batch_size, reader):
    target, _ = pair("llama")
    prompts = ragged_prompts(batch_size, seed=2, min_len=4 if batch_size > 1 else 12)
    embeds = target.get_input_embeddings()(prompts["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": prompts["attention_mask"]}
    if num_ids:
        inputs["input_ids"] = prompts["input_ids"][:, -num_ids:]
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    assert_equal_ids(plain, target.generate(**inputs, max_new_tokens=NUM_NEW, drafter=reader, num_assistant_tokens=3))
    first = reader.seen[0]
    for row, (text, mask) in enumerate(zip(prompts["input_ids"], prompts["attention_mask"], strict=True)):
        text = text[mask.bool()].tolist()
        count = min(len(text), num_ids + 1)
        assert first.num_emitted[row] == count
        assert first.token_ids[row, :count].tolist() == [*text, int(plain[row, num_ids])][-count:]
        states = states_of(target, text, (-1,))[-count:]
        torch.testing.assert_close(first.hidden_states[row, :count], states, rtol=0, atol=STATE_TOLERANCE)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_decoders_states_are_its_decoders(kind, reader):
    target, _ = encoder_pair(kind)
    inputs = inputs_of(kind, 2)
    ours = target.generate(**inputs, max_new_tokens=12, drafter=reader, num_assistant_tokens=2)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=12), ours)
    for kept in reader.seen:
        chosen = target.get_output_embeddings()(kept.hidden_states).argmax(-1)
        assert torch.equal(chosen[kept.token_ids >= 0], kept.token_ids[kept.token_ids >= 0])


@pytest.mark.parametrize("layers", [(), ("2",), (True,)])
def test_layers_that_are_no_numbers_are_an_error(layers):
    class Reader(Repeats):
        hidden_layers = layers

    with pytest.raises(ConfigError, match="hidden_layers of a drafter must be one or more ints"):
        hf_speculate.enable(make_model("llama")).generate(**ragged_prompts(1, seed=1), drafter=Reader)


def test_the_maker_is_told_of_each_call_once():
    target, _ = pair("llama")
    inputs, requests, asked = ragged_prompts(3, seed=7), [], []

    def factory(request):
        requests.append(request)
        return Repeats(request)

    def note(module, args, kwargs):
        asked.append(kwargs.get("output_hidden_states", False))

    handle = target.register_forward_pre_hook(note, with_kwargs=True)

    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 0, "verifier": "coupled"}
    options = {**sampling, "max_new_tokens": 6, "eos_token_id": [2, 9], "num_assistant_tokens": 3, "drafter": factory}
    for _ in range(2):
        target.generate(**inputs, **options)
    handle.remove()
    assert len(requests) == 2
    assert not any(asked)  # no hidden states for a drafter that reads none
    request = requests[0]
    assert request.target is target
    assert (request.batch_size, request.vocab_size, request.max_draft_tokens) == (3, VOCAB_SIZE, 3)
    assert request.num_pads == tuple((inputs["attention_mask"] == 0).sum(1).tolist())
    assert request.max_length == inputs["input_ids"].shape[1] + 6
    assert request.eos_token_ids == {2, 9}
    assert request.device == inputs["input_ids"].device
    assert len(request.processors) == 1  # the temperature
    assert request.stream is Stream.RACE


@pytest.mark.parametrize(
    "options",
    [{"num_assistant_tokens": 5}, {}, {"num_assistant_tokens_schedule": "heuristic"}],
    ids=["constant", "adaptive", "heuristic"],
)
def test_no_more_is_asked_for_than_a_drafter_proposes(options):
    target, _ = pair("llama")
    asked = []

    class Short(Watcher):
        max_draft_tokens = 2

        def draft(self, request):
            asked.append(request.num_draft_tokens)
            return super().draft(request._replace(num_draft_tokens=min(request.num_draft_tokens, 2)))

    inputs, stats = ragged_prompts(2, seed=8), hf_speculate.SpeculationStats()
    options = {**options, "drafter": functools.partial(Short, target), "speculation_stats": stats}
    assert_equal_ids(
        target.generate(**inputs, max_new_tokens=NUM_NEW), target.generate(**inputs, max_new_tokens=NUM_NEW, **options)
    )
    assert max(stats.rounds_by_draft_len) == 2
    if "num_assistant_tokens_schedule" not in options:
        assert max(asked) == 2


CHANGES = {
    "fewer": lambda draft, number: DraftOut(
        draft.token_ids[:, : number % 3], draft.lens.clamp(max=number % 3), None, None
    ),
    "uneven, 99 is all": lambda draft, number: draft._replace(lens=torch.tensor([1, 4, 99][: len(draft.lens)])),
    "logits in greedy decoding": lambda draft, number: draft._replace(
        token_logits=torch.zeros(*draft.token_ids.shape, VOCAB_SIZE)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_drafts_of_any_form_leave_the_greedy_text(change):
    target, _ = pair("llama")

    class Changed(Watcher):
        def draft(self, request):
            draft = super().draft(request)
            return CHANGES[change](draft, len(self.told))

    inputs, stats = ragged_prompts(3, seed=8), hf_speculate.SpeculationStats()
    options = {"drafter": functools.partial(Changed, target), "num_assistant_tokens": 4, "speculation_stats": stats}
    ours = target.generate(**inputs, max_new_tokens=NUM_NEW, **options)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)
    assert stats.num_accepted > 0


@each_value(wrong_id=[-5, VOCAB_SIZE, 10**9], options=[{}, COUPLED, {"do_sample": True}])
def test_ids_outside_the_vocabulary_are_never_kept(options, wrong_id):
    target, _ = pair("llama")

    class Wrong(Watcher):
        def draft(self, request):
            draft = super().draft(request)
            return draft._replace(token_ids=draft.token_ids.index_fill(1, torch.tensor([1]), wrong_id))

    inputs, stats = ragged_prompts(2, seed=8), hf_speculate.SpeculationStats()
    options = {**options, "max_new_tokens": 12}
    drafter = functools.partial(Wrong, target)
    ours = target.generate(**inputs, **options, drafter=drafter, num_assistant_tokens=3, speculation_stats=stats)
    assert 0 <= ours.min() <= ours.max() < VOCAB_SIZE
    assert stats.accepted_per_position[1:] == [0, 0]
    if options.get("verifier") == "coupled" or not options.get("do_sample"):
        assert_equal_ids(target.generate(**inputs, **options), ours)


class FromTable:
    """Draws each token from a distribution that depends on the last token, and returns it or another one."""

    def __init__(self, table, told, request: DrafterSetup):
        self.table, self.told, self.stream = table, told, request.stream

    def draft(self, request):
        assert request.sample_strategy is SampleStrategy.RANDOM
        num_draft_tokens, newest = request.num_draft_tokens, request.query_token_ids[:, -1]
        draws = Draws(request.keys, self.stream, num_draft_tokens)
        ids, laws = [], []
        for _ in range(num_draft_tokens):
            laws.append(self.told[newest])
            newest = draws.draw(self.table[newest])
            ids.append(newest)
        lens = torch.full((len(newest),), num_draft_tokens)
        return DraftOut(torch.stack(ids, 1), lens, torch.stack(laws, 1), None)

    def rows(self, indices):
        pass


def law_p_value(target, **options) -> float:
    """Of drawn texts against the target's joint law."""
    counts = draw(target, None, NUM_DRAWS, max_new_tokens=NUM_DRAWN, num_assistant_tokens=2, **options)
    return p_value(counts, joint_law(target, NUM_DRAWN))


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_sampled_drafts_leave_the_joint_law_as_it_is(verifier):
    target = hf_speculate.enable(make_law_model(8, seed=0, dtype=torch.float32))
    table, other = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)) * 1.5

    def p_of(told) -> float:
        return law_p_value(target, drafter=functools.partial(FromTable, table, told), verifier=verifier)

    assert p_of(table) > SIGNIFICANCE
    assert p_of(other) < MISTAKEN


def test_parity_is_checked_of_a_drafter_too():
    target, _ = pair("llama")
    report = hf_speculate.check_parity(target, None, ragged_prompts(2, seed=8), drafter=watched(target)[0])
    assert report.ok
    assert [row.verdict for row in report.rows] == ["equal"] * 2


OTHERS = {
    "assistant_model": lambda: pair("llama")[1],
    "assistant_early_exit": lambda: 1,
    "candidate_generator": PromptLookupCandidateGenerator,
    "prompt_lookup_num_tokens": lambda: 3,
}


@pytest.mark.parametrize("name", OTHERS)
def test_there_is_one_source_of_drafts(name):
    target, _ = pair("llama")
    with pytest.raises(UnsupportedGenerationError, match=r"must be one source of drafts, got .*drafter") as error:
        target.generate(**ragged_prompts(1, seed=1), drafter=Repeats, **{name: OTHERS[name]()})
    assert name in str(error.value)


@pytest.mark.parametrize("value", [3, "medusa", Repeats(None)])
def test_what_makes_no_drafter(value):
    target, _ = pair("llama")
    with pytest.raises(ConfigError, match=rf"drafter must make a Drafter .* got {type(value).__name__}; pass a class"):
        target.generate(**ragged_prompts(1, seed=1), drafter=value)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (None, ConfigError, r"an object with draft\(\) and rows\(\), got NoneType"),
        (Repeats, ConfigError, r"an object with draft\(\) and rows\(\), got Repeats"),
        (torch.nn.Linear(1, 1), ConfigError, r"an object with draft\(\) and rows\(\), got Linear"),
        (type("Zero", (Repeats,), {"max_draft_tokens": 0})(None), ConfigError, "max_draft_tokens .* at least 1, got 0"),
        (type("Many", (Repeats,), {"max_draft_tokens": "3"})(None), ConfigError, "max_draft_tokens .* got '3'"),
    ],
)
def test_what_is_no_drafter(made, error, message):
    target, _ = pair("llama")
    with pytest.raises(error, match=message):
        target.generate(**ragged_prompts(1, seed=1), max_new_tokens=3, drafter=lambda request: made)


IDS, LENS = torch.zeros(2, 3, dtype=torch.int64), torch.full((2,), 3)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ((IDS, LENS), "must return a DraftOut, got tuple"),
        (DraftOut(IDS[0], LENS, None, None), r"B = 2 and K of at most 3, got \[3\] int64"),
        (DraftOut(IDS[:1], LENS, None, None), r"B = 2 and K of at most 3, got \[1, 3\] int64"),
        (DraftOut(IDS.repeat(1, 2), LENS, None, None), r"K of at most 3, got \[2, 6\] int64; return fewer tokens"),
        (DraftOut(IDS.float(), LENS, None, None), r"must be \[B, K\] int64 .* got \[2, 3\] float32"),
        (DraftOut(IDS, LENS[:1], None, None), r"lens of a draft must be \[B\] int32 with B = 2, got \[1\] int64"),
        (DraftOut(IDS, LENS.float(), None, None), r"lens of a draft must be \[B\] int32 .* got \[2\] float32"),
        (DraftOut(IDS, LENS, torch.zeros(2, 3, 5), None), r"\[B, K, V\] = \[2, 3, 64\], got \[2, 3, 5\]"),
    ],
)
def test_what_is_no_draft(draft, message):
    target, _ = pair("llama")

    class Wrong(Repeats):
        def draft(self, request):
            return draft

    with pytest.raises(ShapeError, match=message):
        target.generate(**ragged_prompts(2, seed=1), max_new_tokens=9, drafter=Wrong, num_assistant_tokens=3)


def test_a_drafter_is_asked_as_every_drafter_is():
    target, _ = pair("llama")
    request = DrafterSetup(target, 1, (0,), 9, 3, VOCAB_SIZE, frozenset(), torch.device("cpu"), None, Stream.DRAFT)
    drafter = CustomDrafter(Repeats, request)
    with pytest.raises(ConfigError, match="num_draft_tokens must be at least 1"):
        drafter.draft(DraftRequest(torch.zeros(1, 2, dtype=torch.int64), None, 0, SampleStrategy.GREEDY))
    with pytest.raises(ConfigError, match="keys must be given"):
        drafter.draft(DraftRequest(torch.zeros(1, 2, dtype=torch.int64), None, 1, SampleStrategy.RANDOM))
