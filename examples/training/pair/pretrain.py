"""Train the target with the next-token loss within a wall-clock budget."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from training.pair.clock import Budget, warm_then_linear
from training.pair.muon import PairOptimizer
from training.pair.shapes import TARGET_SHAPE, build_model, grow

CHECKPOINT_EVERY_S = 150
MATRIX_LR = 0.015
VECTOR_LR = 0.002
WARMUP = 0.02


@dataclass(frozen=True)
class Phase:
    """Part of the budget with one model depth."""

    until: float  # share of the budget at its end
    num_layers: int
    window_len: int
    batch_size: int


PHASES = (
    Phase(until=0.55, num_layers=4, window_len=256, batch_size=8),
    Phase(until=0.92, num_layers=TARGET_SHAPE.num_layers, window_len=512, batch_size=4),
    Phase(until=1.00, num_layers=TARGET_SHAPE.num_layers, window_len=1024, batch_size=2),
)
"""A shallow start reads three times as many tokens per minute. Long windows come last."""


class Progress(NamedTuple):
    """Progress of a run, saved in the checkpoint."""

    phase: int
    num_steps: int
    num_tokens: int
    spent_s: float


def sample_windows(stream: np.ndarray, phase: Phase, step: int, seed: int) -> torch.Tensor:
    """Draw random windows, which depend only on the step and the seed.

    Args:
        stream: token ids, [N] uint16.
        phase: phase with the batch size B and window length W.
        step: number of the training step.
        seed: seed of the run.

    Returns:
        Token ids, [B, W+1] int64.
    """
    starts = np.random.default_rng((seed, step)).integers(
        0, len(stream) - phase.window_len - 1, phase.batch_size
    )
    rows = [stream[start : start + phase.window_len + 1].astype(np.int64) for start in starts]
    return torch.from_numpy(np.stack(rows))  # [B, W+1]


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per token of `ids`, [B, W+1] int64."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state  # [B, W, D]
    logits = model.lm_head(hidden)  # [B, W, V]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.inference_mode()
def stream_loss(
    model: LlamaForCausalLM, stream: np.ndarray, window_len: int = 512, max_windows: int = 64
) -> float:
    """Return the mean loss in nats per token over consecutive windows of a held-out stream.

    Args:
        model: model to evaluate.
        stream: token ids, [N] uint16.
        window_len: number of tokens per window.
        max_windows: maximum number of windows.
    """
    num_windows = min(max_windows, (len(stream) - 1) // window_len)
    losses = []
    for index in range(num_windows):
        piece = stream[index * window_len : (index + 1) * window_len + 1].astype(np.int64)
        losses.append(next_token_loss(model, torch.from_numpy(piece)[None].to(model.device)).item())
    return sum(losses) / len(losses)


class TargetTraining:
    """Resumable training run of the target.

    A finished run continues if its budget is raised.
    """

    def __init__(self, checkpoint: Path, minutes: float, seed: int, device: str) -> None:
        self.checkpoint = checkpoint
        self.seed = seed
        self.device = device
        self.progress = Progress(phase=0, num_steps=0, num_tokens=0, spent_s=0.0)
        self.model = self._fresh_model(0)
        self.optimizer = PairOptimizer(self.model, MATRIX_LR, VECTOR_LR)
        if checkpoint.is_file():
            self._restore()
        self.budget = Budget(minutes, self.progress.spent_s)

    def _fresh_model(self, phase: int) -> LlamaForCausalLM:
        return build_model(
            replace(TARGET_SHAPE, num_layers=PHASES[phase].num_layers), self.seed
        ).to(self.device)

    def _restore(self) -> None:
        saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.progress = Progress(*saved["progress"])
        self.model = self._fresh_model(self.progress.phase)
        self.model.load_state_dict(saved["model"])
        self.optimizer = PairOptimizer(self.model, MATRIX_LR, VECTOR_LR)
        self.optimizer.load_state_dict(saved["optimizer"])

    def _save(self) -> None:
        saved = {
            "progress": tuple(self.progress),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self.checkpoint)

    def _phase_at(self, share: float) -> int:
        """Return the phase at `share`; a resumed run never returns to fewer layers."""
        depth = len(self.model.model.layers)
        return next(
            i for i, phase in enumerate(PHASES) if share < phase.until and phase.num_layers >= depth
        )

    def _enter_phase(self, phase: int) -> None:
        depth = PHASES[phase].num_layers
        if depth != len(self.model.model.layers):
            self.model = grow(
                self.model.cpu(), replace(TARGET_SHAPE, num_layers=depth), self.seed
            ).to(self.device)
            self.optimizer = PairOptimizer(self.model, MATRIX_LR, VECTOR_LR)
        self.progress = self.progress._replace(phase=phase)

    def run(self, stream: np.ndarray) -> LlamaForCausalLM:
        """Train until the budget is spent.

        Args:
            stream: training token ids, [N] uint16.

        Returns:
            The trained model in evaluation mode, float32.
        """
        bar = tqdm(
            total=100,
            initial=round(100 * self.budget.tick()),
            desc="target",
            unit="%",
            mininterval=10,
        )
        saved_at_s = self.budget.spent_s
        while (share := self.budget.tick()) < 1.0:
            if (phase := self._phase_at(share)) != self.progress.phase:
                self._enter_phase(phase)
            loss = self._step(stream, share)
            if self.budget.spent_s - saved_at_s > CHECKPOINT_EVERY_S:
                saved_at_s = self.budget.spent_s
                self._save()
            bar.n = round(100 * share)
            bar.set_postfix(step=self.progress.num_steps, loss=f"{loss:.3f}", refresh=False)
            bar.update(0)
        self._save()
        bar.close()
        return self.model.eval()

    def _step(self, stream: np.ndarray, share: float) -> float:
        phase = PHASES[self.progress.phase]
        ids = sample_windows(stream, phase, self.progress.num_steps, self.seed).to(self.device)
        loss = next_token_loss(self.model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(warm_then_linear(share, WARMUP))
        self.progress = self.progress._replace(
            num_steps=self.progress.num_steps + 1,
            num_tokens=self.progress.num_tokens + phase.batch_size * phase.window_len,
            spent_s=self.budget.spent_s,
        )
        return loss.item()
