"""Speculative decoding inside transformers' `generate()`."""

import hf_speculate.tools.cli.logging  # noqa: F401  # before anything imports transformers

# isort: split
from hf_speculate.draft.base import Drafter, DrafterRequest
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
from hf_speculate.processors import BlockLogitsProcessorList, register_row_wise
from hf_speculate.processors.rollback import RollbackProcessor
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.checks.pair import PairReport, check_pair
from hf_speculate.tools.checks.parity import ParityReport, check_parity
from hf_speculate.tools.dataset.decode import decode_dataset
from hf_speculate.tools.dataset.run import DatasetReport
from hf_speculate.tools.hub.repository import save_config
from hf_speculate.types import RoundReport
from hf_speculate.verify import keep_prefix, register_verifier

__version__ = "0.1.0"

__all__ = [
    "BadLogitsError",
    "BlockLogitsProcessorList",
    "ConfigError",
    "DatasetReport",
    "DraftModelCandidateGenerator",
    "DraftState",
    "Drafter",
    "DrafterRequest",
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
    "register_row_wise",
    "register_verifier",
    "save_config",
]
