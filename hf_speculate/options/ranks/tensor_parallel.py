"""Tensor-parallel groups, whose processes share one split model and follow rank 0."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.engine.ranks import N, Ranks, tensor_parallel_size
from hf_speculate.processors.of_rows import StopVerdict, TokenRows
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.types import CachedDraft, DraftOut, NoiseKeys, Verdict
from hf_speculate.verify.base import Verifier


@dataclass(frozen=True)
class TensorParallelGroup(Ranks):
    """The processes of one tensor-parallel model.

    All follow the decisions of rank 0, so their forwards agree.
    """

    group: dist.ProcessGroup
    device: torch.device
    is_group = True

    def any(self, flag: bool) -> bool:
        value = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value)

    def broadcast(self, numbers: Tensor) -> Tensor:
        if numbers.dtype == torch.bool:  # not every backend can send bools
            return self.broadcast(numbers.to(torch.uint8)).bool()
        shared = numbers.to(self.device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(shared, src=dist.get_global_rank(self.group, 0), group=self.group)
        return shared.to(numbers.device)

    def broadcast_number(self, number: N) -> N:
        dtype = torch.float64 if isinstance(number, float) else torch.int64
        return type(number)(self.broadcast(torch.tensor(number, dtype=dtype, device="cpu")).item())

    def broadcast_draft(self, own: DraftOut, num_draft_tokens: int, has_cache: bool) -> DraftOut:
        num_drafted = own.token_ids.shape[1]
        # [B, K' + 2]
        packed = own.token_ids.new_full((len(own.token_ids), num_draft_tokens + 2), -1)
        packed[:, :num_drafted] = own.token_ids
        packed[:, -2] = own.lens
        packed[:, -1] = num_drafted
        agreed = self.broadcast(packed)
        num_agreed = int(agreed[0, -1])
        draft = own._replace(
            token_ids=agreed[:, :num_agreed], lens=agreed[:, -2].to(own.lens.dtype)
        )
        if num_agreed == num_drafted:
            return draft
        cached = own.cached or CachedDraft(
            num_drafted - 1 if has_cache else 0, [False] * len(agreed)
        )
        return draft._replace(token_logits=None, logsumexp=None, cached=cached)

    def wrap_verifier(self, verifier: Verifier) -> Verifier:
        return BroadcastVerifier(verifier, self)

    def wrap_criteria(self, criteria: BlockStoppingCriteria) -> BlockStoppingCriteria:
        return criteria if criteria.reads_text_alone else BroadcastStopping(criteria, self)


def tensor_parallel_group(
    models: Iterable[PreTrainedModel], device: torch.device
) -> TensorParallelGroup | None:
    """Return the process group of a tensor-parallel model; None if there is none."""
    weights = (
        weight
        for model in models
        if tensor_parallel_size(model) > 1
        for weight in model.parameters()
    )
    # the mesh of a DTensor
    meshes: Iterator[Any] = (
        weight.device_mesh for weight in weights if hasattr(weight, "device_mesh")
    )
    for mesh in meshes:
        # older versions of transformers set no names; FSDP meshes have no "tp"
        names = mesh.mesh_dim_names or ("tp",)
        if "tp" in names:
            return TensorParallelGroup(mesh.get_group(names.index("tp")), device)
    return None


@dataclass
class BroadcastVerifier:
    """A verifier that returns the verdicts of rank 0."""

    verifier: Verifier
    group: TensorParallelGroup

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        verdict = self.verifier.verify(target_logits, draft, keys)
        # [B, 2]
        counts = torch.stack([verdict.num_accepted, verdict.status], dim=1).to(torch.int64)
        agreed = self.group.broadcast(torch.cat([verdict.token_ids, counts], dim=1))
        return Verdict(agreed[:, :-2], agreed[:, -2].to(torch.int32), agreed[:, -1].to(torch.int32))


class BroadcastStopping(BlockStoppingCriteria):
    """Stopping criteria that return the verdicts of rank 0.

    Time limits read each process's own clock, so ranks could disagree.
    """

    def __init__(self, criteria: Iterable[Any], group: TensorParallelGroup):
        super().__init__(criteria)
        self._group = group

    def __call__(self, tokens: TokenRows, new_ids: Sequence[list[int]]) -> StopVerdict:
        verdict = super().__call__(tokens, new_ids)
        # [2, B]
        packed = torch.tensor(
            [verdict.num_emitted, verdict.is_done], dtype=torch.int64, device="cpu"
        )
        num_emitted, is_done = self._group.broadcast(packed).tolist()
        return StopVerdict(num_emitted, [bool(done) for done in is_done])

    def ask(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
        return self._group.broadcast(super().ask(input_ids, scores))
