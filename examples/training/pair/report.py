"""Write the README of the pair from its measurements."""

import textwrap

from training.pair.acceptance import bound
from training.pair.shapes import DRAFT_SHAPES, TARGET_SHAPE, Shape

GOALS = {1: 1.85, 8: 1.7}
"""Goals of the pair's bound by batch size."""

A_DRAFT_TOKENS = 4
"""Draft tokens of a round for the quoted a."""

HEAD = """# A small pair for speculative decoding

`target` and `draft` are Llama models that continue Python code. They share one byte-level BPE
tokenizer of 4096 tokens, are stored as bfloat16 safetensors, load as float32, and together take
{megabytes:.1f} MB. With them this repository's demo, tests and benchmarks need no download; they
are no coding assistants. `examples/training` made them from the Python {python} standard library
(see `examples/NOTICE`); `sources.json` lists the files read and the modules held out.

This file is written by `cd examples && python -m training.train_pair --stage measure`.
"""


def best_bound(acceptance: float, cost: float, factors: list[float]) -> tuple[float, int]:
    """Return the largest bound and its K; `factors` is v(1), v(2), ..., v(Kmax+1)."""
    return max(
        (bound(acceptance, draft_len, cost, factors[draft_len]), draft_len)
        for draft_len in range(1, len(factors))
    )


def faster_dtype(timings: dict[str, dict]) -> str:
    """Return the dtype with the faster plain step, given the records of one batch size by dtype."""
    return min(timings, key=lambda dtype: timings[dtype]["target_ms"][0])


def pair_bounds(acceptance: dict, timings: dict) -> dict[str, dict]:
    """Compute the bound of the pair at every batch size.

    Args:
        acceptance: `greedy` and `sampling` records by dtype.
        timings: records by batch size (as a string), then by dtype.

    Returns:
        The dtype, K, greedy verified acceptance rate, bound and goal, by batch size.
    """
    bounds = {}
    for batch_size, by_dtype in timings.items():
        dtype = faster_dtype(by_dtype)
        record = by_dtype[dtype]
        greedy = acceptance.get(dtype, acceptance["float32"])["greedy"]["verified_acceptance_rate"]
        value, draft_len = best_bound(greedy, record["cost"], record["factors"])
        bounds[batch_size] = {
            "dtype": dtype,
            "num_draft_tokens": draft_len,
            "verified_acceptance_rate": greedy,
            "bound": value,
            "goal": GOALS[int(batch_size)],
        }
    return bounds


def paragraph(text: str) -> str:
    """Return a wrapped Markdown paragraph with blank lines before and after."""
    return "\n" + textwrap.fill(text, 98) + "\n\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def shape_row(name: str, shape: Shape, num_params: int, training: str) -> list[str]:
    """Return the row of a model in the shape table."""
    heads = f"{shape.num_heads} / {shape.num_kv_heads}"
    sizes = [str(shape.num_layers), str(shape.hidden_size), str(shape.ffn_size), heads]
    return [name, *sizes, f"{num_params / 1e6:.2f} M", training]


def shapes_text(results: dict) -> str:
    """Return the section on shapes and training."""
    run, chosen = results["target_training"], results["choice"]["draft"]
    drafts = results["draft_training"]
    target_note = (
        f"{run['num_tokens'] / 1e6:.1f} M tokens in {run['minutes']:.0f} min on {run['device']}"
    )
    draft_run = drafts["candidates"][chosen]
    draft_note = (
        f"{draft_run['num_tokens'] / 1e6:.1f} M positions in {draft_run['minutes']:.0f} min"
    )
    params = results["pair"]["num_params"]
    header = ["model", "layers", "width", "ffn", "heads / kv heads", "parameters", "training"]
    rows = [
        shape_row("target", TARGET_SHAPE, params["target"], target_note),
        shape_row("draft", DRAFT_SHAPES[chosen], params["draft"], draft_note),
    ]
    note = paragraph(
        f"The target begins with {run['first_layers']} layers and grows to "
        f"{TARGET_SHAPE.num_layers} by copies with zero outputs. The draft is distilled with "
        f"forward KL on {drafts['num_self_tokens'] / 1e6:.2f} M tokens: pieces of the training "
        "text, continued by the target, half of them greedily and half by sampling."
    )
    return "\n## Shapes\n\n" + table(header, rows) + note.rstrip("\n") + "\n"


def losses_text(results: dict) -> str:
    """Return the section on losses."""
    losses = results["pair"]["losses"]
    header = ["held-out modules", "nats per token", "bits per character"]
    rows = [
        [name, f"{losses[name]:.3f}", f"{losses[name] * losses['tokens_per_char'] / 0.693147:.3f}"]
        for name in ("target", "draft")
    ]
    return "\n## Losses\n\n" + table(header, rows)


