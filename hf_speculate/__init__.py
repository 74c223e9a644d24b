"""Speculative decoding inside transformers' `generate()`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_speculate.config import SpeculationConfig as SpeculationConfig
    from hf_speculate.draft.base import Drafter as Drafter
    from hf_speculate.draft.base import DrafterSetup as DrafterSetup
    from hf_speculate.draft.base import DraftRequest as DraftRequest
    from hf_speculate.errors import BadLogitsError as BadLogitsError
    from hf_speculate.errors import ConfigError as ConfigError
    from hf_speculate.errors import KernelUnavailableError as KernelUnavailableError
    from hf_speculate.errors import MissingExtraError as MissingExtraError
    from hf_speculate.errors import OtherRankError as OtherRankError
    from hf_speculate.errors import ShapeError as ShapeError
    from hf_speculate.errors import SpeculateError as SpeculateError
    from hf_speculate.errors import UnsupportedGenerationError as UnsupportedGenerationError
    from hf_speculate.errors import UnsupportedModelError as UnsupportedModelError
    from hf_speculate.generation.defaults import plain as plain
    from hf_speculate.generation.enable import disable as disable
    from hf_speculate.generation.enable import enable as enable
    from hf_speculate.generation.enable import is_enabled as is_enabled
    from hf_speculate.generation.generate import (
        SpeculativeGenerationMixin as SpeculativeGenerationMixin,
    )
    from hf_speculate.generation.generate import generate as generate
    from hf_speculate.options.candidates.to_candidate_generator import (
        DraftModelCandidateGenerator as DraftModelCandidateGenerator,
    )
    from hf_speculate.options.draft_state.state import DraftState as DraftState
    from hf_speculate.options.heads.head import DraftHead as DraftHead
    from hf_speculate.options.heads.load import load_drafter as load_drafter
    from hf_speculate.options.sources.suffix_store import SuffixStore as SuffixStore
    from hf_speculate.options.uno.adapter import UnoAdapter as UnoAdapter
    from hf_speculate.processors.block import BlockLogitsProcessorList as BlockLogitsProcessorList
    from hf_speculate.processors.registry import RollbackProcessor as RollbackProcessor
    from hf_speculate.processors.registry import register_row_wise as register_row_wise
    from hf_speculate.stats import SpeculationStats as SpeculationStats
    from hf_speculate.tools.checks.pair import PairReport as PairReport
    from hf_speculate.tools.checks.pair import check_pair as check_pair
    from hf_speculate.tools.checks.parity import ParityReport as ParityReport
    from hf_speculate.tools.checks.parity import check_parity as check_parity
    from hf_speculate.tools.dataset.decode import DatasetReport as DatasetReport
    from hf_speculate.tools.dataset.decode import decode_dataset as decode_dataset
    from hf_speculate.tools.hub.repository import save_config as save_config
    from hf_speculate.tools.hub.repository import save_settings as save_settings
    from hf_speculate.types import RoundReport as RoundReport
    from hf_speculate.verify.base import register_verifier as register_verifier
    from hf_speculate.verify.prefix import keep_prefix as keep_prefix

__version__ = "0.2.0"

# Public names by the module that defines them. They are imported on first use, so `import
# hf_speculate` loads none.
_NAMES = {
    "config": ("SpeculationConfig",),
    "draft.base": ("DraftRequest", "Drafter", "DrafterSetup"),
    "options.heads.head": ("DraftHead",),
    "options.heads.load": ("load_drafter",),
    "options.candidates.to_candidate_generator": ("DraftModelCandidateGenerator",),
    "options.draft_state.state": ("DraftState",),
    "options.sources.suffix_store": ("SuffixStore",),
    "options.uno.adapter": ("UnoAdapter",),
    "errors": (
        "BadLogitsError",
        "ConfigError",
        "KernelUnavailableError",
        "MissingExtraError",
        "OtherRankError",
        "ShapeError",
        "SpeculateError",
        "UnsupportedGenerationError",
        "UnsupportedModelError",
    ),
    "generation.defaults": ("plain",),
    "generation.enable": ("disable", "enable", "is_enabled"),
    "generation.generate": ("SpeculativeGenerationMixin", "generate"),
    "processors.block": ("BlockLogitsProcessorList",),
    "processors.registry": ("RollbackProcessor", "register_row_wise"),
    "stats": ("SpeculationStats",),
    "tools.checks.pair": ("PairReport", "check_pair"),
    "tools.checks.parity": ("ParityReport", "check_parity"),
    "tools.dataset.decode": ("DatasetReport", "decode_dataset"),
    "tools.hub.repository": ("save_config", "save_settings"),
    "types": ("RoundReport",),
    "verify.base": ("register_verifier",),
    "verify.prefix": ("keep_prefix",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
