"""Installs the wheels of a directory into an empty environment of each Python, serves from there, and asks.

A Python that this machine does not have is skipped, and named.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import set_up

ROOT = Path(__file__).resolve().parents[1]
PROMPT, ANSWER = "12+34=", "46"
START_TIMEOUT_S = 180


class TryError(Exception):
    """What was installed does not work."""


def main() -> None:
    """The script: the directory, and Pythons such as 3.12 if not all."""
    wheels = sorted(map(str, Path(sys.argv[1]).glob("*.whl")))
    if len(wheels) != 2:
        sys.exit(f"There have to be two wheels, and there are: {wheels}")
    for version in sys.argv[2:] or supported():
        found = interpreter(version)
        if found is None:
            print(f"Python {version}: skipped, it is not on this machine")
            continue
        print(f"Python {version}", flush=True)
        try:
            with tempfile.TemporaryDirectory() as directory:
                try_one(found, Path(directory), wheels)
        except (set_up.SetUpError, TryError) as error:
            sys.exit(f"Python {version}: {error}")
        print(f"Python {version}: it answers", flush=True)


def supported() -> list[str]:
    """The versions of Python that the server says it works with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [line.rpartition(" :: ")[2] for line in project["classifiers"] if " :: Python :: 3." in line]
    return sorted(named, key=lambda version: int(version.partition(".")[2]))


def interpreter(version: str) -> str | None:
    """The path of such a Python on this machine. None: there is none."""
    uv = [sys.executable, "-m", "uv", "python", "find", "--no-project", "--system", "--no-python-downloads"]
    found = subprocess.run([*uv, version], capture_output=True, text=True, check=False)  # noqa: S603 - ours
    return None if found.returncode else found.stdout.strip()


def try_one(python: str, directory: Path, wheels: list[str]) -> None:
    """Raises SetUpError if the wheels cannot be installed, TryError if the server does not answer."""
    environment = directory / "environment"
    set_up.run([python, "-m", "venv", str(environment)])
    installed = environment / "bin" / "python"
    set_up.install_torch(installed)
    lock = ["-m", "pip", "--disable-pip-version-check", "install", "--require-hashes", "--requirement"]
    set_up.run([str(installed), *lock, str(ROOT / "requirements.lock")])
    # All else is there: an index is not needed any more, unless the lock file lacks something.
    set_up.run([*set_up.pip(installed), "--no-index", *wheels])
    quire, target = str(environment / "bin" / "quire"), f"unix:{directory / 'socket'}"
    log = directory / "log"
    serve = [quire, "serve", "--listen", target, "--data-dir", str(directory / "data")]
    with log.open("wb") as output:
        server = subprocess.Popen(serve, cwd=directory, stdout=output, stderr=output)  # noqa: S603 - what was installed
    try:
        ask(server, [quire, "generate", PROMPT, "--target", target], log)
    finally:
        server.terminate()
        server.wait(60)


def ask(server: subprocess.Popen[bytes], command: list[str], log: Path) -> None:
    """Asks until the server answers. Raises TryError."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while True:
        asked = subprocess.run(command, cwd=log.parent, capture_output=True, text=True, check=False)  # noqa: S603 - as above
        if asked.returncode == 0:
            break
        if server.poll() is not None or time.monotonic() > until_s:
            raise TryError(f"{asked.stderr}\n{log.read_text(encoding='utf-8')}")
        time.sleep(0.5)
    if asked.stdout.strip() != ANSWER:
        raise TryError(f"{PROMPT} was answered: {asked.stdout}")


if __name__ == "__main__":
    main()
