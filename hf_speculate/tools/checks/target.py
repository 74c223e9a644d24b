"""Check whether a model can be a target before its weights are loaded and a draft is chosen."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_speculate.options.heads.mtp_checkpoint import SERVED_TARGETS
from hf_speculate.options.heads.recognise import is_mtp_checkpoint
from hf_speculate.tools.checks.pair import (
    Finding,
    Memory,
    expert_findings,
    parameter_line,
    quantisation_findings,
    recurrent_findings,
    rope_findings,
    unsupported,
    worst_level,
)
from hf_speculate.tools.checks.sources import Described, ModelSource, describe


@dataclass(frozen=True)
class TargetReport:
    """The result of `check_target`; `print` shows it as text."""

    target: str  #: name of the target
    level: str  #: "ok", "warning" or "not supported", the worst of the findings
    findings: tuple[Finding, ...]  #: findings about the target
    num_params: int  #: number of the target's parameters
    memory: Memory  #: estimate for loading and running the target

    @property
    def ok(self) -> bool:
        """Whether `generate()` accepts the target, perhaps with warnings."""
        return self.level != "not supported"

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON-serialisable values."""
        return asdict(self) | {"ok": self.ok}

    def __str__(self) -> str:
        lines = [
            f"{self.level}: {self.target} as a target",
            parameter_line("target", self.num_params, self.memory),
        ]
        return "\n".join(
            [*lines, *(f"  {finding.level}: {finding.text}" for finding in self.findings)]
        )


def check_target(
    target: ModelSource,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | None = None,
    **options: Any,
) -> TargetReport:
    """Check whether `target` can decode speculatively; see `check_pair` for the arguments."""
    described = describe("target", target, tokenizer, dtype, options)
    size = described.size
    return TargetReport(
        target=described.name,
        level=worst_level(findings := tuple(_findings(described))),
        findings=findings,
        num_params=size.num_params,
        memory=Memory(described.dtype, size.num_bytes, size.kv_bytes_per_token),
    )


def _findings(target: Described) -> Iterator[Finding]:
    text = unsupported(target.model)
    if text:
        yield Finding("not supported", text)
        return
    makers = recurrent_findings, rope_findings, quantisation_findings, expert_findings
    yield from chain.from_iterable(findings(target) for findings in makers)
    config = target.model.config
    if (
        is_mtp_checkpoint(config.to_dict(), config.model_type)
        and config.model_type in SERVED_TARGETS
    ):
        yield Finding("ok", "its checkpoint has layers that draft: pass use_mtp=True to generate()")
    yield Finding("ok", "prompt lookup drafts without another model; --draft names one to check")
