"""Build tiny tokenizers in code, so no test needs a download."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


def letters_tokenizer(tokens: Sequence[str], **special_tokens: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one id per character; `tokens` may contain special tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special_tokens)


def byte_level_tokenizer(words: Sequence[str], **special_tokens: str) -> PreTrainedTokenizerFast:
    """Make a GPT-2 style tokenizer of all 256 bytes and `words`; words are merged from the left."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {
        character: index
        for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    merges = _merges(
        ["".join(piece for piece, _ in to_bytes.pre_tokenize_str(word)) for word in words], vocab
    )
    for token in special_tokens.values():
        vocab.setdefault(token, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = to_bytes
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special_tokens)


def metaspace_tokenizer(
    words: Sequence[str], letters: str, **special_tokens: str
) -> PreTrainedTokenizerFast:
    """Make a Llama 2 style tokenizer of letters, bytes such as <0x0A>, and `words`."""
    vocab: dict[str, int] = {}
    for token in (
        "<unk>",
        *special_tokens.values(),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        WORD_MARK,
    ):
        vocab.setdefault(token, len(vocab))
    merges = _merges([word.replace(" ", WORD_MARK) for word in words], vocab)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side="left", unk_token="<unk>", **special_tokens
    )


def _merges(words: Sequence[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges that build each word from the left, and add them to `vocab` in place."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            pair = word[: end - 1], word[end - 1]
            if pair not in merges:
                merges.append(pair)
            vocab.setdefault(word[:end], len(vocab))
    return merges
