"""Speculative decoding inside transformers' `generate()`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
    from hf_speculate.draft.heads.head import DraftHead
    from hf_speculate.draft.heads.load import load_drafter
    from hf_speculate.draft.state import DraftState
    from hf_speculate.draft.suffix_store import SuffixStore
    from hf_speculate.draft.to_candidate_generator import DraftModelCandidateGenerator
    from hf_speculate.errors import (
        BadLogitsError,
        ConfigError,
        KernelUnavailableError,
        MissingExtraError,
        ShapeError,
        SpeculateError,
        UnsupportedGenerationError,
        UnsupportedModelError,
    )
    from hf_speculate.generation.enable import disable, enable, is_enabled
    from hf_speculate.generation.mixin import SpeculativeGenerationMixin, generate
    from hf_speculate.processors.block import BlockLogitsProcessorList
    from hf_speculate.processors.registry import register_row_wise
    from hf_speculate.processors.rollback import RollbackProcessor
    from hf_speculate.stats import SpeculationStats
    from hf_speculate.tools.checks.pair import PairReport, check_pair
    from hf_speculate.tools.checks.parity import ParityReport, check_parity
    from hf_speculate.tools.dataset.decode import decode_dataset
    from hf_speculate.tools.dataset.run import DatasetReport
    from hf_speculate.tools.hub.repository import save_config
    from hf_speculate.types import RoundReport
    from hf_speculate.verify.base import register_verifier
    from hf_speculate.verify.prefix import keep_prefix

__version__ = "0.1.0"

# Module that defines each public name. Names are imported on first use, so `import hf_speculate` loads none of them.
_MODULES = {
    "BadLogitsError": "errors",
    "BlockLogitsProcessorList": "processors.block",
    "ConfigError": "errors",
    "DatasetReport": "tools.dataset.run",
    "DraftHead": "draft.heads.head",
    "DraftModelCandidateGenerator": "draft.to_candidate_generator",
    "DraftState": "draft.state",
    "Drafter": "draft.base",
    "DraftRequest": "draft.base",
    "DrafterSetup": "draft.base",
    "KernelUnavailableError": "errors",
    "MissingExtraError": "errors",
    "PairReport": "tools.checks.pair",
    "ParityReport": "tools.checks.parity",
    "RollbackProcessor": "processors.rollback",
    "RoundReport": "types",
    "ShapeError": "errors",
    "SpeculateError": "errors",
    "SpeculationStats": "stats",
    "SpeculativeGenerationMixin": "generation.mixin",
    "SuffixStore": "draft.suffix_store",
    "UnsupportedGenerationError": "errors",
    "UnsupportedModelError": "errors",
    "check_pair": "tools.checks.pair",
    "check_parity": "tools.checks.parity",
    "decode_dataset": "tools.dataset.decode",
    "disable": "generation.enable",
    "enable": "generation.enable",
    "generate": "generation.mixin",
    "is_enabled": "generation.enable",
    "keep_prefix": "verify.prefix",
    "load_drafter": "draft.heads.load",
    "register_row_wise": "processors.registry",
    "register_verifier": "verify.base",
    "save_config": "tools.hub.repository",
}

__all__ = [
    "BadLogitsError",
    "BlockLogitsProcessorList",
    "ConfigError",
    "DatasetReport",
    "DraftHead",
    "DraftModelCandidateGenerator",
    "DraftRequest",
    "DraftState",
    "Drafter",
    "DrafterSetup",
    "KernelUnavailableError",
    "MissingExtraError",
    "PairReport",
    "ParityReport",
    "RollbackProcessor",
    "RoundReport",
    "ShapeError",
    "SpeculateError",
    "SpeculationStats",
    "SpeculativeGenerationMixin",
    "SuffixStore",
    "UnsupportedGenerationError",
    "UnsupportedModelError",
    "check_pair",
    "check_parity",
    "decode_dataset",
    "disable",
    "enable",
    "generate",
    "is_enabled",
    "keep_prefix",
    "load_drafter",
    "register_row_wise",
    "register_verifier",
    "save_config",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