def acceptance_text(results: dict) -> str:
    """Return the section on acceptance."""
    rows, walks = [], []
    for dtype, by_mode in results["pair"]["acceptance"].items():
        for mode, record in by_mode.items():
            walk = record["walks"][A_DRAFT_TOKENS - 1]
            counts = f"{walk['num_accepted']} / {walk['num_verified']}"
            overlap = "" if record["overlap"] is None else f"{record['overlap']:.3f}"
            rows.append([dtype, mode, f"{record['verified_acceptance_rate']:.3f}", counts, overlap])
            walks.append(
                [
                    dtype,
                    mode,
                    *(f"{walk_record['tokens_per_round']:.2f}" for walk_record in record["walks"]),
                ]
            )
    num_prompts = results["pair"]["num_prompts"]
    text = "\n## Acceptance\n" + paragraph(
        f"{num_prompts} held-out prompts (`examples/prompts.jsonl`), 128 new tokens each, rounds "
        f"of {A_DRAFT_TOKENS} "
        "draft tokens. The verified acceptance rate a is accepted over verified: of the tokens "
        "after the accepted "
        "ones, only the first is verified. The overlap is the mean of sum(min(p,q)) along the same "
        "text."
    )
    text += table(
        ["dtype", "decoding", "verified acceptance rate", "accepted / verified", "overlap"], rows
    )
    text += "\nMean acceptance length on the same texts:\n\n"
    return text + table(
        ["dtype", "decoding", *(f"K={draft_len}" for draft_len in range(1, 9))], walks
    )


def timings_text(results: dict) -> str:
    """Return the section on forward times."""
    pair = results["pair"]
    rows = []
    for batch_size, by_dtype in pair["timings"].items():
        for dtype, record in by_dtype.items():
            factors = [f"{factor:.2f}" for factor in record["factors"][1:]]
            rows.append(
                [
                    batch_size,
                    dtype,
                    f"{record['target_ms'][0]:.2f}",
                    f"{record['cost']:.3f}",
                    *factors,
                ]
            )
    machine = pair["machine"]
    header = ["B", "dtype", "T(1) ms", "c", *(f"v({num_query})" for num_query in range(2, 10))]
    note = paragraph(
        f"Median of {pair['num_repeats']} forwards over a cache of {pair['context_len']} tokens; "
        f"{machine['device']}, "
        f"{machine['num_threads']} threads, torch {machine['torch']}, transformers "
        f"{machine['transformers']}. c is a "
        "draft's step over a target's step; v(Q) is a target's forward of Q rows over one of a "
        "single row."
    )
    return "\n## Forward times\n" + note + table(header, rows)


def bounds_text(results: dict) -> str:
    """Return the section on the bound of the pair."""
    rows = []
    for batch_size, record in results["pair"]["bounds"].items():
        reached = "yes" if record["bound"] >= record["goal"] else "no"
        facts = [
            record["dtype"],
            str(record["num_draft_tokens"]),
            f"{record['verified_acceptance_rate']:.3f}",
        ]
        rows.append(
            [batch_size, *facts, f"{record['bound']:.2f}", f"{record['goal']:.2f}", reached]
        )
    candidates = []
    for name, by_batch in results["choice"]["candidates"].items():
        values = [
            f"{by_batch[size]['verified_acceptance_rate']:.3f} / {by_batch[size]['bound']:.2f}"
            for size in sorted(by_batch)
        ]
        candidates.append([name, *values])
    text = "\n## The pair's bound\n" + paragraph(
        "The bound is the largest speed-up of a loop without overhead. It takes the greedy "
        "verified acceptance rate a and the dtype of faster plain decoding. It is the maximum over "
        "K of"
    )
    text += "    (1 - a^(K+1)) / ((1 - a) (K c + v(K+1)))\n\n"
    text += table(["B", "dtype", "K", "verified acceptance rate", "bound", "goal", "reached"], rows)
    text += "\nCandidates for the draft, as measured for the choice (verified acceptance rate / "
    text += "bound):\n\n"
    return text + table(
        ["draft", *(f"B = {size}" for size in sorted(results["choice"]["candidates"][name]))],
        candidates,
    )


def sample_text(results: dict) -> str:
    """Return the section with a text generated by the target."""
    sample = results["pair"]["sample"]
    note = paragraph(
        "A greedy continuation in float32; the prompt is everything up to the second `def` line."
    )
    return "\n## A text of the target\n" + note + f"```python\n{sample}\n```\n"


def render(results: dict) -> str:
    """Return the text of the README; `results` is the record in `measurements.json`."""
    pair = results["pair"]
    head = HEAD.format(
        megabytes=pair["num_bytes"] / 1e6, python=results["target_training"]["python"]
    )
    sections = (shapes_text, losses_text, acceptance_text, timings_text, bounds_text, sample_text)
    return head + "".join(section(results) for section in sections)
