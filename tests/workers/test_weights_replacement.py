"""Weights that are read beside those that are served."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

from workers.executors.replacement import WeightsReplacement
from workers.models.model import ModelDescription
from workers.operations import Failed, ReplacementRead

PATIENCE_S = 60


def test_cancelled_replacements_are_not_in_memory_together() -> None:
    """A caller that starts and cancels again and again must not fill the memory."""
    mutex, reading, begun = threading.Lock(), [0], [0]
    most = 0
    released = threading.Event()

    def read(_: Path) -> tuple[str, ModelDescription]:
        nonlocal most
        with mutex:
            reading[0] += 1
            begun[0] += 1
            most = max(most, reading[0])
        released.wait(PATIENCE_S)
        with mutex:
            reading[0] -= 1
        raise OSError

    submitted: queue.SimpleQueue[ReplacementRead] = queue.SimpleQueue()
    replacement = WeightsReplacement(read, lambda _weights, _description: None)
    replacement.submit = submitted.put
    for op_id in range(1, 9):
        replacement.read(op_id, "weights")
        while op_id == 1 and not begun[0]:
            time.sleep(0.001)
        if op_id < 8:
            replacement.discard()
    released.set()
    answers = [replacement.was_read(submitted.get(timeout=PATIENCE_S)) for _ in range(2)]
    assert most == 1
    assert begun[0] == 2, "those that nobody wants any more are not begun"
    assert answers[0] is None
    assert isinstance(answers[1], Failed) and answers[1].op_id == 8
