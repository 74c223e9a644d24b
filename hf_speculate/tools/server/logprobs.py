"""Log probabilities of tokens, under the target's logits before processors and temperature, in OpenAI's two formats."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def prompt_logprobs(target: PreTrainedModel, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Those of a prompt's tokens, from a forward of its own; the first one has none."""
    model: Any = target
    tokens = [TokenLogprob(token_ids[0], None, [])]
    if len(token_ids) > 1:
        with torch.no_grad():
            input_ids = torch.tensor([token_ids[:-1]], device=target.device)  # [1, T - 1]
            logits = model(input_ids=input_ids, use_cache=False).logits[0]
            tokens += token_logprobs(token_ids[1:], logits, num_top)
    return tokens


def completion_format(
    tokens: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase, offset: int = 0
) -> dict[str, Any]:
    """As `/v1/completions` has them; `offset` is the number of characters of the tokens before.

    `top_logprobs` have the token itself, too, also if it is not among the best.
    """
    texts = [_text(token.token_id, tokenizer) for token in tokens]
    tops: list[dict[str, float] | None] = []
    for text, token in zip(texts, tokens, strict=True):
        top: dict[str, float] = {}
        for token_id, logprob in token.top:
            top.setdefault(_text(token_id, tokenizer), logprob)  # the best of equal texts
        if token.logprob is not None:
            top.setdefault(text, token.logprob)
        tops.append(None if token.logprob is None else top)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
    }


def chat_format(tokens: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """As `/v1/chat/completions` has them."""
    content = [
        _entry(token.token_id, token.logprob, tokenizer)
        | {"top_logprobs": [_entry(token_id, logprob, tokenizer) for token_id, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token_id: int, logprob: float | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    text = _text(token_id, tokenizer)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text(token_id: int, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
