"""Test that continuous batching gives every row the tokens its prompt would get on its own."""

import gc
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LogitsProcessor, LogitsProcessorList

from hf_speculate import enable, generate, register_row_wise
from hf_speculate.errors import BadLogitsError, UnsupportedGenerationError
from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.options.sources.suffix_store import SuffixStore
from tests.cases import new_pair, pair
from tests.support.flash import NAMES, flash_attention, set_flash
from tests.support.tiny import cheaper_copy

NUM_ROWS = 3


def source_of(prompts):
    """Return a source that hands out the prompts."""
    return partial(next, iter(prompts), None)


def make_prompts(num=8, **arguments):
    """Make prompts of 2 to 30 tokens that ask for 1 to 40 new tokens."""
    random = torch.Generator().manual_seed(3)

    def draw(low, high, size=()):
        return torch.randint(low, high, size, generator=random).tolist()

    lens = [draw(2, 31) for _ in range(num)]
    return [
        RowPrompt(
            draw(1, 6 if index % 2 else 64, (length,)),
            seed=100 + index,
            arguments={"max_new_tokens": (1, 7, 40, 16)[index % 4], **arguments},
            key=index,
        )
        for index, length in enumerate(lens)
    ]


def alone(target, prompt, **options):
    """Return the new tokens of one prompt in a separate call."""
    ids = torch.tensor([prompt.token_ids])
    output = generate(target, input_ids=ids, seed=prompt.seed, **{**options, **prompt.arguments})
    return output[0, ids.shape[1] :].tolist()


def decoded(target, prompts, num_rows=NUM_ROWS, on_tokens=None, **options):
    """Return the results by key, and the decoder."""
    decoder = ContinuousDecoder(target, num_rows, options, on_tokens=on_tokens)
    results = {
        result.prompt.key: result
        for finished in decoder.decode(source_of(prompts))
        for result in finished
    }
    assert set(results) == {prompt.key for prompt in prompts}
    return results, decoder


def sources(draft):
    """Return draft sources: a model, prompt lookup, both, or neither."""
    return {
        "model": {"assistant_model": draft, "num_assistant_tokens": 3},
        "lookup": {"prompt_lookup_num_tokens": 4, "num_assistant_tokens_schedule": "constant"},
        "both": {
            "assistant_model": draft,
            "num_assistant_tokens": 3,
            "prompt_lookup_num_tokens": 4,
        },
        "none": {},
        "adaptive": {"assistant_model": draft},
    }


@pytest.mark.fallback("rejection in place of block")
@pytest.mark.parametrize(
    ("family", "source", "verifier"),
    [
        *(("llama", source, "greedy") for source in ("model", "lookup", "none", "adaptive")),
        ("mistral_window", "both", "greedy"),
        ("gemma2", "model", "greedy"),
        *(
            ("llama", "model", "rejection"),
            ("llama", "lookup", "block"),
            ("llama", "model", "coupled"),
        ),
    ],
)
def test_rows_with_their_settings_equal_rows_alone(family, source, verifier):
    target, draft = pair(family)
    draft = cheaper_copy(target) if source == "adaptive" else draft
    options = {**sources(draft)[source], "do_sample": verifier != "greedy", "verifier": verifier}
    some = make_prompts(5, temperature=0.8, eos_token_id=[5])
    others = make_prompts(
        5,
        temperature=1.2,
        top_k=9,
        repetition_penalty=1.3,
        eos_token_id=[5],
        no_repeat_ngram_size=2,
    )
    prompts = [
        replace(prompt, seed=50 + key, key=key) for key, prompt in enumerate([*some, *others])
    ]
    results, decoder = decoded(target, [*prompts[::2], *prompts[1::2]], **options)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
    for name in ("num_rounds", "num_drafted", "num_accepted"):
        assert sum(getattr(result, name) for result in results.values()) == getattr(
            decoder.stats, name
        )
    assert decoder.stats.num_accepted > 0 or source in ("none", "adaptive")
    assert decoder.num_live == 0
    assert decoder.stats.num_rounds > 1.5 * decoder.stats.num_batch_rounds, (
        "rows are decoded one by one"
    )


def test_greedy_rows_among_sampled_ones_equal_rows_alone():
    target, draft = pair("llama")
    samples = {"do_sample": True, "verifier": "coupled"}
    prompts = [
        replace(prompt, arguments=prompt.arguments | samples) if prompt.key % 3 else prompt
        for prompt in make_prompts(9)
    ]
    seen = {}

    def on_tokens(prompt, token_ids):
        assert list(token_ids[: len(seen.get(prompt.key, []))]) == seen.get(prompt.key, [])
        seen[prompt.key] = list(token_ids)
        return prompt.key != 2 or len(token_ids) < 9

    results, decoder = decoded(target, prompts, on_tokens=on_tokens, **sources(draft)["model"])
    for prompt in prompts:
        whole, ids = alone(target, prompt, **sources(draft)["model"]), results[prompt.key].token_ids
        assert ids == (whole[: len(ids)] if prompt.key == 2 else whole), prompt.key
    assert 9 <= len(results[2].token_ids) < 13
    assert seen[2] == results[2].token_ids
    assert decoder.num_live == 0


