"""Requests of OpenAI's endpoints: their fields, and values that change nothing."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.validation import invalid_field

_MAX_MESSAGES = 10_000  # and parts of messages; their checks keep all threads waiting, 10 us for each
# Values of fields that are not supported with which they change nothing. None is one for every field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
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
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: int = Field(1, ge=1, le=128)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    num_assistant_tokens: int | None = Field(None, ge=0, le=128)
    verifier: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        return {
            name: value for name, value in body.items() if not _changes_nothing(cls.model_fields.get(name), name, value)
        }


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
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def num_top(self) -> int | None:
        """Most likely tokens whose log probabilities are asked for; None if none are."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"logprobs must be true with top_logprobs, got {self.top_logprobs}", "logprobs")
        return self

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


class CompletionRequest(Request):
    """A request for `/v1/completions`: one prompt or several, each as text or token ids."""

    prompt: (
        str
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def num_top(self) -> int | None:
        """Most likely tokens whose log probabilities are asked for; None if none are."""
        return self.logprobs


def _changes_nothing(field: FieldInfo | None, name: str, value: Any) -> bool:
    """Whether a value may be left out: None for what need not be given, or a neutral one of what is not supported."""
    if field is not None:
        return value is None and not field.is_required()
    return value is None or name in _IGNORED or value in NEUTRAL.get(name, ())


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
