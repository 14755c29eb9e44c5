"""The packages of docs/clients.md, at the versions of client_packages/*.txt, against a server.

Those of a file are installed together, in an environment of their own:

    python -m venv build/clients/agents
    build/clients/agents/bin/pip install -r tests/e2e/client_packages/agents.txt

The shipped model does what a grammar makes it do. What models write by themselves is written by a script.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_openai import HttpGateway
from tests.gateway_process import ROOT
from tests.service.extensions.openai.test_tools import answering

SCRIPTS = Path(__file__).with_name("client_scripts.py")
TIMEOUT_S = 300
# The environment of each.
WITH_MODEL = {
    "anthropic": "agents",
    "evalscope": "evalscope",
    "guidellm": "guidellm",
    "instructor": "instructor",
    "langchain": "agents",
    "litellm": "litellm",
    "llama_index": "llama_index",
    "llm": "litellm",
    "lm_eval": "agents",
    "openai_embeddings": "agents",
    "pydantic_ai": "agents",
    "pydantic_ai_anthropic": "agents",
}
# What the model writes, one answer after the other.
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
WITH_SCRIPT = {
    "openai_agents": ("agents", [CALL, "There is sun."]),
    "smolagents": ("agents", [json.dumps([{"name": "final_answer", "arguments": {"answer": "A dog."}}])]),
    "dspy": ("litellm", ["[[ ## kind ## ]]\ndog\n\n[[ ## completed ## ]]"]),
}
# What they need is tested one by one in tests/service/extensions/openai.
pytestmark = pytest.mark.thorough


def python_of(environment: str) -> Path:
    python = ROOT / "build/clients" / environment / "bin/python"
    if not python.exists():
        pytest.skip(f"no clients: this file says how to install {environment}.txt")
    return python


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HttpGateway(model="storyteller", flags=["--openai-listen", "127.0.0.1:0"]) as gateway:
        yield f"http://127.0.0.1:{gateway.port}/v1"


@pytest.mark.parametrize("name", WITH_MODEL)
def test_what_is_forced(url: str, name: str) -> None:
    done = subprocess.run(
        [python_of(WITH_MODEL[name]), SCRIPTS, name, url],
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WITH_SCRIPT)
async def test_what_a_model_decides(name: str) -> None:
    environment, written = WITH_SCRIPT[name]
    python = python_of(environment)
    async with answering(list(written)) as (client, _):
        url = str(client.base_url).removesuffix("/")
        process = await asyncio.create_subprocess_exec(
            python, SCRIPTS, name, url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        assert process.returncode == 0, errors.decode()


def test_a_visitor_of_the_page(url: str) -> None:
    python, chromium = python_of("browser"), shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    command = [str(python), str(SCRIPTS.with_name("page_script.py")), chromium, url.removesuffix("v1")]
    done = subprocess.run(command, timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
