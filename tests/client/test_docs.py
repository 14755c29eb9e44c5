"""The examples of docs/runtimes.md and docs/openai.md, run as they are written there, but without a network.

In place of a model of the hub there is a copy of the shipped one, which has been given a chat template.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import Client
from quire.v1 import runner_pb2

from tests.client.pages import blocks, run, run_python
from tests.gateway_process import ROOT, GatewayProcess
from tests.grpcurl import needs_grpcurl

BIN = Path(sys.executable).parent
GRPC, HTTP, HUB = "127.0.0.1:50051", "127.0.0.1:8000", "Qwen/Qwen3-0.6B"
# Sums are asked as they are; of anything else it makes one that the model can read.
TEMPLATE = "{% set said = messages[-1].content %}{{ said if said[0] in '0123456789' else '12+34=' }}"


def commands(page: str) -> list[list[str]]:
    """What a shell would run, one line after the other."""
    joined = "\n".join(blocks(f"docs/{page}.md", "sh")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in joined.splitlines() if line]


class Served(GatewayProcess):
    """A server of the model, by both APIs."""

    def __init__(self, model: Path, *flags: str) -> None:
        super().__init__(model=str(model), flags=["--openai-listen", "127.0.0.1:0", *flags])

    def replaced(self, text: str) -> str:
        """An example that asks this one."""
        http = next(str(record["listen"]) for record in self.records() if "HTTP" in str(record["event"]))
        return text.replace(GRPC, self.address).replace(HTTP, http)

    def printed(self, code: str, directory: Path) -> str:
        script = directory / "copied.py"
        script.write_text(self.replaced(code))
        return run_python(script)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("models") / "talker"
    shutil.copytree(ROOT / "workers" / "models" / "adder", copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return copy


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with Served(model) as served:
        yield served


def test_whole_texts_by_python(served: Served, tmp_path: Path) -> None:
    code, _ = blocks("docs/runtimes.md", "python")
    texts: defaultdict[tuple[str, str], str] = defaultdict(str)
    reasons = {}
    for line in served.printed(code, tmp_path).splitlines():
        item, sample, _, text, reason = line.split(" ")
        texts[item, sample] += ast.literal_eval(text)
        reasons[item, sample] = reason
    assert set(reasons.values()) == {"stop"}
    assert texts["stop", "0"] == "4" and texts["schema", "0"] == "6" and texts["chat", "0"] == "10"
    assert re.fullmatch("[0-9]{3}", texts["regex", "0"]) and {"samples"} == {
        item for item, sample in texts if sample == "1"
    }


@needs_grpcurl
def test_whole_texts_by_a_command(served: Served) -> None:
    command = commands("runtimes")[0]
    assert command[0] == ".venv/bin/grpcurl"
    said = run(str(BIN / "grpcurl"), *map(served.replaced, command[1:]))
    assert "".join(re.findall(r'"text": "(.*?)"', said)) == "46"


@needs_grpcurl
def test_other_weights_by_a_command(model: Path) -> None:
    command = commands("runtimes")[1]
    asked = json.loads(command[command.index("-d") + 1])
    assert asked["source"] == "adder"
    with Served(model) as served:
        asked["source"] = str(model)
        command[command.index("-d") + 1] = json.dumps(asked)
        said = run(str(BIN / "grpcurl"), *map(served.replaced, command[1:]))
    phases = re.findall(r'"phase": "LOAD_WEIGHTS_PHASE_(\w+)"', said)
    assert list(dict.fromkeys(phases)) == ["LOADING", "SERVING"]


def test_weights_on_a_stream_by_python(model: Path, tmp_path: Path) -> None:
    _, code = blocks("docs/runtimes.md", "python")
    with Served(model) as served, Client(served.address) as client:
        fingerprint = client.model_info().model.fingerprint
        (*_, last) = served.printed(code, tmp_path).splitlines()
        assert last == fingerprint, "the same weights"
        answered = client.execute("12+30=")
        assert "".join(chunk.text for chunk in answered) == "42"


def test_providers_by_files(served: Served, model: Path, tmp_path: Path) -> None:
    routing, provider = blocks("docs/runtimes.md", "toml")
    # Nobody is asked for credentials until somebody asks the provider.
    (tmp_path / "runtimes.toml").write_text(served.replaced(routing + provider))
    with (
        Served(model, "--runtimes", str(tmp_path / "runtimes.toml")) as second,
        Client(second.address) as client,
    ):
        listed = client.runner_stub.ListRuntimes(runner_pb2.ListRuntimesRequest()).runtimes
        assert [runtime.name for runtime in listed] == ["local", "gpt", "other"]
        answered = client.execute("12+30=", runtime="other")
        assert "".join(chunk.text for chunk in answered) == "42"
        assert answered.started is not None and answered.started.runtime == "other"


def test_openais_client(served: Served, tmp_path: Path) -> None:
    ((program, *serve),) = commands("openai")
    assert program == ".venv/bin/quire" and serve == ["serve", "--model", HUB, "--openai-listen", HTTP]
    (code,) = blocks("docs/openai.md", "python")
    assert served.printed(code, tmp_path) == "46"
