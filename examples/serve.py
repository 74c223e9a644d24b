"""An OpenAI-compatible chat endpoint on FastAPI and uvicorn, over a target that drafts.

    pip install ".[serve]"
    python examples/serve.py
    python examples/serve.py --target <model> --draft <smaller model>
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

`generate()` runs in one worker thread, off the event loop: one request is decoded at a time, the others wait in line.
That serves one user at a time as fast as the pair decodes; for many at once take an engine with continuous batching.
A client that hangs up ends its generation within a round. Parameters of OpenAI's that are not served are refused.
"""

import argparse
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from models import TEMPLATE, load_models
from serving.engine import Engine, Finish, Question

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise SystemExit(f'{error.name} is not installed; run: pip install ".[serve]"') from error

DEFAULT_TOKENS = 256  # of an answer that names no number
MAX_STOPS = 4


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def plain(self) -> dict[str, str]:
        """With its content as one text, as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """What is served of OpenAI's parameters; others are refused, for they would change the answer."""

    model_config = ConfigDict(extra="forbid")

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Refusal(Exception):
    """A request that cannot be served."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def question_of(chat: ChatRequest, engine: Engine) -> Question:
    """What to decode for a request.

    Raises:
        Refusal: it cannot be served.
    """
    if chat.model not in (None, engine.name):
        raise Refusal(f"model must be {engine.name!r}, got {chat.model!r}", "model", "model_not_found", 404)
    if chat.n not in (None, 1):
        raise Refusal(f"n must be 1, got {chat.n}; send a request for each answer", "n")
    if not all(chat.stops) or len(chat.stops) > MAX_STOPS:
        raise Refusal(f"stop must be up to {MAX_STOPS} strings, none of them empty, got {chat.stops}", "stop")
    messages = [message.plain() for message in chat.messages]
    text = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = engine.tokenizer(text, return_tensors="pt", add_special_tokens=False).to(engine.target.device)
    num_prompt = inputs["input_ids"].shape[1]
    if not num_prompt:
        raise Refusal("messages must hold some text, got none", "messages")
    wanted = chat.max_completion_tokens or chat.max_tokens
    room = DEFAULT_TOKENS if engine.max_length is None else engine.max_length - num_prompt
    if engine.max_length is not None and room < (wanted or 1):
        message = f"the model reads {engine.max_length} tokens, got {num_prompt} of messages and {wanted or 1} to come"
        raise Refusal(message, "messages", "context_length_exceeded")
    options: dict[str, Any] = {"max_new_tokens": wanted or min(room, DEFAULT_TOKENS), "do_sample": False}
    if chat.temperature != 0:
        temperature, top_p = (1.0 if value is None else value for value in (chat.temperature, chat.top_p))
        options |= {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    if chat.seed is not None:  # the one rule under which a seed repeats the text, however fast drafts come
        options |= {"seed": chat.seed, "verifier": "coupled"}
    return Question(inputs["input_ids"], inputs["attention_mask"], chat.stops, options)


def usage(question: Question, finish: Finish) -> dict[str, Any]:
    """OpenAI's counts, and what drafting was worth."""
    num_prompt, num_new, stats = question.num_prompt_tokens, finish.num_new_tokens, finish.stats
    speculation = {
        "rounds": stats.num_rounds,
        "acceptance": round(stats.acceptance_rate, 4),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
    }
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    return {**counts, "speculation": speculation}


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """OpenAI's form of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status)


async def events(
    answer: AsyncIterator[str | Finish], first: str | Finish, question: Question, head: dict[str, Any], has_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events of an answer whose first piece is known."""

    def event(delta: dict[str, str] | None, reason: str | None = None, **more: Any) -> str:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    async with aclosing(answer):
        yield event({"role": "assistant", "content": ""})
        piece = first
        while isinstance(piece, str):
            yield event({"content": piece})
            piece = await anext(answer, None)
        if piece is None:
            return
        yield event({}, piece.reason)
        if has_usage:
            yield event(None, usage=usage(question, piece))
        yield "data: [DONE]\n\n"


async def whole(answer: AsyncIterator[str | Finish], question: Question, head: dict[str, Any]) -> dict[str, Any] | None:
    """An answer in one piece; None where nobody waits for it any more."""
    text = ""
    async with aclosing(answer):
        async for piece in answer:
            if isinstance(piece, str):
                text += piece
                continue
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": piece.reason}
            return {**head, "choices": [choice], "usage": usage(question, piece)}
    return None


def make_app(engine: Engine) -> FastAPI:
    """The endpoint over an engine."""
    app = FastAPI(title="hf_speculate")
    began = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": engine.name, "object": "model", "created": began, "owned_by": "hf_speculate"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
    async def complete(chat: ChatRequest, http: Request) -> Any:
        question = question_of(chat, engine)
        answer = engine.answer(question, http.is_disconnected)
        name = f"chat.completion{'.chunk' if chat.stream else ''}"
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": name, "created": int(time.time()), "model": engine.name}
        if not chat.stream:
            return await whole(answer, question, head)
        first = await anext(answer, None)  # what generate() refuses is then an error of its own, not a broken stream
        if first is None:
            return None
        has_usage = chat.stream_options is not None and chat.stream_options.include_usage
        return StreamingResponse(events(answer, first, question, head, has_usage), media_type="text/event-stream")

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return error_response(error.status, str(error), error.param, error.code)

    @app.exception_handler(hf_speculate.SpeculateError)
    async def not_decoded(_: Request, error: hf_speculate.SpeculateError) -> JSONResponse:
        return error_response(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(place) for place in first["loc"][1:])
        return error_response(400, f"{param}: {first['msg']}", param or None)

    @app.exception_handler(HTTPException)
    async def not_found(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail))

    return app


def load(target: str | None, draft: str | None, is_tiny: bool = False) -> Engine:
    """The engine over models by their names or paths; without a target, over the examples' own."""
    if target is None:
        models = load_models(is_tiny)
        return Engine(models.target, None, models.tokenizer, models.name, **models.options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [
        AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval() for name in (target, draft) if name
    ]
    tokenizer = AutoTokenizer.from_pretrained(target)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
    return Engine(hf_speculate.enable(models[0]), models[1] if draft else None, tokenizer, Path(target).name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a target that drafts, as OpenAI's chat endpoint.")
    parser.add_argument("--target", help="a model of your own; the default is SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help="its draft model; unset: none")
    parser.add_argument("--tiny", action="store_true", help="serve the bundled 7 M pair")
    parser.add_argument("--host", default="127.0.0.1", help="there is no authentication: keep to this machine")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    app = make_app(load(arguments.target, arguments.draft, arguments.tiny))
    uvicorn.run(app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
