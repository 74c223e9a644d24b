"""`decode_dataset` gives every row the text of plain decoding, once, whatever stopped it before."""

import json

import filelock
import pytest
import torch
from transformers import StoppingCriteria

import hf_speculate
from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.row_decoder import row_seed
from tests.cases import pair
from tests.tiny import make_model
from tests.tiny_tokenizers import letters_tokenizer
from tests.tools.dataset.common import (
    CHAT_TEMPLATE,
    EOS,
    LETTERS,
    NUM_NEW,
    PAD,
    begun_in,
    plain_results,
    prompts,
    results_in,
    texts_in,
)

EOS_ID = LETTERS.index(EOS)
TEXTS = prompts(11)
COMMON = {"max_new_tokens": NUM_NEW, "eos_token_id": EOS_ID, "do_sample": False}


@pytest.fixture
def tokenizer():
    return letters_tokenizer(LETTERS, pad_token=PAD, eos_token=EOS)


@pytest.fixture(scope="module")
def plain():
    """Text, number of tokens and reason of the end, of each text alone."""
    found = plain_results(pair("llama")[0], TEXTS)
    assert {reason for *_, reason in found} == {"stop", "length"}
    return found


def decode(tmp_path, tokenizer, texts=TEXTS, **options):
    """One call with the tiny pair; returns its report and the output."""
    target, draft = pair("llama")
    options = COMMON | {"batch_size": 4, "assistant_model": draft, "num_assistant_tokens": 3} | options
    report = hf_speculate.decode_dataset(target, tokenizer, texts, tmp_path / "out.jsonl", **options)
    return report, tmp_path / "out.jsonl"


NO_DRAFT = {"assistant_model": None, "num_assistant_tokens": None}


@pytest.mark.parametrize("options", [{}, NO_DRAFT], ids=["draft", "none"])
def test_texts_counts_and_reasons_are_those_of_plain_decoding(options, plain, tokenizer, tmp_path):
    report, output = decode(tmp_path, tokenizer, [{"prompt": text, "tag": text[:2]} for text in TEXTS], **options)
    found = results_in(output)
    lines = [found[key] for key in range(1, 12)]
    assert [(line["text"], line["num_tokens"], line["finish_reason"]) for line in lines] == plain
    assert [line["tag"] for line in lines] == [text[:2] for text in TEXTS]
    assert (report.num_rows, report.num_resumed, report.num_finished) == (11, 0, 11)
    assert report.num_tokens == sum(num for _, num, _ in plain)
    assert (report.num_accepted > 0) is (not options)
    assert [line["id"] for line in report.results()] == list(found)


@pytest.mark.parametrize("options", [{}, NO_DRAFT], ids=["draft", "none"])
def test_stop_strings_end_rows_where_plain_decoding_ends_them(options, plain, tokenizer, tmp_path):
    stop = plain[0][0][3:5]
    assert len(stop) == 2
    _, output = decode(tmp_path, tokenizer, stop_strings=[stop], **options)
    found = texts_in(output)
    assert [found[key] for key in range(1, 12)] == [text.split(stop)[0] + stop * (stop in text) for text, *_ in plain]


class EndsAtPair(StoppingCriteria):
    """A user's own criterion: ends a row behind two ids that follow each other in any of some pairs."""

    def __init__(self, *pairs):
        self.pairs = torch.tensor(pairs)

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, None, -2:] == self.pairs).all(-1).any(-1)


@hf_speculate.register_row_wise
class RowWiseEnd(EndsAtPair):
    """As EndsAtPair, declared pure."""


