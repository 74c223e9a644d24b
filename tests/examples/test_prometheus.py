"""The Prometheus example: its counters are the statistics', and its own scrape shows them."""

from pathlib import Path

import pytest

import hf_speculate
from tests.cases import pair
from tests.tiny import ragged_prompts

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "prometheus.py"
COUNTERS = {
    "rounds": "num_batch_rounds",
    "drafted_tokens": "num_drafted",
    "accepted_tokens": "num_accepted",
    "emitted_tokens": "num_emitted",
}


@pytest.fixture
def example(import_example):
    return import_example("prometheus")


def test_the_counters_are_the_statistics_of_all_calls(example):
    registry = prometheus_client.CollectorRegistry()
    metrics = example.SpeculationMetrics("tiny", registry)
    target, draft = pair("llama")
    stats, sums = hf_speculate.SpeculationStats(), dict.fromkeys(COUNTERS, 0)
    seconds: dict[str, float] = {}
    for batch_size in (1, 3):
        target.generate(
            **ragged_prompts(batch_size, seed=1),
            assistant_model=draft,
            num_assistant_tokens=3,
            max_new_tokens=9,
            speculation_stats=stats,
            speculation_callback=metrics.on_round,
        )
        metrics.add(stats)
        for name, field in COUNTERS.items():
            sums[name] += getattr(stats, field)
        for stage, spent in stats.seconds_by_stage.items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
    labels = {"model": "tiny"}
    for name, total in sums.items():
        assert registry.get_sample_value(f"speculation_{name}_total", labels) == total > 0
    for stage, spent in seconds.items():
        value = registry.get_sample_value("speculation_seconds_total", {**labels, "stage": stage})
        assert value == pytest.approx(spent)
    assert registry.get_sample_value("speculation_round_seconds_count", labels) == sums["rounds"]


@pytest.mark.slow
def test_the_script_prints_a_scrape_of_its_own(run):
    printed = run("prometheus.py", "--num-prompts", "1", "--max-new-tokens", "8")
    lines = dict(line.rsplit(" ", 1) for line in printed.splitlines() if line and not line.startswith("#"))
    assert float(lines['speculation_emitted_tokens_total{model="bundled"}']) == 7
    assert float(lines['speculation_rounds_total{model="bundled"}']) >= 2
    assert float(lines['speculation_seconds_total{model="bundled",stage="score"}']) > 0
