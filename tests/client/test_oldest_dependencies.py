"""The client beside the oldest versions of what it needs, in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
import venv
from pathlib import Path
from types import ModuleType

import pytest

from tests.gateway_process import GatewayProcess
from tests.programs import output_of, run

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "python"

# Calls of each kind: unary, on a session, a stream of texts, errors with details, and with await.
_PROGRAM = """
import asyncio, sys, warnings
warnings.simplefilter("error")
from quire import AsyncClient, CacheNotFound, Client

target = sys.argv[1]
with Client(target, timeout_s=60) as client:
    client.warmup()
    with client.session() as session, session.prefill([1, 10, 2, 11], priority="high") as cache:
        cache.decode(3)
        cache.verify([1, 2, 3])
        cache.truncate(3)
        for copy in cache.fork(2):
            copy.release()
    assert client.execute(["1+1=", "2+2="], max_tokens=8).texts() == ["2", "4"]
    assert client.status().workers and client.capabilities().limits.max_request_bytes
    try:
        client.cache("nowhere")
    except CacheNotFound as error:
        assert error.reason == "CACHE_NOT_FOUND"

async def main():
    async with AsyncClient(target, timeout_s=60) as client:
        async with client.session() as session, session.prefill([1]) as cache:
            await cache.decode(2)
        assert await client.generate("12+30=") == "42"

asyncio.run(main())
"""


def floors() -> dict[str, str]:
    """The oldest version of each of the client's dependencies, by name."""
    project = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]
    return dict(dependency.split(">=") for dependency in project["dependencies"])


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stubs_ask_for_what_the_client_asks_for() -> None:
    generate = generator()
    found = floors()
    assert ".".join(map(str, generate.OLDEST_PROTOBUF)).startswith(found["protobuf"] + ".")
    assert generate.OLDEST_GRPC.startswith(found["grpcio"] + ".")
    for stub in (CLIENT / "quire" / "v1").glob("*_pb2.py"):
        numbers = re.search(r"Domain\.PUBLIC,\n\s*(\d+),\n\s*(\d+),\n\s*(\d+),", stub.read_text())
        assert numbers is not None and tuple(map(int, numbers.groups())) == generate.OLDEST_PROTOBUF
    for stub in (CLIENT / "quire" / "v1").glob("*_pb2_grpc.py"):
        assert f"GRPC_GENERATED_VERSION = '{generate.OLDEST_GRPC}'" in stub.read_text()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_oldest_versions_serve(shipped_gateway: GatewayProcess, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pins = [f"{name}=={version}" for name, version in floors().items()]
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *pins]
    if run(*install).returncode:
        pytest.skip("needs a registry of packages")
    ours = {**os.environ, "PYTHONPATH": str(CLIENT)}
    output_of(python, "-c", _PROGRAM, shipped_gateway.address, env=ours)
