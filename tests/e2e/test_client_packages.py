"""The packages of docs/clients.md, at the versions of client_packages/*.txt, against a server.

Those of a file are installed together, in an environment of their own:

    python -m venv build/clients/agents
    build/clients/agents/bin/pip install -r tests/e2e/client_packages/agents.txt

prime-rl is not published as a package: its sources are in build/clients/prime-rl, a clone of
github.com/PrimeIntellect-ai/prime-rl at 559b44772e, and run in the environment `renderers`.

The shipped model does what a grammar makes it do. What models write by themselves is written by a script.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.adapter_factory import make_adapter, merge
from tests.client.pages import blocks
from tests.e2e.greedy import assert_serves
from tests.expert_routing import library_experts
from tests.families import settings_of
from tests.gateway_process import ROOT, GatewayProcess
from tests.http_gateway import HttpGateway
from tests.model_factory import TinyModel, make_family_model, make_model
from tests.programs import output_of
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
    "renderers": "renderers",
    "verl": "verl",
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
    with HttpGateway(model="storyteller") as gateway:
        yield gateway.url


@pytest.mark.parametrize("name", WITH_MODEL)
def test_what_is_forced(url: str, name: str) -> None:
    output_of(python_of(WITH_MODEL[name]), SCRIPTS, name, url)


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
    output_of(python, SCRIPTS.with_name("page_script.py"), chromium, url.removesuffix("v1"))


def test_a_trainer_of_trl(tmp_path: Path) -> None:
    """That of docs/training.md finds tokens as likely as the server that drew them, and learns."""
    python, program = python_of("trl"), tmp_path / "program.py"
    (block,) = [each for each in blocks("docs/training.md", "python") if "GRPOTrainer" in each.text]
    with GatewayProcess(model="storyteller", flags=["--dtype", "float32"]) as gateway:
        text = block.text.replace("127.0.0.1:50051", gateway.address)
        program.write_text(text.replace('"workers/', f'"{ROOT}/workers/'), encoding="utf-8")
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        output = output_of(python, SCRIPTS.with_name("trl_script.py"), program, cwd=tmp_path, env=offline)
    printed = [line for line in output.splitlines() if line.startswith(('{"', "["))]
    *steps, rewards = map(json.loads, printed)
    assert len(steps) == len(rewards) == 20
    for step in steps:
        assert step["difference"] < step["tolerance"], step
    # One step changes the tokens' log-probabilities by far more: weights that were not pushed would be seen.
    assert all(step["without_the_push"] > step["tolerance"] for step in steps[1:]), steps
    # A story has 6 to 8 of 100 letters that are an e.
    assert fmean(rewards[-5:]) > 2 * rewards[0], rewards


def test_routed_experts_of_rollouts(tmp_path: Path) -> None:
    """What verifiers attributes to the tokens of two turns is where the transformers library routes them."""
    python = python_of("renderers")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "workers/models/storyteller")
    model_type, settings = settings_of("qwen3_moe")
    model = make_family_model(tmp_path, model_type, {**settings, "vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(model)
    flags = ["--dtype", "float32", "--openai-routed-experts", "raw"]
    with HttpGateway(model=str(model), flags=flags) as gateway:
        output = output_of(python, SCRIPTS, "verifiers", gateway.url, model)
    # The random model writes what its tokenizer divides in another way: the second turn is another branch.
    branches = json.loads(output.splitlines()[-1])
    assert len(branches) == 2
    for tokens, experts in branches:
        # No forward has read the last one: it has a copy of those before it.
        assert len(tokens) == len(experts) and experts[-1] == experts[-2]
        assert np.array_equal(experts[:-1], library_experts(model, tokens[:-1]))


def test_a_trainer_of_prime_rl(tmp_path: Path) -> None:
    """Its own code pushes weights and an adapter, from files as its trainer writes them."""
    python, sources = python_of("renderers"), ROOT / "build/clients/prime-rl"
    if not sources.exists():
        pytest.skip("no sources of prime-rl: this file says where they are")
    old, new = (make_model(tmp_path / f"model_{seed}", TinyModel(seed=seed)) for seed in (0, 1))
    weights, adapter = tmp_path / "step_1", tmp_path / "step_2"
    weights.mkdir()
    shutil.copy(new / "model.safetensors", weights)
    make_adapter(adapter, new, seed=1)
    flags = ["--dtype", "float32", "--openai-weight-transfer", "filesystem"]
    with HttpGateway(model=str(old), flags=flags) as gateway:
        output_of(python, SCRIPTS, "prime_rl", gateway.url, sources, weights, adapter)
        for adapter_id, served in (("", new), ("policy", merge(tmp_path / "merged", new, adapter))):
            assert_serves(gateway, served, adapter_id)
