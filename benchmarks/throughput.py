"""Compare refilled rows with static batches over prompts with long-tailed output lengths.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --models head      # the bundled target with its EAGLE-3 head
    python benchmarks/throughput.py --models hybrid    # a random Qwen3.5 with prompt lookup

Prompts are pieces of Python's standard library, encoded by the bundled tokenizer. Outputs are
greedy and end at a length drawn for each prompt from a log-normal distribution. A stopping
criterion ends the rows of static batches, and the limit of the row ends refilled rows. Refilled
rows and static batches decode with and without the bundled draft model; continuous batching in
transformers (`generate_batch`) decodes without a draft. All methods run alternately in one process,
and the results are written after each run.

The last column describes what limits a method. A static batch runs as many rounds as its slowest
row needs, with fewer and fewer live rows; a round can emit at most `--rows` times the mean
acceptance length. Refilled rows stay live until the prompts run out, and the other rows wait while
a prompt is read. This wait is the prefill share.
"""

import argparse
import copy
import itertools
from functools import partial
from typing import Any

import torch
from _harness import Cells, Results, add_common_arguments, markdown, parse_common, spread, timed_run
from _subjects import PAIR
from suffix import library_tokens
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    Qwen3_5TextConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_speculate
from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt

NAME = "throughput"
REFILL, STATIC, REFILL_PLAIN, STATIC_PLAIN, PEER = (
    "refill, speculative",
    "static, speculative",
    "refill, plain",
    "static, plain",
    "transformers, continuous",
)
# Refilled speculative rows should be at least this many times faster.
TARGETS = {STATIC: 1.3, STATIC_PLAIN: 1.5}
MODELS = ("pair", "head", "hybrid")
HYBRID = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,  # three with linear attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 4096,
}


@hf_speculate.register_row_wise
class EndsAtItsLength(StoppingCriteria):
    """Criterion that ends rows at individual lengths.

    Args:
        lens: number of new tokens by the first token of the prompt; first tokens must differ.
        prompt_len: length of all prompts.
    """

    def __init__(self, lens: dict[int, int], prompt_len: int):
        self.ends = torch.zeros(max(lens) + 1, dtype=torch.int64)
        for token_id, max_new in lens.items():
            self.ends[token_id] = prompt_len + max_new

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self.ends.to(input_ids.device)[input_ids[:, 0]]


