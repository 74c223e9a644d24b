"""A greedy text that leaves plain decoding's is a near tie or wrong, and both are said."""

import pytest
import torch

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.equality import Compared, TextCheck
from hf_speculate.tools.bench.measuring import Run
from hf_speculate.tools.bench.methods import DraftLen, Method
from tests.tiny import make_model, ragged_prompts

NUM_NEW = 10
METHODS = [
    Method("ours", "ours", {"verifier": "greedy", **DraftLen(3, False).fields}),
    Method("theirs", "transformers", DraftLen(3, False).fields),
]


def stats():
    found = SpeculationStats()
    found.add_draft_len(3)
    return found


@pytest.fixture(scope="module")
def batch():
    inputs = ragged_prompts(3, seed=4)
    return Batch(0, inputs["input_ids"], inputs["attention_mask"])


def plain_texts(model, batch):
    output = model.generate(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=NUM_NEW, do_sample=False
    )
    return output[:, batch.input_ids.shape[1] :].tolist()


def check_of(model):
    return TextCheck(Decoder(model, {}, max_new_tokens=NUM_NEW))


def compare(model, method, batch, plain, texts):
    run = Run(0, 0, 1.0, texts, stats() if method.engine == "ours" else None)
    return check_of(model)(method, [run], [Run(0, 0, 1.0, plain, None)], {0: batch})


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.engine)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_another_token_is_wrong(method, dtype, batch):
    model = make_model("llama", dtype=dtype)
    plain = plain_texts(model, batch)
    assert compare(model, method, batch, plain, plain) == Compared(num_equal=3)
    least = [list(text) for text in plain]
    logits = model(input_ids=torch.cat([batch.rows[1], torch.tensor(plain[1][:4])])[None]).logits[0, -1]
    least[1][4] = int(logits.argmin())
    found = compare(model, method, batch, plain, least)
    assert found == Compared(num_equal=2, num_wrong=1)
    assert not found.ok
    assert str(found) == "2 of 3 rows equal, 1 differ"


def test_a_row_that_ends_elsewhere_is_wrong(batch):
    model = make_model("llama")
    plain = plain_texts(model, batch)
    cut = [plain[0], plain[1][:5], plain[2]]
    assert compare(model, METHODS[0], batch, plain, cut) == Compared(num_equal=2, num_wrong=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_token_that_ties_is_a_near_tie(dtype, batch):
    model = make_model("llama", dtype=dtype)
    plain = plain_texts(model, batch)
    row = next(row for row, text in enumerate(plain) if len(set(text)) > 1)
    seen = {one for text in plain for one in text}
    best, twin = plain[row][0], next(one for one in range(1, 64) if one not in seen)
    head = model.get_output_embeddings().weight
    head[twin] = head[best]  # as likely wherever the best token is
    plain = plain_texts(model, batch)
    assert plain[row][0] in (best, twin)
    other = [list(text) for text in plain]
    other[row][0] = twin if plain[row][0] == best else best
    found = compare(model, METHODS[0], batch, plain, other)
    assert found == Compared(num_equal=2, num_ties=1)
    assert found.ok
    assert str(found) == "2 of 3 rows equal, 1 differ at a near-tie"


def test_every_call_is_compared_with_plain_decoding_at_the_same_time(batch):
    model = make_model("llama")
    plain = plain_texts(model, batch)
    runs = [Run(0, repeat, 1.0, plain, stats()) for repeat in (0, 1)]
    others = [Run(0, 1, 1.0, plain, None), Run(0, 0, 1.0, plain, None)]
    assert check_of(model)(METHODS[0], runs, others, {0: batch}) == Compared(num_equal=6)
