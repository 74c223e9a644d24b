"""Test that a head drafts for the current state of the target in the call."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_speculate
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.options.heads.network import TargetParts
from hf_speculate.types import SampleStrategy
from tests.cases import assert_decodes_as_plain, each_value
from tests.options.heads.designs import (
    DFLASH,
    DSPARK,
    EAGLE3,
    MTP,
    PEAGLE,
    VOCAB_SIZE,
    make_weights,
    write_speculators,
)
from tests.options.heads.kinds import KINDS
from tests.options.heads.reference import Reference
from tests.options.heads.rounds import Rounds, random_texts, target_of
from tests.support.gpu_rounds import counted, on_gpu
from tests.support.tiny import make_model, ragged_prompts

K = 3
TOLERANCE = 1e-5  # MTP and PARD run layers of transformers, which compute norms in float32


def with_embeddings(target):
    target.set_input_embeddings(random_like(target.get_input_embeddings()))


def with_tables(target):
    target.set_output_embeddings(random_like(target.get_output_embeddings()))
    with_embeddings(target)


def with_tied_tables(target):
    target.config.get_text_config(decoder=True).tie_word_embeddings = True
    target.tie_weights()
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight


def with_rotary(target):
    decoder = target.get_decoder()
    decoder.rotary_emb = copy.deepcopy(decoder.rotary_emb)
    decoder.rotary_emb.inv_freq *= 0.5


def random_like(module):
    copied = copy.deepcopy(module)
    nn.init.normal_(copied.weight, generator=torch.Generator().manual_seed(8))
    return copied


CHANGES: dict[str, Callable] = {
    "embeddings": with_embeddings,
    "tables": with_tables,
    "tied": with_tied_tables,
    "rotary": with_rotary,
    "longer": lambda target: target.resize_token_embeddings(VOCAB_SIZE + 8),
    "padded": lambda target: target.resize_token_embeddings(VOCAB_SIZE, pad_to_multiple_of=64),
    "shorter": lambda target: target.resize_token_embeddings(VOCAB_SIZE - 4),
    "float32": lambda target: target.to(torch.float32),
}


CHECKPOINT = "MTP, two layers of a checkpoint"  # these run as modules of transformers
# Every change is tested with the layers of a checkpoint and, in turn, with other kinds of heads.
OTHERS = [name for name in KINDS if name != CHECKPOINT]
PAIRS = [(CHECKPOINT, change) for change in CHANGES]
PAIRS += [(name, change) for change, name in zip(CHANGES, OTHERS * 2, strict=False)]
PAIRS += [(name, "embeddings") for name in OTHERS[1:]]


@pytest.fixture(scope="module")
def load_kind(tmp_path_factory):
    """Return a function that makes a head by kind, its target, and a function to reload it."""

    @functools.cache
    def load(name):
        folder = tmp_path_factory.mktemp("head")
        return *KINDS[name](folder), functools.partial(load_drafter, folder, dtype=torch.float64)

    return load


def draft_of(rounds):
    return rounds.draft(K, SampleStrategy.RANDOM).token_logits


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:the draft head .* vocabulary")
@pytest.mark.parametrize(("kind", "change"), PAIRS)
def test_drafts_equal_a_head_loaded_for_the_changed_target(kind, change, load_kind):
    head, target, load = load_kind(kind)
    changed = copy.deepcopy(target)
    CHANGES[change](changed)
    texts = random_texts([9, 5], seed=2, vocab_size=VOCAB_SIZE - 4)
    ours, others, theirs = (
        Rounds(head, changed, texts),
        Rounds(head, target, texts),
        Rounds(load(changed), changed, texts),
    )
    expected = draft_of(Rounds(load(target), target, texts))
    assert_same(draft_of(ours), draft_of(theirs))
    # A call with another target in between changes nothing.
    assert_same(draft_of(others), expected)


@pytest.mark.filterwarnings("ignore:the draft head .* vocabulary")
@each_value(kind=KINDS, size=[VOCAB_SIZE + 8, VOCAB_SIZE - 4])
def test_text_equals_plain_after_a_vocabulary_change(kind, size, load_kind):
    head, target, _ = load_kind(kind)
    changed = hf_speculate.enable(copy.deepcopy(target))
    changed.resize_token_embeddings(size)
    inputs = ragged_prompts(2, seed=3, vocab_size=size)
    stats = assert_decodes_as_plain(
        changed, head, inputs, max_new_tokens=12, num_assistant_tokens=K
    )
    assert max(stats.rounds_by_draft_len) == K


@pytest.mark.fallback("no graphs")  # the test model has hooks
@pytest.mark.parametrize("kind", ["DFlash", CHECKPOINT])
def test_head_stays_on_its_device_while_the_target_moves(kind, load_kind):
    pytest.importorskip("triton", reason="the simulated device needs Triton")
    head, target, _ = load_kind(kind)
    moved, inputs = (
        hf_speculate.enable(copy.deepcopy(target)),
        ragged_prompts(2, seed=3, vocab_size=VOCAB_SIZE),
    )
    options = {
        "max_new_tokens": 8,
        "num_assistant_tokens": K,
        "verifier_backend": "torch",
        "assistant_model": head,
    }
    texts, counts = [moved.generate(**inputs, **options)], hf_speculate.SpeculationStats()
    with counted(moved, None):
        texts.append(moved.generate(**on_gpu(inputs), **options, speculation_stats=counts).cpu())
    assert torch.equal(*texts)
    assert counts.num_drafted > 0


SIZED = {
    "EAGLE-3": EAGLE3,
    "EAGLE-3, own embeddings": replace(EAGLE3, has_embeddings=True),
    "P-EAGLE": PEAGLE,
    "another width": replace(EAGLE3, hidden_size=16, draft_ids=None),
    "DFlash": DFLASH,
    "DSpark": DSPARK,
    "DSpark, some ids": replace(DSPARK, draft_ids=EAGLE3.draft_ids),
    "MTP": MTP,
}


@pytest.mark.parametrize("strategy", SampleStrategy)
@pytest.mark.parametrize("size", [VOCAB_SIZE + 8, VOCAB_SIZE - 4])
@pytest.mark.parametrize("name", SIZED)
def test_ids_missing_on_one_side_are_not_drafted(name, size, strategy, tmp_path):
    """Feed a head its last id for ids that it lacks; no id that the target lacks is proposed."""
    design, target = SIZED[name], copy.deepcopy(target_of())
    target.resize_token_embeddings(size)
    weights = make_weights(design)
    if "lm_head.weight" in weights:
        weights["lm_head.weight"][-1] *= 9  # chosen wherever possible
    with pytest.warns(
        UserWarning,
        match=f"vocabulary has 32 tokens, and the target's {size}; ids are taken to mean",
    ):
        head = load_drafter(write_speculators(tmp_path, design, weights), target)
    reference = Reference(
        design, weights, target.get_input_embeddings().weight, target.get_output_embeddings().weight
    )
    rounds = Rounds(
        head, target, [[*text, size - 1] for text in random_texts([7, 3], seed=1, vocab_size=size)]
    )
    shares_head = "lm_head.weight" not in weights and "markov_head.markov_w2.weight" not in weights
    ids = list(design.draft_ids or range(size if shares_head else VOCAB_SIZE))
    ids = [token for token in ids if token < size]
    for accepted in ((2, 0), (0, 1)):
        draft = rounds.draft(K, strategy)
        for row, text in enumerate(rounds.texts):
            drafted = draft.token_ids[row].tolist()
            logits = reference.logits(text, rounds.states(row), drafted, K)[:, : len(ids)]
            expected = torch.full((K, size), -torch.inf, dtype=torch.float64)
            expected[:, ids] = logits
            if strategy is SampleStrategy.GREEDY:
                assert drafted == expected.argmax(-1).tolist()
            else:
                assert_same(draft.token_logits[row], expected)
        rounds.accept(draft, accepted, seed=1)


def test_target_of_another_shape_is_refused(tmp_path):
    head = load_drafter(
        write_speculators(tmp_path / "a", DFLASH, make_weights(DFLASH)), target_of()
    )
    for fields, message in (
        (
            {"vocab_size": VOCAB_SIZE + 1025},
            "32 tokens, and the target's 1057, more than 1,024 apart",
        ),
        ({"vocab_size": 3}, "it looks up token 3, and the target has 3"),
        ({"num_hidden_layers": 7}, "it was loaded for 6 layers, and the target has 7"),
        ({"hidden_size": 32}, "it reads states of width 24, and the target's are 32"),
    ):
        other = copy.deepcopy(target_of())
        other.config.update(fields)
        with pytest.raises(
            UnsupportedModelError, match=f"must fit its target LlamaForCausalLM.*{message}"
        ):
            Rounds(head, other, [[1, 2]])
    longest = DFLASH.with_options(mask_token_id=VOCAB_SIZE - 1)
    folder, short = (
        write_speculators(tmp_path / "b", longest, make_weights(longest)),
        copy.deepcopy(target_of()),
    )
    short.resize_token_embeddings(VOCAB_SIZE - 4)
    with (
        pytest.warns(UserWarning, match="ids are taken to mean"),
        pytest.raises(UnsupportedModelError, match="it looks up token 31, and the target has 28"),
    ):
        load_drafter(folder, short)


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_embeddings_follow_the_scale_of_the_family(is_wrapped, is_scaled):
    """Use Gemma's scaled embeddings, including ones with an adapter."""
    target = copy.deepcopy(make_model("gemma3"))
    config = LoraConfig(
        target_modules=["embed_tokens"] if is_wrapped else ["q_proj"], init_lora_weights=False
    )
    wrapped = get_peft_model(target, config).eval().to(torch.float64)
    base, ids = wrapped.get_base_model(), torch.arange(9)
    parts = TargetParts(base, DraftVocabulary(64), torch.device("cpu"), torch.float64)
    found = parts.embedded(ids, is_scaled)
    merged = copy.deepcopy(wrapped).merge_and_unload().get_input_embeddings()
    expected = merged(ids) if is_scaled else merged.weight[ids]
    assert isinstance(base.get_input_embeddings(), nn.Embedding) != is_wrapped
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