@pytest.mark.parametrize(
    ("kind", "eos", "options"),
    [
        ("stop_strings", None, {}),
        ("stop_strings", EOS_ID, {}),
        ("stop_strings", None, NO_DRAFT),
        (EndsAtPair, None, {}),
        (EndsAtPair, EOS_ID, NO_DRAFT),
        (RowWiseEnd, None, {}),
    ],
)
def test_what_follows_a_stop_is_in_no_result_whatever_the_batch(kind, eos, options, plain, tokenizer, tmp_path):
    """Without EOS, rows of a batch go on until the last one has stopped; with one, they are padded, here with EOS."""
    long = [(one, text) for one, (text, num, _) in zip(TEXTS, plain, strict=True) if len(text) == num == NUM_NEW][:4]
    texts = [one for one, _ in long]
    strings = [text[1 + 2 * place :][:2] for place, (_, text) in enumerate(long)]
    pairs = [[LETTERS.index(letter) for letter in string] for string in strings]
    stops = {"stop_strings": strings} if kind == "stop_strings" else {"stopping_criteria": [kind(*pairs)]}
    found = []
    for name, size in (("alone", 1), ("batch", 4)):
        own = {**stops, "eos_token_id": eos, "pad_token_id": EOS_ID, "batch_size": size, **options}
        (tmp_path / name).mkdir()
        _, output = decode(tmp_path / name, tokenizer, texts, **own)
        lines = [results_in(output)[place] for place in range(1, 5)]
        found.append([(line["text"], line["num_tokens"], line["finish_reason"]) for line in lines])
    assert found[0] == found[1]
    assert {reason for *_, reason in found[0]} == {"stop"}
    assert all(text.endswith(tuple(strings)) and len(text) == num_tokens for text, num_tokens, _ in found[0])
    assert len({num_tokens for _, num_tokens, _ in found[0]}) == 4


def test_none_for_eos_overrules_the_models(tokenizer, tmp_path):
    target = make_model("llama")
    target.generation_config.eos_token_id = [*range(64)]
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": None, "do_sample": False}
    hf_speculate.decode_dataset(target, tokenizer, TEXTS, tmp_path / "out.jsonl", **options)
    assert {line["num_tokens"] for line in results_in(tmp_path / "out.jsonl").values()} == {NUM_NEW}


def test_batches_hold_rows_of_like_length_the_longest_first(tokenizer, tmp_path):
    _, output = decode(tmp_path, tokenizer, static_batches=True)
    batches = begun_in(output)
    lens = [len(TEXTS[int(key) - 1]) for batch in batches for key in batch]
    assert list(map(len, batches)) == [4, 4, 3]
    assert lens == sorted(map(len, TEXTS), reverse=True)


def test_the_model_and_the_tokenizer_stay_as_they_are(plain, tmp_path):
    target, bare = make_model("llama"), letters_tokenizer(LETTERS)
    bare.padding_side = "right"
    options = {**COMMON, "assistant_model": pair("llama")[1], "pad_token_id": 0}
    hf_speculate.decode_dataset(target, bare, TEXTS, tmp_path / "out.jsonl", **options)
    assert not hf_speculate.is_enabled(target)
    assert (bare.padding_side, bare.pad_token) == ("right", None)
    found = results_in(tmp_path / "out.jsonl")
    assert [found[key]["num_tokens"] for key in range(1, 12)] == [num for _, num, _ in plain]


def test_an_ordered_output_is_in_the_order_of_the_prompts(tokenizer, tmp_path):
    _, output = decode(tmp_path, tokenizer)
    texts = texts_in(output)
    assert list(texts) != list(range(1, 12))
    report, _ = decode(tmp_path, tokenizer, is_ordered=True)
    assert list(texts_in(output)) == list(range(1, 12))
    assert texts_in(output) == texts
    assert (report.num_resumed, report.num_tokens) == (11, 0)


@pytest.mark.parametrize("num_bytes", [0, 1, 40, -1, None])
def test_what_is_finished_is_not_decoded_again(num_bytes, tokenizer, tmp_path):
    _, output = decode(tmp_path, tokenizer)
    whole = texts_in(output)
    output.write_bytes(output.read_bytes()[:num_bytes])  # as a kill in the middle of a write leaves it
    kept = [json.loads(line)["id"] for line in output.read_bytes().split(b"\n")[:-1]]
    num_begun = len(begun_in(output))
    report, _ = decode(tmp_path, tokenizer)
    again = [key for batch in begun_in(output)[num_begun:] for key in batch]
    assert texts_in(output) == whole
    assert sorted(again) == sorted(str(key) for key in set(whole) - set(kept))
    assert report.num_resumed == len(kept)


