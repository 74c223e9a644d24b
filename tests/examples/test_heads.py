"""Test the draft heads of the examples: their drafts with and without a cache, and training."""

import functools

import pytest
import torch

import hf_speculate
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.options.heads.network import TargetParts
from hf_speculate.types import SampleStrategy
from tests.cases import assert_equal_ids
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value
from tests.options.heads.designs import DFLASH, DFLASH2, EAGLE3, make_weights, write_speculators
from tests.options.heads.rounds import Rounds, random_texts, states_of, target_of
from tests.options.heads.test_against_reference import reference_of
from tests.support.tiny import make_model, make_small_model, ragged_prompts

MIN_LENGTHS = {"eagle3": 3.0, "dflash": 2.0, "dflash2": 2.0}  # mean acceptance lengths at K = 5
NUM_STEPS = 4
TOLERANCE = 1e-9


def test_rollout_gives_the_logits_of_drafts(import_example, tmp_path):
    rollout, target = import_example("training.eagle3.rollout").rollout, target_of()
    head = load_drafter(write_speculators(tmp_path, EAGLE3, make_weights(EAGLE3)), target)
    for text in random_texts([5, 9], seed=3):
        draft = Rounds(head, target, [text]).draft(NUM_STEPS, SampleStrategy.RANDOM)
        ids = torch.tensor([text + draft.token_ids[0].tolist()])
        states = states_of(target, text[:-1], EAGLE3.aux_layers)
        # States after the newest token are not read.
        states = torch.nn.functional.pad(states, (0, 0, 0, NUM_STEPS))[None]
        states_seen = rollout(
            head.network, target.get_input_embeddings().weight, ids, states, NUM_STEPS
        )
        for step, logits in enumerate(states_seen):
            expected = draft.token_logits[0, step, list(EAGLE3.draft_ids)]
            torch.testing.assert_close(logits[0, len(text) - 2], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "design", [DFLASH, DFLASH2.with_options(selector_top_k=32)], ids=["DFlash", "DFlash 2"]
)
def test_blocks_give_the_logits_of_drafts(import_example, design, tmp_path):
    blocks, target = import_example("training.dflash.blocks"), target_of()
    head = load_drafter(write_speculators(tmp_path, design, make_weights(design)), target)
    parts = TargetParts(target, head.network.vocabulary, target.device, target.dtype)
    texts, starts = torch.tensor(random_texts([12, 12], seed=3)), torch.tensor([[3, 7], [6, 2]])
    states = torch.stack([states_of(target, text, design.aux_layers) for text in texts.tolist()])
    found = blocks.block_logits(head.network, parts, texts, states, starts)
    reference = reference_of(design, make_weights(design), target)
    for block, start in enumerate(starts.flatten().tolist()):
        row = texts[block // starts.shape[1]].tolist()
        text, drafted = row[: start + 1], row[start + 1 :]
        expected = reference.logits(
            text, states_of(target, text[:-1], design.aux_layers), drafted, NUM_STEPS
        )
        torch.testing.assert_close(found.selected[block], expected, rtol=0, atol=TOLERANCE)
        assert (found.parallel is found.selected) == (design is DFLASH)


@pytest.mark.parametrize("name", MIN_LENGTHS)
def test_saved_heads_draft_long_greedy_texts(import_example, name):
    measure, models = import_example("training.measure_eagle3"), import_example("models")
    target = measure.load_model(models.PAIR / "target", torch.float32, "cpu")
    head, stats = load_drafter(models.EAGLE3.parent / name, target), hf_speculate.SpeculationStats()
    tokenizer = measure.load_tokenizer(models.PAIR / "target")
    inputs = tokenizer(models.read_questions(measure.PROMPTS, 8), return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")} | {
        "max_new_tokens": 48
    }
    plain = target.generate(**inputs, do_sample=False)
    options = {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "speculation_stats": stats,
    }
    assert_equal_ids(
        plain,
        hf_speculate.generate(target, **inputs, assistant_model=head, do_sample=False, **options),
    )
    assert stats.mean_acceptance_length > MIN_LENGTHS[name]


AUX_LAYERS = [1, 2]
K = 3


def make_head(import_example, target, draft_ids):
    """Make a random head that drafts the ids in `draft_ids`."""
    torch.manual_seed(1)
    head = import_example("smollm2_head.head").DraftHead(
        target.config, AUX_LAYERS, draft_ids, target
    )
    head = head.to(target.dtype).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.5)
    return head