class Packed(nn.Module):
    """Linear layer or embedding table stored in 8 bits that computes in float64."""

    def __init__(self, module, stored=torch.uint8, has_weight=True):
        super().__init__()
        codes = (module.weight * 16 + 128).round().clamp(0, 255)
        self.codes = codes.to(torch.uint8) if stored is torch.uint8 else (codes - 128).to(stored)
        self.zero = 128 if stored is torch.uint8 else 0
        self.is_table = isinstance(module, nn.Embedding)
        if has_weight:
            self.weight = nn.Parameter(self.codes, requires_grad=False)

    def dequantised(self):
        return (self.codes.to(torch.float64) - self.zero) / 16

    def forward(self, inputs):
        assert inputs.dtype == (torch.int64 if self.is_table else torch.float64)
        read = nn.functional.embedding if self.is_table else nn.functional.linear
        return read(inputs, self.dequantised())


def with_plain_weights(target):
    """Return the target with unpacked embedding tables."""
    copied = copy.deepcopy(target_of())
    for name in ("input", "output"):
        table = getattr(copied, f"get_{name}_embeddings")()
        table.weight.copy_(getattr(target, f"get_{name}_embeddings")().dequantised())
    return copied


FORMATS = [
    (torch.uint8, True),
    (torch.int8, True),
    (torch.float8_e4m3fn, True),
    (torch.uint8, False),
]


