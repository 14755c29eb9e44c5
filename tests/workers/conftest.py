"""Models that tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model of `tests.families`, under its name: made once, and not to be changed."""
    # Not imported on a machine for the GPU suite.
    from tests.families import settings_of
    from tests.model_factory import make_family_model

    directory = tmp_path_factory.mktemp("families")

    def make(name: str) -> Path:
        if not (directory / name).exists():
            make_family_model(directory / name, *settings_of(name), seed=7)
        return directory / name

    return make
