"""Clients that know nothing but the address: grpcurl, buf curl and Python's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from quire.v1 import executor_pb2

from tests.gateway_process import GatewayProcess
from tests.grpcurl import GRPCURL, needs_grpcurl
from tests.programs import output_of, run

SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"]
HEALTH = "grpc.health.v1.Health"
SERVICES = {
    SERVICE.full_name,
    "quire.v1.AdminService",
    "quire.v1.ModelRunnerService",
    HEALTH,
    "grpc.reflection.v1alpha.ServerReflection",
}
BUF = Path(sys.executable).parent / "buf"
TIMEOUT_S = 60


def buf_curl(gateway: GatewayProcess, *arguments: str, method: str = "") -> subprocess.CompletedProcess[str]:
    url = f"http://{gateway.address}" + (f"/{method}" if method else "")
    command = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", *arguments, url]
    return run(*command)


def call(gateway: GatewayProcess, method: str, request: Any) -> Any:
    """Calls a method with a request as JSON, and returns the answer as JSON."""
    done = buf_curl(gateway, "--data", json.dumps(request), method=method)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_buf_curl_finds_and_calls_everything(weightless_gateway: GatewayProcess) -> None:
    services = buf_curl(weightless_gateway, "--list-services")
    assert set(services.stdout.split()) == SERVICES, services.stderr
    methods = buf_curl(weightless_gateway, "--list-methods")
    expected = {f"{SERVICE.full_name}/{method.name}" for method in SERVICE.methods}
    assert {m for m in methods.stdout.split() if m.startswith(SERVICE.full_name)} == expected
    assert {f"{HEALTH}/Check", f"{HEALTH}/Watch"} <= set(methods.stdout.split())

    def execute(rpc: str, request: Any) -> Any:
        return call(weightless_gateway, f"{SERVICE.full_name}/{rpc}", request)

    status = execute("GetStatus", {})
    assert status["state"] == "SERVER_STATE_SERVING" and len(status["workers"]) == 2
    cache = execute("Prefill", {"tokenIds": [1, 2, 3], "output": {"logprob": True}})["kvCache"]
    assert cache["seqLen"] == 3
    step = {"cacheId": cache["cacheId"], "tokenId": 4, "position": 3}
    assert execute("Decode", step)["kvCache"]["seqLen"] == 4
    assert execute("ReleaseCache", {"cacheId": cache["cacheId"]}) == {"released": True}


def test_buf_curl_shows_why_a_call_was_refused(weightless_gateway: GatewayProcess) -> None:
    refused = buf_curl(weightless_gateway, "--data", "{}", method=f"{SERVICE.full_name}/Prefill")

    assert refused.returncode != 0
    error = json.loads(refused.stderr)
    assert (error["code"], error["message"]) == ("invalid_argument", "at least one token is required")
    kinds = [detail["type"] for detail in error["details"]]
    assert kinds == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]


@needs_grpcurl
def test_grpcurl_finds_and_describes_everything(weightless_gateway: GatewayProcess) -> None:
    def grpcurl(*arguments: str) -> str:
        return output_of(GRPCURL, "-plaintext", weightless_gateway.address, *arguments)

    assert set(grpcurl("list").split()) == SERVICES
    for service in SERVICES:
        assert f"{service} is a service" in grpcurl("describe", service)


def test_pythons_own_reflection_client_works(weightless_gateway: GatewayProcess) -> None:
    assert weightless_gateway.channel is not None
    database = ProtoReflectionDescriptorDatabase(weightless_gateway.channel)
    assert set(database.get_services()) == SERVICES
    pool = descriptor_pool.DescriptorPool(database)
    names = {method.name for method in pool.FindServiceByName(SERVICE.full_name).methods}
    assert names == {method.name for method in SERVICE.methods}