@each_value(kind=[name for name in KINDS if name not in ("PARD", CHECKPOINT)], stored=FORMATS)
def test_quantised_tables_draft_as_their_plain_weights(kind, stored, load_kind):
    head, target, _ = load_kind(kind)
    packed = copy.deepcopy(target)
    packed.set_input_embeddings(Packed(target.get_input_embeddings(), *stored))
    packed.set_output_embeddings(Packed(target.get_output_embeddings(), *stored))
    texts = random_texts([9, 5], seed=2)
    plain = with_plain_weights(packed)
    assert_same(draft_of(Rounds(head, packed, texts)), draft_of(Rounds(head, plain, texts)))
    stats = assert_decodes_as_plain(
        hf_speculate.enable(packed),
        head,
        ragged_prompts(2, vocab_size=VOCAB_SIZE),
        max_new_tokens=8,
    )
    assert stats.num_drafted > 0


def test_head_has_the_compute_dtype_of_a_quantised_target(load_kind):
    _, target, load = load_kind("EAGLE-3")
    packed = copy.deepcopy(target)
    packed.set_input_embeddings(Packed(target.get_input_embeddings(), torch.float8_e4m3fn))
    head = load_drafter(load.args[0], packed)
    assert packed.dtype == torch.float8_e4m3fn
    assert head.dtype == torch.float64


