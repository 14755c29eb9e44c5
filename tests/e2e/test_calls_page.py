"""docs/calls.md and docs/clients.md, as callers without the Python client use them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_tools import protoc
from safetensors.torch import save_file

from tests.gateway_process import GatewayProcess
from tests.grpcurl import GRPCURL, needs_grpcurl
from tests.programs import output_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "calls.md"
ADDRESS = "127.0.0.1:50051"
# A plugin of protoc and buf, which writes the packages of the files for Go and Java.
OPTIONS_PLUGIN = """
import json, os, sys
from google.protobuf.compiler import plugin_pb2

request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
files = [file.options for file in request.proto_file if file.name in request.file_to_generate]
answer = plugin_pb2.CodeGeneratorResponse(supported_features=1)
content = json.dumps([(options.go_package, options.java_package) for options in files])
answer.file.add(name=os.path.basename(sys.argv[0]) + ".json", content=content)
sys.stdout.buffer.write(answer.SerializeToString())
"""
BIN = Path(sys.executable).parent
BUF = [str(BIN / "buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"
REFLECTION = "grpc.reflection."
TIMEOUT_S = 120


@dataclass
class Call:
    """A section of the page about one call."""

    # As SERVICE/METHOD.
    method: str
    # Its line, as one.
    line: str
    # What the page says about the answer.
    answer: str


def calls() -> list[Call]:
    found = []
    for service_section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        service, _, rest = service_section.partition("\n")
        for section in re.split(r"^### ", rest, flags=re.MULTILINE)[1:]:
            parts = re.fullmatch(
                r"(\w+)\n\n.+?\n\n```sh\n(.+?)\n```\n\nResponse: (.+)\n+", section, re.DOTALL
            )
            assert parts, f"{service}: no sentence, line and answer in\n{section}"
            found.append(Call(f"{service}/{parts[1]}", parts[2].replace("\\\n", " "), parts[3]))
    return found


@dataclass
class Line:
    """A line for grpcurl. Flags that the page may not use are refused."""

    # Where the test's server is.
    address: str
    flags: dict[str, str]
    arguments: list[str]

    @staticmethod
    def of(written: str, address: str) -> Line:
        name, *arguments = shlex.split(written)
        assert name == "grpcurl", written
        flags: dict[str, str] = {}
        while arguments[0].startswith("-"):
            flag = arguments.pop(0)
            flags[flag] = "" if flag == "-plaintext" else arguments.pop(0)
        assert flags.keys() <= {"-plaintext", "-d", "-max-time"} and "-plaintext" in flags, written
        assert arguments.pop(0) == ADDRESS, written
        # How long the first answer takes says nothing.
        flags.pop("-max-time", None)
        return Line(address, flags, arguments)

    def grpcurl(self) -> list[str]:
        """The line itself."""
        flags = [part for flag in self.flags.items() for part in flag if part]
        return [str(GRPCURL), *flags, self.address, *self.arguments]


def answers(command: list[str], *, ends_by_itself: bool) -> list[Any]:
    """The messages of the answer; of one that does not end, the first."""
    if ends_by_itself:
        return messages(output_of(*command))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = ""
        try:
            for line in process.stdout:
                output += line
                with contextlib.suppress(json.JSONDecodeError):
                    return messages(output)
        finally:
            process.kill()
    raise AssertionError(f"{shlex.join(command)} has ended")


def messages(output: str) -> list[Any]:
    """The JSON values that stand one behind another."""
    found, decoder, output = [], json.JSONDecoder(), output.strip()
    while output:
        value, end = decoder.raw_decode(output)
        found.append(value)
        output = output[end:].lstrip()
    return found


def names_in(value: Any) -> set[str]:
    """The fields of a message and of those in it, and the names that are values."""
    if isinstance(value, dict):
        return set(value).union(*(names_in(inner) for inner in value.values()))
    if isinstance(value, list):
        return set().union(*(names_in(inner) for inner in value))
    return {value} if isinstance(value, str) else set()


def value_at(message: Any, path: str) -> str:
    for part in re.findall(r"\w+", path):
        message = message[int(part)] if part.isdigit() else message[part]
    return str(message)


# With buf curl: test_reflection.py.
@needs_grpcurl
def test_each_line_does_what_the_page_says(tmp_path: Path) -> None:
    with GatewayProcess(model="adder") as gateway:
        follow_the_page(gateway, {"ADAPTER": str(adapter(tmp_path))})
        assert gateway.process.wait(TIMEOUT_S) == 0, "the last line ends the server"


def adapter(directory: Path) -> Path:
    """Writes a LoRA adapter of the shipped model, in PEFT's layout. Returns its directory."""
    settings = json.loads((ROOT / "workers" / "models" / "adder" / "config.json").read_text())
    hidden, out = settings["hidden_size"], settings["num_attention_heads"] * settings["head_dim"]
    tensors = {}
    for layer in range(settings["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.ones(1, hidden)
        tensors[f"{name}.lora_B.weight"] = torch.zeros(out, 1)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def follow_the_page(gateway: GatewayProcess, variables: dict[str, str]) -> None:
    """Runs each line of the page. `variables` has what the page does not take from an answer; mutated."""
    for call in calls():
        line = re.sub(r"\$([A-Z_]+)", lambda name: variables[name[1]], call.line)
        assert line.split()[-1] == call.method
        command = Line.of(line, gateway.address).grpcurl()
        answered = answers(command, ends_by_itself="-max-time" not in line)
        promised = set(re.findall(r"`(\w+)`", call.answer))
        missing = promised - set().union(*(names_in(message) for message in answered))
        assert not missing, f"{call.method} answered {answered} without {missing}"
        for name, path in re.findall(r"`\$(\w+)` to\s+`([\w.\[\]]+)`", call.answer):
            variables[name] = value_at(answered[0], path)


def listed_with_buf(line: str, address: str) -> set[str]:
    """What a line of the page lists: the services, or the methods of one."""
    what = "--list-methods" if Line.of(line, address).arguments[1:] else "--list-services"
    return set(output_of(*BUF, what, f"http://{address}").split())


def test_every_public_call_is_on_the_page_once(shipped_gateway: GatewayProcess) -> None:
    text = PAGE.read_text(encoding="utf-8")
    listings = re.findall(r"^grpcurl .+ list.*$", text, re.MULTILINE)
    services, methods = (listed_with_buf(line, shipped_gateway.address) for line in listings)
    told = [call.method for call in calls()]
    served = {name for name in methods if not name.startswith(REFLECTION)}
    assert len(told) == len(set(told)) and set(told) == served
    assert {name.split("/")[0] for name in served} == {s for s in services if not s.startswith(REFLECTION)}


def test_the_protos_need_nothing_else(tmp_path: Path) -> None:
    """The commands of docs/clients.md, in a folder that has nothing but the protos."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    compiler = tmp_path / "bin" / "protoc"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m grpc_tools.protoc "$@"\n')
    compiler.chmod(0o755)
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    commands = "set -e\n" + "\n".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL))
    path = f"{compiler.parent}:{BIN}:{os.environ['PATH']}"
    output_of("bash", "-c", commands, cwd=tmp_path, env=os.environ | {"PATH": path})
    generated = {path.stem: path.read_text() for path in (tmp_path / "gen").rglob("*_pb2.py")}
    assert {"admin_pb2", "executor_pb2", "runner_pb2", "types_pb2", "status_pb2"} <= set(generated)
    imports = re.findall(
        r"^from (?:quire.v1|google.rpc) import (\w+)", "\n".join(generated.values()), re.MULTILINE
    )
    assert set(imports) <= set(generated), "they can be imported"
    assert (tmp_path / "gen" / "quire.binpb").stat().st_size
    assert (tmp_path / "gen" / "quire" / "v1" / "executor_pb2.pyi").exists()


def test_buf_names_the_package_that_go_needs(tmp_path: Path) -> None:
    """By the file that docs/clients.md shows, with plugins that print what those of Go and Java read."""
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "buf.gen.yaml").write_text(textwrap.dedent(shown))
    for name in ("protoc-gen-go", "protoc-gen-go-grpc"):
        plugin = tmp_path / name
        plugin.write_text(f"#!{sys.executable}\n{OPTIONS_PLUGIN}")
        plugin.chmod(0o755)
    command = [
        str(BIN / "buf"),
        "generate",
        str(ROOT / "protos"),
        "--path",
        str(ROOT / "protos" / "quire" / "v1"),
    ]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    packages = json.loads((tmp_path / "gen" / "protoc-gen-go.json").read_text())
    assert len(packages) == len([*(ROOT / "protos" / "quire" / "v1").glob("*.proto")])
    assert {go for go, _ in packages} == {"example.com/me/gen/quire/v1;quirev1"}
    assert all(java for _, java in packages)


@pytest.mark.parametrize("module", [status_pb2, error_details_pb2], ids=["status", "error_details"])
def test_details_of_errors_are_those_that_the_server_sends(module: ModuleType, tmp_path: Path) -> None:
    """protos/google/rpc says what the package does that server and Python's client use."""
    image = tmp_path / "image"
    options = [f"-I{ROOT / 'protos'}", f"-I{WELL_KNOWN}", f"--descriptor_set_out={image}"]
    assert protoc.main(["protoc", *options, module.DESCRIPTOR.name]) == 0
    (ours,) = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    theirs = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(theirs)
    assert without_json_names(ours).message_type == without_json_names(theirs).message_type


def without_json_names(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """Protoc writes them into images, and not into stubs."""

    def clear(messages: Iterable[descriptor_pb2.DescriptorProto]) -> None:
        for message in messages:
            for field in message.field:
                field.ClearField("json_name")
            clear(message.nested_type)

    clear(file.message_type)
    return file
