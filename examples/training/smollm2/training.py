"""Fit a head to text and distributions of the target.

Training imitates drafting. In step 1, all states come from the target. In step s, the state of
every pair is the head's output of step s - 1 at the previous pair, and attention sees states of the
target only up to s - 1 pairs back.

Source: Li et al., "EAGLE-3" (arXiv:2503.01840), section 3.2.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from smollm2_head.head import EMBEDDING_SCALE, LAYER_FIELDS, DraftHead, Heads
from training.pair.clock import Budget, warm_then_linear
from training.smollm2.writing import Conversations

BATCH_SIZE = 4
LEARNING_RATE = 2e-4
WARMUP = 0.08  # long, because the first AdamW steps move all inputs of fc in the same direction
RIDGE = 1e-3  # ridge penalty as a share of the sum of squares of each input
STATE_WEIGHT = 0.1
CHECKPOINT_EVERY_S = 120
STEP_WEIGHTS = (1.0, 0.7)
ONE_STEP_SHARE = 0.6  # share of the budget spent on the first step alone


class Loss(NamedTuple):
    """Loss of one batch."""

    total: Tensor
    accuracy: list[float]  # by step: share of likeliest tokens equal to those of the target


def frequent_ids(folder: Path, num_ids: int, vocab_size: int) -> Tensor:
    """Return the ids that the target generated most often, in ascending order, [Vd] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for rows in read_batches(folder):
        counts += rows.ids[rows.is_written].long().bincount(minlength=vocab_size)
    # Ties go to the lower id, which was merged earlier, from more frequent text.
    order = counts.argsort(descending=True, stable=True)
    return order[:num_ids].sort().values


def read_batches(folder: Path) -> Iterator[Conversations]:
    """Yield every file of text from the target; rows stay on disk until they are read."""
    for path in sorted(folder.glob("*.pt")):
        yield Conversations(*torch.load(path, mmap=True, weights_only=True))


