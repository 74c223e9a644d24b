"""Compare drafts of text that a grammar forces with decoding token by token."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.draft.acceptance_rates import forced_rates
from hf_speculate.draft.no_drafts import NoDrafter
from hf_speculate.errors import ConfigError, UnsupportedGenerationError
from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.options.sources.forced_text import Continuation, ForcedTextDrafter
from hf_speculate.types import DraftOut
from tests.cases import VERIFIERS, assert_equal_ids, each_value, pair
from tests.generation.test_distribution import SIGNIFICANCE, draw, p_value, step_distribution
from tests.options.refill.test_continuous import source_of
from tests.support.forced_texts import ForcedGrammar, PureForcedGrammar, TextMachine, pieces
from tests.support.tiny import make_small_model, noisy_copy, ragged_prompts
from tests.support.tiny_tokenizers import byte_level_tokenizer, metaspace_tokenizer

SIZE, NUM_NEW, K = 64, 30, 4
SOURCES: dict[str, dict[str, Any]] = {
    "alone": {"grammar_draft": True},
    "lookup": {"prompt_lookup_num_tokens": K, "num_assistant_tokens": K},
    "model": {"num_assistant_tokens": K},
    "both": {"num_assistant_tokens": K, "prompt_lookup_num_tokens": K + 2},
}


@cache
def smallest() -> tuple[Any, Any]:
    """Return a pair of one-layer models. Tests share them: change neither."""
    target = make_small_model(SIZE, seed=0)
    return hf_speculate.enable(target), noisy_copy(target, 0.3)


def decode(
    source: str, inputs: dict, models: Any = None, grammar: Any = None, **options: Any
) -> Any:
    """Return ids and statistics of one call; without a source, of plain decoding."""
    target, draft = models or smallest()
    stats = hf_speculate.SpeculationStats()
    draft_options = {
        "speculation_stats": stats,
        "tokenizer": pieces(SIZE),
        "max_new_tokens": NUM_NEW,
        "pad_token_id": 0,
    }
    draft_options |= SOURCES.get(source, {}) | (
        {"assistant_model": draft} if source in ("model", "both") else {}
    )
    grammar = grammar or ForcedGrammar(TextMachine(SIZE))
    return target.generate(
        **inputs, **{**draft_options, **options}, logits_processor=[grammar]
    ), stats


@pytest.mark.fallback("forced text alone, because a draft model as large as its target")
@each_value(
    family=["llama", "gemma2", "gpt2", "falcon_h1"],
    source=list(SOURCES),
    batch_size=[1, 3],
    schedule=["constant", "constant", "adaptive"],
    eos=[None, 30],
)
def test_text_equals_that_of_the_grammar_alone(family, source, batch_size, schedule, eos):
    inputs, models = ragged_prompts(batch_size, seed=3), pair(family)
    options = {"eos_token_id": eos, "num_assistant_tokens_schedule": schedule}
    plain, _ = decode("", inputs, models, eos_token_id=eos)
    grammar = ForcedGrammar(TextMachine(SIZE))
    ours, stats = decode(source, inputs, models, grammar, **options)
    assert_equal_ids(plain, ours)
    assert stats.num_accepted > 0.2 * stats.num_emitted or schedule == "adaptive"
    assert "forced text" in stats.plan
    assert 0 < grammar.num_asked <= stats.num_rounds


@pytest.mark.fallback("rejection in place of block")
@each_value(verifier=list(VERIFIERS), source=list(SOURCES))
def test_sampled_rows_equal_those_of_a_stateless_grammar(verifier, source):
    inputs, results = ragged_prompts(3, seed=5), []
    options = {**VERIFIERS[verifier], "seed": [4, 5, 6], "num_assistant_tokens": K}
    prompt_len = inputs["input_ids"].shape[1]
    for grammar in (
        ForcedGrammar(TextMachine(SIZE)),
        PureForcedGrammar(TextMachine(SIZE), prompt_len),
    ):
        ids, stats = decode(source, inputs, grammar=grammar, **options)
        results.append((ids.tolist(), stats.num_accepted, stats.status))
    assert results[0] == results[1]
    if verifier == "coupled":
        assert_equal_ids(ids, decode("", inputs, **options, grammar_draft=False)[0])
    last = {name: value[-1:] for name, value in inputs.items()}
    alone, _ = decode(source, last, **options | {"seed": 6})
    assert torch.equal(alone, ids[-1:])


def test_sampled_text_keeps_its_distribution():
    """Let the target split the forced text into any tokens, so drafts are rejected."""
    target = hf_speculate.enable(make_small_model(8, seed=0, dtype=torch.float32))
    machine, num_new, num_rows = TextMachine(8, ("abc", "a", "b", "c", "d", "ab")), 4, 2_000
    prompt = torch.tensor([[1, 5, 2, 7]])
    joint = torch.zeros((8,) * num_new, dtype=torch.float64)
    paths = [((), 0, 1.0)]
    for _ in range(num_new):
        paths = [
            ((*ids, token_id), machine.step(state, token_id), share * probability)
            for ids, state, share in paths
            for token_id, probability in enumerate(_masked(target, machine, state, prompt, ids))
            if probability
        ]
    for ids, _, share in paths:
        joint[ids] = share
    stats = hf_speculate.SpeculationStats()
    counts = draw(
        target,
        None,
        num_rows,
        logits_processor=[PureForcedGrammar(machine, prompt.shape[1])],
        grammar_draft=True,
        num_assistant_tokens=3,
        tokenizer=pieces(8),
        speculation_stats=stats,
    )
    assert 0 < stats.num_accepted < stats.num_verified
    assert p_value(counts, joint) > SIGNIFICANCE


@torch.no_grad()
def _masked(
    target: Any, machine: TextMachine, state: int, prompt: torch.Tensor, ids: tuple[int, ...]
) -> list[float]:
    """Return the distribution of the next token under the mask."""
    text = torch.cat([prompt, torch.tensor([ids], dtype=torch.int64)], dim=1)
    allowed = torch.tensor(machine.allowed(state, 8))
    logits = target(text).logits[:, -1].masked_fill(~allowed, -torch.inf)
    return step_distribution(logits)[0].tolist()


END = 63


@each_value(source=list(SOURCES), batch_size=[1, 2])
def test_grammar_ending_within_a_draft_ends_the_row(source, batch_size):
    inputs = ragged_prompts(batch_size, seed=7)
    machine = TextMachine(SIZE, ("ab", *"cdefghi"), END)
    plain, _ = decode("", inputs, grammar=ForcedGrammar(machine), eos_token_id=END)
    ours, stats = decode(source, inputs, grammar=ForcedGrammar(machine), eos_token_id=END)
    assert_equal_ids(plain, ours)
    assert plain[0, -1] in (0, END)
    assert stats.num_accepted > 0


def test_grammar_without_allowed_tokens_gives_the_plain_text():
    inputs, machine = ragged_prompts(2, seed=7), TextMachine(SIZE, (*"abcdef", ""))
    plain, _ = decode("", inputs, grammar=ForcedGrammar(machine), max_new_tokens=9)
    assert_equal_ids(
        plain, decode("alone", inputs, grammar=ForcedGrammar(machine), max_new_tokens=9)[0]
    )


def test_grammar_draft_of_the_call_is_followed():
    inputs, drafted = ragged_prompts(2, seed=3), []
    for source in ("lookup", ""):
        for choice in (None, True, False):
            grammar = ForcedGrammar(TextMachine(SIZE))
            _, stats = decode(source, inputs, grammar=grammar, grammar_draft=choice)
            assert ("forced text" in stats.plan) == (grammar.num_asked > 0)
            drafted.append(grammar.num_asked > 0)
    assert drafted == [True, True, False, False, True, False]


def test_invalid_uses_of_grammar_draft_are_refused():
    target, inputs = smallest()[0], ragged_prompts(1, seed=3)
    options = {"max_new_tokens": 3, "grammar_draft": True, "tokenizer": pieces(SIZE)}
    with pytest.raises(
        ConfigError, match=r"unless a logits processor has forced_text\(\), got True"
    ):
        target.generate(**inputs, **options)
    with pytest.raises(ConfigError, match="tokenizer must be given with grammar_draft, got None"):
        decode("alone", inputs, tokenizer=None)
    generator = PromptLookupCandidateGenerator(num_output_tokens=K)
    with pytest.raises(
        UnsupportedGenerationError, match="left out with candidate_generator, got True"
    ):
        decode("alone", inputs, candidate_generator=generator)
    with pytest.raises(ConfigError, match="grammar_draft must be True or False, got 'yes'"):
        decode("alone", inputs, grammar_draft="yes")


@pytest.mark.fallback("no drafts of forced text, because the call has no tokenizer")
def test_missing_tokenizer_falls_back_to_lookup():
    _, stats = decode("lookup", ragged_prompts(1, seed=3), tokenizer=None)
    assert "prompt lookup" in stats.plan
    assert "forced text" not in stats.plan


class Wrong(ForcedGrammar):
    """Grammar that returns or raises a given value."""

    value: Any = None

    def forced_text(self, row, input_ids):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize(("value", "error"), [(KeyError("mine"), KeyError), (b"ab", ConfigError)])
def test_error_in_forced_text_is_raised_to_the_caller(value, error):
    grammar = Wrong(TextMachine(SIZE))
    grammar.value = value
    with pytest.raises(error):
        decode("model", ragged_prompts(2, seed=3), grammar=grammar)


class NoTokenizer:
    """Tokenizer that fails."""

    def encode(self, text, add_special_tokens):
        raise ValueError("no such text")

    decode = encode


@pytest.mark.fallback("raised TypeError")
def test_error_in_the_tokenizer_ends_the_drafts_only():
    inputs = ragged_prompts(2, seed=3)
    ours, _ = decode("alone", inputs, tokenizer=NoTokenizer())
    assert_equal_ids(decode("", inputs)[0], ours)


class Accumulates:
    """Custom drafter that collects the text itself: the first query, then accepted tokens."""

    def __init__(self, setup):
        self.rows_of_text = []

    def draft(self, request):
        if request.kept is None:
            self.rows_of_text = request.query_token_ids.tolist()
        else:
            lens = request.kept.num_emitted.tolist()
            for text, ids, num in zip(
                self.rows_of_text, request.kept.token_ids.tolist(), lens, strict=True
            ):
                text += ids[:num]
        assert [text[-1] for text in self.rows_of_text] == request.query_token_ids[:, -1].tolist()
        assert all(len(text) > 1 for text in self.rows_of_text)
        num = torch.full((len(self.rows_of_text),), 1, dtype=torch.int32)
        return DraftOut(request.query_token_ids[:, -1:].clone(), num, None, None)

    def rows(self, indices):
        self.rows_of_text = [self.rows_of_text[row] for row in indices]


def test_custom_drafter_gets_all_emitted_tokens():
    inputs = ragged_prompts(2, seed=3)
    ours, stats = decode("", inputs, drafter=Accumulates, num_assistant_tokens=K)
    assert_equal_ids(decode("", inputs)[0], ours)
    assert "forced text and custom drafter" in stats.plan


WORDS = ['{"', '":', ' "', "name", "a b", "size"]
TOKENIZERS = {
    "bytes": byte_level_tokenizer(WORDS, eos_token="</s>"),
    "marks": metaspace_tokenizer(WORDS, 'abcdeimnsz{}":,[]', eos_token="</s>"),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    ("before", "forced", "expected"),
    [
        (["a", '{"'], 'name": ', ["name", '":', " "]),
        # Otherwise, the tokenizer would prepend {".
        (["a", "{"], '"name":', ['"', "name", '":']),
        (["a b"[:1]], " bc", [" ", "b", "c"]),
        (["n"], "am", ["a", "m"]),
        ([], "size", ["size"]),
    ],
)
def test_forced_text_is_tokenised_as_it_continues_the_row(tokenizer, before, forced, expected):
    ids = [tokenizer.encode(piece, add_special_tokens=False)[-1] for piece in before]
    token_ids, is_whole = Continuation(tokenizer, 10, len(tokenizer)).tokens(ids, forced)
    written = [tokenizer.encode(piece, add_special_tokens=False) for piece in expected]
    assert token_ids == [token_id for piece in written for token_id in piece]
    assert is_whole


def test_forced_text_follows_the_emitted_tokens():
    tokenizer = byte_level_tokenizer([*WORDS, "\n\n"])
    (brace,), (newline,) = tokenizer.encode("{"), tokenizer.encode("\n")
    continuation = Continuation(tokenizer, 10, len(tokenizer))
    drafter = ForcedTextDrafter(NoDrafter(), continuation, forced_rates, 5, torch.device("cpu"))
    drafter.begin(torch.tensor([[brace], [newline]]))
    drafter.force(["\nname", "\nname"])
    drafter.look_up([[newline], [brace]])
    # Two newlines would be one token.
    assert drafter.cut_proposal(5).token_ids.tolist()[1] == [newline, *tokenizer.encode("name")]
    assert drafter.cut_proposal(5).lens.tolist() == [0, 2]


class Counted:
    """Tokenizer that counts the characters it tokenises."""

    def __init__(self):
        self.num = 0

    def encode(self, text, add_special_tokens):
        self.num += len(text)
        return [ord(character) for character in text]

    def decode(self, token_ids, **options):
        return "".join(map(chr, token_ids))


def test_tokenised_length_of_a_huge_text_is_bounded():
    tokenizer = Counted()
    continuation = Continuation(tokenizer, 5, 1000)
    assert continuation.tokens([97], 10**6 * "x") == (5 * [ord("x")], False)
    assert tokenizer.num < 200
    assert continuation.tokens([97], "ab\N{SNOWMAN}c") == (
        [97, 98],
        False,
    )  # an id past the vocabulary


class Fails(LookupError):
    """Error for one row."""


class PureWrong(PureForcedGrammar):
    """Stateless grammar that fails after some tokens."""

    def forced_text(self, row, input_ids):
        if len(input_ids) > self.prompt_len + 5:
            raise Fails
        return super().forced_text(row, input_ids)


hf_speculate.register_row_wise(PureWrong)


@each_value(source=list(SOURCES), samples=[False, True])
def test_refilled_rows_equal_rows_alone_and_fail_alone(source, samples):
    target, draft = smallest()
    options = SOURCES[source] | ({"assistant_model": draft} if source in ("model", "both") else {})
    options |= {
        "grammar_draft": True,
        "tokenizer": pieces(SIZE),
        "do_sample": samples,
        "num_assistant_tokens": K,
    }
    options |= {"verifier": "coupled"} if samples else {}
    prompts = []
    for number in range(6):
        ids = list(range(3 + number, 12 + 2 * number))
        grammar = {0: None, 1: PureWrong}.get(number, PureForcedGrammar)
        arguments = {"max_new_tokens": 6 + 4 * number}
        if grammar is not None:
            arguments["logits_processor"] = [grammar(TextMachine(SIZE), len(ids))]
        prompts.append(RowPrompt(ids, 7 + number if samples else None, arguments, key=number))
    decoder = ContinuousDecoder(target, 3, options, ends_rows=True)
    results = {one.prompt.key: one for done in decoder.decode(source_of(prompts)) for one in done}
    assert {key: type(one.error) for key, one in results.items() if one.error is not None} == {
        1: Fails
    }
    for key, one in results.items():
        ids = torch.tensor([prompts[key].token_ids])
        own = (
            {"do_sample": samples, "verifier": "coupled", "seed": prompts[key].seed}
            if samples
            else {}
        )
        plain = target.generate(ids, **prompts[key].arguments, **own)[0, ids.shape[1] :].tolist()
        assert one.token_ids == plain or key == 1
        assert one.num_accepted > 0.2 * len(plain) or key < 2
    assert decoder.stats.num_rounds > 1.5 * decoder.stats.num_batch_rounds, (
        "rows are decoded one by one"
    )
