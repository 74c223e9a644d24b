"""Kernel choice: `verifier_backend="auto"` leaves out Triton kernels that `hf-speculate doctor` saw fail."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from hf_speculate.config import SpeculationConfig
from hf_speculate.options.verdicts.verdict import COMMAND, CRASHED, KERNELS, RIGHT, read_verdict
from hf_speculate.stats import SpeculationStats

_warn_once = cache(logging.getLogger("hf_speculate").warning)


def without_failed_kernels(
    config: SpeculationConfig, devices: Sequence[torch.device], stats: SpeculationStats
) -> SpeculationConfig:
    """The settings, with torch in place of kernels that were seen to fail; named kernels run, with a warning."""
    verdicts = [read_verdict(device) for device in set(devices)]
    seen = {verdict.of(KERNELS) for verdict in verdicts if verdict is not None} - {None, RIGHT}
    if not seen:
        return config
    problem = f"{COMMAND} saw Triton kernels {'crash' if CRASHED in seen else 'give wrong results'} on this device"
    if config.verifier_backend == "triton":
        _warn_once(f'verifier_backend="triton" runs them, though {problem}; leave it out for torch')
        return config
    stats.add_fallback(f"torch in place of Triton kernels, because {problem}")
    return replace(config, verifier_backend="torch")
