"""`quire convert`: finds a model, then executes the process that writes it as a file, which needs torch."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from service.model_names import WEIGHTLESS_MODEL, is_hub_model, is_model, local_path, model_problem
from service.printable import escaped
from workers.common import child_process
from workers.common.protocol import EXIT_CONFIG


def run(options: argparse.Namespace) -> int:
    """Executes another program in this process. Returns an exit status only if nothing can be converted."""
    model, out = str(options.model), Path(options.out).absolute()
    if not is_model(model) or model == WEIGHTLESS_MODEL:
        problem = "it has no weights" if model == WEIGHTLESS_MODEL else model_problem(model)
        return _failed(f"{model} cannot be converted: {problem}", EXIT_CONFIG)
    if out.suffix != ".gguf":
        return _failed(
            f"{options.out} is refused: must end with .gguf, by which a model's format is known", 2
        )
    if not out.parent.is_dir():
        return _failed(f"{options.out} cannot be written: there is no directory {out.parent}", 1)
    found = local_path(model)
    if is_hub_model(model):
        from service.cli import hub

        try:
            found = hub.find_model(model, options.model_revision)
        except hub.HubError as error:
            return _failed(str(error), error.status)
    return _write(found, out, options.quantization)


def _write(model: Path, out: Path, quantization: str) -> int:
    """Executes the program that writes the file, so that signals and the exit status are its own."""
    command = [sys.executable, "-P", "-m", "workers.convert", str(model), str(out), quantization]
    environment = os.environ | {"PYTHONPATH": child_process.import_path()}
    os.execve(sys.executable, command, environment)  # noqa: S606 - no shell is needed


def _failed(problem: str, status: int) -> int:
    print(f"quire: {escaped(problem)}", file=sys.stderr)
    return status
