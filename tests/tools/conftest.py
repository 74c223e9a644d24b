"""Provide a pair of models in folders."""

from pathlib import Path

import pytest

from tests.tools.dataset.common import save_pair


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a tiny pair in `target` and `draft`. Do not change it."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder
