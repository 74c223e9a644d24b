"""An OpenAI-compatible endpoint over SmolLM2-135M-Instruct with its draft head, or over the bundled pair.

    pip install ".[serve]"
    python examples/serve.py
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

`hf-speculate serve TARGET --draft DRAFT` serves models of your own. Requests are decoded one at a time: for many users
take a server with continuous batching. A client that disconnects ends its generation.
"""

import argparse

import hf_speculate
from hf_speculate.tools.cli.serve import serve
from hf_speculate.tools.server.engine import Engine
from models import load_models


def load(is_tiny: bool = False) -> Engine:
    """The engine over the examples' model."""
    models = load_models(is_tiny)
    return Engine(models.target, models.tokenizer, models.name, models.options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the examples' model in OpenAI's format.")
    parser.add_argument("--tiny", action="store_true", help="serve the bundled 7 M pair")
    parser.add_argument("--host", default="127.0.0.1", help="there is no authentication: keep to this machine")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    try:
        serve(lambda: load(arguments.tiny), arguments.host, arguments.port)
    except hf_speculate.SpeculateError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
