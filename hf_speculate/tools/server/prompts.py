"""Translate requests into prompts with arguments of `generate()`, one per text."""

import json
import reprlib
import secrets
from collections.abc import Mapping
from typing import Any

from transformers import LogitsProcessor

from hf_speculate.errors import ConfigError
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.tools.dataset.rows import Row, token_ids_of
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.penalties import PenaltiesProcessor
from hf_speculate.tools.server.response_format import GrammarProcessor, GrammarSource
from hf_speculate.tools.server.schemas import ChatRequest, CompletionRequest, Request
from hf_speculate.tools.server.text_request import TextRequest
from hf_speculate.tools.server.token_bytes import StopTexts
from hf_speculate.tools.server.tool_grammar import (
    ToolCallProcessor,
    begins_reasoning,
    source_of_tools,
)

_DEFAULT_NUM_TOKENS = 256  # maximum tokens in an answer if its request sets no limit
_MAX_STOPS = 16  # OpenAI allows four, but tasks of lm-evaluation-harness have more
# Smallest temperature and penalty. Both divide logits, which must stay finite in float32.
_MIN_DIVISOR = 1e-10
_NOT_COMPILED: Any = object()


def text_requests(
    request: ChatRequest | CompletionRequest, engine: Engine, grammar: Any = _NOT_COMPILED
) -> list[TextRequest]:
    """Return the texts of a request, `n` for each prompt.

    The choices for a prompt use the seeds `seed`, `seed + 1` and so on.

    Args:
        request: the request.
        engine: the engine that will decode it.
        grammar: the compiled grammar for the request's `grammar_source`; None if it has none. By
            default, the grammar is compiled here.

    Raises:
        RequestError: a part of the request is not supported.
    """
    if request.model is not None:
        check_model(request.model, engine)
    contents = _contents(request)
    num_texts = len(contents) * request.n
    if num_texts > engine.max_texts:  # checked before they are tokenised
        raise RequestError(
            f"n times the number of prompts must be at most {engine.max_texts}, got {num_texts}; "
            "send several requests",
            "n" if len(contents) == 1 else "prompt",
        )
    prompts = [_token_ids(content, request, engine) for content in contents]
    if grammar is _NOT_COMPILED:
        source = grammar_source(request, engine)
        grammar = None if source is None else engine.grammars.compile(source)
    shared, num_top, texts = _shared_options(request, engine), request.num_top, []
    is_chat = isinstance(request, ChatRequest)
    # A grammar for JSON allows no tags, but strings in the JSON may contain their text.
    is_parsed = is_chat and not request.has_grammar and engine.response_template is not None
    has_origins = isinstance(request, ChatRequest) and request.speculation
    for token_ids, echoed in zip(prompts, _echoed(request, prompts, engine), strict=True):
        options = shared | _own_options(request, len(token_ids), engine)
        for choice in range(request.n):
            processors = _processors(
                request, token_ids, engine, options.get("eos_token_id"), grammar
            )
            row_options = options | ({"logits_processor": processors} if processors else {})
            row = RowPrompt(token_ids, _seed(request, engine, choice), row_options)
            texts.append(TextRequest(row, echoed, num_top, not is_chat, is_parsed, has_origins))
    return texts


def _echoed(
    request: ChatRequest | CompletionRequest, prompts: list[list[int]], engine: Engine
) -> list[str]:
    """Return the text before the answers to each prompt: the prompt if the request echoes it."""
    if not (isinstance(request, CompletionRequest) and request.echo):
        return [""] * len(prompts)
    if isinstance(request.prompt, str):
        return [request.prompt]
    prompts_as_sent: Any = request.prompt if isinstance(request.prompt[0], str) else prompts
    return [
        prompt if isinstance(prompt, str) else _text_of(prompt, engine)
        for prompt in prompts_as_sent
    ]


def _text_of(token_ids: list[int], engine: Engine) -> str:
    return str(
        engine.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )


def check_model(name: str, engine: Engine) -> None:
    """Raise `RequestError` unless `name` is the served model's name, or the last part of it."""
    if name not in (engine.name, engine.name.rstrip("/").rpartition("/")[2]):
        raise RequestError(
            f"model must be {engine.name!r}, got {reprlib.repr(name)}",
            "model",
            "model_not_found",
            404,
        )


def _seed(request: Request, engine: Engine, choice: int) -> int | None:
    if request.temperature == 0:
        return None
    if request.seed is not None:
        return request.seed + choice
    # Sampled rows share a batch, and all of them use the same verifier.
    return secrets.randbits(63) if engine.num_rows > 1 else None


def _shared_options(request: Request, engine: Engine) -> dict[str, Any]:
    """Return the arguments of `generate()` that all prompts share."""
    for name in ("temperature", "repetition_penalty"):
        value = getattr(request, name)
        if value and not _MIN_DIVISOR <= value <= 1 / _MIN_DIVISOR:
            allowed = "0 or at least 1e-10" if name == "temperature" else "from 1e-10 to 1e10"
            raise RequestError(
                f"{name} must be {allowed}, got {value}; logits divided by it could overflow", name
            )
    options: dict[str, Any] = {"do_sample": False}
    if request.temperature != 0:
        temperature, top_p = (
            1.0 if value is None else value for value in (request.temperature, request.top_p)
        )
        options |= {
            "do_sample": True,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": request.top_k or 0,
        }
        if request.min_p:
            options["min_p"] = request.min_p
        # Only this verifier gives the same text for any draft.
        if request.seed is not None or engine.num_rows > 1:
            options["verifier"] = "coupled"
    if request.verifier is not None:
        options["verifier"] = request.verifier
    if request.num_assistant_tokens is not None:
        options["num_assistant_tokens"] = [request.num_assistant_tokens]
    if request.repetition_penalty not in (None, 1):
        options["repetition_penalty"] = float(request.repetition_penalty or 1)
    if request.logit_bias:
        _check_ids(list(request.logit_bias), "logit_bias", engine)
        options["sequence_bias"] = {
            (token_id,): bias for token_id, bias in request.logit_bias.items()
        }
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if not all(stops) or len(stops) > _MAX_STOPS:
        raise RequestError(
            f"stop must be up to {_MAX_STOPS} strings, none of them empty, got "
            f"{reprlib.repr(stops)}",
            "stop",
        )
    if not all(map(engine.token_bytes.can_write, stops)):
        raise RequestError(
            f"stop must be strings that the tokenizer can write, got {reprlib.repr(stops)}; leave "
            "out the others",
            "stop",
        )
    if request.stop_token_ids or request.ignore_eos:
        _check_ids(request.stop_token_ids or [], "stop_token_ids", engine)
        ends = sorted(
            {*(request.stop_token_ids or ()), *(() if request.ignore_eos else engine.eos_token_ids)}
        )
        options["eos_token_id"] = ends or [engine.vocab_size]  # no token has this id
    return options


