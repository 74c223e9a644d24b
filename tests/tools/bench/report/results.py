"""A result as `hf-speculate bench` gives it, with made-up figures."""

from typing import Any

from hf_speculate.stats import STAGES

FALLBACK = "the cache is dynamic: the model reads no explicit mask"
LEFT_OUT = {"transformers, defaults": "RuntimeError: another vocabulary"}


def spread(middle: float, width: float = 0.2) -> dict[str, float]:
    return {"min": round(middle * (1 - width), 4), "median": middle, "max": round(middle * (1 + width), 4)}


def method(name: str, speedup: float, **more: Any) -> dict[str, Any]:
    """A method's entry; `more` replaces what stands here."""
    entry = {
        "name": name,
        "engine": "ours",
        "verifier": "greedy",
        "num_assistant_tokens": 5,
        "is_lossy": False,
        "tokens_per_s": spread(59.3 * speedup),
        "speedup": spread(speedup),
        "mean_acceptance_length": 2.87,
        "acceptance_rate": 0.53,
        "acceptance_rate_per_position": [0.81, 0.74, 0.66, 0.61, 0.52],
        "draft_lens": [5] * 14,
        "seconds": dict(zip(STAGES, (0.05, 0.6, 1.4, 0.09, 0.07), strict=True)),
        "first_token_s": spread(0.013),
        "ms_per_token": spread(16.9 / speedup),
        "peak_bytes": 3 * 2**29,
        "sample": "greedy text",
        "checked": "12 of 12 rows equal",
        "fallbacks": [],
    }
    return entry | more


def make_result() -> dict[str, Any]:
    plain = method("plain, greedy", 1.0, engine="plain", verifier=None, num_assistant_tokens=None, checked=None)
    plain["speedup"] = spread(1.0, 0.0)
    for name in ("mean_acceptance_length", "acceptance_rate", "acceptance_rate_per_position", "draft_lens", "seconds"):
        del plain[name]
    adaptive_lens = [round(3 + 3 * (index % 9) / 8) if index % 11 else 0 for index in range(700)]
    methods = [
        plain,
        method(
            "transformers, K = 5",
            1.38,
            engine="transformers",
            verifier=None,
            acceptance_rate_per_position=[],
            draft_lens=None,
        ),
        method("greedy, adaptive", 1.93, num_assistant_tokens=None, draft_lens=adaptive_lens),
        method("greedy, K = 5", 2.13, is_noise=False, acceptance_rate_per_position=[0.9, 0.8, 0.7, 0.66, 0.6]),
        method(
            "typical, K = 5",
            2.61,
            verifier="typical",
            is_lossy=True,
            checked=None,
            fallbacks=[FALLBACK],
            sample="other",
        ),
    ]
    names = [entry["name"] for entry in methods[2:]]
    categories = [
        {
            "category": category,
            "method": name,
            "speedup": 0.8 + 0.25 * place + 0.15 * order,
            "acceptance_rate": 0.4 + 0.05 * place,
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
        "environment": {
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
            "command": "hf-speculate bench target prompts.jsonl --draft draft",
            "drift_num_assistant_tokens": "K = 5",
        },
        "prompt": "a prompt",
        "methods": methods,
        "categories": categories,
        "drift": [
            drift("plain, greedy", None, 1.0, -0.92, 1.0),
            drift("plain, sampling", None, 0.97, -1.38, 0.71),
            *lossy,
        ],
    }


def drift(
    verifier: str, threshold: float | None, speedup: float, log_likelihood: float, agreement: float
) -> dict[str, Any]:
    return {
        "verifier": verifier,
        "posterior_threshold": threshold,
        "tokens_per_s": spread(59.3 * speedup),
        "speedup": spread(speedup),
        "log_likelihood_per_token": log_likelihood,
        "agreement_with_greedy": agreement,
        "num_tokens": 768,
    }
