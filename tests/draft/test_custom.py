"""Test custom drafters: their input, validation of their output, and unchanged text."""

import functools

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate import DrafterSetup
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import ConfigError, ShapeError, UnsupportedModelError
from hf_speculate.kernels import Draws
from hf_speculate.types import DraftOut, Stream
from tests.cases import Unchanged, assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.options.heads.rounds import states_of
from tests.support.tiny import PAD_TOKEN_ID, make_model, make_small_model, ragged_prompts

NUM_NEW = 24
VOCAB_SIZE = 64
# float64; a forward over one token rounds differently from a forward over several
STATE_TOLERANCE = 1e-9
COUPLED = {"do_sample": True, "verifier": "coupled", "seed": 5}


class Watcher:
    """Drafter that checks its hidden states.

    It compares each state with a plain forward and drafts the next tokens, some of them wrong.
    """

    def __init__(
        self, target, setup: DrafterSetup, num_cached: int = 0, layers: tuple[int, ...] = (-1,)
    ):
        self.target, self.num_cached, self.hidden_layers = target, num_cached, layers
        self.pads = list(setup.num_pads)
        self.texts: list[list[int]] = []
        self.told: list[list[int]] = []  # number of tokens that each row gained, per call

    def draft(self, request):
        query, kept, counts = (
            request.query_token_ids,
            request.kept,
            request.kept.num_emitted.tolist(),
        )
        assert request.kv_cache is None
        assert kept.hidden_states.shape[:2] == kept.token_ids.shape == (len(counts), max(counts))
        if not self.told:
            self.texts = [row[pad:] for row, pad in zip(query.tolist(), self.pads, strict=True)]
            assert counts == [len(text) - 1 - self.num_cached for text in self.texts]
        else:
            for text, ids, count in zip(self.texts, kept.token_ids.tolist(), counts, strict=True):
                assert ids[count:] == [-1] * (len(ids) - count)
                text += ids[:count]
        for row, (text, count) in enumerate(zip(self.texts, counts, strict=True)):
            num_known = min(query.shape[1], len(text))
            assert query[row, -num_known:].tolist() == text[-num_known:]
            states = self.project_states(states_of(self.target, text, self.hidden_layers))
            # the states of the tokens before the gained ones
            states = states[len(text) - 1 - count : -1]
            torch.testing.assert_close(
                kept.hidden_states[row, :count], states, rtol=0, atol=STATE_TOLERANCE
            )
        self.told.append(counts)
        num = request.num_draft_tokens
        drafts = [self.continued(row, text, num) for row, text in enumerate(self.texts)]
        return DraftOut(torch.tensor(drafts), torch.full((len(drafts),), num), None, None)

    def rows(self, indices):
        self.pads = [self.pads[row] for row in indices]
        self.texts = [self.texts[row] for row in indices] if self.told else []

    def project_states(self, states):
        return states.roll(1, dims=-1)

    def continued(self, row: int, text: list[int], num: int) -> list[int]:
        """Decode greedily, with a wrong token at about every fourth position."""
        text, ids = list(text), []
        for _ in range(num):
            best = int(self.target(torch.tensor([text])).logits[0, -1].argmax())
            ids.append((best + 1) % VOCAB_SIZE if (len(text) + row) % 4 == 0 else best)
            text.append(best)
        return ids


def followed(target, inputs, num_cached=0, layers=(-1,), **options):
    """Return the `Watcher` and the statistics of a call; check its text against plain decoding."""
    watchers: list[Watcher] = []

    def factory(setup: DrafterSetup) -> Watcher:
        watchers.append(Watcher(target, setup, num_cached, layers))
        return watchers[-1]

    stats, own = hf_speculate.SpeculationStats(), {"num_assistant_tokens": 4, "drafter": factory}
    own |= {
        name: options.pop(name) for name in ("speculation_cache", CACHE_NAME) if name in options
    }
    options["max_new_tokens"] = NUM_NEW
    outputs = [
        target.generate(**inputs, **options, **more)
        for more in ({}, own | {"speculation_stats": stats})
    ]
    assert_equal_ids(*(getattr(output, "sequences", output) for output in outputs))
    (watcher,) = watchers
    return watcher, stats


