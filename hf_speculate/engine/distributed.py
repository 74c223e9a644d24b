"""Distributed calls: ranks that must run equally many forwards, and tensor-parallel groups that follow rank 0."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_speculate.draft.base import DraftRequest
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria, StopVerdict, TokenRows
from hf_speculate.types import CachedDraft, DraftOut, NoiseKeys, Verdict
from hf_speculate.verify.base import Verifier


@dataclass(frozen=True)
class SyncedRanks:
    """The ranks that must run as many forwards as this one, because each forward gathers weights from all of them."""

    device: torch.device

    def max(self, num: int | None) -> int | None:
        """The largest number of any rank; None if every rank passes None."""
        wish = torch.tensor(0 if num is None else num + 1, device=self.device)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        agreed = int(wish)
        return agreed - 1 if agreed else None

    def min(self, num: int) -> int:
        """The smallest number of any rank."""
        wish = torch.tensor(num, device=self.device)
        dist.all_reduce(wish, op=dist.ReduceOp.MIN)
        return int(wish)

    def any(self, flag: bool) -> bool:
        """Whether the flag of any rank is set."""
        return self.min(int(not flag)) == 0


def synced_ranks(wanted: bool | None, models: Iterable[nn.Module], device: torch.device) -> SyncedRanks | None:
    """The ranks that must run equally many forwards: as `synced_gpus` says, else by ZeRO-3 and FSDP; or None."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    if wanted is None:
        wanted = is_deepspeed_zero3_enabled() or any(is_fsdp_managed_module(model) for model in models)
    return SyncedRanks(device) if wanted else None


@dataclass(frozen=True)
class TensorParallelGroup:
    """The processes that compute one tensor-parallel model together; all use what rank 0 decides, so forwards agree."""

    group: dist.ProcessGroup
    device: torch.device

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Rank 0's numbers, of one shape and dtype on all ranks, on every rank; `numbers` is left as it is."""
        shared = numbers.to(self.device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(shared, src=dist.get_global_rank(self.group, 0), group=self.group)
        return shared.to(numbers.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag of any process is set."""
        wish = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self.group)
        return bool(wish)


def tensor_parallel_size(model: PreTrainedModel) -> int:
    """The number of processes that hold a part of each large weight; 1 without tensor parallelism."""
    return getattr(model, "tp_size", None) or 1


def tensor_parallel_group(models: Iterable[PreTrainedModel], device: torch.device) -> TensorParallelGroup | None:
    """The processes that compute one of the models together; None if this process computes them alone."""
    weights = (weight for one in models if tensor_parallel_size(one) > 1 for weight in one.parameters())
    meshes: Iterator[Any] = (weight.device_mesh for weight in weights if hasattr(weight, "device_mesh"))  # a DTensor's
    for mesh in meshes:
        names = mesh.mesh_dim_names or ("tp",)  # older versions of transformers name none; FSDP's have no "tp"
        if "tp" in names:
            return TensorParallelGroup(mesh.get_group(names.index("tp")), device)
    return None


def broadcast_draft(own: DraftOut, request: DraftRequest, group: TensorParallelGroup) -> DraftOut:
    """Rank 0's draft on every rank; all ranks have drafted, so that each draft cache is up to date."""
    num_own = own.token_ids.shape[1]
    packed = own.token_ids.new_full((len(own.token_ids), request.num_draft_tokens + 2), -1)  # [B, K' + 2]
    packed[:, :num_own] = own.token_ids
    packed[:, -2] = own.lens
    packed[:, -1] = num_own
    agreed = group.broadcast(packed)
    num = int(agreed[0, -1])
    draft = own._replace(token_ids=agreed[:, :num], lens=agreed[:, -2].to(own.lens.dtype))
    if num == num_own:
        return draft
    cached = own.cached or CachedDraft(num_own - 1 if request.kv_cache is not None else 0, [False] * len(agreed))
    return draft._replace(token_logits=None, logsumexp=None, cached=cached)


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
        flags = super().ask(input_ids, scores)
        return self._group.broadcast(flags.to(torch.uint8)).bool()  # not every backend sends bool
