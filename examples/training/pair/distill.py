"""Distil a draft from the full next-token distributions of the target."""

from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from training.pair.clock import Budget, warm_then_linear
from training.pair.muon import PairOptimizer
from training.pair.selftext import SelfText
from training.pair.shapes import Shape, build_model

BATCH_SIZE = 8
CHECKPOINT_EVERY_S = 120
MATRIX_LR = 0.015
VECTOR_LR = 0.002
WARMUP = 0.03


@torch.no_grad()
def start_draft(shape: Shape, target: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """Initialise a draft from the target's embeddings, last norm and first attention layers.

    Args:
        shape: dimensions of the draft; width and heads are the same as in the target.
        target: the trained target.
        seed: as for `build_model`.
    """
    draft = build_model(shape, seed)
    draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    draft.model.norm.weight.copy_(target.model.norm.weight)
    for draft_layer, target_layer in zip(draft.model.layers, target.model.layers, strict=False):
        draft_layer.self_attn.load_state_dict(target_layer.self_attn.state_dict())
        draft_layer.input_layernorm.load_state_dict(target_layer.input_layernorm.state_dict())
    return draft


def forward_kl(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Return the mean of KL(target || draft) in nats per position.

    Args:
        draft_logits: [..., V] float32.
        target_logits: [..., V] float32.
    """
    draft_logprobs = draft_logits.log_softmax(-1).flatten(0, -2)
    target_logprobs = target_logits.log_softmax(-1).flatten(0, -2)
    return torch.nn.functional.kl_div(
        draft_logprobs, target_logprobs, reduction="batchmean", log_target=True
    )


class DraftTraining:
    """Resumable distillation of one draft."""

    def __init__(
        self, draft: LlamaForCausalLM, target: LlamaForCausalLM, checkpoint: Path, minutes: float
    ) -> None:
        self.model = draft.to(target.device)
        self.teacher_head = target.lm_head.weight.detach().clone()  # [V, D]
        self.checkpoint = checkpoint
        self.optimizer = PairOptimizer(self.model, MATRIX_LR, VECTOR_LR)
        self.num_steps = 0
        spent_s = 0.0
        if checkpoint.is_file():
            saved = torch.load(checkpoint, map_location=target.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.num_steps, spent_s = saved["num_steps"], saved["spent_s"]
        self.budget = Budget(minutes, spent_s)

    def _save(self) -> None:
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "spent_s": self.budget.spent_s,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self.checkpoint)

    def run(self, rows: SelfText, seed: int) -> LlamaForCausalLM:
        """Distil until the budget is spent.

        Args:
            rows: text written by the target, R rows.
            seed: seed for the order of rows.

        Returns:
            The draft in evaluation mode, float32.
        """
        bar = tqdm(total=100, desc=self.checkpoint.stem, unit="%", mininterval=10)
        saved_at_s = self.budget.spent_s
        while (share := self.budget.tick()) < 1.0:
            loss = self._step(rows, share, seed)
            if self.budget.spent_s - saved_at_s > CHECKPOINT_EVERY_S:
                saved_at_s = self.budget.spent_s
                self._save()
            bar.n = round(100 * share)
            bar.set_postfix(step=self.num_steps, kl=f"{loss:.3f}", refresh=False)
            bar.update(0)
        self._save()
        bar.close()
        return self.model.eval()

    def _step(self, rows: SelfText, share: float, seed: int) -> float:
        num_batches = len(rows.ids) // BATCH_SIZE
        epoch, batch = divmod(self.num_steps, num_batches)
        order = torch.randperm(
            len(rows.ids), generator=torch.Generator().manual_seed(seed * 1009 + epoch)
        )
        chosen = order[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE]
        ids = rows.ids[chosen].to(self.model.device)  # [B, W]
        with torch.no_grad():
            # [B, W-1, V]
            target_logits = rows.hidden[chosen].to(self.model.device).float() @ self.teacher_head.T
        hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        loss = forward_kl(self.model.lm_head(hidden), target_logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(warm_then_linear(share, WARMUP))
        self.num_steps += 1
        return loss.item()