@pytest.mark.parametrize(
    ("family", "batch_size", "cache", "layers"),
    [
        ("llama", 3, "preallocated", (0, 1, 2, -1)),  # 2: before the final norm
        ("llama", 3, "dynamic", (1,)),
        ("gpt2", 3, "preallocated", (-1,)),
        ("mistral_window", 1, "dynamic", (-1,)),
        # the last two layers share states, and state 3 comes after the first of them
        ("gemma4", 3, "preallocated", (1, 3)),
        ("gemma4", 1, "dynamic", (4,)),
        ("gemma4", 3, "dynamic", (-1,)),
    ],
)
def test_reader_gets_every_state(family, batch_size, cache, layers):
    inputs = ragged_prompts(batch_size, seed=3)
    watcher, stats = followed(pair(family)[0], inputs, speculation_cache=cache, layers=layers)
    assert 0.5 < stats.verified_acceptance_rate < 1
    assert sum(watcher.told[0]) == int(inputs["attention_mask"].sum())
    assert batch_size == 1 or any(len(set(counts)) > 1 for counts in watcher.told[1:])


def test_layers_with_shared_states_give_those_of_one_token():
    target, inputs, seen = hf_speculate.enable(make_model("gemma4")), ragged_prompts(1, seed=3), []
    drafter = functools.partial(Repeats, seen=seen, hidden_layers=(1, 3), reads_prompt=False)
    assert_decodes_as_plain(
        target, None, inputs, max_new_tokens=4, drafter=drafter, num_assistant_tokens=2
    )
    states = states_of(target, inputs["input_ids"][0].tolist(), (1, 3))[-1:]
    torch.testing.assert_close(seen[0].kept.hidden_states[0], states, rtol=0, atol=STATE_TOLERANCE)


@pytest.mark.parametrize("layers", [(-1,), (1, 3)])
def test_multi_stream_states_are_refused_by_name(layers):
    target, inputs = make_model("gemma3n"), ragged_prompts(2, seed=3)
    with pytest.raises(
        UnsupportedModelError, match=r"hidden state.* (one vector for|for every) .*token"
    ):
        followed(hf_speculate.enable(target), inputs, layers=layers)


LOCK_STEP = {"logits_processor": [Unchanged()]}


@pytest.mark.fallback("lock step")
@each_value(ends=[(), (11, 9), (0, 3)], options=[{}, COUPLED, {"prefill_chunk_size": 5}, LOCK_STEP])
def test_plain_steps_report_their_states(scripted, options, ends):
    (target, _), inputs, eos = pair("llama"), ragged_prompts(3, seed=4), None
    if ends:
        eos = target.generate(**inputs, **options, max_new_tokens=NUM_NEW)[[0, 2], -NUM_NEW:][
            [0, 1], ends
        ].tolist()
    watcher, stats = followed(
        target, inputs, **options, eos_token_id=eos, pad_token_id=PAD_TOKEN_ID
    )
    assert stats.rounds_by_draft_len[0] > 2
    assert max(max(counts) for counts in watcher.told[1:]) > 3
    assert stats.lock_step == (options == LOCK_STEP)
    assert len(watcher.told[0]) == (2 if 0 in ends else 3)


def test_ended_rows_gain_no_tokens():
    (target, _), inputs = pair("llama"), ragged_prompts(3, seed=4)
    eos = target.generate(**inputs, max_new_tokens=NUM_NEW)[1, 4 - NUM_NEW]
    options = {
        "eos_token_id": int(eos),
        "pad_token_id": PAD_TOKEN_ID,
        "return_dict_in_generate": True,
    }
    assert 0 in followed(target, inputs, **options)[0].told[-1]


def test_passed_cache_reports_no_states():
    (target, _), inputs, cache = pair("llama"), ragged_prompts(1, seed=3, min_len=8), DynamicCache()
    target(inputs["input_ids"][:, :4], **{CACHE_NAME: cache})
    watcher, _ = followed(target, inputs, num_cached=4, **{CACHE_NAME: cache})
    assert watcher.told[0] == [inputs["input_ids"].shape[1] - 4]


class Repeats:
    """Drafter that repeats the newest token.

    It records each request and has the given attributes.
    """

    def __init__(self, setup: DrafterSetup, seen: list | None = None, **attributes):
        self.setup, self.seen = setup, [] if seen is None else seen
        vars(self).update(attributes)

    def draft(self, request):
        self.seen.append(request)
        ids = request.query_token_ids[:, -1:].expand(-1, request.num_draft_tokens)
        return DraftOut(
            ids, torch.full((len(ids),), request.num_draft_tokens, dtype=torch.int32), None, None
        )

    def rows(self, indices):
        pass


