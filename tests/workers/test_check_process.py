"""The self-check in a process of its own: what it finds, and what the worker does not import for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import quire_command
from tests.model_factory import TinyModel, make_model
from workers.common.child_process import import_path
from workers.executors.llm import LlmExecutor
from workers.kv.sizing import KvSizingError
from workers.models import passed_checks
from workers.models.check_process import check_apart
from workers.models.config import ModelConfig

CPU = torch.device("cpu")
# Loads a model as a worker does. Its code is not the one that has passed, if it ever has.
LOAD = """
import sys
from pathlib import Path
from workers.executors.llm import LlmExecutor
from workers.models import passed_checks

passed_checks._DIRECTORY = Path(sys.argv[2])
LlmExecutor.load(Path(sys.argv[1]), kv_pages=8, quantization="q8_0")
assert list(Path(sys.argv[2]).iterdir()), "it was not checked"
libraries = {name.split(".")[0] for name in sys.modules} & {"transformers", "sympy", "triton", "accelerate"}
assert not libraries, f"they stay in memory: {libraries}"
"""


def test_a_worker_that_checks_its_model_imports_neither_the_library_nor_what_is_where_it_starts(
    tmp_path: Path,
) -> None:
    """The library and what it needs took 180 MB of each worker that had checked its model."""
    directory, passed = make_model(tmp_path / "model", TinyModel()), tmp_path / "passed"
    here = tmp_path / "here"
    here.mkdir()
    # In place of the one of the standard library.
    (here / "queue.py").write_text("raise SystemExit(1)\n")
    (tmp_path / "load_as_a_worker.py").write_text(LOAD)
    load = quire_command.module("load_as_a_worker", str(directory), str(passed))
    path = os.pathsep.join([import_path(), str(tmp_path)])
    subprocess.run(load, cwd=here, env=os.environ | {"PYTHONPATH": path}, check=True)


def test_a_model_is_served_where_the_library_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a version of tokenizers that it does not take."""
    directory = make_model(tmp_path / "model", TinyModel())
    (tmp_path / "transformers.py").write_text("raise ImportError('tokenizers>=0.22 is required')\n")
    monkeypatch.syspath_prepend(tmp_path)
    # As in a worker, which has not imported it.
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    monkeypatch.setattr(passed_checks, "_DIRECTORY", tmp_path / "passed")
    LlmExecutor.load(directory, kv_pages=8)
    assert not passed_checks._DIRECTORY.exists()
    assert "the model is not checked: the transformers library cannot be imported" in caplog.text
    assert "tokenizers>=0.22 is required" in caplog.text


@pytest.mark.parametrize(
    ("happens", "error", "said"),
    [
        ("raise MemoryError('of the library')", MemoryError, "of the library"),
        (
            "from workers.kv.sizing import KvSizingError as Error; raise Error('no room')",
            KvSizingError,
            "room",
        ),
        ("import os; os.kill(os.getpid(), 9)", RuntimeError, "status -9, and [0-9]+ MiB of memory are free"),
    ],
)
def test_how_the_check_ends_is_said(
    happens: str, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here while it imports the library: it refuses, or memory ran out, by a limit or by the kernel."""
    directory = make_model(tmp_path / "model", TinyModel())
    (tmp_path / "transformers.py").write_text(happens)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=said):
        check_apart(directory, ModelConfig.from_directory(directory), torch.float32, CPU)