@pytest.fixture(scope="module")
def target():
    return hf_speculate.enable(make_model("llama", num_hidden_layers=3))


def drafted_without_cache(head, target, text, num_tokens):
    """Return the greedy draft after `text`, recomputing attention in every step.

    Outputs of the head replace later states.
    """
    states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    # [1, N, D]
    states = head.project(torch.cat([states[layer] for layer in head.hidden_layers], dim=-1))
    ids = list(text[1:])
    for _ in range(num_tokens):
        for count in range(states.shape[1], len(ids) + 1):
            heads, residual = head.attend_from(
                torch.tensor([ids[:count]]), states, head.turns(torch.arange(count)[None])
            )
            groups = heads.query.shape[1] // heads.key.shape[1]
            key, value = (part.repeat_interleave(groups, 1) for part in (heads.key, heads.value))
            mixed = torch.nn.functional.scaled_dot_product_attention(
                heads.query, key, value, is_causal=True
            )
            output = head.finish(residual, mixed)[:, -1:]
            states = torch.cat([states, output], dim=1) if count < len(ids) else states
        ids.append(int(head.target_ids[head.logits(output[:, 0])[0].argmax()]))
    return ids[-num_tokens:]


@pytest.mark.parametrize(("confidence", "lens"), [(0.0, {K}), (0.1, {1, K})])
def test_drafts_equal_a_forward_without_a_cache(import_example, target, confidence, lens):
    head = make_head(import_example, target, torch.arange(0, 64, 2))
    inputs, seen = ragged_prompts(3, seed=4), []
    eos = int(target.generate(**inputs, max_new_tokens=6)[0, -1])  # one row ends early

    class Recording(import_example("smollm2_head.drafter").HeadDrafter):
        def draft(self, request):
            draft = super().draft(request)
            texts = [row.token_ids for row in self.lookup.texts]
            seen.extend(
                (list(text), ids[:num])
                for text, ids, num in zip(texts, draft.token_ids.tolist(), draft.lens, strict=True)
            )
            return draft

        def _copies(self, num_draft_tokens):
            return [[]] * len(self.lookup.texts)

    options = {"max_new_tokens": 24, "eos_token_id": eos}
    drafter = functools.partial(Recording, head, confidence=confidence, copies=True)
    ours = target.generate(**inputs, **options, drafter=drafter, num_assistant_tokens=K)
    assert_equal_ids(target.generate(**inputs, **options), ours)
    assert len(seen) > 12
    assert {len(ids) for _, ids in seen} >= lens
    for text, ids in seen:
        assert (
            not ids
            or eos in text[-K:]
            or ids == drafted_without_cache(head, target, text, len(ids))
        )


def test_sampled_tokens_keep_the_targets_distribution(import_example):
    model = hf_speculate.enable(make_small_model(8, num_hidden_layers=3, dtype=torch.float32))
    head = make_head(import_example, model, torch.tensor([0, 2, 3, 5, 6]))
    stats = hf_speculate.SpeculationStats()
    drafter = functools.partial(
        import_example("smollm2_head.drafter").HeadDrafter, head, confidence=0.4, copies=True
    )
    options = {
        "drafter": drafter,
        "verifier": "rejection",
        "num_assistant_tokens": 2,
        "speculation_stats": stats,
    }
    counts = draw(model, None, 20_000, **options)
    assert p_value(counts, joint_distribution(model)) > SIGNIFICANCE
    assert 0 < stats.num_accepted < stats.num_drafted