@each_value(batch_size=[1, 3], num_ids=[0, 2, 12])
def test_embedding_prompt_reports_tokens_with_ids_only(num_ids, batch_size):
    target, _ = pair("llama")
    prompts, seen = ragged_prompts(batch_size, seed=2, min_len=4 if batch_size > 1 else 12), []
    inputs = {"inputs_embeds": target.get_input_embeddings()(prompts["input_ids"])}
    inputs |= {"attention_mask": prompts["attention_mask"], "max_new_tokens": NUM_NEW}
    if num_ids:
        inputs["input_ids"] = prompts["input_ids"][:, -num_ids:]
    plain = target.generate(**inputs)
    drafter = functools.partial(Repeats, seen=seen, hidden_layers=(-1,))
    assert_equal_ids(plain, target.generate(**inputs, drafter=drafter, num_assistant_tokens=3))
    first = seen[0].kept
    for row, (text, mask) in enumerate(
        zip(prompts["input_ids"], prompts["attention_mask"], strict=True)
    ):
        text = text[mask.bool()].tolist()
        count = min(len(text), num_ids + 1)
        assert first.num_emitted[row] == count
        assert first.token_ids[row, :count].tolist() == [*text, int(plain[row, num_ids])][-count:]
        states = states_of(target, text, (-1,))[-count:]
        torch.testing.assert_close(
            first.hidden_states[row, :count], states, rtol=0, atol=STATE_TOLERANCE
        )


def test_encoder_decoder_states_are_those_of_the_decoder():
    (target, _), inputs, seen = encoder_pair("t5"), inputs_of("t5", 2), []
    drafter = functools.partial(Repeats, seen=seen, hidden_layers=(-1,))
    assert_decodes_as_plain(
        target, None, inputs, max_new_tokens=12, drafter=drafter, num_assistant_tokens=2
    )
    for kept in (request.kept for request in seen):
        chosen = target.get_output_embeddings()(kept.hidden_states).argmax(-1)
        assert torch.equal(chosen[kept.token_ids >= 0], kept.token_ids[kept.token_ids >= 0])


def test_drafter_factory_runs_once_per_call():
    (target, _), inputs, setups, seen = pair("llama"), ragged_prompts(3, seed=7), [], []

    def factory(setup):
        setups.append(setup)
        return Repeats(setup, seen, max_draft_tokens=2)

    options = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 0,
        "verifier": "coupled",
        "eos_token_id": [2, 9],
    }
    target.generate(**inputs, **options, max_new_tokens=6, num_assistant_tokens=3, drafter=factory)
    # limited to the size of its proposal
    assert max(request.num_draft_tokens for request in seen) == 2
    (setup,) = setups
    assert len(setup.processors) == 1  # only temperature
    pads, max_length = (
        tuple((inputs["attention_mask"] == 0).sum(1).tolist()),
        inputs["input_ids"].shape[1] + 6,
    )
    fields = (
        target,
        3,
        pads,
        max_length,
        3,
        VOCAB_SIZE,
        {2, 9},
        target.device,
        setup.processors,
        Stream.RACE,
    )
    # coupled verification reads no logits
    assert setup == DrafterSetup(*fields, keeps_logits=False)


class Aside:
    """Drafter that drafts with the target, if the target can drop the tokens again."""

    reads_prompt = False

    def __init__(self, setup):
        pass

    def draft(self, request):
        token_ids = torch.full_like(request.query_token_ids[:, :1], 7)
        if request.run_target is not None:
            query = torch.cat([request.query_token_ids[:, -1:], token_ids], dim=1)
            token_ids = request.run_target(query).argmax(-1)[:, :1]
        return DraftOut(token_ids, torch.ones(len(token_ids), dtype=torch.int32), None, None)

    def rows(self, indices):
        pass


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_recurrent_targets_read_no_tokens_aside(family):
    """Their states would keep the tokens."""
    stats = assert_decodes_as_plain(
        pair(family)[0], None, ragged_prompts(2, seed=1), drafter=Aside, max_new_tokens=NUM_NEW
    )
    assert (stats.num_accepted == stats.num_verified > 20) == (family == "llama")


