"""Token healing: provides the tokenizer, which transformers does not pass on to a custom decoding method."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from hf_speculate.errors import UnsupportedGenerationError
from hf_speculate.generation.arguments import setting

_tokenizer: ContextVar[Any] = ContextVar("hf_speculate_healing_tokenizer", default=None)


class TokenHealingMixin(GenerationMixin):
    """Uses the current call's tokenizer if `heal_tokens` gets none."""

    def heal_tokens(self, input_ids: Any, tokenizer: Any = None) -> Any:
        tokenizer = _tokenizer.get() if tokenizer is None else tokenizer
        token = _tokenizer.set(None)  # heal_tokens calls `generate` itself
        try:
            return super().heal_tokens(input_ids, tokenizer)
        finally:
            _tokenizer.reset(token)


@contextmanager
def provide_tokenizer(model: PreTrainedModel, call: Mapping[str, Any]) -> Iterator[None]:
    """Make the tokenizer of a call available to `heal_tokens` while transformers prepares the call."""
    if setting(model, call, "token_healing") and not isinstance(model, TokenHealingMixin):
        raise UnsupportedGenerationError(
            "token_healing must be left out for a model that is not enabled, got True; call enable(model), or "
            "model.heal_tokens(input_ids, tokenizer) beforehand"
        )
    token = _tokenizer.set(call.get("tokenizer"))
    try:
        yield
    finally:
        _tokenizer.reset(token)
