"""Pipelines of speech and of images decode with a draft, for one input and for batches."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaProcessor, WhisperFeatureExtractor, WhisperTokenizer, pipeline

import hf_speculate
from tests.tiny import noisy_copy
from tests.tiny_encoders import NUM_FRAMES, NUM_MEL_BINS, decoder_of, make_llava, make_whisper, text_draft
from tests.tiny_tokenizers import letters_tokenizer

HOP_LEN = 160
SAMPLING_RATE = NUM_FRAMES * HOP_LEN  # a window lasts a second
NO_TIMES_ID = 49
# Fields, with the least and the largest share of judged tokens that stays. A strict typical bound keeps nothing, so
# that its text is plain decoding's as well; a loose one keeps all.
GREEDY = {"verifier": "greedy"}, 0.01, 1.0
STRICT = {"verifier": "typical", "posterior_threshold": 1 - 1e-9, "posterior_alpha": 1e9}, 0.0, 0.0
LOOSE = {"verifier": "typical", "posterior_threshold": 1e-9}, 1.0, 1.0
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"


def speech_tokenizer() -> WhisperTokenizer:
    tokens = ["<|pad|>", "<|startoftranscript|>", "<|endoftext|>", *LETTERS[: NO_TIMES_ID - 3], "<|notimestamps|>"]
    tokens += [f"<|{0.02 * step:.2f}|>" for step in range(64 - len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    return WhisperTokenizer(vocab=vocab, merges=[], pad_token="<|pad|>")


@pytest.fixture(scope="module", params=["whisper", "decoder only"])
def transcribers(request):
    target = make_whisper()
    draft = noisy_copy(make_whisper(), 0.01)
    draft = decoder_of(draft) if request.param == "decoder only" else draft
    extractor = WhisperFeatureExtractor(
        feature_size=NUM_MEL_BINS, sampling_rate=SAMPLING_RATE, hop_length=HOP_LEN, chunk_length=1, n_fft=512
    )
    make = {
        "task": "automatic-speech-recognition",
        "tokenizer": speech_tokenizer(),
        "feature_extractor": extractor,
        "dtype": torch.float64,
    }
    plain = pipeline(model=target, **make)
    return plain, pipeline(model=hf_speculate.enable(make_whisper()), assistant_model=draft, **make)


def sounds(num: int) -> list[dict]:
    rng = np.random.default_rng(0)
    lens = [SAMPLING_RATE - 400 * number for number in range(num)]
    return [{"raw": rng.normal(size=size).astype(np.float32), "sampling_rate": SAMPLING_RATE} for size in lens]


@pytest.mark.parametrize(("fields", "least", "largest"), [GREEDY, STRICT, LOOSE], ids=["greedy", "strict", "loose"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_speech_is_read_as_without_a_draft_unless_loosely(transcribers, batch_size, fields, least, largest):
    plain, ours = transcribers
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 16, "num_beams": 1}  # the pipeline would search beams
    expected = plain(sounds(3), batch_size=batch_size, generate_kwargs=dict(options))
    own = {"num_assistant_tokens": 3, "speculation_stats": stats, **fields}
    found = ours(sounds(3), batch_size=batch_size, generate_kwargs=options | own)
    assert (found == expected) is (fields != LOOSE[0])
    assert stats.verifier == fields["verifier"]
    assert stats.num_verified > 0
    assert least <= stats.verified_acceptance_rate <= largest


@pytest.fixture(scope="module")
def readers_of_images():
    target = make_llava()
    tokens = list("_" + LETTERS + "0123456789.,:;!")
    tokens[0], tokens[60] = "<pad>", "<image>"
    tokenizer = letters_tokenizer(tokens, pad_token="<pad>", additional_special_tokens=["<image>"])
    tokenizer.padding_side = "left"
    size = {"height": 8, "width": 8}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=size, do_convert_rgb=True),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    make = {"task": "image-text-to-text", "processor": processor, "dtype": torch.float64}
    return (
        pipeline(model=target, **make),
        pipeline(model=hf_speculate.enable(copy.deepcopy(target)), **make),
        text_draft(target),
    )


@pytest.mark.parametrize(("fields", "least", "largest"), [GREEDY, STRICT, LOOSE], ids=["greedy", "strict", "loose"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_images_are_described_as_without_a_draft_unless_loosely(readers_of_images, batch_size, fields, least, largest):
    plain, ours, draft = readers_of_images
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)) for _ in range(2)]
    texts = ["a<image>bc", "defg<image>h"]
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = plain(images=images, text=texts, batch_size=batch_size, generate_kwargs=dict(options))
    own = {"assistant_model": draft, "num_assistant_tokens": 3, "speculation_stats": stats, **fields}
    found = ours(images=images, text=texts, batch_size=batch_size, generate_kwargs=options | own)
    assert (found == expected) is (fields != LOOSE[0])
    assert stats.verifier == fields["verifier"]
    assert stats.num_verified > 0
    assert least <= stats.verified_acceptance_rate <= largest
