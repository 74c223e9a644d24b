"""Makes Triton's interpreter fast enough for tests of whole operations."""

from collections.abc import Iterator

import pytest

from tests.triton_kernels.interpreter import quick_interpreter


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield
