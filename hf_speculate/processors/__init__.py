"""Logits processors that are applied to all K+1 positions of a round at once."""

from hf_speculate.processors.block import BlockLogitsProcessorList
from hf_speculate.processors.registry import register_row_wise

__all__ = ["BlockLogitsProcessorList", "register_row_wise"]
