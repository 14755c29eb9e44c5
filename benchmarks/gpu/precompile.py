"""Compiles the kernels of a model for a GPU in many processes, before anything is timed or served.

A worker compiles what it launches when it first launches it, mostly on one core. What is compiled here, it
finds in Triton's cache on disk (TRITON_CACHE_DIR). Needs no weights, and no GPU if the device is described.
"""

# ruff: noqa: PLC0415 - kernels are imported where it is known that they are not to be interpreted

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.dry_run import Steps
    from benchmarks.gpu.launches import Argument, Device, Launch
    from workers.models.config import ModelConfig

# What names of kernels that take long have in them. These are first, so that none is left for the end.
LONG = ("prefill", "product", "decode", "threshold", "draft")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of one kernel.

    Attributes:
        name: The kernel and its constexprs.
        seconds: That it took; next to nothing if it was in the cache.
        error: In one line; empty: it is in the cache.
    """

    name: str
    seconds: float
    error: str = ""


def current_device() -> Device:
    """Describes the first CUDA device of this machine."""
    import torch

    from benchmarks.gpu.launches import Device
    from kernels.cuda.paged_attention import limits_of

    limits = limits_of(torch.device("cuda", 0))
    return Device(torch.cuda.get_device_capability(0), limits.multiprocessors, limits.shared_bytes)


def precompile(
    config: ModelConfig,
    dtype: torch.dtype,
    steps: Steps,
    device: Device | None = None,
    processes: int | None = None,
    quantization: str | None = None,
) -> Iterator[Compiled]:
    """Compile all that a worker with this model launches.

    Args:
        config: The model.
        dtype: That of its weights and KV.
        steps: The sizes of the worker's steps.
        device: What is compiled for. None: the first CUDA device here.
        processes: None: one for each core.
        quantization: How its matrices are quantised, a name of `workers.models.recipes`; None: they are not.

    Yields:
        Each kernel, as it is done. One that does not compile is an error in there, and no exception.
    """
    device = device or current_device()
    # Spawned, not forked: torch may have started threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_compile_for_real) as pool:
        launches = pool.submit(_launches_of, config, dtype, steps, device, quantization).result()
        launches.sort(key=lambda launch: not any(name in launch.kernel for name in LONG))
        jobs = [pool.submit(_try_to_compile, launch, device.capability) for launch in launches]
        for job in jobs:
            yield job.result()


def _compile_for_real() -> None:
    # An interpreted kernel cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)


def _launches_of(
    config: ModelConfig, dtype: torch.dtype, steps: Steps, device: Device, quantization: str | None
) -> list[Launch]:
    import torch

    from benchmarks.gpu.dry_run import few_layers, launches_of
    from workers.models.weights import formats_of

    formats = formats_of(quantization, {}, few_layers(config), torch.device("cuda"))
    return sorted(launches_of(config, dtype, steps, device, formats), key=repr)


def compile_launch(launch: Launch, capability: tuple[int, int]) -> Any:
    """Compile one kernel as a launch would, into the cache on disk. Changes Triton's active device.

    Returns Triton's compiled kernel: `asm` by stage, and `metadata`. Raises whatever the compiler raises.
    """
    import triton

    triton.runtime.driver.set_active(_NoDevice(capability))
    arguments = map(_stand_in, launch.arguments)
    # What `kernel[grid](...)` calls, with `warmup`: the key in the cache is made by the same code.
    return kernel_of(launch).run(
        *arguments, grid=(1,), warmup=True, **dict(launch.constexprs), **dict(launch.options)
    )


def kernel_of(launch: Launch) -> Any:
    """The function that is launched, as `triton.jit` has decorated it."""
    return getattr(importlib.import_module(launch.module), launch.kernel)


def _try_to_compile(launch: Launch, capability: tuple[int, int]) -> Compiled:
    name = f"{launch.kernel} {' '.join(f'{key}={value}' for key, value in launch.constexprs)}"
    began_s = time.monotonic()
    try:
        compile_launch(launch, capability)
    except Exception as error:  # whatever the compiler raises
        return Compiled(
            name, time.monotonic() - began_s, f"{type(error).__name__}: {error}".partition("\n")[0]
        )
    return Compiled(name, time.monotonic() - began_s)


class _NoDevice:
    """What Triton asks of a device before it compiles for it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._architecture = 10 * capability[0] + capability[1]

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        # What is compiled is kept for each device, so each architecture is one.
        return self._architecture

    def get_current_stream(self, _device: int) -> int:
        return 0


def _stand_in(argument: Argument) -> object:
    """An argument of a kernel for which Triton compiles the same as for one that was launched with it."""
    if argument is None or isinstance(argument, int | float):
        return argument
    import torch
    from triton.runtime.jit import MockTensor

    address = 0 if argument.is_aligned else 8
    tensor: Any = MockTensor(getattr(torch, argument.dtype))
    tensor.data_ptr = lambda: address
    return tensor
