"""Count the launches, uploads and waits in each round of a call on the fake GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.types import RoundReport
from tests.support.fake_attention import AttentionCall
from tests.support.fake_cuda import FakeCuda


class RoundCount(NamedTuple):
    """Counts of one round, excluding the forwards of the two models."""

    num_launches: int
    launches: dict[str, int]  # by operator
    waits: list[str]
    num_uploads: int
    attention: list[AttentionCall]  # in the models' forwards
    num_plans: int  # plans that cuDNN has built so far
    report: RoundReport


class Enough(Exception):
    """Exception that ends a call when enough rounds are counted."""


class Rounds(list[RoundCount]):
    """Rounds of a call, recorded with `speculation_callback=rounds.end`."""

    def __init__(self, gpu: FakeCuda):
        super().__init__()
        self.gpu = gpu
        # `Enough` ends the call after this many rounds; None for no limit
        self.most: int | None = None

    def end(self, report: RoundReport) -> None:
        """Record the log since the last round."""
        log = self.gpu.log
        own, waits = dict(log.launches.get("", {})), log.waits.get("", [])
        num_uploads, attention, num_plans = len(log.uploads), log.attention[:], len(log.plans)
        self.append(
            RoundCount(sum(own.values()), own, waits, num_uploads, attention, num_plans, report)
        )
        log.clear()
        if len(self) == self.most:
            raise Enough

    def steady(self) -> list[RoundCount]:
        """Return the rounds that have a draft and the same batch as the round before.

        The first round is left out, because it reads the prompt.
        """
        rounds = ((now, before.report.row_ids) for before, now in pairwise(self))
        drafted = [
            now
            for now, row_ids in rounds
            if row_ids == now.report.row_ids and any(now.report.num_drafted)
        ]
        return drafted if any(self[0].report.num_drafted) else drafted[1:]


@contextmanager
def counted(target: PreTrainedModel, draft: PreTrainedModel | None) -> Iterator[Rounds]:
    """Enter a fake GPU and move both models to it; their forwards are counted separately."""
    with FakeCuda() as gpu:
        for model, stage in ((target, "target"), (draft, "draft")):
            if model is not None:
                model.to("cuda:0")
                gpu.watch(model, stage)
        yield Rounds(gpu)


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Upload the inputs."""
    return {name: value.to("cuda:0") for name, value in inputs.items()}
