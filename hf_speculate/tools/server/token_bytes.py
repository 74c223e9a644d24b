"""Bytes of tokens, and a stopping criterion that searches them for stop strings."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_speculate.processors.registry import register_row_wise

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's token for a single byte
# GPT-2's characters for bytes
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenBytes:
    """The bytes of each token of a tokenizer.

    Joined together, the bytes of a text's tokens are the text. The bytes of an id are computed
    on its first use, and cached.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer: Any = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._is_byte_level = decoder is not None and "ByteLevel" in _state_of(decoder)
        self._anchor_ids: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._anchor = self._decode(self._anchor_ids)
        self._bytes: dict[int, bytes] = {}
        self._first: dict[int, bytes] = {}
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special_ids = {token_id for token_id, token in added.items() if token.special}
        # tokens left out of texts
        self.hidden_ids = frozenset(special_ids.union(tokenizer.all_special_ids))

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text; empty if the id is unknown."""
        spelled = self._bytes.get(token_id)
        if spelled is None:
            spelled = self._bytes[token_id] = self._find(token_id)
        return spelled

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a text's first token; SentencePiece's decoders drop its space."""
        spelled = self._first.get(token_id)
        if spelled is None:
            spelled = self(token_id)
            if spelled.startswith(b" ") and not self._decode([token_id]).startswith(" "):
                spelled = spelled[1:]
            self._first[token_id] = spelled
        return spelled

    def can_write(self, text: str) -> bool:
        """Return whether the tokens can spell a text."""
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._is_byte_level or text.encode() in b"".join(map(self, token_ids))

    def _find(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            is_spelled = all(character in _BYTE_OF for character in token)
            return (
                bytes(_BYTE_OF[character] for character in token) if is_spelled else token.encode()
            )
        text = self._decode([*self._anchor_ids, token_id])
        is_after = text.startswith(self._anchor)
        text = text[len(self._anchor) :] if is_after else self._decode([token_id])
        if (byte := _BYTE_TOKEN.fullmatch(token)) and text != token:
            return bytes([int(byte[1], 16)])
        return text.encode(errors="replace")

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def _state_of(decoder: Any) -> str:
    """Return the settings of a decoder as JSON, or the name of its class if it has none."""
    state = getattr(decoder, "__getstate__", lambda: None)()
    return state.decode() if isinstance(state, bytes) else type(decoder).__name__


@register_row_wise
@dataclass(frozen=True)
class StopTexts(StoppingCriteria):
    """Stopping criterion for stop strings.

    A row ends when its newest token completes one of the `stops`. A call reads the bytes of as many
    tokens as the longest stop string has bytes. transformers' criterion builds a table of all
    tokens by all positions in all stop strings.
    """

    token_bytes: TokenBytes
    stops: tuple[str, ...]
    prompt_len: int  # number of tokens to skip, which belong to the prompt
    # whether the answer begins a text, as in chats, or continues the prompt's text
    is_begin: bool = False

    def __call__(self, input_ids: Tensor, scores: Any = None, **kwargs: Any) -> Tensor:
        """Return whether each row ends, [N] bool; `input_ids` are [N, T] int64."""
        stops = [stop.encode() for stop in self.stops]
        max_len = max(map(len, stops))
        begin = max(self.prompt_len, input_ids.shape[1] - max_len)
        rows: list[list[int]] = input_ids[:, begin:].tolist()
        is_first = self.is_begin and begin == self.prompt_len
        return torch.tensor(
            [self._ends(ids, is_first, stops) for ids in rows], device=input_ids.device
        )

    def _ends(self, token_ids: list[int], is_first: bool, stops: list[bytes]) -> bool:
        if not token_ids:
            return False
        spelled = [self.token_bytes(token_id) for token_id in token_ids]
        if is_first:
            spelled[0] = self.token_bytes.first(token_ids[0])
        text = b"".join(spelled)
        num_before = len(text) - len(spelled[-1])
        return any(text.find(stop, max(num_before - len(stop) + 1, 0)) >= 0 for stop in stops)