def _own_options(request: Request, num_prompt: int, engine: Engine) -> dict[str, Any]:
    """Return the arguments of `generate()` for a prompt with `num_prompt` tokens."""
    num_requested: int | None = (
        getattr(request, "max_completion_tokens", None) or request.max_tokens
    )
    max_answer_len = _DEFAULT_NUM_TOKENS
    if engine.max_length is not None:
        max_answer_len = engine.max_length - num_prompt
        if max_answer_len < (num_requested or 1):
            raise RequestError(
                f"prompt and answer must have at most {engine.max_length} tokens, got {num_prompt} "
                f"+ {num_requested or 1}; "
                "send less text, or ask for fewer tokens",
                "messages" if isinstance(request, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
    options: dict[str, Any] = {
        "max_new_tokens": num_requested or min(max_answer_len, _DEFAULT_NUM_TOKENS)
    }
    if stops := tuple([request.stop] if isinstance(request.stop, str) else request.stop or ()):
        is_chat = isinstance(request, ChatRequest)
        options["stopping_criteria"] = [StopTexts(engine.token_bytes, stops, num_prompt, is_chat)]
    return options


def grammar_source(request: Request, engine: Engine) -> GrammarSource | None:
    """Return the source of the grammar for a request's answers; None if any text is allowed."""
    has_ends = bool(request.stop_token_ids or engine.eos_token_ids) and not request.ignore_eos
    if request.has_grammar:
        if not has_ends:
            raise RequestError(
                "response_format must be text if no EOS id ends the answer, got another type; "
                "leave out ignore_eos",
                "response_format",
            )
        return GrammarSource.of_schema(request.answer_schema)
    if isinstance(request, ChatRequest) and request.has_tools:
        return source_of_tools(request, engine.call_format, has_ends)
    return None


def _processors(
    request: Request, prompt_ids: list[int], engine: Engine, end_ids: list[int] | None, grammar: Any
) -> list[LogitsProcessor]:
    """Make the logits processors for a single text."""
    processors: list[LogitsProcessor] = []
    num_prompt, end_ids = len(prompt_ids), engine.eos_token_ids if end_ids is None else end_ids
    frequency, presence = request.frequency_penalty or 0.0, request.presence_penalty or 0.0
    if frequency or presence:
        processors.append(PenaltiesProcessor(num_prompt, frequency=frequency, presence=presence))
    if grammar is not None and isinstance(request, ChatRequest) and not request.has_grammar:
        # other ids that end the text, such as `</tool_call>`, may be part of a call
        call_ends = [each for each in end_ids if each in engine.eos_token_ids] or end_ids
        reasoning = engine.call_format.reasoning
        has_begun = begins_reasoning(prompt_ids, reasoning, engine.token_bytes)
        processors.append(
            ToolCallProcessor(
                grammar, num_prompt, call_ends, reasoning, has_begun, request.requires_calls
            )
        )
    elif grammar is not None:
        processors.append(GrammarProcessor(grammar, num_prompt, end_ids))
    return processors


def _contents(request: ChatRequest | CompletionRequest) -> list[Any]:
    """Return the prompts of a request: texts, token ids, or messages."""
    if isinstance(request, ChatRequest):
        return [[message.as_dict() for message in request.messages]]
    prompt: Any = request.prompt
    prompts = (
        [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    )
    if not prompts:
        raise RequestError("prompt must have at least one token, got none", "prompt")
    return list(prompts)


def _token_ids(content: Any, request: ChatRequest | CompletionRequest, engine: Engine) -> list[int]:
    if isinstance(request, ChatRequest):
        return _encoded(content, "messages", engine, request.template_options)
    return (
        _encoded(content, "prompt", engine)
        if isinstance(content, str)
        else _checked(content, engine)
    )


def _checked(token_ids: list[int], engine: Engine) -> list[int]:
    if not token_ids:
        raise RequestError("prompt must have at least one token, got none", "prompt")
    _check_ids(token_ids, "prompt", engine)
    return token_ids


def _check_ids(token_ids: list[int], param: str, engine: Engine) -> None:
    size = engine.vocab_size
    if not all(0 <= token_id < size for token_id in token_ids):
        raise RequestError(f"{param} must hold token ids in [0, {size}), got another number", param)


def _encoded(
    content: str | list[dict[str, Any]],
    param: str,
    engine: Engine,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    try:
        num_chars = len(
            content
            if isinstance(content, str)
            else json.dumps([content, options], ensure_ascii=False)
        )
    except RecursionError:
        raise RequestError(
            f"{param} must hold JSON of fewer levels, got too many; send flatter arguments", param
        ) from None
    if num_chars > engine.max_chars:  # tokenising would take seconds and gigabytes
        raise RequestError(
            f"{param} must have at most {engine.max_chars} characters, got {num_chars}; send less "
            "text",
            param,
            "context_length_exceeded",
        )
    try:
        row = Row(1, content, source=param)
        return token_ids_of(
            row, engine.tokenizer, is_chat=param == "messages", template_options=options
        )
    except ConfigError as error:
        raise RequestError(str(error), param) from error
