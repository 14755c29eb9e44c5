"""The packages of docs/clients.md, at the versions of client_packages.txt, against a server.

The shipped model does what a grammar makes it do. What models write by themselves is written by a script.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_openai import HttpGateway
from tests.gateway_process import ROOT
from tests.service.extensions.openai.test_tools import answering

PYTHON = ROOT / "build/clients/bin/python"
SCRIPTS = Path(__file__).with_name("client_scripts.py")
TIMEOUT_S = 300
WITH_MODEL = ["instructor", "langchain", "pydantic_ai", "pydantic_ai_anthropic", "anthropic", "lm_eval"]
# What the model writes, one answer after the other.
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
WITH_SCRIPT = {
    "openai_agents": [CALL, "There is sun."],
    "smolagents": [json.dumps([{"name": "final_answer", "arguments": {"answer": "A dog."}}])],
}
pytestmark = [
    pytest.mark.thorough,  # what they need is tested one by one in tests/service/extensions/openai
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no clients: client_packages.txt says how to install them"
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HttpGateway(model="storyteller", flags=["--openai-listen", "127.0.0.1:0"]) as gateway:
        yield f"http://127.0.0.1:{gateway.port}/v1"


@pytest.mark.parametrize("name", WITH_MODEL)
def test_what_is_forced(url: str, name: str) -> None:
    done = subprocess.run(
        [PYTHON, SCRIPTS, name, url], timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WITH_SCRIPT)
async def test_what_a_model_decides(name: str) -> None:
    async with answering(list(WITH_SCRIPT[name])) as (client, _):
        url = str(client.base_url).removesuffix("/")
        process = await asyncio.create_subprocess_exec(
            PYTHON, SCRIPTS, name, url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        assert process.returncode == 0, errors.decode()
