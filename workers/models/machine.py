"""What torch and the kernels find on this machine: `python -m workers.models.machine` prints it as JSON.

For commands of operators. Nothing here is used when a model is served.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from kernels.cpu import library
from workers.machine_limits import available_bytes
from workers.models.active_kernels import active_products
from workers.models.checkpoint import DTYPES, name_of

# Larger than any last-level cache, where memory allows it.
_BUFFER_BYTES, _BUFFER_SHARE = 1 << 30, 8
_ROWS = 1 << 10
_READ_S = 1.5
_DRIVER = re.compile(r"Module\s.*?(\d+\.[\d.]+)")


def describe_cpu() -> dict[str, object]:
    """The instruction sets, what multiplies by weights of each dtype, and the compiled library.

    Raises InstructionSetError if QUIRE_CPU_ISA names one that this machine lacks.
    """
    flags, cpu = library.cpu_flags(), torch.device("cpu")
    loaded = library.load()
    return {
        "cpu": _cpu_name(),
        "instruction_sets": [known.name for known in library.INSTRUCTION_SETS if known.cpu_flags <= flags],
        "kernels": library.kernel_name(),
        "library": Path(loaded._name).name if loaded is not None else None,  # noqa: SLF001 - no public name
        "compiler": os.environ.get("CXX") or shutil.which("g++"),
        "products": {name_of(dtype): active_products(cpu, name_of(dtype)) for dtype in DTYPES.values()},
        "torch": torch.__version__,
    }


def describe_gpus() -> dict[str, object]:
    """The CUDA devices, and why torch sees none although there seems to be one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    gpus = []
    for index in range(torch.cuda.device_count() if is_available else 0):
        found = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": found.name,
                "capability": f"{found.major}.{found.minor}",
                "memory_bytes": total_bytes,
                "free_bytes": free_bytes,
            }
        )
    driver = ""
    with contextlib.suppress(OSError):
        # What nvidia-smi says, which may not be there.
        found_version = _DRIVER.search(Path("/proc/driver/nvidia/version").read_text(encoding="ascii"))
        driver = found_version[1] if found_version else ""
    try:
        triton: str | None = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "driver": driver,
        "has_device_files": Path("/dev/nvidia0").exists(),
        "warning": str(caught[0].message).partition("\n")[0] if caught else "",
        "triton": triton,
    }


def read_bytes_per_s() -> float:
    """The fastest of several plain reads of a large buffer, as in benchmarks/peers/machine_peer.py.

    Takes about two seconds, and an eighth of the free memory or 1 GiB.
    """
    size_bytes = min(_BUFFER_BYTES, available_bytes() // _BUFFER_SHARE)
    buffer = torch.ones(max(1, size_bytes // (4 * _ROWS)) * _ROWS).view(_ROWS, -1)
    ones = torch.ones(buffer.shape[1])
    return buffer.nbytes / min(
        _fastest_s(lambda: torch.sum(buffer), _READ_S / 2),
        _fastest_s(lambda: torch.mv(buffer, ones), _READ_S / 2),
    )


def _fastest_s(work: Callable[[], object], seconds: float) -> float:
    """The shortest time of a call: at least two calls, and no more after `seconds`."""
    began_s, times_s = time.perf_counter(), list[float]()
    with torch.inference_mode():
        while len(times_s) < 2 or time.perf_counter() - began_s < seconds:
            start_s = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _cpu_name() -> str:
    """The name in /proc/cpuinfo, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def main() -> None:
    """Print a line for each part, so that a part that fails does not take the others with it."""
    for part in (describe_cpu, describe_gpus, lambda: {"read_bytes_per_s": read_bytes_per_s()}):
        print(json.dumps(part()), flush=True)


if __name__ == "__main__":
    try:
        main()
    except library.InstructionSetError as error:
        sys.exit(str(error))
