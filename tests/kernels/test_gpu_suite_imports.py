"""`make gpu-test` needs torch, triton, transformers and pytest, and nothing else that an image may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("psutil", "hypothesis", "structlog", "grpc", "google.protobuf", "quire", "pytest_asyncio")
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); "
COLLECT = """
import pytest
from tests.gpu.run import OWN, all_parts
files = [file for part in all_parts() for file in part.files]
sys.exit(pytest.main(["-c", OWN + "gpu.ini", "--rootdir", ".", "-p", "no:cacheprovider", "--co", *files]))
"""


def test_all_of_it_is_imported_without_them() -> None:
    pytest.importorskip("triton")
    # No plugin either: those that are installed here may need what is absent there.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{ROOT}"}
    command = [sys.executable, "-c", BLOCK + COLLECT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1], "a file was left out"
