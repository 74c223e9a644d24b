"""Test that `decode_dataset` gives every row the text of plain decoding once, even after a stop."""

import copy
import json

import filelock
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LogitsProcessor, StoppingCriteria

import hf_speculate
from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.row_decoder import row_seed
from hf_speculate.tools.dataset.rows import Row
from tests.cases import pair
from tests.support.tiny_tokenizers import letters_tokenizer
from tests.tools.dataset.common import (
    EOS,
    LETTERS,
    NUM_NEW,
    PAD,
    begun_in,
    ends_of,
    plain_results,
    prompts,
    results_in,
    texts_in,
)

EOS_ID = LETTERS.index(EOS)
TEXTS = prompts(11)
COMMON = {"max_new_tokens": NUM_NEW, "eos_token_id": EOS_ID, "do_sample": False}


@pytest.fixture(scope="module")
def plain():
    """Return text, number of tokens and finish reason of each text on its own."""
    return plain_results(pair("llama")[0], TEXTS)


def decode(tmp_path, texts=TEXTS, family="llama", chat_template=None, **options):
    """Run one call with the tiny pair; return its report and the output."""
    target, draft = pair(family)
    tokenizer = letters_tokenizer(
        LETTERS, pad_token=PAD, eos_token=EOS, chat_template=chat_template
    )
    tmp_path.mkdir(exist_ok=True)
    options = (
        COMMON | {"batch_size": 4, "assistant_model": draft, "num_assistant_tokens": 3} | options
    )
    report = hf_speculate.decode_dataset(
        target, tokenizer, texts, tmp_path / "out.jsonl", **options
    )
    return report, tmp_path / "out.jsonl"


NO_DRAFT = {"assistant_model": None, "num_assistant_tokens": None}


# As in LLaMA's first configs.
@pytest.mark.parametrize("options", [{}, {"pad_token_id": -1, "static_batches": True}])
def test_texts_counts_and_reasons_equal_plain_decoding(options, plain, tmp_path):
    report, output = decode(
        tmp_path, [{"prompt": text, "tag": text[:2]} for text in TEXTS], **options
    )
    results = results_in(output)
    assert [ends_of(results[key]) for key in range(1, 12)] == plain
    assert {reason for *_, reason in plain} == {"stop", "length"}
    assert [results[key]["tag"] for key in range(1, 12)] == [text[:2] for text in TEXTS]
    assert (report.num_rows, report.num_resumed, report.num_finished) == (11, 0, 11)
    assert report.num_tokens == sum(num for _, num, _ in plain)
    assert report.num_accepted > 0
    assert [line["id"] for line in report.results()] == list(results)


@pytest.mark.parametrize("options", [{}, {"static_batches": True}])
def test_peft_target_decodes_with_its_adapter(options, plain, tmp_path):
    target, draft = pair("llama")
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = hf_speculate.enable(
        get_peft_model(copy.deepcopy(target), lora).eval().to(torch.float64)
    )
    tokenizer, output = (
        letters_tokenizer(LETTERS, pad_token=PAD, eos_token=EOS),
        tmp_path / "out.jsonl",
    )
    options |= {**COMMON, "batch_size": 4, "assistant_model": draft, "num_assistant_tokens": 3}
    report = hf_speculate.decode_dataset(wrapped, tokenizer, TEXTS, output, **options)
    results = results_in(output)
    assert [ends_of(results[key]) for key in range(1, 12)] == plain_results(wrapped, TEXTS) != plain
    assert report.num_accepted > 0


class EndsAtPair(StoppingCriteria):
    """Custom criterion that ends a row after certain pairs of consecutive ids."""

    def __init__(self, pairs):
        self.pairs = torch.tensor(pairs)

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, None, -2:] == self.pairs).all(-1).any(-1)


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize(
    ("stop", "eos", "options"),
    [
        ("stop_strings", None, NO_DRAFT),
        (EndsAtPair, EOS_ID, NO_DRAFT),
        (hf_speculate.register_row_wise(type("RowWiseEnd", (EndsAtPair,), {})), None, {}),
    ],
)
def test_text_after_a_stop_is_in_no_result(stop, eos, options, plain, tmp_path):
    """Decode without EOS, where rows go on until the last one has stopped, and with EOS padding."""
    long = [
        (prompt, text)
        for prompt, (text, *_) in zip(TEXTS, plain, strict=True)
        if len(text) == NUM_NEW
    ][:4]
    texts, strings = (
        [prompt for prompt, _ in long],
        [text[1 + 2 * place :][:2] for place, (_, text) in enumerate(long)],
    )
    pairs = [[LETTERS.index(letter) for letter in string] for string in strings]
    stops = (
        {"stop_strings": strings}
        if stop == "stop_strings"
        else {"stopping_criteria": [stop(pairs)]}
    )
    reports = []
    for size in (1, 4):
        own = (
            stops
            | {"eos_token_id": eos, "pad_token_id": EOS_ID, "batch_size": size, "is_ordered": True}
            | options
        )
        reports.append(
            [ends_of(line) for line in decode(tmp_path / str(size), texts, **own)[0].results()]
        )
    assert reports[0] == reports[1]
    assert len({num_tokens for _, num_tokens, _ in reports[0]}) == 4
    assert all(
        reason == "stop" and len(text) == num and text[-2:] in strings
        for text, num, reason in reports[0]
    )


