"""Clients that know nothing but the address: grpcurl, buf curl and Python's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_database, descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from quire.v1 import executor_pb2

from tests.gateway_process import GatewayProcess
from tests.grpcurl import GRPCURL, needs_grpcurl

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
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


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


def ask(
    gateway: GatewayProcess, *requests: reflection_pb2.ServerReflectionRequest
) -> list[reflection_pb2.ServerReflectionResponse]:
    assert gateway.channel is not None
    method: Any = gateway.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    return list(method(iter(requests), timeout=TIMEOUT_S))


def pool_of(response: reflection_pb2.ServerReflectionResponse) -> descriptor_pool.DescriptorPool:
    """The files of an answer: the one asked for first, then those it depends on."""
    database = descriptor_database.DescriptorDatabase()
    for serialized in response.file_descriptor_response.file_descriptor_proto:
        database.Add(descriptor_pb2.FileDescriptorProto.FromString(serialized))
    return descriptor_pool.DescriptorPool(database)


def test_a_client_without_stubs_can_call(weightless_gateway: GatewayProcess) -> None:
    def request(**kind: str) -> reflection_pb2.ServerReflectionRequest:
        return reflection_pb2.ServerReflectionRequest(**kind)  # type: ignore[arg-type]

    listed, known, unknown = ask(
        weightless_gateway,
        request(list_services=""),
        request(file_containing_symbol=SERVICE.full_name),
        request(file_containing_symbol="quire.v1.Nothing"),
    )

    assert {service.name for service in listed.list_services_response.service} == SERVICES
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    service = pool_of(known).FindServiceByName(SERVICE.full_name)
    assert [method.name for method in service.methods] == [method.name for method in SERVICE.methods]
    prefill = service.FindMethodByName("Prefill")
    message = json_format.ParseDict(
        {"token_ids": [1024]}, message_factory.GetMessageClass(prefill.input_type)()
    )
    assert weightless_gateway.channel is not None
    send: Any = weightless_gateway.channel.unary_unary(f"/{SERVICE.full_name}/Prefill")
    with pytest.raises(grpc.RpcError, match="token 1024 is not below the vocabulary size 1024"):
        send(message.SerializeToString(), timeout=TIMEOUT_S)


@needs_grpcurl
def test_grpcurl_finds_and_describes_everything(weightless_gateway: GatewayProcess) -> None:
    def grpcurl(*arguments: str) -> str:
        command = [str(GRPCURL), "-plaintext", weightless_gateway.address, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

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
