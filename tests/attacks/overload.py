"""More callers than can be served: what is done in time, from one to fifty times the capacity.

The model is large enough, and has few enough threads, for its computing to be what there is too little of: a
forward takes some 30 ms. Refusing then leaves the worker its core.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT, environment, quire_command
from benchmarks.shapes import Shape
from benchmarks.weights import make_model
from tests.attacks.frame import Attack, Scene
from tests.gateway_process import GatewayProcess

TIMES = (1, 2, 5, 10, 20, 50)
DEADLINES_S = (1.0, 0.25)
_SECONDS = 8
_SHAPE = Shape(
    "overloaded",
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)


def load(address: str, seconds: float, deadline_s: float, *pace: str) -> dict[str, Any]:
    """The figures of `quire load` with prompts of 256 tokens and one token each."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        flags = [
            "--target",
            address,
            "--duration",
            str(seconds),
            "--timeout",
            str(deadline_s),
            "--out",
            str(out),
        ]
        flags += ["--warm-up", "0", "--prompt-tokens", "256", "--output-tokens", "1", *pace]
        # The callers stand for other machines: on this one they get what the server leaves.
        command = ["nice", "-n", "19", *quire_command(ROOT, "load", *flags)]
        subprocess.run(command, env=environment(ROOT), capture_output=True, check=False)
        (found,) = json.loads(out.read_text())["runs"]
    return dict(found)


def _serve() -> GatewayProcess:
    directory = make_model(_SHAPE, Path(tempfile.mkdtemp(prefix="quire-attacks-")))
    return GatewayProcess(model=str(directory), workers=1, flags=["--threads-per-worker", "1"])


def _done_per_s(found: dict[str, Any]) -> float:
    return float(found["throughput"]["requests_per_s"])


def _capacity(scene: Scene) -> None:
    callers = ("--callers", "64")
    load(scene.gateway.address, 2, 30, *callers)
    scene.notes["capacity_per_s"] = _done_per_s(load(scene.gateway.address, 6, 30, *callers))


def _at(times: int, deadline_s: float) -> Callable[[Scene], None]:
    def run(scene: Scene) -> None:
        rate = times * scene.notes["capacity_per_s"]
        pace = ("--rate", f"{rate:.3f}", "--arrivals", "constant")
        found = load(scene.gateway.address, _SECONDS, deadline_s, *pace)
        scene.answers.update(found["errors"] | {"OK": found["requests"]["done"]})
        scene.notes |= {"asked_per_s": rate, "in_time_per_s": _done_per_s(found)}

    return run


ATTACKS = tuple(
    Attack(
        f"load x{times}, {deadline_s:g} s",
        f"{times} times the capacity, deadlines of {deadline_s:g} s",
        _at(times, deadline_s),
        tries=1,
        prepare=_capacity,
        gateway=_serve,
        least_s=0.0,
    )
    for deadline_s in DEADLINES_S
    for times in TIMES
)
