"""The hidden states that a drafter is handed are those of plain forwards, layer by layer."""

import torch

import hf_speculate
from hf_speculate.types import DraftOut
from tests.cases import each_value
from tests.draft.heads.designs import NUM_TARGET_LAYERS, TARGET_WIDTH, VOCAB_SIZE
from tests.draft.heads.rounds import states_of
from tests.tiny import make_model, ragged_prompts

LAYERS = (0, 4, NUM_TARGET_LAYERS, -1)
TOLERANCE = 1e-9


class Reader:
    """Writes down the states that it is handed, and drafts the newest token again."""

    hidden_layers = LAYERS

    def __init__(self, setup):
        self.pads, self.texts, self.states = list(setup.num_pads), [], []

    def project_states(self, states):
        return states.roll(1, dims=-1)

    def draft(self, request):
        query_token_ids, num_draft_tokens, kept = request.query_token_ids, request.num_draft_tokens, request.kept
        if not self.texts:
            self.texts = [row[pad:][:1] for row, pad in zip(query_token_ids.tolist(), self.pads, strict=True)]
            self.states = [[] for _ in self.texts]
            self.live = list(range(len(self.texts)))
        for index, count in enumerate(kept.num_emitted.tolist()):
            self.texts[self.live[index]] += kept.token_ids[index, :count].tolist()
            self.states[self.live[index]].append(kept.hidden_states[index, :count])
        ids = query_token_ids[:, -1:].expand(-1, num_draft_tokens)
        return DraftOut(ids, torch.full((len(ids),), num_draft_tokens, dtype=torch.int32), None, None)

    def rows(self, indices):
        self.live = [self.live[index] for index in indices]


@each_value(cache=["dynamic", "preallocated"], options=[{}, {"prefill_chunk_size": 3}])
def test_states_are_those_of_plain_forwards(cache, options):
    target = make_model("llama", vocab_size=VOCAB_SIZE, hidden_size=TARGET_WIDTH, num_hidden_layers=NUM_TARGET_LAYERS)
    target, made = hf_speculate.enable(target), []

    def factory(setup):
        made.append(Reader(setup))
        return made[0]

    inputs = ragged_prompts(3, seed=1, vocab_size=VOCAB_SIZE)
    options = {**options, "drafter": factory, "num_assistant_tokens": 2, "speculation_cache": cache}
    target.generate(**inputs, max_new_tokens=10, **options)
    for text, states in zip(made[0].texts, made[0].states, strict=True):
        expected = states_of(target, text[:-1], LAYERS).roll(1, dims=-1)
        torch.testing.assert_close(torch.cat(states), expected, rtol=0, atol=TOLERANCE)
    before, after = expected.roll(-1, dims=-1)[:, -2 * TARGET_WIDTH :].split(TARGET_WIDTH, dim=-1)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(target.model.norm(before), after)
