"""Requests of OpenAI's endpoints, and their translation into arguments of `generate()`."""

import reprlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hf_speculate.errors import ConfigError
from hf_speculate.options.refill.continuous import RowPrompt
from hf_speculate.tools.dataset.rows import Row, token_ids_of
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.validation import invalid_field

_DEFAULT_NUM_TOKENS = 256  # of an answer whose request names no number
_MAX_STOPS = 4
_MAX_MESSAGES = 10_000  # and parts of messages; their checks keep all threads waiting, 10 us for each
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


class AnswerFormat(NamedTuple):
    is_chat: bool
    is_streamed: bool
    has_usage: bool  # of a stream; a whole answer always has it


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

    @property
    def answer_format(self) -> AnswerFormat:
        has_usage = self.stream_options is not None and self.stream_options.include_usage
        return AnswerFormat(isinstance(self, ChatRequest), self.stream, has_usage)


class Part(BaseModel):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]

    def as_dict(self) -> dict[str, str]:
        """As chat templates take it: with one text, and with the older name of the role `developer`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Request):
    """A request for `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)

    @field_validator("messages", mode="before")
    @classmethod
    def _check_number(cls, messages: Any) -> Any:
        contents = (
            [one.get("content") for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
        )
        num = sum(len(one) if isinstance(one, list) else 1 for one in contents)
        if num > _MAX_MESSAGES:
            raise RequestError(f"messages must have at most {_MAX_MESSAGES} parts, got {num}; join some", "messages")
        return messages

    def token_ids(self, engine: Engine) -> list[int]:
        return _encoded([message.as_dict() for message in self.messages], "messages", engine)


class CompletionRequest(Request):
    """A request for `/v1/completions`: one prompt, as text or token ids."""

    prompt: str | Annotated[list[int], Field(fail_fast=True)]

    @field_validator("prompt", mode="before")
    @classmethod
    def _unwrap(cls, prompt: Any) -> Any:
        """Take one prompt out of a list of prompts."""
        if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
            return prompt
        if len(prompt) > 1:
            raise RequestError(f"prompt must be one prompt, got {len(prompt)}; send a request for each", "prompt")
        return prompt[0]

    def token_ids(self, engine: Engine) -> list[int]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return _encoded(prompt, "prompt", engine)
        size: Any = engine.target.get_input_embeddings().num_embeddings
        if not all(0 <= token_id < size for token_id in prompt):
            raise RequestError(f"prompt must hold token ids in [0, {size}), got another number", "prompt")
        if not prompt:
            raise RequestError("prompt must have at least one token, got none", "prompt")
        return prompt


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)
_FIELDS = {
    name for kind in (ChatRequest, CompletionRequest, Message, Part, StreamOptions) for name in kind.model_fields
}


def parse(kind: type[AnyRequest], body: bytes | bytearray) -> AnyRequest:
    """Read a request from JSON, or raise `RequestError`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_field(error, _FIELDS, NEUTRAL) from None


def row_prompt(request: ChatRequest | CompletionRequest, engine: Engine) -> RowPrompt:
    """Translate a request, or raise `RequestError` if it is not supported."""
    if request.model is not None:
        check_model(request.model, engine)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if not all(stops) or len(stops) > _MAX_STOPS:
        raise RequestError(
            f"stop must be up to {_MAX_STOPS} strings, none of them empty, got {reprlib.repr(stops)}", "stop"
        )
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
        raise RequestError(f"model must be {engine.name!r}, got {reprlib.repr(name)}", "model", "model_not_found", 404)


def _encoded(content: str | list[dict[str, str]], param: str, engine: Engine) -> list[int]:
    num_chars = len(content) if isinstance(content, str) else sum(len(message["content"]) for message in content)
    if num_chars > engine.max_chars:  # tokenising would take seconds, and the tokens gigabytes
        raise RequestError(
            f"{param} must have at most {engine.max_chars} characters, got {num_chars}; send less text",
            param,
            "context_length_exceeded",
        )
    try:
        return token_ids_of(Row(1, content, source=param), engine.tokenizer, is_chat=param == "messages")
    except ConfigError as error:
        raise RequestError(str(error), param) from error
