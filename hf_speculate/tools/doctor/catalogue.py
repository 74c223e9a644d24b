"""The checks by name, and which of them concern a device."""

import torch

from hf_speculate.options.verdicts.verdict import GRAPHS, KERNELS
from hf_speculate.tools.doctor.attention import attention_checks
from hf_speculate.tools.doctor.compiled import compiled_checks
from hf_speculate.tools.doctor.graphs import graph_checks
from hf_speculate.tools.doctor.kernels import kernel_checks
from hf_speculate.tools.doctor.site import Check
from hf_speculate.tools.doctor.texts import text_checks

ATTENTION, TEXTS, COMPILED = "attention", "texts", "compiled"
_ALL = (torch.float32, torch.bfloat16, torch.float16)
# Older and other devices may lack bfloat16, or compute float16 slowly.
_DTYPES = {"cuda": _ALL, "xpu": _ALL, "mps": (torch.float32, torch.float16), "cpu": (torch.float32, torch.bfloat16)}

CHECKS: dict[str, Check] = {
    f"{group}: {name}": check
    for group, checks in (
        (ATTENTION, attention_checks(_ALL)),
        (GRAPHS, graph_checks((torch.float32, torch.bfloat16))),
        (TEXTS, text_checks(_ALL)),
        (KERNELS, kernel_checks()),
        (COMPILED, compiled_checks()),
    )
    for name, check in checks.items()
}
"""By the name "<group>: <what>", in the order in which they run: the checks that decide most come first."""


def names_for(device_type: str, *, compiles: bool, has_kernels: bool) -> list[str]:
    """The checks that concern devices of a type."""
    dtypes = _DTYPES.get(device_type, (torch.float32,))
    left_out = {str(dtype).removeprefix("torch.") for dtype in _ALL if dtype not in dtypes}
    groups = {TEXTS, ATTENTION}
    groups |= {GRAPHS} if device_type == "cuda" else set()
    groups |= {KERNELS} if has_kernels else set()
    groups |= {COMPILED} if compiles and device_type != "cpu" else set()  # where transformers compiles nothing
    in_groups = (name for name in CHECKS if name.partition(":")[0] in groups)
    return [name for name in in_groups if not left_out & set(name.replace(":", ",").split(", "))]
