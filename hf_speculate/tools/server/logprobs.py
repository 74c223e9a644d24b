"""Log probabilities of tokens in OpenAI's two formats.

They are computed from the target's logits before processors and temperature.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_speculate.models.language_model import cache_name, device_of
from hf_speculate.tools.server.token_bytes import TokenBytes

_MIN_LOGPROB = -9999.0  # replaces -inf, which JSON does not support
_NUM_AT_ONCE = 256  # number of positions per log-softmax in float32


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[int, float]]  # the most likely ids and their log probabilities, best first


def token_logprobs(token_ids: Sequence[int], logits: Tensor, num_top: int) -> list[TokenLogprob]:
    """Compute the log probabilities of N tokens, and of the `num_top` best tokens.

    Args:
        token_ids: N token ids.
        logits: [N, V], any floating dtype.
        num_top: number of most likely tokens per position.
    """
    tokens: list[TokenLogprob] = []
    for begin in range(0, len(token_ids), _NUM_AT_ONCE):
        chunk = list(token_ids[begin : begin + _NUM_AT_ONCE])
        logprobs = logits[begin : begin + len(chunk)].float().log_softmax(-1)
        logprobs = logprobs.nan_to_num(nan=_MIN_LOGPROB, neginf=_MIN_LOGPROB)
        ids = torch.tensor(chunk, device=logits.device)[:, None]  # [N, 1]
        chosen: list[float] = logprobs.gather(1, ids)[:, 0].tolist()
        values, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]))  # [N, num_top]
        tops = [
            list(zip(row_ids, row, strict=True))
            for row_ids, row in zip(top_ids.tolist(), values.tolist(), strict=True)
        ]
        tokens += map(TokenLogprob, chunk, chosen, tops)
    return tokens


def prompt_logprobs(
    target: PreTrainedModel, token_ids: Sequence[int], num_top: int, chunk_size: int | None
) -> Iterator[list[TokenLogprob]]:
    """Yield the log probabilities of a prompt's tokens, chunk by chunk, from separate forwards.

    The first token has no log probability.

    Args:
        target: the target model.
        token_ids: the prompt, T >= 1 ids.
        num_top: number of most likely tokens per position.
        chunk_size: tokens per forward. None to read all tokens in one forward.
    """
    model: Any = target
    read_ids, size = token_ids[:-1], chunk_size or len(token_ids)
    options: dict[str, Any] = {"use_cache": len(read_ids) > size}
    if options["use_cache"]:
        options[cache_name(target)] = DynamicCache(config=target.config)
    yield [TokenLogprob(token_ids[0], None, [])]
    for begin in range(0, len(read_ids), size):
        chunk = read_ids[begin : begin + size]
        with torch.no_grad():
            input_ids = torch.tensor([chunk], device=device_of(target))  # [1, N]
            logits = model(input_ids=input_ids, **options).logits[0]
            yield token_logprobs(token_ids[begin + 1 : begin + 1 + len(chunk)], logits, num_top)


def completion_format(
    tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, offset: int = 0, is_begin: bool = False
) -> dict[str, Any]:
    """Format log probabilities for `/v1/completions`.

    `top_logprobs` always includes the token itself. If two tokens have the same text, the second is
    named by its id.

    Args:
        tokens: consecutive tokens of a text.
        token_bytes: bytes of the tokens.
        offset: number of characters before these tokens.
        is_begin: whether the first of these tokens begins a new text.
    """
    spelled = _spelled(tokens, token_bytes, offset, is_begin)
    tops: list[dict[str, float] | None] = []
    for token, (text, _, is_first) in zip(tokens, spelled, strict=True):
        top: dict[str, float] = {}
        for token_id, logprob in token.top:
            name = _text(_bytes(token_id, token_bytes, is_first))
            is_taken = name in top or (name == text and token_id != token.token_id)
            top[f"token_id:{token_id}" if is_taken else name] = logprob
        if token.logprob is not None:
            top.setdefault(text, token.logprob)
        tops.append(None if token.logprob is None else top)
    return {
        "tokens": [text for text, _, _ in spelled],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": [begin for _, begin, _ in spelled],
    }


def chat_format(
    tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, is_begin: bool = True
) -> dict[str, Any]:
    """Format log probabilities for `/v1/chat/completions`.

    Joined together, the `bytes` of all tokens are the text. Special tokens have no bytes.
    """

    def entry(token_id: int, logprob: float | None, is_first: bool) -> dict[str, Any]:
        spelled = _bytes(token_id, token_bytes, is_first)
        visible = b"" if token_id in token_bytes.hidden_ids else spelled
        return {"token": _text(spelled), "logprob": logprob, "bytes": list(visible)}

    content = [
        entry(token.token_id, token.logprob, is_first)
        | {"top_logprobs": [entry(token_id, logprob, is_first) for token_id, logprob in token.top]}
        for token, (_, _, is_first) in zip(
            tokens, _spelled(tokens, token_bytes, 0, is_begin), strict=True
        )
    ]
    return {"content": content, "refusal": None}


def num_chars(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, is_begin: bool) -> int:
    """Count the characters of a text's tokens; special tokens have no characters."""
    count = 0
    for token in tokens:
        if token.token_id not in token_bytes.hidden_ids:
            spelled = _bytes(token.token_id, token_bytes, is_begin)
            count, is_begin = count + _num_begun(spelled), is_begin and not spelled
    return count


def _spelled(
    tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, offset: int, is_begin: bool
) -> list[tuple[str, int, bool]]:
    """Spell the tokens of a text.

    Returns:
        For each token, its text, the number of characters before it, and whether it is the first
        visible token.
    """
    texts = []
    for token in tokens:
        spelled = _bytes(token.token_id, token_bytes, is_begin)
        texts.append((_text(spelled), offset - (offset > 0 and _is_inside(spelled[:1])), is_begin))
        if token.token_id not in token_bytes.hidden_ids:
            offset, is_begin = offset + _num_begun(spelled), is_begin and not spelled
    return texts


def _is_inside(spelled: bytes) -> bool:
    """Return whether UTF-8 bytes begin inside a character."""
    return bool(spelled) and spelled[0] & 0xC0 == 0x80


def _num_begun(spelled: bytes) -> int:
    """Count the characters that begin in UTF-8 bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in spelled)


def _bytes(token_id: int, token_bytes: TokenBytes, is_first: bool) -> bytes:
    return token_bytes.first(token_id) if is_first else token_bytes(token_id)


def _text(spelled: bytes) -> str:
    r"""Decode bytes; write incomplete characters like OpenAI, for example bytes:\xe6\x97."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
