"""Tensor-parallel groups: processes that compute one split model together, and all use what rank 0 decides."""

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
    """The processes that compute one tensor-parallel model together; all use what rank 0 decides, so forwards agree."""

    group: dist.ProcessGroup
    device: torch.device
    is_group = True

    def any(self, flag: bool) -> bool:
        wish = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self.group)
        return bool(wish)

    def broadcast(self, numbers: Tensor) -> Tensor:
        if numbers.dtype == torch.bool:  # which not every backend sends
            return self.broadcast(numbers.to(torch.uint8)).bool()
        shared = numbers.to(self.device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(shared, src=dist.get_global_rank(self.group, 0), group=self.group)
        return shared.to(numbers.device)

    def broadcast_number(self, number: N) -> N:
        dtype = torch.float64 if isinstance(number, float) else torch.int64
        return type(number)(self.broadcast(torch.tensor(number, dtype=dtype, device="cpu")).item())

    def broadcast_draft(self, own: DraftOut, num_draft_tokens: int, has_cache: bool) -> DraftOut:
        num_own = own.token_ids.shape[1]
        packed = own.token_ids.new_full((len(own.token_ids), num_draft_tokens + 2), -1)  # [B, K' + 2]
        packed[:, :num_own] = own.token_ids
        packed[:, -2] = own.lens
        packed[:, -1] = num_own
        agreed = self.broadcast(packed)
        num = int(agreed[0, -1])
        draft = own._replace(token_ids=agreed[:, :num], lens=agreed[:, -2].to(own.lens.dtype))
        if num == num_own:
            return draft
        cached = own.cached or CachedDraft(num_own - 1 if has_cache else 0, [False] * len(agreed))
        return draft._replace(token_logits=None, logsumexp=None, cached=cached)

    def wrap_verifier(self, verifier: Verifier) -> Verifier:
        return BroadcastVerifier(verifier, self)

    def wrap_criteria(self, criteria: BlockStoppingCriteria) -> BlockStoppingCriteria:
        return criteria if criteria.reads_text_alone else BroadcastStopping(criteria, self)


def tensor_parallel_group(models: Iterable[PreTrainedModel], device: torch.device) -> TensorParallelGroup | None:
    """The processes that compute one of the models together; None if this process computes them alone."""
    weights = (weight for model in models if tensor_parallel_size(model) > 1 for weight in model.parameters())
    meshes: Iterator[Any] = (weight.device_mesh for weight in weights if hasattr(weight, "device_mesh"))  # a DTensor's
    for mesh in meshes:
        names = mesh.mesh_dim_names or ("tp",)  # older versions of transformers name none; FSDP's have no "tp"
        if "tp" in names:
            return TensorParallelGroup(mesh.get_group(names.index("tp")), device)
    return None


@dataclass
class BroadcastVerifier:
    """A verifier on a tensor-parallel group: rank 0's verdict counts."""

    verifier: Verifier
    group: TensorParallelGroup

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        own = self.verifier.verify(target_logits, draft, keys)
        counts = torch.stack([own.num_accepted, own.status], dim=1).to(torch.int64)  # [B, 2]
        agreed = self.group.broadcast(torch.cat([own.token_ids, counts], dim=1))
        return Verdict(agreed[:, :-2], agreed[:, -2].to(torch.int32), agreed[:, -1].to(torch.int32))


class BroadcastStopping(BlockStoppingCriteria):
    """Stopping criteria on a tensor-parallel group: rank 0's verdict counts, another rank's may read another clock."""

    def __init__(self, criteria: Iterable[Any], group: TensorParallelGroup):
        super().__init__(criteria)
        self._group = group

    def __call__(self, tokens: TokenRows, new_ids: Sequence[list[int]]) -> StopVerdict:
        own = super().__call__(tokens, new_ids)
        verdict = torch.tensor([own.num_emitted, own.is_done], dtype=torch.int64, device="cpu")  # [2, B]
        num_emitted, is_done = self._group.broadcast(verdict).tolist()
        return StopVerdict(num_emitted, [bool(done) for done in is_done])

    def ask(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
        return self._group.broadcast(super().ask(input_ids, scores))
