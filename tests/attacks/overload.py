"""More callers than can be served: what is done in time, from one to fifty times the capacity.

The model is large enough, and has few enough threads, for its computing to be what there is too little of: a
forward takes some 30 ms. Refusing then leaves the worker its core.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT, environment
from benchmarks.shapes import Shape
from benchmarks.weights import make_model
from tests.attacks.frame import Attack, Scene
from tests.gateway_process import GatewayProcess

TIMES = (1, 2, 5, 10, 20, 50)
DEADLINES_S = (1.0, 0.25)
_SECONDS = 8.0
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
# Python's gRPC sends about two thousand calls a second, so that more needs more processes.
_PER_PROCESS = 1500


def load(address: str, rate: float, seconds: float, deadline_s: float) -> dict[str, Any]:
    """What came of a load, from one or several processes of callers. Figures are summed."""
    processes = max(1, min(8, round(rate / _PER_PROCESS)))
    arguments = [address, str(rate / processes), str(seconds), str(deadline_s)]
    # They stand for other machines: on this one they get what the server leaves.
    command = ["nice", "-n", "19", sys.executable, "-m", "tests.attacks.load", *arguments]
    callers = [
        subprocess.Popen(command, cwd=ROOT, env=environment(ROOT), stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    done = [json.loads(caller.communicate()[0]) for caller in callers]
    answers: dict[str, int] = {}
    for one in done:
        for name, count in one["answers"].items():
            answers[name] = answers.get(name, 0) + count
    return {name: round(sum(one[name] for one in done), 1) for name in ("asked_per_s", "in_time_per_s")} | {
        "answers": answers
    }


def _serve(root: Path) -> GatewayProcess:
    directory = make_model(_SHAPE, Path(tempfile.mkdtemp(prefix="quire-attacks-")))
    return GatewayProcess(model=str(directory), workers=1, flags=["--threads-per-worker", "1"], root=root)


def _capacity(scene: Scene) -> None:
    load(scene.gateway.address, 0, 2, 30)
    scene.notes["capacity_per_s"] = load(scene.gateway.address, 0, 6, 30)["in_time_per_s"]


def _at(times: int, deadline_s: float) -> Callable[[Scene], None]:
    def run(scene: Scene) -> None:
        done = load(scene.gateway.address, times * scene.notes["capacity_per_s"], _SECONDS, deadline_s)
        scene.answers.update(done.pop("answers"))
        scene.notes |= done | {"times": times, "deadline_s": deadline_s}

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
