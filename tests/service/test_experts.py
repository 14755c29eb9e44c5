"""What is said of experts that a request gives."""

from __future__ import annotations

import random

import pytest
from quire.v1 import types_pb2

from service.api import request_limits
from service.api.request_limits import Experts
from service.errors import InvalidArgument

LAYERS, PER_TOKEN = 3, 4


@pytest.mark.parametrize("count", [8, 255, 257])
def test_the_first_wrong_row_is_named(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In whatever block it is. Rows are right unless an expert is unknown or occurs twice."""
    monkeypatch.setattr(request_limits, "_BLOCK_ROWS", 5)
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