CHANGES = {
    "fewer": lambda draft, num: DraftOut(
        draft.token_ids[:, : num % 3], draft.lens.clamp(max=num % 3), None, None
    ),
    "uneven, 99 is all": lambda draft, num: draft._replace(
        lens=torch.tensor([1, 4, 99][: len(draft.lens)])
    ),
    "logits in greedy decoding": lambda draft, num: draft._replace(
        token_logits=torch.zeros(*draft.token_ids.shape, VOCAB_SIZE)
    ),
    "ids below the vocabulary": lambda draft, num: draft._replace(
        token_ids=draft.token_ids.clone().fill_(-5)
    ),
    "ids past the vocabulary": lambda draft, num: draft._replace(
        token_ids=draft.token_ids + VOCAB_SIZE
    ),
}


@each_value(change=CHANGES, options=[{}, COUPLED])
def test_drafts_of_any_form_keep_the_text(change, options):
    class Changed(Watcher):
        def draft(self, request):
            return CHANGES[change](super().draft(request), len(self.told))

    target, options = pair("llama")[0], {} if "logits" in change else options
    draft_options = {
        "drafter": functools.partial(Changed, target),
        "num_assistant_tokens": 4,
        "max_new_tokens": NUM_NEW,
    }
    stats = assert_decodes_as_plain(
        target, None, ragged_prompts(3, seed=8), **options, **draft_options
    )
    assert (stats.num_accepted > 0) is ("ids" not in change)


IDS, LENS = torch.zeros(2, 3, dtype=torch.int64), torch.full((2,), 3)


def returning(draft):
    return type("Wrong", (Repeats,), {"draft": lambda self, request: draft})


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("medusa", r"drafter must make a Drafter .* got str"),
        (lambda setup: Repeats, r"draft\(\) and rows\(\), got Repeats"),
        (functools.partial(Repeats, max_draft_tokens=0), "max_draft_tokens .* got 0"),
        (functools.partial(Repeats, hidden_layers=()), "hidden_layers"),
        (returning((IDS, LENS)), "must return a DraftOut, got tuple"),
        (returning(DraftOut(IDS.repeat(1, 2), LENS, None, None)), r"K of at most 3, got \[2, 6\]"),
        (returning(DraftOut(IDS, LENS[:1], None, None)), "lens of a draft"),
        (
            returning(DraftOut(IDS, LENS, torch.zeros(2, 3, 5), None)),
            r"\[B, K, V\] = \[2, 3, 64\], got \[2, 3, 5\]",
        ),
    ],
)
def test_invalid_drafters_and_drafts_are_refused(drafter, message):
    options = {"max_new_tokens": 9, "drafter": drafter, "num_assistant_tokens": 3}
    with pytest.raises((ConfigError, ShapeError), match=message):
        pair("llama")[0].generate(**ragged_prompts(2, seed=1), **options)


NUM_DRAWS = 8_000  # over 512 texts
NUM_DRAWN = 3  # tokens per text: the first from the prompt's forward, the others from a round
MISTAKEN = 1e-12  # upper bound on the p-value of the negative control


def test_sampled_drafts_keep_the_joint_distribution():
    """Sample drafts from a table indexed by the previous token; a wrong table must be noticed."""
    target = hf_speculate.enable(make_small_model(8, seed=0, dtype=torch.float32))
    table, second = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)) * 1.5

    def p_of(told) -> float:
        def draft(self, request):
            newest, ids, logits = request.query_token_ids[:, -1], [], []
            draws = Draws(request.keys, self.setup.stream, request.num_draft_tokens)
            for _ in range(request.num_draft_tokens):
                logits.append(told[newest])
                newest = draws.draw(table[newest])
                ids.append(newest)
            lens = torch.full((len(newest),), request.num_draft_tokens)
            return DraftOut(torch.stack(ids, 1), lens, torch.stack(logits, 1), None)

        options = {
            "drafter": type("FromTable", (Repeats,), {"draft": draft}),
            "num_assistant_tokens": 2,
        }
        counts = draw(
            target, None, NUM_DRAWS, max_new_tokens=NUM_DRAWN, verifier="rejection", **options
        )
        return p_value(counts, joint_distribution(target, NUM_DRAWN))

    assert p_of(table) > SIGNIFICANCE
    assert p_of(second) < MISTAKEN
