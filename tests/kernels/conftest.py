"""What the kernels' tests run on, and what they find in new memory.

The kernels of `kernels.cuda` run on the GPU where there is one, else in Triton's interpreter on the CPU.
Whether a kernel is interpreted is decided when its module is imported, so this file decides it first. On a
machine with a GPU, TRITON_INTERPRET=1 in the environment of pytest selects the interpreter. Without a GPU
nothing needs to be set, and nothing is set that processes started by other tests would inherit. Without
Triton, as on a Mac, these kernels are not tested.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
# Of what takes seconds in the interpreter and seldom tells more. On a GPU each run has it.
SELDOM: pytest.MarkDecorator | tuple[()] = pytest.mark.thorough if INTERPRETED else ()


def _interpret_library() -> None:
    """Make the functions of Triton's own library interpreted, `tl.sum` for one.

    They are compiled ones by now: Triton was imported without TRITON_INTERPRET, maybe by what torch imports.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[object, object] = {}  # One for each function: the interpreter compares identities.
    for name in [name for name in sys.modules if name.startswith("triton.language")]:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, JITFunction):
                replacement = interpreted.setdefault(value.fn, InterpretedFunction(value.fn))
                setattr(sys.modules[name], attribute, replacement)


def _interpret() -> None:
    """Interpret, in this process, every kernel that is imported from now on."""
    import triton

    from benchmarks.gpu.interpreted import convert_scalars

    compiled = [name for name in sys.modules if name.startswith("kernels.cuda.")]
    assert not compiled, f"imported before tests/kernels/conftest.py, and not interpreted: {compiled}"
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    _interpret_library()
    convert_scalars()
    from tests.kernels.cuda import interpreter_bf16, interpreter_speed

    interpreter_bf16.install()
    interpreter_speed.install()


if not HAS_TRITON:
    collect_ignore_glob = ["cuda/*.py"]
elif INTERPRETED:
    _interpret()


@pytest.fixture
def device() -> str:
    """Where the tensors for kernels of `kernels.cuda` have to be: "cuda", or "cpu" for the interpreter."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _useless_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, or the largest integer; except for `torch.empty_strided`, for huge tensors."""
    for where, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(where, name, _filled(getattr(where, name)))


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.dtype is torch.bool:
            return tensor
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    return allocate_filled


@pytest.fixture(autouse=True)
def _launched_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel fails that is launched with options which the compile gate does not compile it for."""
    if not HAS_TRITON:
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "run", _refusing_other_options(kind.run))


def _refusing_other_options(run: Callable[..., Any]) -> Callable[..., Any]:
    from tests.kernels.cuda.compile_gate import shipped_options

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched = self.fn.__name__, kwargs.get("num_warps"), kwargs.get("num_stages")
        if self.fn.__module__.startswith("kernels.cuda."):
            assert launched in shipped_options(), (
                f"{launched} is not compiled by the compile gate: "
                "python -m tests.kernels.cuda.compile_gate --record, after a change of kernels"
            )
        return run(self, *args, **kwargs)

    return checked


@pytest.fixture(autouse=True)
def _silent_numpy() -> Iterator[None]:
    """As on the GPU, NaN and overflow in the interpreter are values and not warnings."""
    with np.errstate(all="ignore"):
        yield
