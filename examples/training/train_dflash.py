"""Fit a DFlash or DFlash 2 head to the bundled target, and save it in z-lab's format.

    cd examples && python -m training.train_dflash dflash2    # ten minutes on one core

Generating the text takes ten more minutes. The text is the same as for the EAGLE-3 head,
`training/train_eagle3.py`. In every step, the head fills blocks at random columns of a few rows and
learns the target's distribution at each slot. A DFlash 2 head learns this distribution twice:
without the token before a slot, to choose the candidates, and with this token. The target does not
change.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.options.heads.dflash import DFlashNetwork, DFlashOptions
from hf_speculate.options.heads.dflash2 import DFlash2Network, DFlash2Options
from hf_speculate.options.heads.layers import read_layer_config
from hf_speculate.options.heads.network import NetworkPlan, TargetParts
from training.dflash.blocks import block_logits
from training.eagle3.rows import AUX_LAYERS, READ_LEN, Rows, draw_rows
from training.eagle3.target_rows import EXAMPLES, add_row_arguments, load_target_rows
from training.pair.clock import warm_then_linear
from training.pair.muon import PairOptimizer

MASK_ID = 1  # the padding token
WARMUP = 0.03
SHORTEST_CONTEXT = 8
CHECKED_EVERY = 250  # steps
NUM_CHECKED_ROWS = 32
PARALLEL_SHARE = 0.5  # relative loss weight of logits without the previous token
SELECTION = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 32,
    "selector_top_k": 16,
}


class Settings(NamedTuple):
    """Settings for training a head."""

    block_size: int = 8
    num_layers: int = 2
    intermediate_size: int = 512
    rows_per_step: int = 4
    blocks_per_row: int = 16
    greedy_share: float = 0.75  # share of rows generated greedily
    matrix_lr: float = 0.015
    vector_lr: float = 0.002
    decay: float = 0.85  # loss weight of a slot relative to the previous slot


def layer_fields(target: LlamaForCausalLM, settings: Settings) -> dict[str, Any]:
    """Return the config for the layers of the head: the target config with another MLP width."""
    names = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
    )
    fields = {
        name: getattr(target.config, name) for name in (*names, "vocab_size", "rope_parameters")
    }
    head_fields = {
        "num_hidden_layers": settings.num_layers,
        "intermediate_size": settings.intermediate_size,
    }
    return {"model_type": "qwen3", "max_position_embeddings": 2048, **head_fields, **fields}


def new_head(kind: str, target: LlamaForCausalLM, settings: Settings, seed: int) -> DFlashNetwork:
    """Make a head with random layers, whose convolutions and selection have no effect yet."""
    torch.manual_seed(seed)
    layers, num_ids = read_layer_config(layer_fields(target, settings)), target.config.vocab_size
    fields = {"layers": layers, "block_size": settings.block_size, "mask_token_id": MASK_ID}
    fields |= {"num_states": len(AUX_LAYERS), "is_causal": (False,) * settings.num_layers}
    shapes = {"layers.0.self_attn.q_norm.weight": (layers.head_dim,)}
    plan = NetworkPlan(None, shapes, layers.hidden_size, DraftVocabulary(num_ids), target.device)
    with torch.device("meta"):
        if kind == "dflash2":
            num_taps, group_size, rank, num_candidates = SELECTION.values()
            selection = {"num_taps": num_taps, "group_size": group_size, "selector_rank": rank}
            options = DFlash2Options(
                **fields, **selection, num_candidates=num_candidates, vocab_size=num_ids
            )
            network: DFlashNetwork = DFlash2Network(plan._replace(options=options))
        else:
            network = DFlashNetwork(plan._replace(options=DFlashOptions(**fields)))
    network = network.to_empty(device=target.device)
    for name, weight in network.named_parameters():
        if weight.dim() == 1:
            weight.data.fill_(1.0)
        elif name.endswith("base_kernel"):
            weight.data.zero_()[:, 0] = 1.0
        elif name.endswith(("kernel_projection.weight", "successor_codebook")):
            weight.data.zero_()
        else:
            is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.data.normal_(0, (0.2 if is_last else 1.0) * weight.shape[1] ** -0.5)
    network.norm.weight.data.copy_(target.model.norm.weight)
    return network


class DFlashTraining:
    """Training run.

    Args:
        network: network to train.
        target: target model, which is not changed.
        batches: batches of rows; the last one is held out.
        settings: settings for the training.
        seed: seed for the order of rows and blocks.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        target: LlamaForCausalLM,
        batches: list[Rows],
        settings: Settings,
        seed: int,
    ):
        self.network, self.target, self.settings, self.seed = (
            network,
            target.requires_grad_(False),
            settings,
            seed,
        )
        self.batches, self.held_out = batches[:-1], batches[-1]
        self.parts = TargetParts(target, network.vocabulary, target.device, target.dtype)
        self.weights = settings.decay ** torch.arange(settings.block_size - 1)

    def run(self, num_steps: int) -> DFlashNetwork:
        """Train for `num_steps` steps."""
        settings, begin = self.settings, time.monotonic()
        optimizer = PairOptimizer(self.network, settings.matrix_lr, settings.vector_lr)
        for step in range(num_steps):
            seed = self.seed * 1_000_003 + step
            rows = draw_rows(self.batches, settings.rows_per_step, settings.greedy_share, seed)
            nats, _ = self._measured(rows, torch.Generator().manual_seed(seed))
            (nats * self.weights).sum().backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            optimizer.step(warm_then_linear(step / num_steps, WARMUP))
            if (step + 1) % CHECKED_EVERY == 0 or step + 1 == num_steps:
                print(
                    f"step {step + 1}, {time.monotonic() - begin:.0f} s, held out, "
                    f"{self._checked()}",
                    flush=True,
                )
        return self.network.eval().requires_grad_(False)

    def _measured(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return loss in nats and accuracy at each slot [b-1], over blocks at random columns."""
        num_slots, last = self.settings.block_size - 1, READ_LEN - self.settings.block_size
        size = (len(rows.ids), self.settings.blocks_per_row)
        starts = torch.randint(SHORTEST_CONTEXT, last + 1, size, generator=generator)
        columns = (starts[:, :, None] + torch.arange(num_slots)).flatten(1)  # [R, M * (b-1)]
        read = rows.last.float().gather(1, columns[:, :, None].expand(-1, -1, rows.last.shape[2]))
        with torch.no_grad():
            # [N, b-1, V]
            wanted = self.target.lm_head(read).unflatten(1, (-1, num_slots)).flatten(0, 1)
            probs, best = wanted.softmax(-1), wanted.argmax(-1)
        logits = block_logits(self.network, self.parts, rows.ids, rows.states.float(), starts)
        nats = -(probs * logits.selected.log_softmax(-1)).sum(-1).mean(0)
        if logits.parallel is not logits.selected:
            nats = nats - PARALLEL_SHARE * (probs * logits.parallel.log_softmax(-1)).sum(-1).mean(0)
        return nats, (logits.selected.argmax(-1) == best).float().mean(0)

    @torch.no_grad()
    def _checked(self) -> str:
        # Every other row was generated greedily.
        rows = Rows(*(values[: 2 * NUM_CHECKED_ROWS : 2, -READ_LEN:] for values in self.held_out))
        nats, accuracy = self._measured(rows, torch.Generator().manual_seed(self.seed))
        loss, shares = (
            " ".join(f"{value:.3f}" for value in values.tolist()) for values in (nats, accuracy)
        )
        return f"by slot: nats {loss}, accuracy {shares}"


def save_head(
    kind: str, network: DFlashNetwork, target: LlamaForCausalLM, settings: Settings, folder: Path
) -> None:
    """Save a head in bfloat16, in z-lab's format."""
    folder.mkdir(parents=True, exist_ok=True)
    selection_fields = SELECTION if kind == "dflash2" else {}
    config = {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"],
        "block_size": settings.block_size,
        "dflash_config": {
            "mask_token_id": MASK_ID,
            # The format identifies layers by their outputs.
            "target_layer_ids": [layer - 1 for layer in AUX_LAYERS],
            **selection_fields,
        },
        "num_target_layers": target.config.num_hidden_layers,
        **layer_fields(target, settings),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in network.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["dflash", "dflash2"])
    add_row_arguments(parser)
    parser.add_argument(
        "--output", type=Path, help="a folder; heads/ with the kind as its name unless given"
    )
    parser.add_argument("--steps", type=int, default=2000)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    target, batches = load_target_rows(args)
    settings, output = Settings(), args.output or EXAMPLES / "heads" / args.kind
    network = new_head(args.kind, target, settings, args.seed)
    training = DFlashTraining(network, target, batches, settings, args.seed)
    save_head(args.kind, training.run(args.steps), target, settings, output)
    print(f"wrote {output}, {(output / 'model.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
