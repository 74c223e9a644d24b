"""Verifiers, and all methods that run them on a round."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import _rivals
import torch
from _rivals import Assisted
from _rounds import PLAIN, WARPED, Round, Warp, cutoffs
from torch import Tensor

from hf_speculate.kernels import (
    Stream,
    sample,
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_rejection,
    verify_typical,
)

Emitted = Tensor | list[Tensor]  # ids [B, K+1] padded with -1, or [1, n+1] per row
Run = Callable[[Round], Emitted]
WARM_UPS = 3


def _settings(round_: Round, logits: Tensor, backend: str) -> dict[str, Any]:
    """Return all settings except the logits; computing the cutoffs is part of the measured time."""
    return {
        "temperature": round_.warp.temperature,
        "row_cutoffs": cutoffs(logits, round_.warp),
        "backend": backend,
    }


def greedy(round_: Round, backend: str) -> Tensor:
    return verify_greedy(round_.target_logits, round_.draft_token_ids, backend=backend).token_ids


def rejection(round_: Round, backend: str, logsumexp: Tensor | None = None) -> Tensor:
    settings = _settings(round_, round_.target_logits, backend)
    logits, ids = round_.target_logits, round_.draft_token_ids
    return verify_rejection(
        logits, ids, round_.draft_logits, keys=round_.keys, draft_logsumexp=logsumexp, **settings
    ).token_ids


def rejection_saved(round_: Round, backend: str) -> Tensor:
    return rejection(round_, backend, round_.draft_logsumexp)


def point_mass(round_: Round, backend: str) -> Tensor:
    settings = _settings(round_, round_.target_logits, backend)
    return verify_rejection(
        round_.target_logits, round_.draft_token_ids, keys=round_.keys, **settings
    ).token_ids


def typical(round_: Round, backend: str) -> Tensor:
    settings = _settings(round_, round_.target_logits, backend)
    return verify_typical(round_.target_logits, round_.draft_token_ids, **settings).token_ids


def block(round_: Round, backend: str) -> Tensor:
    settings = _settings(round_, round_.target_logits, backend)
    logits, ids, logsumexp = round_.target_logits, round_.draft_token_ids, round_.draft_logsumexp
    return verify_block(
        logits, ids, round_.draft_logits, keys=round_.keys, draft_logsumexp=logsumexp, **settings
    ).token_ids


def coupled(round_: Round, backend: str) -> Tensor:
    settings = _settings(round_, round_.target_logits, backend)
    return verify_coupled(
        round_.target_logits, round_.draft_token_ids, keys=round_.keys, **settings
    ).token_ids


def draft_sample(round_: Round, backend: str) -> Tensor:
    logits = round_.target_logits[:, 0]
    settings = _settings(round_, logits, backend)
    return sample(logits, keys=round_.keys, stream=Stream.DRAFT, **settings).token_ids.unsqueeze(-1)


@dataclass(frozen=True)
class Verifier:
    """One verifier.

    Args:
        ours: function of a round and a backend.
        theirs: method in transformers, or the closest one if transformers lacks the verifier.
        theirs_is: description of `theirs`.
        textbook: function in plain eager torch.
        drafts: how tokens are drafted; see `draw`.
        rule: name of the check in `_exactness`.
        num_rows_read: number of rows of V logits that must be read, as a function of K.
        warps: sampling settings to measure.
        flashinfer: method in FlashInfer.
            None if it has none.
    """

    ours: Callable[[Round, str], Tensor]
    theirs: Run
    theirs_is: str
    textbook: Run
    drafts: str
    rule: str
    num_rows_read: Callable[[int], int]
    warps: tuple[Warp, ...] = field(default=(WARPED, PLAIN))
    flashinfer: Run | None = None


def _target_rows(num_draft_tokens: int) -> int:
    return num_draft_tokens + 1


def _and_one_draft_row(num_draft_tokens: int) -> int:
    return num_draft_tokens + 2


def _and_all_draft_rows(num_draft_tokens: int) -> int:
    return 2 * num_draft_tokens + 1


def _one_row(_: int) -> int:
    return 1


_REJECTION = Assisted("rejection")
_MATCHING = Assisted("multinomial")
_FLASHINFER = _rivals.flashinfer_rejection
VERIFIERS = {
    "greedy": Verifier(
        greedy,
        Assisted("argmax"),
        "its greedy matching",
        _rivals.textbook_greedy,
        "argmax",
        "greedy",
        _target_rows,
        warps=(PLAIN,),
    ),
    "rejection, saved sums": Verifier(
        rejection_saved,
        _REJECTION,
        "its rejection",
        _rivals.textbook_rejection,
        "sampled",
        "rejection",
        _and_one_draft_row,
        flashinfer=_FLASHINFER,
    ),
    "rejection": Verifier(
        lambda round_, backend: rejection(round_, backend),
        _REJECTION,
        "its rejection",
        _rivals.textbook_rejection,
        "sampled",
        "rejection",
        _and_all_draft_rows,
        flashinfer=_FLASHINFER,
    ),
    "point mass": Verifier(
        point_mass,
        _MATCHING,
        "its matching of sampled tokens",
        _rivals.textbook_point_mass,
        "argmax",
        "point mass",
        _target_rows,
    ),
    "typical": Verifier(
        typical,
        _REJECTION,
        "its rejection, as it has no such verifier",
        _rivals.textbook_typical,
        "sampled",
        "typical",
        _target_rows,
    ),
    "block": Verifier(
        block,
        _REJECTION,
        "its rejection, as it has no such verifier",
        _rivals.textbook_block,
        "sampled",
        "block",
        _and_all_draft_rows,
    ),
    "coupled": Verifier(
        coupled,
        _MATCHING,
        "its matching of sampled tokens",
        _rivals.textbook_coupled,
        "raced",
        "coupled",
        _target_rows,
    ),
    "sample": Verifier(
        draft_sample,
        _rivals.transformers_sample,
        "its sampling step",
        _rivals.textbook_sample,
        "sampled",
        "sample",
        _one_row,
    ),
}


def captured(run: Run, rounds: list[Round]) -> Callable[[], None]:
    """Capture `run` on all rounds in a CUDA graph, and check the output of a replay."""
    expected = [run(round_) for round_ in rounds]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            for round_ in rounds:
                run(round_)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        emitted = [run(round_) for round_ in rounds]
    graph.replay()
    if not all(map(torch.equal, emitted, expected)):
        raise SystemExit("a replayed graph gives other ids than the same calls without one")
    return graph.replay


def missing(method: str, device: torch.device) -> str | None:
    """Return why `method` cannot run on `device`, or None."""
    if method == "flashinfer":
        if device.type != "cuda":
            return "needs a GPU"
        return None if importlib.util.find_spec("flashinfer") else "is not installed"
    if method.startswith("ours, triton"):
        if device.type != "cuda":
            return "needs a GPU"
        return None if importlib.util.find_spec("triton") else "triton is not installed"
    return None


def methods_of(
    verifier: Verifier, device: torch.device, compiled: bool
) -> tuple[dict[str, Run], dict[str, str]]:
    """Return the methods that can run on `device`, and the reasons why others cannot."""
    methods: dict[str, Run] = {
        "ours, torch": lambda round_: verifier.ours(round_, "torch"),
        "transformers": verifier.theirs,
        "textbook": verifier.textbook,
    }
    left_out = {}
    optional: dict[str, Run | None] = {
        "ours, triton": lambda round_: verifier.ours(round_, "triton"),
        "flashinfer": verifier.flashinfer,
    }
    for name, run in optional.items():
        if run is None:
            continue
        if reason := missing(name, device):
            left_out[name] = reason
        else:
            methods[name] = run
    if compiled:
        methods["ours, compiled"] = torch.compile(
            lambda round_: verifier.ours(round_, "torch"), dynamic=False
        )
    return methods, left_out
