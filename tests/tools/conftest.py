"""A pair in folders."""

from pathlib import Path

import pytest

from tests.tools.dataset.common import save_pair


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair in `target` and `draft`, not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder
