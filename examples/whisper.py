"""Transcribe speech with a draft decoder on the target's encoder, as in distilled Whisper.

    python examples/whisper.py

Whisper weights cannot be bundled, so the script builds a tiny random pair and synthetic audio. The
text is noise, but every step is the same as for a real pair. With real models, `make_pair` is

    target = AutoModelForSpeechSeq2Seq.from_pretrained("openai/whisper-large-v3")
    draft = AutoModelForCausalLM.from_pretrained("distil-whisper/distil-large-v3")
    extractor = AutoFeatureExtractor.from_pretrained("openai/whisper-large-v3")

and `AutoTokenizer.from_pretrained("openai/whisper-large-v3").batch_decode(ids)` turns the ids into
text.
"""

import copy
import math

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)

import hf_speculate

SAMPLING_RATE = 16_000
NUM_NEW = 32
NOISE = 0.02  # noise in the draft weights, as a share of the target weights' standard deviation


def make_pair() -> tuple[
    WhisperForConditionalGeneration, WhisperForCausalLM, WhisperFeatureExtractor
]:
    """Make a random target, a similar draft without an encoder, and a feature extractor.

    The extractor takes up to one second of audio.
    """
    extractor = WhisperFeatureExtractor(
        feature_size=16, sampling_rate=SAMPLING_RATE, chunk_length=1
    )
    config = WhisperConfig(
        vocab_size=256,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=extractor.nb_max_frames // 2,
        max_target_positions=64,
        init_std=0.3,  # large, so that the text depends on the audio
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    torch.manual_seed(0)
    target = WhisperForConditionalGeneration(config).double().eval()
    target.generation_config = GenerationConfig(
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        is_multilingual=False,
        no_timestamps_token_id=255,
        return_timestamps=False,
    )
    draft = WhisperForCausalLM(copy.deepcopy(config)).double().eval()
    draft.model.decoder.load_state_dict(target.model.decoder.state_dict())
    draft.proj_out.load_state_dict(target.proj_out.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight.add_(NOISE * weight.std() * torch.randn_like(weight))
    return target, draft, extractor


def make_sounds() -> list[Tensor]:
    """Make a one-second rising tone and a half-second falling tone, [N] float32 each."""
    sounds = []
    for seconds, low, high in ((1.0, 200.0, 800.0), (0.5, 500.0, 300.0)):
        times = torch.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
        sounds.append(torch.sin(2 * math.pi * (low + (high - low) * times / 2) * times))
    return sounds


def main() -> None:
    target, draft, extractor = make_pair()
    hf_speculate.enable(target)
    arrays = [sound.numpy() for sound in make_sounds()]
    features = extractor(arrays, sampling_rate=SAMPLING_RATE, return_tensors="pt")[
        "input_features"
    ].double()

    stats = hf_speculate.SpeculationStats()
    plain = target.generate(features, max_new_tokens=NUM_NEW)
    ours = target.generate(
        features,
        assistant_model=draft,
        num_assistant_tokens=4,
        max_new_tokens=NUM_NEW,
        speculation_stats=stats,
    )
    for number, ids in enumerate(ours.tolist()):
        print(f"sound {number}: {ids}")
    print(
        f"mean acceptance length {stats.mean_acceptance_length:.2f}, acceptance rate "
        f"{stats.acceptance_rate:.3f}"
    )
    print(f"ids equal plain decoding's: {torch.equal(plain, ours)}")


if __name__ == "__main__":
    main()