@pytest.mark.bitsandbytes
@pytest.mark.parametrize("layer", ["Linear4bit", "Linear8bitLt"])
def test_bitsandbytes_lm_head_is_shared(layer, tmp_path):
    layers = pytest.importorskip("bitsandbytes").nn
    target = target_of(torch.float32)
    folder = write_speculators(tmp_path, DFLASH, make_weights(DFLASH))
    packed, before = copy.deepcopy(target), target.get_output_embeddings()
    head = getattr(layers, layer)(before.in_features, before.out_features, bias=False)
    head.load_state_dict(before.state_dict())
    packed.set_output_embeddings(head.to("cpu"))
    ours = draft_of(Rounds(load_drafter(folder, packed), packed, random_texts([9], seed=2)))
    plain = draft_of(Rounds(load_drafter(folder, target), target, random_texts([9], seed=2)))
    gaps = [(logits - plain).norm() / plain.norm() for logits in (ours, ours.roll(1, -1))]
    assert gaps[0] < 0.2 < gaps[1]  # rounded weights stay below the threshold, wrong states do not


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["EAGLE-3", "DFlash", CHECKPOINT])
def test_drafts_are_unchanged_by_offloading_the_target(kind, place, load_kind, tmp_path):
    head, target, load = load_kind(kind)
    offloaded = copy.deepcopy(target)
    accelerate.cpu_offload(offloaded) if place == "cpu" else accelerate.disk_offload(
        offloaded, tmp_path
    )
    assert offloaded.get_output_embeddings().weight.is_meta
    texts = random_texts([9, 5], seed=2)
    ours = Rounds(load(offloaded), offloaded, texts)
    assert_same(draft_of(ours), draft_of(Rounds(head, target, texts)))
    inputs = ragged_prompts(2, vocab_size=VOCAB_SIZE)
    assert (
        assert_decodes_as_plain(
            hf_speculate.enable(offloaded), head, inputs, max_new_tokens=8
        ).num_drafted
        > 0
    )


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("has_buffers", [True, False])
def test_offloaded_embeddings_follow_the_scale_of_the_family(has_buffers, is_scaled):
    target, ids = copy.deepcopy(make_model("gemma3")), torch.arange(9)
    table = target.get_input_embeddings()
    expected = table(ids) if is_scaled else table.weight[ids]
    accelerate.cpu_offload(target, offload_buffers=has_buffers)
    parts = TargetParts(target, DraftVocabulary(64), torch.device("cpu"), torch.float64)
    torch.testing.assert_close(parts.embedded(ids, is_scaled), expected, rtol=0, atol=0)
    assert table.weight.is_meta


ADAPTERS = {
    "LoRA": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "saved modules": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "trained tokens": {"target_modules": ["o_proj"], "trainable_token_indices": [1, 2, 5]},
}


@pytest.mark.parametrize("kind", ["EAGLE-3", "DFlash", CHECKPOINT])
@pytest.mark.parametrize("name", ADAPTERS)
def test_drafts_follow_the_active_adapter(kind, name, load_kind):
    head, target, load = load_kind(kind)
    wrapped = get_peft_model(
        copy.deepcopy(target), LoraConfig(**ADAPTERS[name], init_lora_weights=False), "a"
    )
    wrapped.add_adapter("b", LoraConfig(**ADAPTERS[name], init_lora_weights=False))
    wrapped.eval().to(torch.float64)
    for weight_name, weight in wrapped.named_parameters():
        if ".b" in weight_name:
            nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(4))
    wrapped.set_adapter("b")
    texts = [[1, 2, 5, 7, 1], [5, 3, 2]]
    merged = copy.deepcopy(wrapped).merge_and_unload()
    ours = draft_of(Rounds(head, wrapped.get_base_model(), texts))
    assert_same(ours, draft_of(Rounds(load(merged), merged, texts)))
    assert_same(ours, draft_of(Rounds(load(wrapped), wrapped.get_base_model(), texts)))
    assert not torch.allclose(ours, draft_of(Rounds(head, target, texts)))