@pytest.mark.parametrize("num_bytes", [1, -1, None])
def test_finished_rows_and_the_drawn_seed_are_kept(num_bytes, tmp_path):
    options = {"do_sample": True, "verifier": "coupled"}
    _, output = decode(tmp_path, **options)
    whole = texts_in(output)
    assert list(whole) != list(range(1, 12))
    # If the process is killed during a write, it leaves such a file.
    output.write_bytes(output.read_bytes()[:num_bytes])
    finished_ids = [json.loads(line)["id"] for line in output.read_bytes().split(b"\n")[:-1]]
    num_begun = len(begun_in(output))
    report, _ = decode(tmp_path, is_ordered=True, **options)
    assert list(texts_in(output)) == list(range(1, 12))
    again = [key for batch in begun_in(output)[num_begun:] for key in batch]
    assert texts_in(output) == whole
    assert sorted(again) == sorted(str(key) for key in set(whole) - set(finished_ids))
    assert report.num_resumed == len(finished_ids)


@pytest.mark.parametrize(
    ("begun", "resumed", "words"),
    [
        ({}, {"texts": [*TEXTS[:-1], "zzz"]}, "got other prompts"),
        ({}, {"num_assistant_tokens": 2}, r"num_assistant_tokens \(2, was 3\)"),
        ({"seed": 4}, {"seed": 5}, r"\(5, was 4\)"),
        ({"texts": TEXTS[:5]}, {}, "got other prompts"),  # more prompts
    ],
)
def test_run_with_other_prompts_or_settings_is_refused(begun, resumed, words, tmp_path):
    first, output = decode(tmp_path, **begun)
    before = output.read_bytes()
    with pytest.raises(ConfigError, match=words):
        decode(tmp_path, **resumed)
    assert output.read_bytes() == before
    report, _ = decode(tmp_path, if_changed="keep", **resumed)
    assert (report.num_resumed, report.num_finished) == (first.num_rows, 11)
    decode(tmp_path, **resumed)  # the output now has these settings
    report, _ = decode(tmp_path, if_changed="restart", **begun)
    assert (report.num_resumed, report.num_finished) == (0, first.num_rows)


