"""Tiny tokenizers built in code."""

from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(num_tokens: int, words: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """One whose tokens are whole words, `w0` padding, `w1` unknown."""
    words = words or [f"w{token}" for token in range(num_tokens)]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[0], unk_token=words[1])