def start_head(
    target: LlamaForCausalLM, aux_layers: list[int], target_ids: Tensor, folder: Path, seed: int
) -> DraftHead:
    """Make a head whose `fc` predicts the next last state linearly.

    The layer adds nothing yet. Its inner projections are initialised from the last layer of the
    target.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(**{key: getattr(target.config, key) for key in LAYER_FIELDS})
    head = DraftHead(config, aux_layers, target_ids, target)
    head_layer, target_layer = head.layer, target.model.layers[-1]
    with torch.no_grad():
        head_layer.load_state_dict(target_layer.state_dict())
        for weight in (
            head_layer.self_attn.o_proj.weight,
            head_layer.mlp.down_proj.weight,
            head.aux_proj.weight,
        ):
            weight.zero_()
        solution = linear_prediction(head, folder)  # [2 * D + 1, D]
        head.fc.weight.copy_(solution[:-1].T)
        head.fc.bias.copy_(solution[-1])
    return head


def linear_prediction(head: DraftHead, folder: Path) -> Tensor:
    """Solve a ridge regression of the next last state on the embedding and state of a pair.

    Returns:
        Coefficients [2 * D + 1, D], with the constant in the last row.
    """
    width = head.config.hidden_size
    gram, moments = torch.zeros(2 * width + 1, 2 * width + 1), torch.zeros(2 * width + 1, width)
    for rows in read_batches(folder):
        is_wanted = wanted_pairs(rows)
        embedded, states = (
            head.embeddings[rows.ids[:, 1:].long()] * EMBEDDING_SCALE,
            rows.hidden.float() / head.scale,
        )
        pairs = [embedded, states[:, :-1], torch.ones(*is_wanted.shape, 1)]
        x, y = torch.cat(pairs, dim=-1)[is_wanted], states[:, 1:][is_wanted]
        gram += x.T @ x
        moments += x.T @ y
    return torch.linalg.solve(gram + RIDGE * gram.diag().diag(), moments)


def wanted_pairs(rows: Conversations) -> Tensor:
    """Return a mask [R, N] bool of the pairs that predict a token chosen by the target.

    Tokens of the user are not predicted.
    """
    return torch.cat([rows.is_written[:, 2:], torch.zeros_like(rows.is_written[:, :1])], dim=1)


def attend(heads: list[Heads], num_groups: int) -> Tensor:
    """Return the attention output [B, H, N, D] for the queries of the last step.

    A query at pair i sees the keys of pairs 0 to i - s + 1 from the first step, and one pair from
    each later step, which is pair i - s + r from step r.

    Args:
        heads: queries, keys and values of the s steps so far.
        num_groups: number of query heads per key-value head.
    """
    query, num_steps, num_pairs = heads[-1].query, len(heads), heads[-1].query.shape[2]
    scale = query.shape[-1] ** -0.5
    keys, values = (
        [getattr(step_heads, name).repeat_interleave(num_groups, dim=1) for step_heads in heads]
        for name in ("key", "value")
    )
    if num_steps == 1:
        return nn.functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    is_visible = torch.ones(num_pairs, num_pairs, dtype=torch.bool).tril(1 - num_steps)
    # [B, H, N, N]
    scores = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(~is_visible, -torch.inf)
    shifted = [
        (_shifted(keys[step], num_steps - 1 - step), _shifted(values[step], num_steps - 1 - step))
        for step in range(1, num_steps)
    ]
    columns = [(query * key).sum(-1, keepdim=True) * scale for key, _ in shifted]  # [B, H, N, 1]
    weights = torch.cat([scores, *columns], dim=-1).float().softmax(-1).to(query.dtype)
    mixed = weights[..., :num_pairs] @ values[0]
    for index, (_, value) in enumerate(shifted):
        mixed = mixed + weights[..., num_pairs + index, None] * value
    return mixed


def _shifted(x: Tensor, num_pairs: int) -> Tensor:
    """Shift [B, H, N, D] to later pairs; the first pairs become zero and are not trained."""
    return x if not num_pairs else nn.functional.pad(x, (0, 0, num_pairs, 0))[:, :, : x.shape[2]]


def head_loss(head: DraftHead, rows: Conversations, num_steps: int) -> Loss:
    """Return the KL divergence from the target's distribution plus the distance to its next state.

    The divergence is over the draft vocabulary. The distance keeps the output a valid state for the
    next step.

    Args:
        head: head in training.
        rows: rows of text from the target.
        num_steps: number of drafted tokens after each pair, at least 1.
    """
    # [B, N]; [B, N, D]
    ids, next_states = rows.ids.long()[:, 1:], rows.hidden[:, 1:].float() / head.scale
    is_wanted = wanted_pairs(rows)
    turns = head.turns(torch.arange(ids.shape[1])[None])
    hidden = torch.cat([rows.aux[:, :-1].float(), rows.hidden[:, :-1].float()], dim=-1)
    states, steps, accuracy, total = head.project(hidden), [], [], torch.zeros(())
    num_groups = head.config.num_attention_heads // head.config.num_key_value_heads
    for step in range(num_steps):
        heads, residual = head.attend_from(ids, states, turns)
        steps.append(heads)
        output = head.finish(residual, attend(steps, num_groups))
        is_here = is_wanted & (torch.arange(ids.shape[1]) >= step)
        logits = head.logits(output[is_here]).float()  # [M, Vd]
        with torch.no_grad():
            goal = (
                nn.functional.linear(next_states[is_here], head.output).float()
                - rows.logsumexp[:, 1:][is_here][:, None]
            )
        divergence = -(goal.exp() * logits.log_softmax(-1)).sum(-1).mean()
        distance = nn.functional.smooth_l1_loss(output[is_here].float(), next_states[is_here])
        total = total + STEP_WEIGHTS[step] * (divergence + STATE_WEIGHT * distance)
        accuracy.append((logits.argmax(-1) == goal.argmax(-1)).float().mean().item())
        states = nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]  # states of the pair before
    return Loss(total, accuracy)


class HeadTraining:
    """Resumable training run for a head.

    Under `torchrun`, the ranks share the rows of each step.

    Args:
        head: untrained head.
        folder: text from the target, one file per batch.
        checkpoint: file with the state of the run.
        minutes: budget over all sessions.
        seed: seed for the order of rows.
    """

    def __init__(self, head: DraftHead, folder: Path, checkpoint: Path, minutes: float, seed: int):
        self.head, self.checkpoint, self.seed = head, checkpoint, seed
        self.files = list(read_batches(folder))
        self.optimizer = torch.optim.AdamW(
            head.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.num_steps, spent_s = 0, 0.0
        self.rank, self.num_ranks = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        if checkpoint.is_file():
            saved = torch.load(checkpoint, weights_only=True)
            # More text may have changed the draft vocabulary, but no trained weight depends on it.
            head.load_state_dict(saved["head"] | {"target_ids": head.target_ids})
            self.optimizer.load_state_dict(saved["optimizer"])
            self.num_steps, spent_s = saved["num_steps"], saved["spent_s"]
        self.budget = Budget(minutes, spent_s)

    def run(self) -> DraftHead:
        """Train until the budget is spent."""
        saved_at_s, averages = self.budget.spent_s, None
        while (share := self._share()) < 1.0:
            num_steps = 1 if share < ONE_STEP_SHARE else len(STEP_WEIGHTS)
            loss = self._step(num_steps, share)
            new = torch.tensor(loss.accuracy)
            averages = (
                new if averages is None or len(averages) != len(new) else averages.lerp(new, 0.05)
            )
            if self.num_steps % 10 == 0 and not self.rank:
                shown = " ".join(f"{value:.3f}" for value in averages.tolist())
                print(f"{share:.1%}, step {self.num_steps}: accuracy {shown}", flush=True)
            if self.budget.spent_s - saved_at_s > CHECKPOINT_EVERY_S:
                saved_at_s = self.budget.spent_s
                self._save()
        self._save()
        return self.head.eval()

    def _share(self) -> float:
        """Return the elapsed share of the budget according to the clock of rank 0."""
        share = torch.tensor(self.budget.tick())
        if self.num_ranks > 1:
            dist.broadcast(share, src=0)
        return share.item()

    def _step(self, num_steps: int, share: float) -> Loss:
        rows = self._rows()
        with torch.autocast("cpu", torch.bfloat16):
            loss = head_loss(self.head, rows, num_steps)
        loss.total.backward()
        if self.num_ranks > 1:
            for weight in self.head.parameters():
                dist.all_reduce(weight.grad)
                weight.grad /= self.num_ranks
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm_then_linear(share, WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return loss

    def _rows(self) -> Conversations:
        """Return the next rows in the order of the epoch."""
        row_indices = [
            (file, row) for file, batch in enumerate(self.files) for row in range(len(batch.ids))
        ]
        epoch, number = divmod(
            self.num_steps * self.num_ranks + self.rank, len(row_indices) // BATCH_SIZE
        )
        order = torch.randperm(
            len(row_indices), generator=torch.Generator().manual_seed(self.seed * 1009 + epoch)
        )
        chosen = [
            row_indices[index]
            for index in order[number * BATCH_SIZE : (number + 1) * BATCH_SIZE].tolist()
        ]
        picked = [[values[row] for values in self.files[file]] for file, row in chosen]
        return Conversations(*(torch.stack(columns) for columns in zip(*picked, strict=True)))

    def _save(self) -> None:
        if self.rank:
            return
        saved = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "spent_s": self.budget.spent_s,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self.checkpoint)
