"""Test `pipeline(..., assistant_model=draft)` for text, speech and images."""

import copy
import functools

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    LlavaProcessor,
    WhisperFeatureExtractor,
    WhisperTokenizer,
    pipeline,
)

import hf_speculate
from tests.cases import each_value, pair
from tests.compatibility_rows import CHARACTERS
from tests.support.tiny import make_model, noisy_copy
from tests.support.tiny_encoders import (
    NUM_FRAMES,
    NUM_MEL_BINS,
    decoder_of,
    make_llava,
    make_whisper,
    text_draft,
)
from tests.support.tiny_tokenizers import letters_tokenizer

PROMPTS = ["bcd", "efghij", "kl", "mnopq"]
SAMPLING = {"do_sample": True, "verifier": "coupled", "seed": 3}


@pytest.fixture(scope="module")
def pipelines():
    target, draft = pair("llama")
    make = {
        "task": "text-generation",
        "model": target,
        "tokenizer": letters_tokenizer(CHARACTERS, pad_token="a"),
    }
    return pipeline(**make), pipeline(**make, assistant_model=draft)


def texts(outputs) -> list[str]:
    return [
        output[0]["generated_text"] if isinstance(output, list) else output["generated_text"]
        for output in outputs
    ]


@each_value(
    field=["eos_token_id", "pad_token_id", "bos_token_id"],
    sampling=[{}, SAMPLING],
    batch_size=[1, 2, 4],
)
def test_fault_h_draft_of_other_special_ids_drafts(pipelines, field, sampling, batch_size):
    """Pass the assistant to the constructor.

    transformers requires its tokenizer there, and then raises in the call because of that
    tokenizer.
    """
    plain, ours = pipelines
    stranger = copy.deepcopy(ours.assistant_model)
    setattr(stranger.config, field, 7)
    setattr(stranger.generation_config, field, 7)
    tokenizers = {
        "tokenizer": plain.tokenizer,
        "assistant_tokenizer": copy.deepcopy(plain.tokenizer),
    }
    in_constructor = pipeline(
        "text-generation", model=plain.model, **tokenizers, assistant_model=stranger
    )
    options = {"max_new_tokens": 12, "batch_size": batch_size, **sampling}
    expected = texts(plain(PROMPTS, **options))
    for run in (ours, in_constructor, functools.partial(plain, assistant_model=stranger)):
        stats = hf_speculate.SpeculationStats()
        assert (
            texts(run(PROMPTS, **options, num_assistant_tokens=3, speculation_stats=stats))
            == expected
        )
        assert stats.verifier == sampling.get("verifier", "greedy")
        assert stats.num_accepted > 0


def test_pipeline_drafts_prompts_and_chats_by_enabled_defaults():
    target = make_model("llama")
    tokenizer = letters_tokenizer(CHARACTERS, pad_token="a")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    write = pipeline("text-generation", model=target, tokenizer=tokenizer)
    asked = PROMPTS, [{"role": "user", "content": "bcd"}]
    options = {"batch_size": 4, "max_new_tokens": 12, "do_sample": False}
    expected = [write(inputs, **options) for inputs in asked]
    calls, draft = [], noisy_copy(target, 0.05, seed=1)
    hf_speculate.enable(target, draft, num_assistant_tokens=3, speculation_stats=calls.append)
    assert [write(inputs, **options) for inputs in asked] == expected
    assert [stats.num_accepted > 0 for stats in calls] == [True, True]


HOP_LEN = 160
SAMPLING_RATE = NUM_FRAMES * HOP_LEN  # a window lasts one second
NO_TIMES_ID = 49
LETTERS = CHARACTERS[:48]


def speech_tokenizer() -> WhisperTokenizer:
    tokens = [
        "<|pad|>",
        "<|startoftranscript|>",
        "<|endoftext|>",
        *LETTERS[: NO_TIMES_ID - 3],
        "<|notimestamps|>",
    ]
    tokens += [f"<|{0.02 * step:.2f}|>" for step in range(64 - len(tokens))]
    return WhisperTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], pad_token="<|pad|>"
    )


@each_value(make_draft=[lambda model: model, decoder_of], batch_size=[1, 3])
def test_speech_text_is_the_same_with_a_draft(make_draft, batch_size):
    sizes = {
        "feature_size": NUM_MEL_BINS,
        "sampling_rate": SAMPLING_RATE,
        "hop_length": HOP_LEN,
        "n_fft": 512,
    }
    make = {
        "task": "automatic-speech-recognition",
        "tokenizer": speech_tokenizer(),
        "dtype": torch.float64,
    }
    make |= {"feature_extractor": WhisperFeatureExtractor(**sizes, chunk_length=1)}
    make |= {"model": hf_speculate.enable(make_whisper())}
    rng, stats = np.random.default_rng(0), hf_speculate.SpeculationStats()
    waves = [rng.normal(size=SAMPLING_RATE - 400 * num).astype(np.float32) for num in range(3)]
    options = {"max_new_tokens": 16, "num_beams": 1}  # otherwise, the pipeline uses beam search
    own = {**options, "num_assistant_tokens": 3, "speculation_stats": stats}
    draft = make_draft(noisy_copy(make_whisper(), 0.01))
    plain, ours = pipeline(**make), pipeline(**make, assistant_model=draft)

    def read(pipe, own_options):
        inputs = [{"raw": wave, "sampling_rate": SAMPLING_RATE} for wave in waves]
        return pipe(inputs, batch_size=batch_size, generate_kwargs=own_options)

    expected = read(plain, options)
    assert read(ours, own) == expected
    assert stats.num_accepted > 0
    hf_speculate.enable(make["model"], draft, num_assistant_tokens=3, speculation_stats=stats)
    stats.reset()
    assert read(plain, options) == expected
    assert stats.num_accepted > 0


@pytest.mark.parametrize("batch_size", [1, 2])
def test_image_text_is_the_same_with_a_draft(batch_size):
    tokens = ["<pad>", *LETTERS, *"0123456789.", "<image>", *",:;"]
    tokenizer = letters_tokenizer(tokens, pad_token="<pad>", additional_special_tokens=["<image>"])
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
    )
    reading = {
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    make = {
        "processor": LlavaProcessor(image_processor, tokenizer, **reading),
        "dtype": torch.float64,
    }
    reader = pipeline("image-text-to-text", model=hf_speculate.enable(make_llava()), **make)
    rng, stats = np.random.default_rng(0), hf_speculate.SpeculationStats()
    images = [Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)) for _ in range(2)]
    inputs = {"images": images, "text": ["a<image>bc", "defg<image>h"], "batch_size": batch_size}
    own = {
        "assistant_model": text_draft(reader.model),
        "num_assistant_tokens": 3,
        "speculation_stats": stats,
    }
    options = {"max_new_tokens": 12, "do_sample": False}
    plain, ours = (
        reader(**inputs, generate_kwargs=call_options) for call_options in (options, options | own)
    )
    assert plain == ours
    assert stats.num_accepted > 0
