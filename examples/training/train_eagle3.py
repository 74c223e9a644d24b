"""Fit an EAGLE-3 head to the bundled target, and save it in the speculators format.

    cd examples && python -m training.train_eagle3    # an hour on two cores

The target continues pieces of the Python standard library, half of the rows greedily and half by
sampling. The head learns the target's distribution at each of several draft steps. Interrupted
training resumes from its checkpoint.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.options.heads.eagle3 import Eagle3Network, Eagle3Options
from hf_speculate.options.heads.layers import read_layer_config
from hf_speculate.options.heads.network import NetworkPlan
from training.eagle3.rollout import rollout
from training.eagle3.rows import AUX_LAYERS, READ_LEN, Rows, draw_rows
from training.eagle3.target_rows import EXAMPLES, add_row_arguments, load_target_rows
from training.pair.clock import Budget, warm_then_linear
from training.pair.muon import PairOptimizer

HEAD = EXAMPLES / "heads" / "eagle3"
CHECKED_EVERY_S = 300
NUM_CHECKED_ROWS = 64  # only every other row is read; these are greedy
WARMUP = 0.03


class Settings(NamedTuple):
    """Settings for training a head."""

    draft_vocab_size: int = 2048
    intermediate_size: int = 768
    rows_per_step: int = 4
    greedy_share: float = 0.75  # share of rows generated greedily
    matrix_lr: float = 0.015
    vector_lr: float = 0.002
    num_draft_steps: int = 4
    num_first_draft_steps: int = 2  # in the first half of the training
    decay: float = 0.9  # loss weight of a draft step relative to the previous step


class Figures(NamedTuple):
    """Losses and accuracies of a head by draft step."""

    nats: Tensor  # [K], cross-entropy with the target's distribution
    accuracy: Tensor  # [K], share of tokens equal to the target's most probable token

    def __str__(self) -> str:
        nats, shares = (" ".join(f"{value:.3f}" for value in values.tolist()) for values in self)
        return f"by draft step: nats {nats}, accuracy {shares}"


def frequent_ids(batches: list[Rows], vocab_size: int, num_ids: int) -> Tensor:
    """Return the most frequent tokens in the rows, [num_ids] int64, in ascending order."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for rows in batches:
        counts += torch.bincount(rows.ids.flatten(), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)[:num_ids]
    print(f"{num_ids} tokens are {counts[order].sum() / counts.sum():.4f} of the text", flush=True)
    return order.sort().values


def layer_fields(target: LlamaForCausalLM, settings: Settings) -> dict[str, Any]:
    """Return the config for the layer of the head: the target config with another MLP width."""
    names = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
    )
    shared = {
        name: getattr(target.config, name) for name in (*names, "vocab_size", "rope_parameters")
    }
    head_fields = {
        "num_hidden_layers": 1,
        "intermediate_size": settings.intermediate_size,
        "max_position_embeddings": 2048,
    }
    return {"model_type": "llama", **head_fields, **shared}


