"""Speed up Triton's interpreter and poison newly allocated memory."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.interpreter import quick_interpreter


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN and the largest integers, as torch does in deterministic mode."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
