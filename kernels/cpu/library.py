"""Builds and loads the compiled CPU kernels: one shared library of the C++ files in this directory.

`python -m kernels.cpu.library` builds it, unless there is a build of the same sources, flags and compiler. A
wheel has libraries for all instruction sets (.ci/build_wheels.py). What loads takes a library of the same
sources that was built on this machine, else the wheel's. Without one `available` is false, and the wrappers
compute in plain torch, with correct results. The environment variable QUIRE_CPU_ISA, which workers inherit,
selects a lower instruction set than that of the CPU.

AMX's tiles add up in an order of their own. What has to have the same bits on every CPU does without them:
see `leave_out_tiles`.

The library has a C interface and threads of its own (threads.h), and does not use torch. Nor does this
module: `make` compiles while pip still installs torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

_SOURCES = Path(__file__).resolve().parent
# Next to the sources, so that each checkout or installation has its own builds, with the same owner.
BUILD_DIR = _SOURCES / "build"
_CPU_INFO = Path("/proc/cpuinfo")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-pthread",
    "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=off",  # see vectors.h
    "-Wno-psabi",
)
_BUILD_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set for the compiler: explicit and not "native", so that the needs of a build are known.

    Attributes:
        name: The name in reports to users and in file names.
        compiler_flags: The compiler's flags that enable it, and the macros that tell the sources.
        cpu_flags: The flags in /proc/cpuinfo that a CPU needs to run the build.
        machine: The kind of CPU, as uname and compilers name it.
    """

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    machine: str = "x86_64"


