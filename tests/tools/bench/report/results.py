"""Make a result like one of `hf-speculate bench`, with made-up numbers."""

from typing import Any

from hf_speculate.stats import STAGES

FALLBACK = "the cache is dynamic: the model reads no explicit mask"
LEFT_OUT = {"transformers, defaults": "RuntimeError: another vocabulary"}


def spread(middle: float, width: float = 0.2) -> dict[str, float]:
    return {
        "min": round(middle * (1 - width), 4),
        "median": middle,
        "max": round(middle * (1 + width), 4),
    }


def method(name: str, speedup: float, **more: Any) -> dict[str, Any]:
    """Return the entry of a method; `more` replaces fields of the entry."""
    entry = {
        "name": name,
        "engine": "ours",
        "num_assistant_tokens": 5,
        "is_lossy": False,
        "peak_bytes": 3 * 2**29,
    }
    entry |= {
        "tokens_per_s": spread(59.3 * speedup),
        "speedup": spread(speedup),
        "ms_per_token": spread(16.9 / speedup),
    }
    entry |= {
        "acceptance_rate": 0.53,
        "acceptance_rate_per_position": [0.81, 0.74, 0.66, 0.61, 0.52],
    }
    entry |= {
        "mean_acceptance_length": 2.87,
        "draft_lens": [5] * 14,
        "first_token_s": spread(0.013),
    }
    entry |= {
        "seconds": dict(zip(STAGES, (0.01, 0.01, 0.0, 0.05, 0.6, 1.4, 0.09, 0.07), strict=True)),
        "verifier": "greedy",
    }
    return (
        entry | {"sample": "greedy text", "checked": "12 of 12 rows equal", "fallbacks": []} | more
    )


def make_result() -> dict[str, Any]:
    not_ours = {"verifier": None, "acceptance_rate_per_position": [], "draft_lens": None}
    missing = dict.fromkeys(
        ("mean_acceptance_length", "acceptance_rate", "seconds", "num_assistant_tokens", "checked")
    )
    adaptive_lens = [round(3 + 3 * (index % 9) / 8) if index % 11 else 0 for index in range(700)]
    lossy = {
        "verifier": "typical",
        "is_lossy": True,
        "checked": None,
        "fallbacks": [FALLBACK],
        "sample": "other",
    }
    methods = [
        method("plain, greedy", 1.0, engine="plain", **not_ours, **missing)
        | {"speedup": spread(1.0, 0.0)},
        method("transformers, K = 5", 1.38, engine="transformers", **not_ours),
        method("greedy, adaptive", 1.93, num_assistant_tokens=None, draft_lens=adaptive_lens),
        method(
            "greedy, K = 5",
            2.13,
            is_noise=False,
            acceptance_rate_per_position=[0.9, 0.8, 0.7, 0.66, 0.6],
        ),
        method("typical, K = 5", 2.61, **lossy),
    ]
    categories = [
        {
            "category": category,
            "method": entry["name"],
            "speedup": 0.8 + 0.25 * number + 0.15 * order,
        }
        | {"acceptance_rate": 0.4 + 0.05 * number, "num_prompts": 10}
        for number, category in enumerate(("writing", "coding", "translation", "math_reasoning"))
        for order, entry in enumerate(methods[2:])
    ]
    drift = [("plain, greedy", None, 1.0, -0.92, 1.0), ("plain, sampling", None, 0.97, -1.38, 0.71)]
    drift += [
        ("typical", threshold, 2.9 - threshold, -1.61 + 0.8 * threshold, 0.62 + 0.4 * threshold)
        for threshold in (0.01, 0.03, 0.09, 0.2, 0.5)
    ]
    fields = (
        "verifier",
        "posterior_threshold",
        "speedup",
        "log_likelihood_per_token",
        "agreement_with_greedy",
    )
    return {
        "environment": {
            "device": "AMD EPYC",
            "versions": {"torch": "2.13.0"},
            "target": "examples/pair/target",
        },
        "settings": {
            "left_out": LEFT_OUT,
            "command": "hf-speculate bench target prompts.jsonl --draft draft",
        },
        "prompt": "a prompt",
        "methods": methods,
        "categories": categories,
        "drift": [
            dict(zip(fields, row, strict=True)) | {"tokens_per_s": 59.3 * row[2]} for row in drift
        ],
    }