def test_output_in_use_or_of_another_run_is_left_alone(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text('{"id": 1}\n')
    with pytest.raises(ConfigError, match="must be new or written by an earlier run"):
        decode(tmp_path, if_changed="restart")
    assert output.read_text() == '{"id": 1}\n'
    output.unlink()
    decode(tmp_path)
    with pytest.raises(ConfigError, match="must be ids of the prompts, got 10, 11;"):
        decode(tmp_path, TEXTS[:9], if_changed="keep")
    with (
        filelock.FileLock(tmp_path / "out.jsonl.run" / "lock"),
        pytest.raises(ConfigError, match="one run at a time"),
    ):
        decode(tmp_path)


@pytest.mark.parametrize("method", [{"verifier": "rejection"}, NO_DRAFT])
def test_sampled_text_depends_on_seed_and_id_only(method, tmp_path):
    texts = [{"id": f"r{number}", "prompt": text} for number, text in enumerate(TEXTS)]
    reports = []
    for order, batch_size, seed in ((texts, 4, 1), (texts[:2:-1], 1, 1), (texts[:4], 4, 2)):
        options = method | {"do_sample": True, "seed": seed, "batch_size": batch_size}
        reports.append(texts_in(decode(tmp_path / str(len(reports)), order, **options)[1]))
    whole, fewer, last = reports
    assert fewer == {key: whole[key] for key in fewer}
    assert last != {key: whole[key] for key in last}
    assert row_seed(0, Row("1", "")) == 3373202220108974583  # must never change


def test_messages_are_rendered_by_the_chat_template(tmp_path):
    reports, options = (
        [],
        {"chat_template": "{{ messages[0]['content'] }}.", "if_changed": "restart"},
    )
    for prompt, is_chat in (
        ({"messages": [{"role": "user", "content": "bc"}]}, False),
        ("bc", True),
        ("bc.", False),
    ):
        reports.append(texts_in(decode(tmp_path, [prompt], is_chat=is_chat, **options)[1]))
    assert reports[0] == reports[1] == reports[2]


def test_invalid_settings_are_named_before_decoding(tmp_path):
    for row, options, message in (
        ({"prompt": ""}, {}, "at least one token, got none at prompt 12"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            {},
            "must have a chat template .* at prompt 12",
        ),
        ("a", {"batch_size": 2.5}, "batch_size must be at least 1, got 2.5"),
        ({"prompt": "d", "top_p": 1.5}, {}, r"top_p must be .* at prompt 12;"),
        ("a", {"max_length": 9}, "got max_length; leave it out"),
        (
            "a",
            {"do_sample": True, "verifier": "rejection", "assistant_model": None},
            "verifier must be 'coupled'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            decode(tmp_path, [*TEXTS, row], **options)
        assert not (tmp_path / "out.jsonl").exists()


def test_too_large_batch_is_named_and_finished_rows_stay(tmp_path):
    def run_out(module, args):
        if len(begun_in(tmp_path / "out.jsonl")) > 1:
            raise torch.OutOfMemoryError("none left")

    handle = pair("llama")[0].register_forward_pre_hook(run_out)
    with pytest.raises(ConfigError, match="must fit into memory, got 4 rows of"):
        decode(tmp_path, static_batches=True)
    handle.remove()
    report, output = decode(tmp_path, static_batches=True, batch_size=2)
    assert (report.num_resumed, len(results_in(output))) == (4, 11)
    batches = begun_in(output)[2:]  # batches of rows with similar lengths, the longest first
    lens = [len(TEXTS[int(key) - 1]) for batch in batches for key in batch]
    assert (list(map(len, batches)), lens) == ([2, 2, 2, 1], sorted(lens, reverse=True))


OWN = [
    {"max_new_tokens": 3},
    {"stop_strings": list(LETTERS[1:12])},
    {"seed": 7, "temperature": 1.5, "top_k": 8},
    {"max_new_tokens": 30, "repetition_penalty": 1.4},
    {},
]


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "seed": 3}])
def test_lines_with_their_settings_equal_static_batches(options, tmp_path):
    own = (
        OWN
        if options["do_sample"]
        else [settings for settings in OWN if "temperature" not in settings]
    )
    lines = [
        {"id": f"r{row}", "prompt": text, **own[row % len(own)]} for row, text in enumerate(TEXTS)
    ]
    reports, options = [], {"batch_size": 3, "is_ordered": True, **options}
    for is_static in (True, False):
        report, _ = decode(tmp_path / str(is_static), lines, static_batches=is_static, **options)
        reports.append(list(report.results()))
        assert not report.fallback
        assert report.num_tokens == sum(line["num_tokens"] for line in reports[-1])
    assert reports[0] == reports[1]
    assert reports[0][0]["num_tokens"] <= 3
    assert any(
        line["text"].endswith(tuple(LETTERS[1:12])) for line in reports[0] if "stop_strings" in line
    )


def test_sampling_settings_need_do_sample(tmp_path):
    lines = [{"prompt": "b", "temperature": 0.5}]
    with pytest.raises(
        ConfigError,
        match=r"temperature of a prompt must come with sampling, .*; pass do_sample=True",
    ):
        decode(tmp_path, lines)
    with pytest.raises(ConfigError, match=r"got 0\.5 with greedy decoding at prompt 1"):
        decode(tmp_path, lines, do_sample=False)


@hf_speculate.register_row_wise
class RaisesAt(LogitsProcessor):
    """Processor that raises an error for texts that contain a given id."""

    def __init__(self, token_id, error):
        self.token_id, self.error = token_id, error

    def __call__(self, input_ids, scores):
        if (input_ids == self.token_id).any():
            raise self.error
        return scores


def test_failing_row_has_its_error_in_its_line(tmp_path):
    texts, errors = (
        [*TEXTS, "b9c"],
        [ArithmeticError("overflow"), torch.OutOfMemoryError("none left")],
    )
    own = [
        {"logits_processor": [RaisesAt(LETTERS.index("9"), error)], "batch_size": 3}
        for error in errors
    ]
    report, output = decode(tmp_path, texts, **own[0])
    failed = {
        key: line["error"]
        for key, line in results_in(output).items()
        if line["finish_reason"] == "error"
    }
    assert failed[12] == "ArithmeticError: overflow"
    assert (report.num_finished, report.num_failed) == (12, len(failed))
    assert len(failed) < 8
    with pytest.raises(ConfigError, match="must fit into memory, got 3 rows at once"):
        decode(tmp_path, [*texts, "b9d"], **own[1], if_changed="restart")


def test_models_without_refill_decode_in_static_batches(tmp_path):
    report, output = decode(
        tmp_path, TEXTS[:4], family="mistral_window", speculation_cache="dynamic"
    )
    assert "window" in report.fallback
    assert len(results_in(output)) == 4
