"""Speculative decoding inside transformers' `generate()`."""

import hf_speculate.quiet  # noqa: F401  # before anything imports transformers

# isort: split
from hf_speculate.checking.pair import PairReport, check_pair
from hf_speculate.checking.parity import ParityReport, check_parity
from hf_speculate.dataset.decode import decode_dataset
from hf_speculate.dataset.run import DatasetReport
from hf_speculate.draft.base import Drafter, DrafterRequest
from hf_speculate.draft.candidates import DraftModelCandidateGenerator
from hf_speculate.draft_state import DraftState
from hf_speculate.enabling import disable, enable, is_enabled
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
from hf_speculate.generation import SpeculativeGenerationMixin, generate
from hf_speculate.hub.repository import save_config
from hf_speculate.processors import BlockLogitsProcessorList, register_row_wise
from hf_speculate.rollback import RollbackProcessor
from hf_speculate.stats import SpeculationStats
from hf_speculate.suffix_store import SuffixStore
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
