"""Serve SmolLM2-135M-Instruct, or the bundled pair, at an OpenAI-compatible endpoint.

    pip install ".[demo,serve]"
    python examples/serve.py
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

A chat page is at http://127.0.0.1:8000/. `hf-speculate serve TARGET --draft DRAFT` serves your own
models. Up to eight requests share one running decoder, which drafts by prompt lookup. With --rows
1, the draft head of the model drafts for one request at a time. When a client disconnects, its row
is freed.
"""

import argparse

import hf_speculate
from hf_speculate.tools.cli.serve import serve
from hf_speculate.tools.server.engine import Engine
from models import load_models

LOOKUP = {"prompt_lookup_num_tokens": 10}


def load(is_tiny: bool, num_rows: int, max_queued: int) -> Engine:
    """Return the engine for the example model; refill does not support its draft head."""
    models = load_models(is_tiny)
    options = LOOKUP if num_rows > 1 and not models.is_tiny else models.options
    return Engine(models.target, models.tokenizer, models.name, options, num_rows, max_queued)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the examples' model in OpenAI's format.")
    parser.add_argument("--tiny", action="store_true", help="serve the bundled 7 M pair")
    parser.add_argument(
        "--host", default="127.0.0.1", help="there is no authentication: keep to this machine"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=8, help="requests decoded at once")
    parser.add_argument("--max-queued", type=int, default=64, help="requests waiting for a row")
    arguments = parser.parse_args()
    try:
        serve(
            lambda: load(arguments.tiny, arguments.rows, arguments.max_queued),
            arguments.host,
            arguments.port,
        )
    except hf_speculate.SpeculateError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
