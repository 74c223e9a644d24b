"""Compare drafting with a full-size EAGLE-3 head with the matrix products of its layers.

    python benchmarks/heads.py

The target and the head have the shapes of Llama-3-8B and its EAGLE-3 heads, with random weights.
The target has only four layers, which does not change the cost of drafting. An oracle fixes the
text and the number of accepted tokens. Each round of a call times drafting K tokens, including the
projection of the target's states, and immediately afterwards the same products with the same
numbers of rows.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from _harness import add_common_arguments, markdown, parse_common, result_name, wait, write_results
from _subjects import BUMP, DTYPES, random_model
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, PreTrainedModel

import hf_speculate
from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.models.foreign_code import KNOWN_PACKAGES
from hf_speculate.options.heads.chain import ChainDrafter
from hf_speculate.options.heads.eagle3 import Eagle3Network, Eagle3Options
from hf_speculate.options.heads.head import DraftHead, HeadSpec
from hf_speculate.options.heads.layers import read_layer_config
from hf_speculate.options.heads.network import NetworkPlan
from hf_speculate.types import DraftOut

# The hooks in this file count forwards or treat each token independently.
KNOWN_PACKAGES.add(__name__.partition(".")[0])

NAME = "heads"
SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "draft_vocab_size": 256,
    },
}
NUM_TARGET_LAYERS = 4
AUX_LAYERS = (1, 2, 3)
GOAL = 1.1  # time of drafting over that of the products alone


def make_target(shape: dict[str, int], dtype: str, device: torch.device) -> PreTrainedModel:
    """Make a random target with four layers."""
    fields = {name: value for name, value in shape.items() if name != "draft_vocab_size"}
    config = LlamaConfig(
        **fields, num_hidden_layers=NUM_TARGET_LAYERS, max_position_embeddings=8192
    )
    target = random_model(config, dtype, device)
    target.generation_config.eos_token_id = None
    return target


def make_head(shape: dict[str, int], target: PreTrainedModel) -> DraftHead:
    """Make a random EAGLE-3 head for a target."""
    width, vocab_size, num_ids = (
        shape["hidden_size"],
        shape["vocab_size"],
        shape["draft_vocab_size"],
    )
    options, device = Eagle3Options(read_layer_config(shape)), target.device
    ids = torch.arange(num_ids, device=device) * (vocab_size // num_ids)
    shapes, vocabulary = {"lm_head.weight": (num_ids, width)}, DraftVocabulary(vocab_size, ids)
    with torch.device("meta"):
        network = Eagle3Network(NetworkPlan(options, shapes, width, vocabulary, device))
    network = network.to_empty(device=device).to(target.dtype)
    for weight in network.parameters():
        torch.nn.init.ones_(weight) if weight.dim() == 1 else torch.nn.init.normal_(
            weight, std=0.02
        )
    spec = HeadSpec("eagle3", "original", "random", AUX_LAYERS, width, width, vocab_size, num_ids)
    return DraftHead(spec, network, target.config, partial(ChainDrafter, network))


class Oracle:
    """Random cycle of tokens, used as the target text."""

    def __init__(self, target: PreTrainedModel, acceptance: float):
        generator = torch.Generator().manual_seed(0)
        cycle = torch.randperm(target.config.vocab_size, generator=generator)
        following = torch.empty_like(cycle)
        following[cycle] = cycle.roll(-1)
        self.following = following.to(target.device)
        self.acceptance = acceptance
        target.register_forward_hook(self._bump, with_kwargs=True)

    def drafts(self, newest_ids: Tensor, num_tokens: int) -> Tensor:
        """Return drafts [B, K] after the newest tokens [B].

        Each draft is correct with probability `acceptance`.
        """
        ids, right = [], newest_ids
        for _ in range(num_tokens):
            right = self.following[right]
            is_right = torch.rand(right.shape, device=right.device) < self.acceptance
            ids.append(torch.where(is_right, right, self.following[right]))
        return torch.stack(ids, dim=1)

    def _bump(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        index = self.following[kwargs["input_ids"][:, -output.logits.shape[1] :]][..., None]
        output.logits.scatter_add_(-1, index, output.logits.new_full((), BUMP).expand(index.shape))


class Products:
    """Matrix products in a round of an EAGLE-3 head.

    The inputs are made in advance.
    """

    def __init__(self, network: Eagle3Network):
        self.network = network
        layer = network.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        self.of_layer = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        self.of_layer += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]

    def run(self, batch_size: int, num_new: int, num_draft_tokens: int) -> float:
        """Return the duration of one round in seconds.

        Args:
            batch_size: B.
            num_new: number of pairs per row with states from the target.
            num_draft_tokens: K.
        """
        head, fc = self.network.lm_head, self.network.fc
        columns = [num_new, *[1] * (num_draft_tokens - 1)]
        products = [(fc, num_draft_tokens + 1)]  # the target scored K + 1 tokens
        products += [
            (layer, num_tokens) for num_tokens in columns for layer in [*self.of_layer, head]
        ]
        inputs = [
            layer.weight.new_ones(batch_size, 1 if layer is head else num_tokens, layer.in_features)
            for layer, num_tokens in products
        ]
        wait()
        begin = time.perf_counter()
        for (layer, _), states in zip(products, inputs, strict=True):
            layer(states)
        wait()
        return time.perf_counter() - begin


class TimedDrafter:
    """Drafter of a head, timed together with the products alone.

    An oracle replaces the drafts.

    Args:
        setup: setup of the call.
        head: head that drafts.
        oracle: oracle that fixes the tokens.
        seconds: list that gets a pair of times for each complete round: drafting, and the products
        alone.
    """

    def __init__(
        self,
        setup: DrafterSetup,
        head: DraftHead,
        oracle: Oracle,
        seconds: list[tuple[float, float]],
    ):
        self.drafter: Drafter = head(setup)
        self.hidden_layers, self.rows = head.hidden_layers, self.drafter.rows
        self.oracle, self.seconds, self.products = oracle, seconds, Products(head.network)
        self._projecting_s, self._is_first = 0.0, True

    def project_states(self, states: Tensor) -> Tensor:
        wait()
        begin = time.perf_counter()
        projected = self.drafter.project_states(states)
        wait()
        self._projecting_s = time.perf_counter() - begin
        return projected

    def draft(self, request: DraftRequest) -> DraftOut:
        begin = time.perf_counter()
        out = self.drafter.draft(request)
        wait()
        drafting_s = time.perf_counter() - begin + self._projecting_s
        batch_size, num_draft_tokens = out.token_ids.shape
        if not self._is_first and request.kept is not None:
            products_s = self.products.run(
                batch_size, request.kept.token_ids.shape[1], num_draft_tokens
            )
            self.seconds.append((drafting_s, products_s))
        self._is_first = False  # the first round reads the prompt
        return out._replace(
            token_ids=self.oracle.drafts(request.query_token_ids[:, -1], num_draft_tokens)
        )


def measure(
    head: DraftHead,
    target: PreTrainedModel,
    oracle: Oracle,
    batch_size: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measure one cell."""
    seconds: list[tuple[float, float]] = []
    ids = torch.randint(
        target.config.vocab_size, (batch_size, args.prompt_len), device=target.device
    )
    stats = hf_speculate.SpeculationStats()
    for _ in range(args.repeats):
        hf_speculate.generate(
            target,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            drafter=partial(TimedDrafter, head=head, oracle=oracle, seconds=seconds),
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            num_assistant_tokens=args.num_assistant_tokens,
            num_assistant_tokens_schedule="constant",
            speculation_stats=stats,
        )
    ratios = [drafting_s / products_s for drafting_s, products_s in seconds[1:]]
    return {
        "shape": args.shape,
        "dtype": args.dtype,
        "batch_size": batch_size,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "drafting_ms": 1e3 * median(drafting_s for drafting_s, _ in seconds[1:]),
        "products_ms": 1e3 * median(products_s for _, products_s in seconds[1:]),
        "ratio": median(ratios),
        "ratio_least": min(ratios),
        "ratio_greatest": max(ratios),
        "num_rounds": len(ratios),
    }


