"""What is said of experts that a request gives."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from quire.v1 import types_pb2

from service.api import experts
from service.api.experts import Experts
from service.errors import InvalidArgument

LAYERS, PER_TOKEN = 3, 4
OF_A_WORKER = """
import sys, threading
from quire.v1 import types_pb2
from workers.common import worker_pb2
from service.config import Config
from tests.service.served import state_of

for layers in 0, 2:
    state_of(Config(), worker_pb2.WorkerReady(model=types_pb2.ModelDescription(moe_layers=layers)))
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
    print("numpy" in sys.modules)
"""


@pytest.mark.parametrize("count", [8, 255, 257])
def test_the_first_wrong_row_is_named(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In whatever block it is. Rows are right unless an expert is unknown or occurs twice."""
    monkeypatch.setattr(experts, "_BLOCK_ROWS", 5)
    described = types_pb2.ModelDescription(moe_layers=LAYERS, num_experts=count, experts_per_token=PER_TOKEN)
    model, dice = Experts(described), random.Random(count)
    width = 1 if count <= 256 else 2
    for tokens in range(1, 12):
        rows = [dice.sample(range(count), PER_TOKEN) for _ in range(tokens * LAYERS)]

        def check() -> None:
            data = b"".join(one.to_bytes(width, "little") for row in rows for one in row)  # noqa: B023
            model.check_replay(data, 0, tokens)  # noqa: B023

        check()
        token, layer = divmod(dice.randrange(len(rows)), LAYERS)
        place, other = dice.sample(range(PER_TOKEN), 2)
        row = rows[token * LAYERS + layer]
        for wrong, text in (row[other], "occurs more than once"), (count, f"expert {count} of {count}"):
            row[place] = wrong
            with pytest.raises(InvalidArgument, match=f"{text}, in layer {layer} .* token {token}"):
                check()


def test_what_the_check_needs_is_imported_with_the_worker_and_only_for_experts() -> None:
    """Not with the first call, which would hold up all others."""
    done = subprocess.run([sys.executable, "-c", OF_A_WORKER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