CHANGES = {"prompts": {"texts": [*TEXTS[:-1], "zzz"]}, "settings": {"num_assistant_tokens": 2}, "seed": {"seed": 5}}


@pytest.mark.parametrize("changed", CHANGES)
def test_what_was_begun_otherwise_is_refused_unless_told(changed, tokenizer, tmp_path):
    options = CHANGES[changed]
    _, output = decode(tmp_path, tokenizer, seed=4)
    before = output.read_bytes()
    options = {"seed": 4} | options
    words = {"prompts": "got other prompts", "settings": r"num_assistant_tokens \(2, was 3\)", "seed": r"\(5, was 4\)"}
    with pytest.raises(ConfigError, match=words[changed]):
        decode(tmp_path, tokenizer, **options)
    assert output.read_bytes() == before
    report, _ = decode(tmp_path, tokenizer, if_changed="keep", **options)
    assert (report.num_resumed, output.read_bytes()) == (11, before)
    decode(tmp_path, tokenizer, **options)  # it is now what the output was begun with
    _, again = decode(tmp_path, tokenizer, if_changed="restart", seed=4)
    assert texts_in(again) == {result["id"]: result["text"] for result in map(json.loads, before.splitlines())}
    begun = [key for keys in begun_in(output) for key in keys]
    assert sorted(begun) == sorted(map(str, range(1, 12)))


def test_more_prompts_are_added_when_told(tokenizer, tmp_path):
    decode(tmp_path, tokenizer, TEXTS[:5])
    report, output = decode(tmp_path, tokenizer, if_changed="keep", is_ordered=True)
    assert (report.num_resumed, report.num_finished) == (5, 11)
    assert list(texts_in(output)) == list(range(1, 12))


def test_settings_may_change_while_nothing_is_finished(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="at least one token, got none at prompt 2"):
        decode(tmp_path, tokenizer, ["bcd", ""])
    report, _ = decode(tmp_path, tokenizer, ["bcd", "e"], num_assistant_tokens=2)
    assert report.num_finished == 2


def test_foreign_outputs_are_left_alone(tokenizer, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text('{"id": 1}\n')
    for if_changed in ("refuse", "keep", "restart"):
        with pytest.raises(ConfigError, match="must be new or written by an earlier run"):
            decode(tmp_path, tokenizer, if_changed=if_changed)
    assert output.read_text() == '{"id": 1}\n'


def test_ids_without_a_prompt_are_refused(tokenizer, tmp_path):
    decode(tmp_path, tokenizer)
    with pytest.raises(ConfigError, match="must be ids of the prompts, got 10, 11;"):
        decode(tmp_path, tokenizer, TEXTS[:9], if_changed="keep")


def test_one_run_at_a_time(tokenizer, tmp_path):
    decode(tmp_path, tokenizer)
    lock = filelock.FileLock(tmp_path / "out.jsonl.run" / "lock")
    with lock, pytest.raises(ConfigError, match="one run at a time"):
        decode(tmp_path, tokenizer)
    decode(tmp_path, tokenizer)


def test_parts_of_ranks_that_were_killed_are_taken_in(tokenizer, tmp_path):
    _, output = decode(tmp_path, tokenizer)
    whole = texts_in(output)
    lines = output.read_bytes().splitlines(keepends=True)
    folder = tmp_path / "out.jsonl.run"
    output.write_bytes(b"".join(lines[:3]))
    (folder / "rank-0.jsonl").write_bytes(b"".join(lines[2:5]))  # line 2 had been moved, the file not yet removed
    (folder / "rank-3.jsonl").write_bytes(b"".join(lines[5:7]) + lines[7][:9])
    report, _ = decode(tmp_path, tokenizer)
    assert report.num_resumed == 7
    assert texts_in(output) == whole
    assert not list(folder.glob("rank-*"))


@pytest.mark.parametrize("way", [{"verifier": "coupled"}, {"verifier": "rejection"}, NO_DRAFT])
def test_a_drawn_text_follows_from_the_seed_and_the_id_alone(way, tokenizer, tmp_path):
    texts = [{"id": f"r{place}", "prompt": text} for place, text in enumerate(TEXTS)]
    found = []
    for order, batch_size, seed in ((texts, 4, 1), (texts[:2:-1], 1, 1), (texts[:4], 4, 2)):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        options = way | {"do_sample": True, "seed": seed, "batch_size": batch_size}
        found.append(texts_in(decode(folder, tokenizer, order, **options)[1]))
    whole, fewer, other = found
    assert fewer == {key: whole[key] for key in fewer}
    assert other != {key: whole[key] for key in other}


def test_a_seed_is_drawn_once_and_kept(tokenizer, tmp_path):
    options = {"do_sample": True, "verifier": "coupled"}
    _, output = decode(tmp_path, tokenizer, **options)
    whole = texts_in(output)
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:2]))
    decode(tmp_path, tokenizer, **options)
    assert texts_in(output) == whole
    other = tmp_path / "other"
    other.mkdir()
    assert texts_in(decode(other, tokenizer, **options)[1]) != whole


