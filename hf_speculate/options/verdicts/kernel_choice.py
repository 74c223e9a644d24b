"""Kernel choice: `verifier_backend="auto"` leaves out Triton kernels that `hf-speculate doctor` saw fail."""

import logging
from dataclasses import replace
from functools import cache

from hf_speculate.engine.call import Call
from hf_speculate.models.language_model import device_of
from hf_speculate.options.verdicts.verdict import COMMAND, CRASHED, KERNELS, RIGHT, read_verdict
from hf_speculate.stats import SpeculationStats

_warn_once = cache(logging.getLogger("hf_speculate").warning)


def without_failed_kernels(call: Call, stats: SpeculationStats) -> Call:
    """The call, with torch in place of kernels that were seen to fail; asked for by name they run, with a warning."""
    verdicts = [read_verdict(device) for device in {device_of(model) for model in call.models}]
    seen = {verdict.of(KERNELS) for verdict in verdicts if verdict is not None} - {None, RIGHT}
    if not seen:
        return call
    problem = f"{COMMAND} saw Triton kernels {'crash' if CRASHED in seen else 'give wrong results'} on this device"
    if call.config.verifier_backend == "triton":
        _warn_once(f'verifier_backend="triton" runs them, though {problem}; leave it out for torch')
        return call
    stats.add_fallback(f"torch in place of Triton kernels, because {problem}")
    return replace(call, config=replace(call.config, verifier_backend="torch"))