_V3_FLAGS = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))
_V4_FLAGS = _V3_FLAGS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V3_COMPILER_FLAG = "-march=x86-64-v3"
_AVX512 = ("-march=x86-64-v4", "-DQUIRE_AVX512")
_BFLOAT16_MACRO = "-DQUIRE_AVX512_BF16"
# Every CPU with products of bfloat16 has those of bytes.
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", _BFLOAT16_MACRO, "-mavx512vnni", "-DQUIRE_VNNI")
_AVX512_BF16_FLAGS = _V4_FLAGS | {"avx512_bf16", "avx512_vnni"}
_AMX = (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-DQUIRE_AMX")
_TILES_FLAG = "amx_tile"
# Instruction sets of x86, best first.
X86_SETS = (
    InstructionSet("amx", _AMX, _AVX512_BF16_FLAGS | {"amx_bf16", _TILES_FLAG}),
    InstructionSet("avx512bf16", _AVX512_BF16, _AVX512_BF16_FLAGS),
    InstructionSet("avx512", _AVX512, _V4_FLAGS),
    InstructionSet("avx2", (_V3_COMPILER_FLAG,), _V3_FLAGS),
)
INSTRUCTION_SETS = (*X86_SETS, InstructionSet("neon", ("-march=armv8-a",), frozenset(("asimd",)), "aarch64"))

# The best without tiles, for CPUs that have them.
_WITHOUT_TILES = X86_SETS[1]
# Names the instruction set to use; "none": no compiled kernels.
VARIABLE = "QUIRE_CPU_ISA"
_NONE = "none"
# Names a header with plain C++ for the intrinsics of x86: tests have one, for any CPU with AVX2.
INTRINSICS_VARIABLE = "QUIRE_CPU_INTRINSICS"


class BuildError(Exception):
    """The library cannot be built here; the message says why."""


class InstructionSetError(Exception):
    """QUIRE_CPU_ISA names an unknown instruction set, or one that this machine lacks."""


def pointers(names: str) -> tuple[tuple[str, type], ...]:
    """Fields of a ctypes structure, by names between blanks: addresses."""
    return tuple((name, ctypes.c_void_p) for name in names.split())


def integers(names: str) -> tuple[tuple[str, type], ...]:
    """Likewise int64_t."""
    return tuple((name, ctypes.c_int64) for name in names.split())


def doubles(names: str) -> tuple[tuple[str, type], ...]:
    """Likewise double."""
    return tuple((name, ctypes.c_double) for name in names.split())


def available() -> bool:
    """Whether the compiled kernels are in use."""
    return load() is not None


def kernel_name() -> str | None:
    """The name of the compiled kernels, such as "cpu-avx512bf16"; None if they are not in use."""
    instructions = instruction_set()
    return f"cpu-{instructions.name}" if instructions is not None and available() else None


def multiplies_bfloat16() -> bool:
    """Whether the instruction set has products of bfloat16. Without them kernels convert rows to float32."""
    instructions = instruction_set()
    return instructions is not None and _BFLOAT16_MACRO in instructions.compiler_flags


def leave_out_tiles() -> None:
    """Use no tiles from now on, nor in processes that are started from this one. Before anything is packed.

    Quantised models, whose products use none, have the same bits then on each CPU.
    """
    instructions = instruction_set()
    if instructions is not None and "-DQUIRE_AMX" in instructions.compiler_flags:
        os.environ[VARIABLE] = _WITHOUT_TILES.name
        for cached in (instruction_set, load, function):
            cached.cache_clear()


def build_name() -> str:
    """The file name of the library that is loaded, which names its sources, flags and compiler. "": none."""
    loaded = load()
    return "" if loaded is None else Path(loaded._name).name  # noqa: SLF001 - ctypes documents it


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, loaded on the first call; None if there is no matching build. Does not build."""
    instructions = instruction_set()
    if instructions is None:
        return None
    # Builds of different compilers are all suitable. Prebuilt ones are the last: they are tuned for no CPU.
    for path in sorted(BUILD_DIR.glob(f"{file_prefix(instructions)}-*.so")):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


@functools.cache
def function(
    name: str, argument_types: tuple[type, ...], result_type: type | None = None
) -> Callable[..., object]:
    """A function of the library; requires `available`. Types are those of ctypes."""
    loaded = load()
    assert loaded is not None
    found = getattr(loaded, name)
    found.argtypes, found.restype = argument_types, result_type
    return cast(Callable[..., object], found)


def build() -> Path:
    """Compile the library, unless the same build exists.

    Safe to run concurrently in several processes: the finished file is renamed to its final name.

    Returns:
        The file.

    Raises:
        BuildError: The library cannot be built on this machine.
        InstructionSetError: See `instruction_set`.
    """
    instructions = instruction_set()
    if instructions is None:
        asked = os.environ.get(VARIABLE) == _NONE
        needed = "needs Linux, and x86-64 with AVX2 or 64-bit ARM"
        raise BuildError(f"{VARIABLE} = {_NONE}" if asked else needed)
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise BuildError("needs g++, or another GCC or Clang named by CXX")
    version = _run([compiler, "--version"])
    target = BUILD_DIR / f"{file_prefix(instructions)}-{_digest(version.encode())}.so"
    if target.exists():
        return target
    print("Compiling the kernels for this CPU", flush=True)
    compile_sources([compiler], ("-mtune=native", *instructions.compiler_flags), target)
    return target


def compile_sources(compiler: list[str], flags: Sequence[str], target: Path) -> None:
    """Compile the sources with these flags on all cores, and link the library.

    Raises:
        BuildError: The compiler fails, or a file cannot be written.
    """
    try:
        # Whatever the umask is, no other user can replace the library, nor what else is there.
        target.parent.mkdir(mode=0o755, exist_ok=True)
        # In the same directory, since a rename is atomic only within a file system.
        with (
            tempfile.TemporaryDirectory(dir=target.parent) as scratch,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            made, sources = Path(scratch) / target.name, sorted(_SOURCES.glob("*.cpp"))
            objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
            commands = [
                [*compiler, *_FLAGS, *flags, "-c", str(source), "-o", file]
                for source, file in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
            # Without the flags of a CPU, for each of which Zig would compile its library of C++, for minutes.
            _run([*compiler, *_FLAGS, "-shared", *objects, "-o", str(made)])
            made.replace(target)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}") from error


@functools.cache
def instruction_set() -> InstructionSet | None:
    """The instruction set that QUIRE_CPU_ISA names, else the best that this CPU has; None if there is none.

    Raises:
        InstructionSetError: QUIRE_CPU_ISA names an unknown instruction set, or one that this machine lacks.
    """
    flags, name = cpu_flags(), os.environ.get(VARIABLE)
    if name is None:
        return next((known for known in INSTRUCTION_SETS if known.cpu_flags <= flags), None)
    if name == _NONE:
        return None
    named = next((known for known in INSTRUCTION_SETS if known.name == name), None)
    if named is None:
        names = ", ".join(known.name for known in INSTRUCTION_SETS)
        raise InstructionSetError(f"{VARIABLE} = {name}: must be one of {names}, {_NONE}")
    if header := os.environ.get(INTRINSICS_VARIABLE):
        macros = [flag for flag in named.compiler_flags if flag.startswith("-D")]
        named = InstructionSet(
            f"emulated-{name}", (_V3_COMPILER_FLAG, f'-DQUIRE_INTRINSICS="{header}"', *macros), _V3_FLAGS
        )
    if missing := named.cpu_flags - flags:
        raise InstructionSetError(f"{VARIABLE} = {name}: this machine lacks {', '.join(sorted(missing))}")
    return named


def cpu_flags() -> set[str]:
    """The flags of this CPU in /proc/cpuinfo, without AMX's if Linux refuses its tiles to this process.

    Empty if the CPU is neither x86-64 nor 64-bit ARM, or the system is not Linux.
    """
    names = {"x86_64": "flags", "aarch64": "Features"}
    if sys.platform != "linux" or platform.machine() not in names:
        return set()
    try:
        lines = _CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    name = names[platform.machine()]
    flags = next((set(line.split()) for line in lines if line.startswith(name)), set[str]())
    return flags if _TILES_FLAG not in flags or _may_use_tiles() else flags - {_TILES_FLAG}


def _may_use_tiles() -> bool:
    """Ask Linux for the tiles of AMX, as each process must that uses them: for all its threads."""
    arguments = 158, 0x1023, 18  # SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return bool(ctypes.CDLL(None).syscall(*map(ctypes.c_long, arguments)) == 0)


def file_prefix(instructions: InstructionSet) -> str:
    """The prefix of the file names of all builds that may be loaded here, by any compiler."""
    parts = [flag.encode() for flag in (*_FLAGS, *instructions.compiler_flags)]
    header = os.environ.get(INTRINSICS_VARIABLE)
    for path in (
        *sorted((*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"))),
        *([Path(header)] if header else ()),
    ):
        parts += [path.name.encode(), path.read_bytes()]
    return f"quire-{instructions.name}-{_digest(*parts)}"


def _digest(*parts: bytes) -> str:
    """A hash of these bytes, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> str:
    """Run a compiler.

    Returns:
        What it printed.

    Raises:
        BuildError: It failed.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that the user named
            command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stderr.strip()}")
    return done.stdout


def main() -> None:
    """Build. If that is impossible on this machine, report it without an error: torch is the fallback."""
    try:
        print(f"Compiled kernels: {build()}")
        best = instruction_set()
        leave_out_tiles()
        if instruction_set() != best:
            print(f"Those of quantised models: {build()}")
    except InstructionSetError as error:
        sys.exit(str(error))
    except BuildError as error:
        print(f"No compiled kernels, plain torch will be used: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
