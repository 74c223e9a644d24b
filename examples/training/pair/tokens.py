"""Train the byte-level BPE tokenizer for both models."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
MAX_CONTEXT_LEN = 8192
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on complete files.

    Args:
        texts: one string per training file.

    Returns:
        A lossless tokenizer, for which `decode(encode(text))` is `text`. It adds no special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=MAX_CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
    )


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """Encode files into one stream, with an end-of-text token after each file.

    Returns:
        The stream, [N] uint16.
    """
    pieces = []
    for ids in tokenizer(texts)["input_ids"]:
        pieces.append(np.asarray([*ids, tokenizer.eos_token_id], dtype=np.uint16))
    return np.concatenate(pieces)  # [N]


def load_stream(path: Path) -> np.ndarray:
    """Load a stream [N] uint16 saved with `numpy.save`, memory-mapped read-only."""
    return np.load(path, mmap_mode="r")
