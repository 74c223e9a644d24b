"""Requests of OpenAI's endpoints: their fields, and values without an effect."""

import gc
import inspect
import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from transformers import PreTrainedTokenizerBase

from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.validation import invalid_field

# messages, their parts and calls; checking one takes 10 us, with all threads waiting
_MAX_MESSAGES = 10_000
_MAX_VALUES = 10_000  # entries of a list or an object; pydantic takes 30 us for each wrong entry
_MAX_FIELDS = 100  # fields of a request
_MAX_LISTED_STOPS = 100
_MAX_STOP_CHARS = 512  # characters of a stop string; each new token searches this many last tokens
# Accepted values of unsupported fields: they have no effect. None is accepted for every field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
# Arguments of `apply_chat_template`, not variables of a chat template.
_TEMPLATE_ARGUMENTS = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
}
# Fields without an effect on an answer of this server.
_IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "user",
}


class StreamOptions(BaseModel):
    """Content of a stream besides the text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(BaseModel):
    # "name" and "strict" may come too; answers always are strict
    model_config = ConfigDict(extra="allow", serialize_by_alias=True)

    content: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """Format of an answer: text, JSON or a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                'response_format must have json_schema if its type is "json_schema", got '
                f"{self.type}",
                "response_format",
            )
        return self


class Request(BaseModel):
    """Common fields of both endpoints.

    Unknown fields are rejected, because they would change the answer.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63 - 128)  # further choices have the next seeds
    n: int = Field(1, ge=1, le=128)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool = False
    num_assistant_tokens: int | None = Field(None, ge=0, le=128)
    verifier: str | None = None
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", "logit_bias", "tools", "prompt", mode="before", check_fields=False)
    @classmethod
    def _check_number_of_values(cls, values: Any, info: ValidationInfo) -> Any:
        """Limit the number of values; the size of the body limits a prompt's ids."""
        is_counted = isinstance(values, list | dict) and not (
            info.field_name == "prompt" and _is_ids(values)
        )
        max_values = _MAX_LISTED_STOPS if info.field_name == "stop" else _MAX_VALUES
        if is_counted and len(values) > max_values:
            name = str(info.field_name)
            raise RequestError(
                f"{name} must have at most {max_values} values, got {len(values)}; send fewer", name
            )
        return values

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        max_chars = max(map(len, [stop] if isinstance(stop, str) else stop or ()), default=0)
        if max_chars > _MAX_STOP_CHARS:
            raise RequestError(
                f"stop must be strings of at most {_MAX_STOP_CHARS} characters, got one of "
                f"{max_chars}; send a part",
                "stop",
            )
        return stop

    @property
    def has_grammar(self) -> bool:
        """Whether the answer must be JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None for any JSON or any text."""
        format_ = self.response_format
        return (
            None if format_ is None or format_.json_schema is None else format_.json_schema.content
        )

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        if len(body) > _MAX_FIELDS:
            raise RequestError(
                f"the body must have at most {_MAX_FIELDS} fields, got {len(body)}; leave some out"
            )
        return {
            name: value
            for name, value in body.items()
            if not _changes_nothing(cls.model_fields.get(name), name, value)
        }


class Part(BaseModel):
    """Part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """Called function; `arguments` are JSON."""

    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function

    def as_dict(self) -> dict[str, Any]:
        """Convert the call for chat templates, with its arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            got = reprlib.repr(self.function.arguments)
            raise RequestError(
                f"arguments of tool_calls must be JSON, got {got}", "messages"
            ) from None
        return {
            **self.model_dump(exclude_none=True),
            "function": {"name": self.function.name, "arguments": arguments},
        }


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, message: Any) -> Any:
        """Add an empty text to a message with tool calls only."""
        if (
            isinstance(message, Mapping)
            and "tool_calls" in message
            and message.get("content") is None
        ):
            return {**message, "content": ""}
        return message

    def as_dict(self) -> dict[str, Any]:
        """Convert the message for chat templates: one text, role `system` for `developer`."""
        text = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text,
        }
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        optional = {
            name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")
        }
        return message | {name: value for name, value in optional.items() if value is not None}