COLUMNS = {
    "head": lambda row: f"EAGLE-3, {row['shape']}",
    "dtype": lambda row: row["dtype"],
    "rows": lambda row: row["batch_size"],
    "length": lambda row: row["mean_acceptance_length"],
    "drafting, ms": lambda row: row["drafting_ms"],
    "products alone, ms": lambda row: row["products_ms"],
    "drafting over products": lambda row: (
        f"{row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_greatest']:.2f})"
    ),
}


def table(content: dict[str, Any]) -> str:
    """Format every cell."""
    return markdown(COLUMNS, content["rows"])


def ratios_of(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the time of drafting over that of the products alone, by cell."""
    return [row["ratio"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=1, limit_s=1200)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument(
        "--acceptance", type=float, default=0.7, help="of each drafted token, given those before it"
    )
    args = parse_common(parser)
    target = make_target(SHAPES[args.shape], args.dtype, args.device)
    head, oracle = make_head(SHAPES[args.shape], target), Oracle(target, args.acceptance)
    rows = [
        measure(head, target, oracle, batch_size, args)
        for batch_size in tqdm(args.batch_sizes, desc=NAME, disable=None)
    ]
    path = write_results(result_name(NAME, args.device), args, rows, args.results)
    print(table({"rows": rows}))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
