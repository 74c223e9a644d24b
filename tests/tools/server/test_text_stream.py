"""Pieces of a text are final."""

from hf_speculate.tools.server.text_stream import TextStream
from tests.tiny_tokenizers import byte_level_tokenizer


def test_pieces_hold_whole_characters_and_no_beginning_of_a_stop_string():
    tokenizer = byte_level_tokenizer(["st"])
    stops, text = ["stop", "zz"], ""
    stream = TextStream(tokenizer, stops)
    whole = "naïve s sto 日本 stip stop, and more"
    for token_id in tokenizer(whole)["input_ids"]:
        text += stream.add([token_id])
        assert whole.startswith(text)
        assert not any(text.endswith(stop[:num]) for stop in stops for num in range(1, len(stop)))
    assert text + stream.end() == "naïve s sto 日本 stip "
    assert stream.is_cut


def test_pieces_give_at_the_end_what_they_held():
    tokenizer = byte_level_tokenizer([])
    stream = TextStream(tokenizer, ["stop"])
    assert "".join(stream.add([token_id]) for token_id in tokenizer("a sto")["input_ids"]) == "a "
    assert stream.end() == "sto"
    assert not stream.is_cut
