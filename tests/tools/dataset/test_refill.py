"""`decode_dataset` refills rows: each line is that of static batches, also with settings of its own."""

import json

import pytest
import torch
from transformers import LogitsProcessor

import hf_speculate
from hf_speculate.errors import ConfigError
from tests.cases import pair
from tests.tiny_tokenizers import letters_tokenizer
from tests.tools.dataset.common import EOS, LETTERS, NUM_NEW, PAD, begun_in, prompts, results_in

TEXTS = prompts(14)
OPTIONS = {"max_new_tokens": NUM_NEW, "eos_token_id": LETTERS.index(EOS), "batch_size": 3, "num_assistant_tokens": 3}
OWN = [
    {"max_new_tokens": 3},
    {"stop_strings": list(LETTERS[1:12])},
    {"seed": 7, "temperature": 1.5, "top_k": 8},
    {"max_new_tokens": 30, "repetition_penalty": 1.4},
]


@pytest.fixture
def tokenizer():
    return letters_tokenizer(LETTERS, pad_token=PAD, eos_token=EOS)


def decode(output, tokenizer, texts, kind="llama", **options):
    target, draft = pair(kind)
    return hf_speculate.decode_dataset(
        target, tokenizer, texts, output, assistant_model=draft, **{**OPTIONS, **options}
    )


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "seed": 3}])
def test_lines_are_those_of_static_batches_also_with_settings_of_their_own(options, tokenizer, tmp_path):
    lines = [
        {"id": f"r{row}", "prompt": text, **OWN[row % 6]} if row % 6 < 4 else text for row, text in enumerate(TEXTS)
    ]
    found, reports = {}, {}
    for is_static in (True, False):
        output = tmp_path / f"{is_static}.jsonl"
        reports[is_static] = decode(output, tokenizer, lines, static_batches=is_static, is_ordered=True, **options)
        found[is_static] = [json.loads(line) for line in output.read_text().splitlines()]
    assert found[True] == found[False]
    assert not reports[False].fallback
    assert reports[False].num_tokens == reports[True].num_tokens == sum(line["num_tokens"] for line in found[True])
    assert reports[False].mean_acceptance_length > 1
    nums = {line["id"]: line["num_tokens"] for line in found[False]}
    assert nums["r0"] <= 3
    assert any(line["num_tokens"] > NUM_NEW for line in found[False])
    stopped = [line["text"] for line in found[False] if line.get("stop_strings")]
    assert any(text.endswith(tuple(LETTERS[1:12])) for text in stopped)


def test_progress_and_journal_follow_the_rows(tokenizer, tmp_path):
    reports, output = [], tmp_path / "out.jsonl"
    decode(output, tokenizer, TEXTS, on_batch=reports.append)
    nums = [report.num_finished for report in reports]
    assert nums == sorted(set(nums))
    assert nums[-1] == 14
    assert len(nums) > 14 / 3
    assert max(report.num_in_flight for report in reports) == 2
    assert reports[-1].num_in_flight == 0
    begun = begun_in(output)
    assert len(begun[0]) == 3
    assert sorted(key for keys in begun for key in keys) == sorted(map(str, range(1, 15)))


def test_rows_in_flight_are_decoded_again_after_an_interrupt(tokenizer, tmp_path):
    def stop(report):
        if report.num_finished >= 6:
            raise KeyboardInterrupt

    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        decode(output, tokenizer, TEXTS, on_batch=stop)
    num_begun, finished = len(begun_in(output)), set(results_in(output))
    report = decode(output, tokenizer, TEXTS)
    again = {int(key) for keys in begun_in(output)[num_begun:] for key in keys}
    assert (report.num_resumed, finished & again) == (len(finished), set())
    assert len(results_in(output)) == 14


@hf_speculate.register_row_wise
class RaisesAt(LogitsProcessor):
    """Raises an error for prompts that begin with an id."""

    def __init__(self, token_id):
        self.token_id = token_id

    def __call__(self, input_ids, scores):
        if (input_ids == self.token_id).any():
            raise ArithmeticError("overflow")
        return scores


def test_a_row_that_fails_has_its_error_in_its_line(tokenizer, tmp_path):
    texts, digit = [*TEXTS[:4], "b9c", *TEXTS[4:]], LETTERS.index("9")
    output = tmp_path / "out.jsonl"
    report = decode(output, tokenizer, texts, logits_processor=[RaisesAt(digit)])
    lines = results_in(output)
    failed = {key: line["error"] for key, line in lines.items() if line["finish_reason"] == "error"}
    assert failed[5] == "ArithmeticError: overflow"
    assert len(lines) == 15
    assert report.num_failed == len(failed) < 8


def test_what_cannot_be_refilled_is_decoded_in_static_batches_and_said(tokenizer, tmp_path):
    report = decode(tmp_path / "out.jsonl", tokenizer, TEXTS[:4], kind="bloom")
    assert "dynamic" in report.fallback
    assert len(results_in(tmp_path / "out.jsonl")) == 4


@pytest.mark.parametrize("own", [{"max_new_tokens": 0}, {"seed": "x"}, {"top_p": 1.5}, {"stop_strings": []}])
def test_wrong_settings_of_a_row_are_named(own, tokenizer, tmp_path):
    (name,) = own
    with pytest.raises(ConfigError, match=rf"{name} must be .* at prompt 2;"):
        decode(tmp_path / "out.jsonl", tokenizer, ["bc", {"prompt": "d", **own}])


def test_too_little_memory_ends_the_run(tokenizer, tmp_path):
    @hf_speculate.register_row_wise
    class RunsOut(RaisesAt):
        def __call__(self, input_ids, scores):
            raise torch.OutOfMemoryError("none left")

    with pytest.raises(ConfigError, match="must fit into memory, got 3 rows at once"):
        decode(tmp_path / "out.jsonl", tokenizer, TEXTS, logits_processor=[RunsOut(0)])
