"""A server with a model whose files have it quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from quire.v1 import executor_pb2 as pb

from tests import quantised_directories as make
from tests.e2e.greedy import chosen_here, decoded
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, make_model

PROMPT = [(5 * i + 2) % 97 for i in range(37)]
COUNT = 24


# Their numbers: tests/workers/test_quantised_directories.py.
@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda directory: make.gptq(directory, ordered=True), "int4"),
        pytest.param(make.awq, "int4", marks=pytest.mark.thorough),
        pytest.param(make.float8, "float8", marks=pytest.mark.thorough),
    ],
    ids=["gptq", "awq", "float8"],
)
def test_its_tokens_are_those_of_the_model(
    write: Callable[[Path], make.Tensors], says: str, tmp_path: Path
) -> None:
    """It has proved itself before: with the self-check, which is not skipped."""
    model = make_model(tmp_path, TinyModel(dtype="bfloat16"))
    write(model)
    expected = chosen_here(model, PROMPT, COUNT)
    with GatewayProcess(model=str(model), flags=["--kv-pages", "64"], self_check=True) as gateway:
        info = gateway.stub.GetModelInfo(pb.GetModelInfoRequest()).model
        assert info.quantization.startswith(says) and info.backend == "native"
        assert decoded(gateway, PROMPT, COUNT) == expected
        assert "native code agree" in gateway.log()
