"""Counters for Prometheus: what was drafted, kept and emitted, and how long each stage took.

    python examples/prometheus.py

Decodes prompts on the bundled pair, serves the counters on 127.0.0.1, and prints what a scrape of them gives. Needs
`pip install ".[metrics]"`.
"""

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
except ImportError as error:
    raise SystemExit(f'{error.name} is not installed; run: pip install ".[metrics]"') from error

EXAMPLES = Path(__file__).parent
HOST = "127.0.0.1"


class SpeculationMetrics:
    """Counters of one served model: pass `on_round` as `speculation_callback`, and each call's statistics to `add`.

    Rounds are counted while a call runs, seconds when it is over: they are the statistics' own, by stage.
    """

    def __init__(self, model: str, registry: CollectorRegistry):
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"speculation_{name}", text, ["model", *labels], registry=registry)

        self.model = model
        self.rounds = counter("rounds", "Rounds of the batch.").labels(model)
        self.drafted = counter("drafted_tokens", "Tokens that were drafted.").labels(model)
        self.accepted = counter("accepted_tokens", "Drafted tokens that stayed.").labels(model)
        self.emitted = counter("emitted_tokens", "Tokens that rounds added to the output.").labels(model)
        self.seconds = counter("seconds", "Seconds by stage.", "stage")
        self.round_seconds = Histogram(
            "speculation_round_seconds", "Seconds of a round.", ["model"], registry=registry
        ).labels(model)

    def on_round(self, report: hf_speculate.RoundReport) -> None:
        self.rounds.inc()
        self.drafted.inc(sum(report.num_drafted))
        self.accepted.inc(sum(report.num_accepted))
        self.emitted.inc(sum(report.num_emitted))
        self.round_seconds.observe(report.round_s)

    def add(self, stats: hf_speculate.SpeculationStats) -> None:
        for stage, seconds in stats.seconds_by_stage.items():
            self.seconds.labels(self.model, stage).inc(seconds)


def decode(folder: Path, num_prompts: int, max_new_tokens: int, metrics: SpeculationMetrics) -> None:
    """Decode bundled prompts one after the other, as a server would."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(folder / "target"))
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft")
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    stats = hf_speculate.SpeculationStats()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens, "num_assistant_tokens": 5}
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--pair", type=Path, default=EXAMPLES / "pair")
    args = parser.parse_args()
    registry = CollectorRegistry()  # only what is counted here; the default one has counters of the process too
    metrics = SpeculationMetrics("bundled", registry)
    server, thread = start_http_server(args.port, addr=HOST, registry=registry)
    decode(args.pair, args.num_prompts, args.max_new_tokens, metrics)
    with urllib.request.urlopen(f"http://{HOST}:{server.server_port}/metrics") as scrape:
        print(scrape.read().decode())
    server.shutdown()
    thread.join()


if __name__ == "__main__":
    main()