def load_models(models: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return the target for one of `MODELS`, and the `generate()` arguments for its drafts."""
    if models == "hybrid":
        torch.manual_seed(0)
        hybrid = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**HYBRID)).to(device).eval()
        return hybrid, {"prompt_lookup_num_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    # All methods write the same text in float32.
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    target = load(PAIR / "target").to(device).eval()
    if models == "head":
        return target, {
            "assistant_model": hf_speculate.load_drafter(PAIR.parent / "heads" / "eagle3", target)
        }
    return target, {"assistant_model": load(PAIR / "draft").to(device).eval()}


def result_of(models: str) -> str:
    """Return the name of the results for one of `MODELS`."""
    return NAME if models == "pair" else f"{NAME}_{models}"


class Methods:
    """All methods, run on one set of prompts."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.target, self.draft_arguments = load_models(args.models, args.device)
        random = torch.Generator().manual_seed(0)
        self.peer_target = copy.deepcopy(self.target)  # continuous batching changes its attention
        spans = (
            args.median_len * torch.exp(args.sigma * torch.randn(args.prompts, generator=random))
        ).tolist()
        self.lens = [min(max(round(span), 2), args.max_len) for span in spans]
        ids, size = library_tokens(4 * args.prompts * args.prompt_len), args.prompt_len
        first_ids = list(dict.fromkeys(token for token in ids if token > 2))[: args.prompts]
        pieces = [ids[begin : begin + size - 1] for begin in range(0, args.prompts * size, size)]
        self.prompts = [[first, *piece] for first, piece in zip(first_ids, pieces, strict=True)]
        self.stats: dict[str, hf_speculate.SpeculationStats] = {}
        self.num_tokens: dict[str, int] = {}
        self.failures: dict[str, str] = {}  # reasons why methods could not run

    def arguments(self, is_speculative: bool) -> dict[str, Any]:
        """Return the arguments of `generate()`."""
        common = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if not is_speculative:
            return common
        return {
            **common,
            **self.draft_arguments,
            "num_assistant_tokens": self.args.num_draft_tokens,
        }

    def refill(self, name: str, is_speculative: bool) -> None:
        """Decode with refilled rows."""
        rows = [
            RowPrompt(ids, arguments={"max_new_tokens": max_new})
            for ids, max_new in zip(self.prompts, self.lens, strict=True)
        ]
        decoder = ContinuousDecoder(self.target, self.args.rows, self.arguments(is_speculative))
        finished = [
            result
            for results in decoder.decode(partial(next, iter(rows), None))
            for result in results
        ]
        self.num_tokens[name] = sum(len(result.token_ids) for result in finished)
        self.stats[name] = decoder.stats

    def static(self, name: str, is_speculative: bool) -> None:
        """Decode in static batches."""
        total, num_tokens, size = hf_speculate.SpeculationStats(), 0, self.args.rows
        for begin in range(0, len(self.prompts), size):
            prompts, lens = self.prompts[begin : begin + size], self.lens[begin : begin + size]
            ends = EndsAtItsLength(
                {ids[0]: max_new for ids, max_new in zip(prompts, lens, strict=True)},
                self.args.prompt_len,
            )
            stats = hf_speculate.SpeculationStats()
            options = self.arguments(is_speculative) | (
                {"speculation_stats": stats} if is_speculative else {}
            )
            generate = (
                partial(hf_speculate.generate, self.target)
                if is_speculative
                else self.target.generate
            )
            output = generate(
                input_ids=torch.tensor(prompts, device=self.args.device),
                max_new_tokens=max(lens),
                stopping_criteria=StoppingCriteriaList([ends]),
                **options,
            )
            num_tokens += sum(
                min(max_new, output.shape[1] - self.args.prompt_len) for max_new in lens
            )
            total += stats
        self.num_tokens[name], self.stats[name] = num_tokens, total

    def peer(self) -> None:
        """Run continuous batching in transformers, without speculation."""
        blocks = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
        with self.peer_target.continuous_batching_context_manager(
            continuous_batching_config=blocks
        ) as manager:
            for ids, max_new in zip(self.prompts, self.lens, strict=True):
                manager.add_request(ids, max_new_tokens=max_new, eos_token_id=-1)
            num_left, num_tokens = len(self.prompts), 0
            while num_left:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError(
                        "continuous batching must give a result within a minute, got none"
                    )
                if result.is_finished():
                    num_left, num_tokens = num_left - 1, num_tokens + len(result.generated_tokens)
        self.num_tokens[PEER] = num_tokens

    def calls(self) -> dict[str, Any]:
        """Return the methods by name."""
        calls = {
            REFILL: partial(self.refill, REFILL, True),
            STATIC: partial(self.static, STATIC, True),
            REFILL_PLAIN: partial(self.refill, REFILL_PLAIN, False),
            STATIC_PLAIN: partial(self.static, STATIC_PLAIN, False),
        }
        return calls if self.args.no_peer else {**calls, PEER: self.peer}

    def run(self, name: str) -> float | None:
        """Run a method; return its duration in seconds, or None if it cannot run here."""
        try:
            return timed_run(self.calls()[name], None, patience=0)[0]
        except Exception as error:
            if name != PEER:
                raise
            self.failures[name] = f"{type(error).__name__}: {error}"
            return None

    def row(self, name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
        """Return the figures of a method."""
        if name in self.failures:
            return {"method": name, "failure": self.failures[name]}
        stats = self.stats.get(name)
        num_rounds = stats.num_batch_rounds if stats is not None else 0
        longest = [
            max(self.lens[begin : begin + self.args.rows])
            for begin in range(0, len(self.lens), self.args.rows)
        ]
        if name == STATIC_PLAIN:
            num_rounds = sum(longest)
        # The last pass may be incomplete.
        paired = zip(seconds[REFILL], seconds[name], strict=False)
        return {
            "method": name,
            "tokens": self.num_tokens[name],
            "tokens_per_s": spread(
                [self.num_tokens[name] / duration_s for duration_s in seconds[name]]
            ),
            "refill_is_faster": spread([other_s / duration_s for duration_s, other_s in paired]),
            "target": TARGETS.get(name),
            "rounds_of_the_batch": num_rounds or None,
            "tokens_per_round": self.num_tokens[name] / num_rounds if num_rounds else None,
            "mean_acceptance_length": stats.mean_acceptance_length
            if stats is not None and stats.num_rounds
            else None,
            **({} if stats is None or not stats.num_rounds else self._bounds(stats)),
        }

    def _bounds(self, stats: hf_speculate.SpeculationStats) -> dict[str, Any]:
        """Return the rows per round, and the share of each stage in the total time."""
        shares = {
            stage: seconds / stats.total_s for stage, seconds in stats.seconds_by_stage.items()
        }
        return {
            "live_rows_per_round": stats.num_rounds / stats.num_batch_rounds,
            "share_by_stage": shares,
        }


def bounds_of(row: dict[str, Any]) -> str:
    """Describe what limits a method."""
    if "share_by_stage" not in row:
        return row.get("failure", "-")
    shares = sorted(row["share_by_stage"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{stage} {share:.0%}" for stage, share in shares if share >= 0.01)
    return f"{row['live_rows_per_round']:.1f} live rows a round; {shown}"


def table(results: dict[str, Any]) -> str:
    """Format the figures as a table."""
    columns = {
        "method": lambda row: row["method"],
        "tokens/s": lambda row: (
            f"{row['tokens_per_s']['median']:.0f}" if "tokens_per_s" in row else None
        ),
        "refill, speculative is faster by": lambda row: row.get("refill_is_faster", {}).get(
            "median"
        ),
        "goal": lambda row: row.get("target"),
        "rounds": lambda row: row.get("rounds_of_the_batch"),
        "tokens per round": lambda row: row.get("tokens_per_round"),
        "mean acceptance length": lambda row: row.get("mean_acceptance_length"),
        "bounded by": bounds_of,
    }
    return markdown(columns, results["rows"])


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=3, limit_s=3600)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="rows decoded at once")
    parser.add_argument("--prompt-len", type=int, default=48)
    parser.add_argument("--median-len", type=float, default=32, help="of the outputs")
    parser.add_argument("--max-len", type=int, default=384, help="of the outputs")
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="of the logarithm of the outputs' lengths"
    )
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=4)
    parser.add_argument(
        "--no-peer", action="store_true", help="leave transformers' continuous batching out"
    )
    parser.add_argument("--models", choices=MODELS, default="pair")
    args = parse_common(parser)
    # continuous batching in transformers does not support recurrent states
    args.no_peer |= args.models == "hybrid"
    methods = Methods(args)
    seconds: dict[str, list[float]] = {name: [] for name in methods.calls()}
    results = Results(result_of(args.models), args)
    for _, name in Cells(itertools.product(range(args.repeats), seconds), args.limit_s, NAME):
        taken = methods.run(name)
        if taken is not None:
            seconds[name].append(taken)
        results.new = [
            methods.row(name, seconds)
            for name in seconds
            if seconds[name] or name in methods.failures
        ]
        results.write()
    print(table({"rows": results.rows}))


if __name__ == "__main__":
    main()
