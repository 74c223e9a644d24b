"""Requests of OpenAI's endpoints, and their translation into arguments of `generate()`."""

import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_speculate.errors import ConfigError
from hf_speculate.generation.continuous import RowPrompt
from hf_speculate.tools.dataset.rows import Row, token_ids_of
from hf_speculate.tools.server.engine import Engine, RequestError

_DEFAULT_NUM_TOKENS = 256  # of an answer whose request names no number
_MAX_STOPS = 4
# Values of fields that are not supported with which they change nothing. None is one for every field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
# Fields that never change an answer of this server.
_IGNORED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "user"}


class StreamOptions(BaseModel):
    """What a stream contains besides the text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Request(BaseModel):
    """Fields that both endpoints support; others are rejected, because they would change the answer."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        return {
            name: value
            for name, value in body.items()
            if name in cls.model_fields or not (value is None or name in _IGNORED or value in NEUTRAL.get(name, ()))
        }


class Part(BaseModel):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def as_dict(self) -> dict[str, str]:
        """As chat templates take it: with one text, and with the older name of the role `developer`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Request):
    """A request for `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def token_ids(self, engine: Engine) -> list[int]:
        return _encoded([message.as_dict() for message in self.messages], "messages", engine)


class CompletionRequest(Request):
    """A request for `/v1/completions`: one prompt, as text or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]

    def token_ids(self, engine: Engine) -> list[int]:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise RequestError(f"prompt must be one prompt, got {len(prompt)}; send a request for each", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return _encoded(prompt, "prompt", engine)
        size = engine.target.get_input_embeddings().num_embeddings
        if not all(0 <= token_id < size for token_id in prompt):
            raise RequestError(f"prompt must hold token ids in [0, {size}), got another number", "prompt")
        if not prompt:
            raise RequestError("prompt must have at least one token, got none", "prompt")
        return list(prompt)


def row_prompt(request: ChatRequest | CompletionRequest, engine: Engine) -> RowPrompt:
    """Translate a request, or raise `RequestError` if it is not supported."""
    if request.model is not None:
        check_model(request.model, engine)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if not all(stops) or len(stops) > _MAX_STOPS:
        raise RequestError(f"stop must be up to {_MAX_STOPS} strings, none of them empty, got {stops}", "stop")
    token_ids = request.token_ids(engine)
    num: int | None = getattr(request, "max_completion_tokens", None) or request.max_tokens
    room = _DEFAULT_NUM_TOKENS
    if engine.max_length is not None:
        room = engine.max_length - len(token_ids)
        if room < (num or 1):
            raise RequestError(
                f"prompt and answer must have at most {engine.max_length} tokens, got {len(token_ids)} + {num or 1}; "
                "send less text, or ask for fewer tokens",
                "messages" if isinstance(request, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
    options: dict[str, Any] = {"max_new_tokens": num or min(room, _DEFAULT_NUM_TOKENS), "do_sample": False}
    seed = None
    if request.temperature != 0:
        temperature, top_p = (1.0 if value is None else value for value in (request.temperature, request.top_p))
        options |= {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": request.top_k or 0}
        seed = request.seed
        if seed is None and engine.num_rows > 1:
            seed = secrets.randbits(63)  # sampled rows share a batch, so that all of them use one verifier
        if seed is not None:  # only this verifier gives the same text whatever was drafted
            options["verifier"] = "coupled"
    if stops:
        options |= {"stop_strings": stops, "tokenizer": engine.tokenizer}
    return RowPrompt(token_ids, seed, options)


def check_model(name: str, engine: Engine) -> None:
    """Check that a name is the served model's, in full or its last part."""
    if name not in (engine.name, engine.name.rstrip("/").rpartition("/")[2]):
        raise RequestError(f"model must be {engine.name!r}, got {name!r}", "model", "model_not_found", 404)


def _encoded(content: str | list[dict[str, str]], param: str, engine: Engine) -> list[int]:
    try:
        return token_ids_of(Row(1, content, source=param), engine.tokenizer, is_chat=param == "messages")
    except ConfigError as error:
        raise RequestError(str(error), param) from error
