"""What all kinds of heads share: what was drafted leaves no trace, logits processors, and the ends of rows."""

import pytest
import torch

from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.types import SampleStrategy
from tests.draft.heads.designs import VOCAB_SIZE
from tests.draft.heads.kinds import KINDS
from tests.draft.heads.rounds import PAD, BySum, Rounds, random_texts

K = 3
TOLERANCE = 1e-5  # MTP and PARD run transformers' layers, whose norms are in float32
LONG = 530  # tokens, more than a head reads in one forward


@pytest.fixture(scope="module", params=KINDS)
def loaded(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("head"))


def test_a_text_that_is_read_in_pieces_drafts_as_one_that_is_read_at_once(loaded):
    """Whatever was drafted between, and after a row has left."""
    head, target = loaded
    texts = random_texts([LONG, 30, 40], seed=4)
    pieces = Rounds(head, target, [text[:20] for text in texts])
    for end in (21, LONG // 2, LONG):
        pieces.draft(K)
        pieces.texts = [text[:end] for text in texts]
        if end == 21:
            pieces.rows([2, 0])
            texts = [texts[2], texts[0]]
    at_once = Rounds(head, target, texts)
    at_once.num_rounds = pieces.num_rounds  # the noise is of the round
    ours, theirs = (one.draft(K, SampleStrategy.RANDOM, seeds=[2, 0]) for one in (at_once, pieces))
    torch.testing.assert_close(ours.token_logits, theirs.token_logits, rtol=0, atol=TOLERANCE)


def test_processors_see_the_text_and_the_drafts_before(loaded):
    """Over rounds in which drafts are refused, and after a row has left."""
    head, target = loaded
    rounds = Rounds(head, target, random_texts([6, 4, 9], seed=6), processors=BlockLogitsProcessorList([BySum()]))
    for number, accepted in enumerate([(0, 2, 1), (1, 0), (1, 2)]):
        draft = rounds.draft(2, SampleStrategy.RANDOM, seeds=range(len(accepted)))
        for text, num_pads, ids in zip(rounds.texts, rounds.pads, draft.token_ids.tolist(), strict=True):
            read = sum(text) + len(text) + num_pads * (PAD + 1)
            assert ids == [read % VOCAB_SIZE, (read + read % VOCAB_SIZE + 1) % VOCAB_SIZE]
        rounds.accept(draft, accepted, seed=number)
        if number == 0:
            rounds.rows([0, 2])


@pytest.mark.parametrize("strategy", SampleStrategy)
def test_drafts_end_with_what_ends_a_row(loaded, strategy):
    head, target = loaded
    texts = random_texts([6, 4, 9], seed=7)
    whole = Rounds(head, target, texts).draft(K, strategy)
    ends = int(whole.token_ids[1, 1])
    draft = Rounds(head, target, texts, eos_token_ids=frozenset({ends})).draft(K, strategy)
    for row, ids in enumerate(whole.token_ids.tolist()):
        expected = ids.index(ends) + 1 if ends in ids else K
        assert draft.lens[row] == expected
        assert draft.token_ids[row, :expected].tolist() == ids[:expected]
