"""Log probabilities of tokens, under the target's logits before processors and temperature, in OpenAI's two formats."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_speculate.models.language_model import cache_name, device_of
from hf_speculate.tools.server.token_bytes import TokenBytes

_LEAST = -9999.0  # in place of -inf, which JSON lacks
_NUM_AT_ONCE = 256  # positions whose log probabilities are computed together, in float32


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[int, float]]  # the most likely ids, the best first


def token_logprobs(token_ids: Sequence[int], logits: Tensor, num_top: int) -> list[TokenLogprob]:
    """The log probabilities of N tokens under their logits [N, V], with those of the `num_top` best tokens."""
    tokens: list[TokenLogprob] = []
    for begin in range(0, len(token_ids), _NUM_AT_ONCE):
        some = list(token_ids[begin : begin + _NUM_AT_ONCE])
        logprobs = logits[begin : begin + len(some)].float().log_softmax(-1)
        logprobs = logprobs.nan_to_num(nan=_LEAST, neginf=_LEAST)
        ids = torch.tensor(some, device=logits.device)[:, None]  # [N, 1]
        chosen: list[float] = logprobs.gather(1, ids)[:, 0].tolist()
        values, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]))  # [N, num_top]
        tops = [
            list(zip(row_ids, row, strict=True)) for row_ids, row in zip(top_ids.tolist(), values.tolist(), strict=True)
        ]
        tokens += map(TokenLogprob, some, chosen, tops)
    return tokens


def prompt_logprobs(
    target: PreTrainedModel, token_ids: Sequence[int], num_top: int, chunk_size: int | None
) -> Iterator[list[TokenLogprob]]:
    """Those of a prompt's tokens, from forwards of their own, chunk by chunk; the first token has none.

    Args:
        target: the model.
        token_ids: the prompt [T], T >= 1.
        num_top: most likely tokens of each position.
        chunk_size: tokens of a forward; None to read all in one.
    """
    model: Any = target
    read_ids, size = token_ids[:-1], chunk_size or len(token_ids)
    options: dict[str, Any] = {"use_cache": len(read_ids) > size}
    if options["use_cache"]:
        options[cache_name(target)] = DynamicCache(config=target.config)
    yield [TokenLogprob(token_ids[0], None, [])]
    for begin in range(0, len(read_ids), size):
        some = read_ids[begin : begin + size]
        with torch.no_grad():
            input_ids = torch.tensor([some], device=device_of(target))  # [1, N]
            logits = model(input_ids=input_ids, **options).logits[0]
            yield token_logprobs(token_ids[begin + 1 : begin + 1 + len(some)], logits, num_top)


def completion_format(
    tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, offset: int = 0, is_begin: bool = False
) -> dict[str, Any]:
    """As `/v1/completions` has them.

    `top_logprobs` have the token itself, too, also if it is not among the best. Of two tokens with one text, the second
    is named by its id.

    Args:
        tokens: of a text, or of a part of it.
        token_bytes: bytes of the tokens.
        offset: number of characters of the tokens before.
        is_begin: whether the first of the tokens begins a text, which is not the continuation of another.
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


def chat_format(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, is_begin: bool = True) -> dict[str, Any]:
    """As `/v1/chat/completions` has them: `bytes` of all tokens join to the text, those of special tokens are none."""

    def entry(token_id: int, logprob: float | None, is_first: bool) -> dict[str, Any]:
        spelled = _bytes(token_id, token_bytes, is_first)
        shown = b"" if token_id in token_bytes.hidden_ids else spelled
        return {"token": _text(spelled), "logprob": logprob, "bytes": list(shown)}

    content = [
        entry(token.token_id, token.logprob, is_first)
        | {"top_logprobs": [entry(token_id, logprob, is_first) for token_id, logprob in token.top]}
        for token, (_, _, is_first) in zip(tokens, _spelled(tokens, token_bytes, 0, is_begin), strict=True)
    ]
    return {"content": content, "refusal": None}


def num_chars(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, is_begin: bool) -> int:
    """Number of characters of a text's tokens; special tokens have none."""
    num = 0
    for token in tokens:
        if token.token_id not in token_bytes.hidden_ids:
            own = _bytes(token.token_id, token_bytes, is_begin)
            num, is_begin = num + _num_begun(own), is_begin and not own
    return num


def _spelled(
    tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, offset: int, is_begin: bool
) -> list[tuple[str, int, bool]]:
    """Text of each token, number of characters before it, and whether it is the first that its text shows."""
    spelled = []
    for token in tokens:
        own = _bytes(token.token_id, token_bytes, is_begin)
        spelled.append((_text(own), offset - (offset > 0 and _is_inside(own[:1])), is_begin))
        if token.token_id not in token_bytes.hidden_ids:
            offset, is_begin = offset + _num_begun(own), is_begin and not own
    return spelled


def _is_inside(spelled: bytes) -> bool:
    """Whether some bytes of UTF-8 go on with the character before them."""
    return bool(spelled) and spelled[0] & 0xC0 == 0x80


def _num_begun(spelled: bytes) -> int:
    """Number of characters that begin in some bytes of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in spelled)


def _bytes(token_id: int, token_bytes: TokenBytes, is_first: bool) -> bytes:
    return token_bytes.first(token_id) if is_first else token_bytes(token_id)


def _text(spelled: bytes) -> str:
    r"""Bytes as text; as OpenAI writes them if they are not whole characters, such as bytes:\xe6\x97."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
