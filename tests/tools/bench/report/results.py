"""A result as `hf-speculate bench` gives it, with made-up figures."""

from typing import Any

FALLBACK = "the cache is dynamic: the model reads no explicit mask"
LEFT_OUT = {"transformers, its defaults": "RuntimeError: another vocabulary"}
STAGES = ("prefill", "draft", "score", "verify", "bookkeeping")


def spread(middle: float, width: float = 0.2) -> dict[str, float]:
    return {"min": round(middle * (1 - width), 4), "median": middle, "max": round(middle * (1 + width), 4)}


def way(name: str, over_plain: float, **more: Any) -> dict[str, Any]:
    """A way's entry; `more` replaces what stands here."""
    entry = {
        "name": name,
        "verifier": "greedy",
        "num_assistant_tokens": 5,
        "is_lossy": False,
        "tokens_per_s": spread(59.3 * over_plain),
        "over_plain": spread(over_plain),
        "tokens_per_round": 2.87,
        "acceptance": 0.53,
        "acceptance_by_position": [0.81, 0.74, 0.66, 0.61, 0.52],
        "draft_lens": [5] * 14,
        "seconds": dict(zip(STAGES, (0.05, 0.6, 1.4, 0.09, 0.07), strict=True)),
        "checked": "12 of 12 rows equal",
        "fallbacks": [],
    }
    return entry | more


def make_result() -> dict[str, Any]:
    plain = way("plain, greedy", 1.0, verifier=None, num_assistant_tokens=None, checked=None)
    plain["over_plain"] = spread(1.0, 0.0)
    for name in ("tokens_per_round", "acceptance", "acceptance_by_position", "draft_lens", "seconds"):
        del plain[name]
    adaptive_lens = [round(3 + 3 * (index % 9) / 8) if index % 11 else 0 for index in range(700)]
    ways = [
        plain,
        way("transformers' assisted, K = 5", 1.38, verifier=None, acceptance_by_position=[], draft_lens=None),
        way("hf_speculate, adaptive", 1.93, num_assistant_tokens=None, draft_lens=adaptive_lens),
        way("hf_speculate, K = 5", 2.13, acceptance=0.61, acceptance_by_position=[0.9, 0.8, 0.7, 0.66, 0.6]),
        way(
            "hf_speculate, typical, K = 5", 2.61, verifier="typical", is_lossy=True, checked=None, fallbacks=[FALLBACK]
        ),
    ]
    names = [entry["name"] for entry in ways[2:]]
    categories = [
        {
            "category": category,
            "way": name,
            "over_plain": 0.8 + 0.25 * place + 0.15 * order,
            "acceptance": 0.4 + 0.05 * place,
            "num_prompts": 10,
        }
        for place, category in enumerate(("writing", "coding", "translation", "math_reasoning"))
        for order, name in enumerate(names)
    ]
    thresholds = (0.01, 0.03, 0.09, 0.2, 0.3, 0.5)
    lossy = [
        drift("typical", threshold, 2.9 - threshold, -1.61 + 0.8 * threshold, 0.62 + 0.4 * threshold)
        for threshold in thresholds
    ]
    return {
        "circumstances": {
            "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
            "device": "AMD EPYC",
            "threads": 2,
            "dtype": "float32",
            "date": "2026-11-22",
            "target": "examples/pair/target",
            "draft": "examples/pair/draft",
        },
        "settings": {
            "prompts": "examples/prompts.jsonl",
            "max_new_tokens": 64,
            "do_sample": False,
            "left_out": LEFT_OUT,
        },
        "ways": ways,
        "categories": categories,
        "drift": [
            drift("plain, greedy", None, 1.0, -0.92, 1.0),
            drift("plain, sampling", None, 0.97, -1.38, 0.71),
            *lossy,
        ],
    }


def drift(
    verifier: str, threshold: float | None, over_plain: float, log_likelihood: float, agreement: float
) -> dict[str, Any]:
    return {
        "verifier": verifier,
        "posterior_threshold": threshold,
        "tokens_per_s": spread(59.3 * over_plain),
        "over_plain": spread(over_plain),
        "log_likelihood_per_token": log_likelihood,
        "agreement_with_greedy": agreement,
        "num_tokens": 768,
    }
