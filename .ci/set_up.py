"""Sets up .venv with what a target of the Makefile needs, and with nothing that it does not need.

    python3 .ci/set_up.py check           tools of `make check` but of its types: no torch, nothing of Quire
    python3 .ci/set_up.py serve           torch and the server
    python3 .ci/set_up.py test            the server, and what tests and types need
    python3 .ci/set_up.py --has test      fails if that is not there; installs nothing

docs and release are tools, too, and bench adds a competitor to test. pip is the installer, since it is what a
machine's mirrors and proxies are configured for. uv gets torch where pip's choice would bring 3 GB of CUDA to
a machine without a GPU.

A file in .venv says what is installed, and for which versions of REQUIREMENTS. Without it the set-up was
interrupted, and .venv is made anew.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
# What pip says, some 200 lines, is shown where it fails.
LOG = VENV / "pip.log"
DONE = VENV / "set-up.json"
REQUIREMENTS = ("constraints.txt", "pyproject.toml", "clients/python/pyproject.toml")
# Extras of the server that are installed alone, without Quire.
TOOLS = ("check", "docs", "release")
ON_TOP_OF = {"test": "serve", "bench": "test"}
# What is there with it, too.
BRINGS = {"test": ("check",)}
KINDS = (*TOOLS, "serve", *ON_TOP_OF)
HAS_GPU = shutil.which("nvidia-smi") is not None


class SetUpError(Exception):
    """Something cannot be installed."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Set up .venv.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--has", action="store_true", help="fail if it is not there; install nothing")
    arguments = parser.parse_args()
    if is_done(arguments.kind) or arguments.has:
        sys.exit(not is_done(arguments.kind))
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is read by any Python
        sys.exit("Python 3.11 or later is needed: make PYTHON=python3.12 ...")
    lock = wait_for_others()
    try:
        set_up(arguments.kind)
    except SetUpError as error:
        sys.exit(str(error))
    finally:
        os.close(lock)


def wait_for_others() -> int:
    """The lock of this checkout, once no other set-up has it: two would clear each other's .venv.

    It goes with the processes that have it open, also where they are killed.
    """
    lock = os.open("Makefile", os.O_RDWR)
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("Waiting for another make, which sets up .venv")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def set_up(kind: str) -> None:
    """Installs what is missing for it. Raises SetUpError."""
    if is_done(kind):
        return
    if kind in ON_TOP_OF:
        set_up(ON_TOP_OF[kind])
    with compiling_kernels() if kind == "serve" else contextlib.nullcontext():
        set_up_alone(kind)


def set_up_alone(kind: str) -> None:
    """Installs it, where what it is on top of is there. Raises SetUpError."""
    if not done():
        say("Creating .venv")
        run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    if not any(map(is_done, KINDS)):
        # An older state is updated in place, and is nobody's until that has ended.
        DONE.unlink(missing_ok=True)
    if kind == "serve":
        install_server()
    elif kind == "bench":
        say("Building llama.cpp, which takes minutes")
        install("--editable", ".[bench]", CMAKE_ARGS="-DLLAVA_BUILD=OFF")
    elif kind == "test":
        say("Installing what tests and types need")
        install("--no-build-isolation", "--editable", ".[dev]")
        # In tests a warning while something is compiled would be an error.
        run([str(PYTHON), "-m", "compileall", "-qq", "-j", "0", str(VENV / "lib")], check=False)
    else:
        say(f"Installing tools: {kind}")
        install("setuptools", *extra(kind))
    now = {one for one in KINDS if is_done(one)} | {kind, *BRINGS.get(kind, ())}
    DONE.write_text(json.dumps(dict.fromkeys(sorted(now), state())))


def install_server() -> None:
    """Torch, the client and the server. Raises SetUpError."""
    # Python compiles what it imports at the first start, a fourth of what is installed. Without leave to keep
    # that, each start would.
    options = [] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]
    # What torch needs is found together with what the server needs.
    install_torch(PYTHON, [*options, "--no-deps"])
    say("Installing Quire and what else it needs")
    # Triton, 700 MB, is for GPUs and for tests.
    server = ".[cuda]" if HAS_GPU else "."
    install(*options, "--no-build-isolation", "--editable", "clients/python", "--editable", server)


@contextlib.contextmanager
def compiling_kernels() -> Iterator[None]:
    """Compiles the kernels meanwhile, which takes as long as all that is installed.

    What hinders the compiler is told when the kernels are asked for.
    """
    command, nowhere = [sys.executable, "-m", "kernels.cpu.library"], subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nowhere, stderr=nowhere):  # noqa: S603 - our own
        yield


def install_torch(python: Path, options: list[str] | tuple[str, ...] = ()) -> None:
    """The pinned torch, without the libraries of CUDA where there is no GPU. Raises SetUpError."""
    say(f"Installing torch, most of what is downloaded (details in {LOG})")
    (torch,) = (line for line in Path("constraints.txt").read_text().split() if line.startswith("torch=="))
    if not HAS_GPU and needs_cuda(python, torch):
        say("  for the CPU, by uv: there is no nvidia-smi")
        uv = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(python)]
        try:
            install("uv")
            run([*uv, "--torch-backend", "cpu", torch])
        except SetUpError:
            say("  with the libraries of CUDA after all: uv cannot get the other one")
    else:
        say("  for CUDA" if HAS_GPU else "  for the CPU")
    run([*pip(python), *options, "setuptools>=80", torch])


def needs_cuda(python: Path, torch: str) -> bool:
    """Whether the torch that pip would choose needs libraries of CUDA. Its metadata alone are downloaded."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        run([*pip(python), "--dry-run", "--no-deps", "--report", str(report), torch], check=False)
        # Without one the installation says why.
        found = json.loads(report.read_text(encoding="utf-8"))["install"] if report.exists() else []
    needs = [need for one in found for need in one["metadata"].get("requires_dist", ())]
    return any(need.startswith(("nvidia-", "cuda-")) for need in needs)


def install(*arguments: str, **environment: str) -> None:
    """Raises SetUpError."""
    run([*pip(PYTHON), *arguments], **environment)


def pip(python: Path) -> list[str]:
    """The command that installs into the environment of that Python, at the versions that are tested."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    return [*command, "--constraint", "constraints.txt"]


def run(command: list[str], *, check: bool = True, **environment: str) -> str:
    """What it says. Raises SetUpError, with all that it said."""
    # The lock is inherited: where make is killed, another one waits for pip.
    running = subprocess.run(  # noqa: S603 - commands of this file
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        close_fds=False,
    )
    if VENV.is_dir():
        LOG.write_text(running.stdout, encoding="utf-8")
    if check and running.returncode:
        raise SetUpError(running.stdout)
    return running.stdout


def extra(name: str) -> list[str]:
    """The requirements of an extra of the server."""
    import tomllib  # noqa: PLC0415 - an older Python has to come as far as to say so

    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"][name])


def state() -> str:
    """Changes with what has to be installed, so that an unchanged environment costs nothing."""
    return str(zlib.crc32(b"".join(Path(path).read_bytes() for path in REQUIREMENTS)))


def done() -> dict[str, str]:
    """By kind that is installed: the state that it was installed for."""
    try:
        return dict(json.loads(DONE.read_text()))
    except (OSError, ValueError):
        return {}


def is_done(kind: str) -> bool:
    """Whether it is there as it has to be now."""
    return done().get(kind) == state()


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    main()