def new_head(
    target: LlamaForCausalLM, target_ids: Tensor, settings: Settings, seed: int
) -> Eagle3Network:
    """Make a head with random layers and an output matrix initialised with target rows."""
    torch.manual_seed(seed)
    layers, width = read_layer_config(layer_fields(target, settings)), target.config.hidden_size
    vocabulary = DraftVocabulary(target.config.vocab_size, target_ids)
    options, shapes = (
        Eagle3Options(layers, num_states=len(AUX_LAYERS)),
        {"lm_head.weight": (len(target_ids), width)},
    )
    with torch.device("meta"):
        network = Eagle3Network(NetworkPlan(options, shapes, width, vocabulary, target.device))
    network = network.to_empty(device=target.device)
    for name, weight in network.named_parameters():
        if weight.dim() == 1:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(
                0,
                (0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
                * weight.shape[1] ** -0.5,
            )
    network.lm_head.weight.data.copy_(target.lm_head.weight[target_ids])
    network.norm.weight.data.copy_(target.model.norm.weight)
    return network


def figures_of(
    network: Eagle3Network, target: LlamaForCausalLM, rows: Rows, num_draft_steps: int
) -> Figures:
    """Return losses and accuracies of the drafts after every token in the rows."""
    with torch.no_grad():
        logits = target.lm_head(rows.last.float())  # [R, W, V]
        best = logits.argmax(-1)
        probs = logits.softmax(-1)[..., network.vocabulary.target_ids]  # [R, W, Vd]
    drafted = rollout(
        network, target.lm_head.weight, rows.ids, rows.states[:, :-1].float(), num_draft_steps
    )
    nats, accuracy = [], []
    for step, scores in enumerate(drafted, start=1):
        nats.append(-(probs[:, step:] * scores.log_softmax(-1)).sum(-1).mean())
        accuracy.append(
            (network.vocabulary.ids(scores.argmax(-1)) == best[:, step:]).float().mean()
        )
    return Figures(torch.stack(nats), torch.stack(accuracy))


class HeadTraining:
    """Resumable training run.

    Args:
        network: network to train.
        target: target model, which is not changed.
        batches: batches of rows; the last one is held out.
        settings: settings for the training.
        seed: seed for the order of rows.
        minutes: wall-clock budget, excluding interruptions.
        work_dir: folder for the checkpoint and the weights with the lowest held-out loss.
    """

    def __init__(
        self,
        network: Eagle3Network,
        target: LlamaForCausalLM,
        batches: list[Rows],
        settings: Settings,
        seed: int,
        minutes: float,
        work_dir: Path,
    ):
        self.network, self.target, self.settings, self.seed = (
            network,
            target.requires_grad_(False),
            settings,
            seed,
        )
        self.batches, self.held_out = batches[:-1], batches[-1]
        self.optimizer = PairOptimizer(network, settings.matrix_lr, settings.vector_lr)
        self.checkpoint, self.best = work_dir / "training.pt", work_dir / "best.pt"
        self.num_steps, self.lowest, spent_s = 0, float("inf"), 0.0
        if self.checkpoint.is_file():
            saved = torch.load(self.checkpoint, weights_only=True)
            network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.num_steps, self.lowest, spent_s = (
                saved["num_steps"],
                saved["lowest"],
                saved["spent_s"],
            )
        self.budget = Budget(minutes, spent_s)
        self.weights = settings.decay ** torch.arange(settings.num_draft_steps)

    def run(self) -> Eagle3Network:
        """Train until the budget is spent and return the network with the lowest held-out loss."""
        checked_at_s = self.budget.spent_s
        while (share := self.budget.tick()) < 1.0:
            self._step(share)
            if self.budget.spent_s - checked_at_s > CHECKED_EVERY_S:
                checked_at_s = self.budget.spent_s
                self._check()
        self._check()
        self.network.load_state_dict(torch.load(self.best, weights_only=True))
        return self.network.eval().requires_grad_(False)

    def _step(self, share: float) -> None:
        settings, seed = self.settings, self.seed * 1_000_003 + self.num_steps
        rows = draw_rows(self.batches, settings.rows_per_step, settings.greedy_share, seed)
        num_draft_steps = (
            settings.num_first_draft_steps if share < 0.5 else settings.num_draft_steps
        )
        figures = figures_of(self.network, self.target, rows, num_draft_steps)
        (figures.nats * self.weights[:num_draft_steps]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step(warm_then_linear(share, WARMUP))
        if self.num_steps % 20 == 0:
            print(f"step {self.num_steps}, {self.budget.spent_s:.0f} s, {figures}", flush=True)
        self.num_steps += 1

    @torch.no_grad()
    def _check(self) -> None:
        """Evaluate held-out rows, save the state, and keep the weights if they are the best."""
        batches = zip(
            *(rows_part[:NUM_CHECKED_ROWS:2, -READ_LEN:].split(8) for rows_part in self.held_out),
            strict=True,
        )
        figures = [
            figures_of(self.network, self.target, Rows(*rows_part), self.settings.num_draft_steps)
            for rows_part in batches
        ]
        mean = Figures(
            *(torch.stack(rows_part).mean(0) for rows_part in zip(*figures, strict=True))
        )
        loss = float((mean.nats * self.weights).sum())
        print(f"step {self.num_steps}, {self.budget.spent_s:.0f} s, held out, {mean}", flush=True)
        if loss < self.lowest:
            self.lowest = loss
            torch.save(self.network.state_dict(), self.best)
        saved = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "lowest": self.lowest,
            "spent_s": self.budget.spent_s,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self.checkpoint)


def save_head(
    network: Eagle3Network, target: LlamaForCausalLM, settings: Settings, folder: Path
) -> None:
    """Save a head in bfloat16, in the format of the speculators library."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = network.vocabulary.target_ids
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "examples/pair/target"},
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": target.config.hidden_size,
        "transformer_layer_config": layer_fields(target, settings),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in network.state_dict().items()
    }
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill_(
        0, ids, True
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_row_arguments(parser)
    parser.add_argument("--output", type=Path, default=HEAD)
    parser.add_argument(
        "--minutes", type=float, default=38.0, help="of training, the writing of text not counted"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    target, batches = load_target_rows(args)
    settings = Settings()
    target_ids = frequent_ids(batches[:-1], target.config.vocab_size, settings.draft_vocab_size)
    network = new_head(target, target_ids, settings, args.seed)
    training = HeadTraining(
        network, target, batches, settings, args.seed, args.minutes, args.work_dir
    )
    save_head(training.run(), target, settings, args.output)
    print(f"wrote {args.output}, {(args.output / 'model.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
