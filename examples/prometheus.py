"""Export Prometheus metrics of `generate()` calls: token counts and the duration of each stage.

    python examples/prometheus.py

The script decodes prompts with the bundled pair, serves the metrics on 127.0.0.1, and prints the
result of one scrape. It needs `pip install ".[metrics]"`. `hf-speculate serve` has its own metrics
at `/metrics`.
"""

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate.tools.server.metrics import SpeculationCounters

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
except ImportError as error:
    raise SystemExit(f'{error.name} is not installed; run: pip install ".[metrics]"') from error

EXAMPLES = Path(__file__).parent
HOST = "127.0.0.1"


class CallMetrics:
    """Metrics for calls of `generate()`.

    Pass `on_round` as `speculation_callback`, and pass the statistics of each call to `add`. Tokens
    are counted while a call runs, under the same names as in the server. Seconds by stage come from
    the statistics after the call.
    """

    def __init__(self, registry: CollectorRegistry, source: str):
        self.tokens = SpeculationCounters(registry, source)
        self.seconds = Counter(
            "hf_speculate_stage_seconds", "Seconds by stage.", ["stage"], registry=registry
        )
        self.round_seconds = Histogram(
            "hf_speculate_round_seconds", "Seconds of a round.", registry=registry
        )

    def on_round(self, report: hf_speculate.RoundReport) -> None:
        self.tokens.add(sum(report.num_drafted), sum(report.num_accepted), sum(report.num_emitted))
        self.round_seconds.observe(report.round_s)

    def add(self, stats: hf_speculate.SpeculationStats) -> None:
        for stage, seconds in stats.seconds_by_stage.items():
            self.seconds.labels(stage).inc(seconds)


def decode(folder: Path, num_prompts: int, max_new_tokens: int, metrics: CallMetrics) -> None:
    """Decode bundled prompts one after another, like a server."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(folder / "target"))
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft")
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    stats = hf_speculate.SpeculationStats()
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "num_assistant_tokens": 5,
    }
    for line in lines[:num_prompts]:
        target.generate(
            **tokenizer(json.loads(line)["turns"][0], return_tensors="pt"),
            **options,
            assistant_model=draft,
            speculation_stats=stats,
            speculation_callback=metrics.on_round,
        )
        metrics.add(stats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--pair", type=Path, default=EXAMPLES / "pair")
    args = parser.parse_args()
    # The default registry also contains process counters.
    registry = CollectorRegistry()
    metrics = CallMetrics(registry, "draft model")
    server, thread = start_http_server(args.port, addr=HOST, registry=registry)
    decode(args.pair, args.num_prompts, args.max_new_tokens, metrics)
    with urllib.request.urlopen(f"http://{HOST}:{server.server_port}/metrics") as scrape:
        print(scrape.read().decode())
    server.shutdown()
    thread.join()


if __name__ == "__main__":
    main()