@pytest.mark.parametrize("source", ["model", "lookup"])
def test_neighbours_of_a_long_prompt_decode_between_chunks(source):
    target, draft = pair("llama")
    options, chunk = sources(draft)[source] | {"prefill_chunk_size": 32}, 32
    short = RowPrompt([3, 4, 5], arguments={"max_new_tokens": 120}, key="short")
    long = RowPrompt(
        [1 + num % 60 for num in range(200)], arguments={"max_new_tokens": 8}, key="long"
    )
    dropped = RowPrompt(long.token_ids, arguments={"max_new_tokens": 9}, key="dropped")
    num_read, most_read, chunks_seen = 0, 0, {"long": 0, "dropped": 0}

    def count(module, args, kwargs):
        nonlocal num_read
        num_read += kwargs["input_ids"].numel() if kwargs["input_ids"].shape[1] > 16 else 0

    def on_tokens(prompt, token_ids):
        nonlocal num_read, most_read
        if prompt.key == "short":
            most_read, num_read = max(most_read, num_read), 0
        elif not token_ids:
            chunks_seen[prompt.key] += 1
        return prompt.key != "dropped" or chunks_seen["dropped"] < 3

    hooks = [model.register_forward_pre_hook(count, with_kwargs=True) for model in (target, draft)]
    results, decoder = decoded(target, [short, long, dropped], on_tokens=on_tokens, **options)
    for hook in hooks:
        hook.remove()
    assert most_read == chunk
    num_models = 2 if source == "model" else 1
    assert chunks_seen == {"long": num_models * (200 // chunk) + 1, "dropped": 3}
    assert results["dropped"].token_ids == []
    for prompt in (short, long):
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
    assert decoder.num_live == 0


@pytest.mark.parametrize("source", ["model", "lookup"])
def test_short_prompt_overtakes_a_long_one_between_chunks(source):
    target, draft = pair("llama")
    options, events = sources(draft)[source] | {"prefill_chunk_size": 32}, []
    long = RowPrompt(
        [1 + num % 60 for num in range(320)], arguments={"max_new_tokens": 8}, key="long"
    )
    shorts = [
        RowPrompt([3, 4, 5 + num], arguments={"max_new_tokens": 20}, key=num) for num in range(3)
    ]
    waiting = [long]

    def count(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 16:
            events.append("chunk")
            if events.count("chunk") in (1, 3, 6):
                events.append("asked")
                waiting.append(shorts.pop())

    def on_tokens(prompt, token_ids):
        if token_ids and prompt.key not in events:
            events.append(prompt.key)
        return True

    hooks = [model.register_forward_pre_hook(count, with_kwargs=True) for model in (target, draft)]
    decoder = ContinuousDecoder(target, len(shorts) + 1, options, on_tokens=on_tokens)
    results = [
        one for some in decoder.decode(lambda: waiting.pop(0) if waiting else None) for one in some
    ]
    for hook in hooks:
        hook.remove()
    asked = [at for at, event in enumerate(events) if event == "asked"]
    begun = [at for at, event in enumerate(events) if isinstance(event, int)]
    assert len(asked) == len(begun) == 3
    for ask, begin in zip(asked, begun, strict=True):
        assert "chunk" not in events[ask:begin]
    # 320 tokens, read by each model.
    assert events.count("chunk") == (20 if source == "model" else 10)
    for result in results:
        assert result.token_ids == alone(target, result.prompt, **options), result.prompt.key


@pytest.mark.fallback("as large as its target")
@pytest.mark.parametrize(
    ("scripted", "reads"), [((0,), False), ((0, 0, 2), True)], indirect=["scripted"]
)
@pytest.mark.parametrize("chunk", [None, 8])
def test_draft_reads_a_prompt_before_its_next_draft(scripted, reads, chunk):
    target, draft = pair("llama")
    options = {"assistant_model": draft, "prefill_chunk_size": chunk}
    prompts, calls = make_prompts(), []
    hook = draft.register_forward_pre_hook(lambda *_: calls.append(1))
    results, decoder = decoded(target, prompts, **options)
    hook.remove()
    assert bool(calls) is reads
    assert (decoder.stats.num_drafted > 0) is reads
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt), prompt.key


class MakesNan(LogitsProcessor):
    """Processor that makes rows with a token NaN, or raises an error for them."""

    def __init__(self, bad, raises):
        self.bad, self.raises = bad, raises

    def __call__(self, input_ids, scores):
        is_bad = (input_ids == self.bad).any(1, keepdim=True)
        if self.raises and is_bad.any():
            raise ValueError("is not allowed")
        return scores.masked_fill(is_bad, torch.nan)


@pytest.mark.parametrize(("raises", "message"), [(True, "is not allowed"), (False, "got NaN")])
def test_failing_row_ends_alone(raises, message):
    register_row_wise(MakesNan)
    target, draft = pair("llama")
    options, prompts = {**sources(draft)["model"], "do_sample": True}, make_prompts(9)
    texts = {prompt.key: alone(target, prompt, **options) for prompt in prompts}
    bad = texts[2][20]  # the token comes late in at least one row, and at once in others
    results, _ = decoded(
        target, prompts, logits_processor=LogitsProcessorList([MakesNan(bad, raises)]), **options
    )
    fails = {
        prompt.key for prompt in prompts if bad in [*prompt.token_ids, *texts[prompt.key][:-1]]
    }
    assert 0 < len(fails) < len(prompts)
    for key, result in results.items():
        assert (message in str(result.error)) == (key in fails)
        assert key in fails or result.token_ids == texts[key]


@pytest.mark.parametrize("do_sample", [False, True])
def test_row_of_nan_ends_with_an_error_only_if_it_samples(do_sample):
    def spoil(module, args, kwargs, output):
        output.logits[(kwargs["input_ids"] == 7).any(1)] = torch.nan

    target, options = new_pair("llama")[0], {"do_sample": do_sample, "prompt_lookup_num_tokens": 3}
    options |= {"num_assistant_tokens_schedule": "constant", "max_new_tokens": 6}
    target.register_forward_hook(spoil, with_kwargs=True)
    prompts = [
        RowPrompt(ids, seed=key, key=key) for key, ids in enumerate([[1, 2, 3], [1, 7], [4, 5]])
    ]
    results, decoder = decoded(target, prompts, **options)
    assert [isinstance(results[key].error, BadLogitsError) for key in range(3)] == [
        False,
        do_sample,
        False,
    ]
    for prompt in prompts[::2] if do_sample else prompts:
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
    assert do_sample or decoder.stats.status


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mistral_window", {"speculation_cache": "dynamic"}, "window"),
        (
            "llama",
            {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
            "lock step",
        ),
    ],
)
def test_rows_that_cannot_join_are_refused_with_a_reason(family, options, reason):
    target, draft = pair(family)
    decoder = ContinuousDecoder(
        target, NUM_ROWS, {"assistant_model": draft, "num_assistant_tokens": 3, **options}
    )
    assert reason in decoder.obstacle(make_prompts(1)[0])
    with pytest.raises(UnsupportedGenerationError, match=reason):
        next(decoder.decode(source_of(make_prompts(1))))


def test_finished_rows_free_their_memory():
    target, draft = pair("llama")
    prompts = (
        RowPrompt((1 + num % 60, 2, 3), arguments={"max_new_tokens": 2 + num % 5})
        for num in itertools.count()
    )
    decoder, sizes = (
        ContinuousDecoder(target, 8, {"assistant_model": draft, "num_assistant_tokens": 3}),
        [],
    )
    for number, _ in enumerate(itertools.islice(decoder.decode(source_of(prompts)), 80)):
        if number % 10 == 9:
            gc.collect()
            sizes.append(len(gc.get_objects()))
    # The object count depends on which rows are in progress, so compare maxima. The second half is
    # about a hundred rows later.
    assert max(sizes[4:]) <= max(sizes[:4]) + 50, sizes


def test_outputs_are_stored_under_the_key_of_their_row():
    store = SuffixStore()
    prompts = [
        RowPrompt(
            [3, 4, 5], arguments={"max_new_tokens": 4, "suffix_store": store.of(name)}, key=name
        )
        for name in "ab"
    ]
    decoded(pair("llama")[0], prompts, prompt_lookup_num_tokens=3)
    assert [store.of(name).num_tokens > 0 for name in "ab"] == [True, True]


def test_attached_draft_with_flash_attention_drafts_on_preallocated_buffers():
    """The draft is not among the arguments, and its LoRA's modules are no layers of attention."""
    target, draft = (set_flash(model, NAMES[0]) for model in new_pair("llama", 0.1))
    lora = LoraConfig(target_modules=["q_proj", "up_proj"], r=2)
    draft = get_peft_model(draft, lora).eval().to(torch.float64)
    prompts = make_prompts(5)
    with flash_attention():
        plain = {prompt.key: alone(target, prompt) for prompt in prompts}
        enabled = enable(target, assistant_model=draft, num_assistant_tokens=3)
        results, decoder = decoded(enabled, prompts)
    assert {key: result.token_ids for key, result in results.items()} == plain
    assert decoder.stats.num_accepted and not decoder.stats.fallbacks
    configs = target.config, draft.config
    assert [config._attn_implementation for config in configs] == [NAMES[0]] * 2
