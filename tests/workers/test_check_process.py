"""The self-check in a process of its own: what it finds, and what the worker does not import for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.families import settings_of
from tests.model_factory import TinyModel, make_family_model, make_model
from workers.common.child_process import import_path
from workers.kv.sizing import KvSizingError
from workers.models.check_process import check_apart
from workers.models.config import ModelConfig
from workers.models.errors import ModelError

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
# Loads one in any case.
WITHOUT_LIBRARY = """
import sys
from pathlib import Path
from workers.executors.llm import LlmExecutor
from workers.models import passed_checks

passed_checks._DIRECTORY = Path(sys.argv[2]) / "passed"
LlmExecutor.load(Path(sys.argv[1]), kv_pages=8)
assert not passed_checks._DIRECTORY.exists()
"""


def test_a_worker_that_checks_its_model_does_not_import_the_library(tmp_path: Path) -> None:
    """The library and what it needs took 180 MB of each worker that had checked its model."""
    directory, passed = make_model(tmp_path / "model", TinyModel()), tmp_path / "passed"
    subprocess.run([sys.executable, "-c", LOAD, directory, passed], check=True)


def test_a_file_of_the_current_directory_is_not_imported_in_place_of_a_library(tmp_path: Path) -> None:
    directory, passed = make_model(tmp_path / "model", TinyModel()), tmp_path / "passed"
    here = tmp_path / "here"
    here.mkdir()
    (here / "queue.py").write_text("raise SystemExit(1)\n")
    # As of the command `quire`, whose modules are not looked for in the current directory.
    load = [sys.executable, "-P", "-c", LOAD, str(directory), str(passed)]
    subprocess.run(load, cwd=here, env=_environment(), check=True)


def test_a_model_is_served_where_the_library_cannot_be_imported(tmp_path: Path) -> None:
    """As with a version of tokenizers that it does not take."""
    directory = make_model(tmp_path / "model", TinyModel())
    (tmp_path / "transformers.py").write_text("raise ImportError('tokenizers>=0.22 is required')\n")
    load = [sys.executable, "-P", "-c", WITHOUT_LIBRARY, str(directory), str(tmp_path)]
    done = subprocess.run(load, env=_environment(tmp_path), stderr=subprocess.PIPE, text=True, check=True)
    assert "the model is not checked: the transformers library cannot be imported" in done.stderr
    assert "tokenizers>=0.22 is required" in done.stderr


def _environment(*first: Path) -> dict[str, str]:
    """The environment, with these directories in front of those from which this process imports."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, first), import_path()])}


def test_what_the_check_refuses_is_refused_by_the_worker(tmp_path: Path) -> None:
    directory = make_model(tmp_path, TinyModel())
    config = ModelConfig.from_directory(directory)
    # As if native code misread it.
    (directory / "config.json").write_text(
        (directory / "config.json").read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 10')
    )
    with pytest.raises(ModelError, match="rms_norm_eps is read as"):
        check_apart(directory, config, torch.float32, CPU)


def test_states_that_do_not_fit_into_memory_are_a_refusal(tmp_path: Path) -> None:
    """And not the end of the check's process, after which a worker is started again and again."""
    family, settings = settings_of("granite hybrid")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_groups": 1}
    states = {"mamba_n_heads": 64, "mamba_d_head": 1024, "mamba_d_state": 1 << 16, "mamba_expand": 8192}
    directory = make_family_model(tmp_path, family, {**settings, **sizes, **states})
    with pytest.raises(KvSizingError, match="the recurrent states do not fit"):
        check_apart(directory, ModelConfig.from_directory(directory), torch.float32, CPU)


@pytest.mark.parametrize(
    ("happens", "error", "said"),
    [
        ("raise MemoryError('of the library')", MemoryError, "of the library"),
        ("import os; os.kill(os.getpid(), 9)", RuntimeError, "status -9, and [0-9]+ MiB of memory are free"),
    ],
)
def test_the_check_says_that_memory_ran_out(
    happens: str, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it imports the library, by a limit of the process or by the kernel."""
    directory = make_model(tmp_path / "model", TinyModel())
    (tmp_path / "transformers.py").write_text(happens)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=said):
        check_apart(directory, ModelConfig.from_directory(directory), torch.float32, CPU)