class Tool(BaseModel):
    """Function for the model.

    The chat template gets it unchanged.
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: dict[str, Any]


class FunctionName(BaseModel):
    """Name of a function."""

    name: str


class NamedTool(BaseModel):
    """Choice of one function."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Request):
    """A request for `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    speculation: bool = False

    @property
    def num_top(self) -> int | None:
        """Number of most likely tokens per position; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def requires_calls(self) -> bool:
        """Whether the answer must be calls alone."""
        return self.tool_choice not in ("none", "auto")

    @property
    def named_function(self) -> str | None:
        """Name of the function to be called; None without a choice of one."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else None

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template besides the messages."""
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        if self.has_tools:
            options["tools"] = [tool.model_dump() for tool in self.tools or ()]
        return options

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_names(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        """Allow the template's variables only; other arguments change the result or template."""
        if reserved := sorted(_TEMPLATE_ARGUMENTS.intersection(options or ())):
            raise RequestError(
                "chat_template_kwargs must be variables of the chat template, got "
                f"{reserved[0]!r}; leave it out",
                "chat_template_kwargs",
            )
        return options

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        """Check a choice that requires calls: it needs tools, and no other format."""
        if not self.requires_calls:
            return self
        name, tools = self.named_function, self.tools or ()
        got = '"required"' if name is None else f"the function {reprlib.repr(name)}"
        if not any(name in (None, tool.function.get("name")) for tool in tools):
            raise RequestError(
                f'tool_choice must be "none", "auto" or a choice of tools, got {got}; add it to '
                "tools",
                "tool_choice",
            )
        if self.has_grammar:
            raise RequestError(
                f'tool_choice must be "none" or "auto" with response_format, got {got}; leave one '
                "of them out",
                "tool_choice",
            )
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"logprobs must be true with top_logprobs, got {self.top_logprobs}", "logprobs"
            )
        return self

    @model_validator(mode="after")
    def _check_speculation(self) -> Self:
        if self.speculation and not self.stream:
            raise RequestError("stream must be true with speculation, got false", "stream")
        return self

    @field_validator("messages", mode="before")
    @classmethod
    def _check_number(cls, messages: Any) -> Any:
        listed = (
            [message for message in messages if isinstance(message, dict)]
            if isinstance(messages, list)
            else []
        )
        num_parts = sum(_num_parts(message.get("content")) for message in listed)
        num_parts += sum(_num_parts(message.get("tool_calls") or []) for message in listed)
        if num_parts > _MAX_MESSAGES:
            raise RequestError(
                f"messages must have at most {_MAX_MESSAGES} parts, got {num_parts}; join some",
                "messages",
            )
        return messages


class CompletionRequest(Request):
    """A request for `/v1/completions`.

    It has one prompt or several, each as text or token ids.
    """

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
        """Number of most likely tokens per position; None without log probabilities."""
        return self.logprobs


def _num_parts(content: Any) -> int:
    return len(content) if isinstance(content, list) else 1


def _is_ids(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and isinstance(values[0], int)


def _changes_nothing(field: FieldInfo | None, name: str, value: Any) -> bool:
    """Return whether leaving out a field gives the same answer.

    It does for None in an optional field, and for neutral values of an unsupported field.
    """
    if field is not None:
        return value is None and not field.is_required()
    return value is None or name in _IGNORED or value in NEUTRAL.get(name, ())


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)
_KINDS = (
    ChatRequest,
    CompletionRequest,
    Message,
    Part,
    StreamOptions,
    Tool,
    ToolCall,
    Function,
    NamedTool,
    ResponseFormat,
)
_FIELDS = {name for kind in _KINDS for name in kind.model_fields} | {"schema"}


def parse(kind: type[AnyRequest], body: bytes | bytearray) -> AnyRequest:
    """Read a request from JSON, or raise `RequestError`."""
    is_collecting = gc.isenabled()
    # a million small lists take 0.1 s to make, and a second in repeated garbage collections
    gc.disable()
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_field(error, _FIELDS, NEUTRAL) from None
    finally:
        if is_collecting:
            gc.enable()