def test_row_seeds_are_fixed_for_ever():
    assert row_seed(0, "1") == 3373202220108974583
    assert len({row_seed(seed, str(key)) for seed in range(30) for key in range(30)}) == 900


def test_messages_go_through_the_chat_template(plain, tokenizer, tmp_path):
    tokenizer.chat_template = CHAT_TEMPLATE
    chats = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    _, as_messages = decode(tmp_path, tokenizer, chats)
    (tmp_path / "a").mkdir()
    _, as_chat = decode(tmp_path / "a", tokenizer, is_chat=True)
    (tmp_path / "b").mkdir()
    _, as_text = decode(tmp_path / "b", tokenizer, [f"{text}." for text in TEXTS])
    assert texts_in(as_messages) == texts_in(as_chat) == texts_in(as_text)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ""}, "at least one token, got none at prompt 12"),
        ({"messages": [{"role": "user", "content": "a"}]}, "must have a chat template for prompt 12"),
        ({"prompt": "a", "id": 3}, "ids must be unique, got '3' at prompt 3 and at prompt 12"),
    ],
)
def test_bad_rows_are_named_before_anything_is_decoded(row, message, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=message):
        decode(tmp_path, tokenizer, [*TEXTS, row])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 2.5}, "batch_size must be at least 1, got 2.5"),
        ({"seed": "x"}, "seed must be an int, got 'x'"),
        ({"if_changed": "perhaps"}, "if_changed must be one of keep, refuse, restart"),
        ({"max_length": 9}, "got max_length; leave it out"),
        ({"do_sample": True, "verifier": "rejection", "assistant_model": None}, "verifier must be 'coupled'"),
        ({"verifier": "nonsense"}, "verifier must be one of"),
    ],
)
def test_wrong_settings_are_said(options, message, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=message):
        decode(tmp_path, tokenizer, **options)


def test_a_batch_too_large_is_said_and_what_is_finished_stays(tokenizer, tmp_path, monkeypatch):
    target, _ = pair("llama")
    whole = type(target).generate
    calls = []

    def runs_out(model, **arguments):
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("none left")
        return whole(model, **arguments)

    monkeypatch.setattr(type(target), "generate", runs_out)
    with pytest.raises(ConfigError, match="a batch must fit into memory, got 4 rows"):
        decode(tmp_path, tokenizer, static_batches=True)
    monkeypatch.undo()
    report, output = decode(tmp_path, tokenizer, batch_size=2)
    assert report.num_resumed == 4
    assert len(results_in(output)) == 11
