"""What users of other packages write, run by their own interpreter: `client_scripts.py NAME URL ...`.

Each raises an error if the answer is not what the package promises.
"""

# mypy: ignore-errors

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

STORYTELLER = Path(__file__).parents[2] / "workers/models/storyteller"
MODEL, KEY = "storyteller", "none"
QUESTION = "Describe a pet."
LIMITS = {"max_tokens": 300, "temperature": 0}


def pet_class():
    from pydantic import BaseModel, Field

    class Pet(BaseModel):
        """A pet."""

        kind: Literal["cat", "dog"]
        age: int = Field(ge=0, le=9)

    return Pet


def renderers(url):
    import asyncio

    import openai
    from renderers.base import create_renderer
    from renderers.client import generate
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(STORYTELLER)
    talk = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    drawn = asyncio.run(
        generate(
            client=openai.AsyncOpenAI(base_url=url, api_key=KEY),
            renderer=create_renderer(tokenizer),
            messages=talk,
            model=MODEL,
            sampling_params={"temperature": 0.8, "seed": 1, "max_tokens": 20},
            cache_salt="step 1",
            priority=1,
        )
    )
    assert drawn["prompt_ids"] == prompt
    assert len(drawn["completion_logprobs"]) == len(drawn["completion_ids"]) == 20
    assert drawn["content"] == tokenizer.decode(drawn["completion_ids"])


def verifiers(url, directory):
    """Two turns of a rollout, as prime-rl runs them. Prints the tokens of each branch, and their experts."""
    import asyncio

    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.trace import Trace
    from verifiers.v1.types import SamplingConfig, SystemMessage, UserMessage

    config = TrainClientConfig(base_url=url, api_key_var="NO_KEY", renderer_model_name=directory)
    sampling = SamplingConfig(temperature=0.8, seed=1, max_tokens=12)
    trace = Trace.model_construct(task=None, agent=None)

    async def roll_out():
        client = TrainClient(config)
        said = [SystemMessage(content="You tell stories."), UserMessage(content=QUESTION)]
        for more in ("Where does it live?", None):
            turn = prepare_turn(trace, said)
            body = {"model": "local"}
            response = await client.get_response(ChatDialect(), body, sampling, turn=turn)
            turn.commit(response)
            said += [response.message, UserMessage(content=more or "")]
        await client.close()

    asyncio.run(roll_out())
    print(json.dumps([[branch.token_ids, branch.routed_experts.tolist()] for branch in trace.branches]))


def prime_rl(url, sources, weights, adapter):
    """What its orchestrator does after two steps of a trainer, one of them of a LoRA adapter."""
    import asyncio

    sys.path += [f"{sources}/src", f"{sources}/packages/prime-rl-configs/src"]
    from prime_rl.configs.shared import ClientConfig
    from prime_rl.utils.client import InferencePool

    async def push():
        pool = InferencePool(ClientConfig(base_url=url), "local")
        await pool.wait_for_ready("local", timeout=10)
        await pool.update_weights(Path(weights), step=1)
        await pool.update_weights(Path(adapter), lora_name="policy", step=2)
        await pool.wait_for_ready("policy", timeout=10)
        await pool.stop()

    asyncio.run(push())


def verl(url):
    """Its generation of data sets. What it trains with are servers within its own processes."""
    import asyncio

    import numpy as np
    from verl.trainer.main_generation_server import generate

    talks = [[{"role": "user", "content": text}] for text in (QUESTION, "Where does it live?")]
    # As its config says by default.
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 20}
    address = url.removeprefix("http://").removesuffix("/v1")
    (answers,) = asyncio.run(generate([address], MODEL, 2, sampling, np.array(talks, dtype=object)))
    assert len(answers) == 4 and all(answer.choices[0].message.content for answer in answers)


def instructor(url):
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=KEY), mode=instructor.Mode.TOOLS)
    talk = [{"role": "user", "content": QUESTION}]
    client.chat.completions.create(
        model=MODEL, response_model=pet_class(), messages=talk, max_retries=0, **LIMITS
    )


def langchain(url):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key=KEY, model=MODEL, **LIMITS)
    pet = pet_class()
    assert isinstance(model.with_structured_output(pet, method="function_calling").invoke(QUESTION), pet)
    (call,) = (
        model.bind_tools([pet], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls
    )
    assert pet(**call["args"])


def pydantic_ai(url):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(MODEL, provider=provider), output_type=pet_class())
        agent.run_sync(QUESTION, model_settings=LIMITS)


def pydantic_ai_anthropic(url):
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=KEY)
    model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    Agent(model, output_type=pet_class()).run_sync(QUESTION, model_settings=LIMITS)


def anthropic(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    tool = {"name": "pet", "input_schema": pet_class().model_json_schema()}
    choice = {"type": "tool", "name": "pet"}
    whole = client.messages.create(**asked, max_tokens=100, tools=[tool], tool_choice=choice)
    assert pet_class()(**whole.content[0].input) and whole.stop_reason == "tool_use"
    with client.messages.stream(**asked, max_tokens=20) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text and final.usage.output_tokens == 20
    assert client.messages.count_tokens(**asked).input_tokens == final.usage.input_tokens


def smolagents(url):
    from smolagents import OpenAIServerModel, ToolCallingAgent

    model = OpenAIServerModel("local", api_base=url, api_key=KEY)
    agent = ToolCallingAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
    assert agent.run(QUESTION) == "A dog."


def openai_agents(url):
    import openai
    from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_client(openai.AsyncOpenAI(base_url=url, api_key=KEY))

    @function_tool
    def weather(city: str) -> str:
        return f"Sun in {city}."

    done = Runner.run_sync(Agent(name="guide", model="local", tools=[weather]), QUESTION)
    assert done.final_output == "There is sun."
    assert "Sun in Bern." in json.dumps(done.to_input_list())


def openai_embeddings(url):
    import openai

    client = openai.OpenAI(base_url=url, api_key=KEY)
    first, second = client.embeddings.create(model=MODEL, input=["A cat.", "A dog."]).data
    assert len(first.embedding) == len(second.embedding) > 0 and first.embedding != second.embedding


def litellm(url):
    import litellm

    asked = {"api_base": url, "api_key": KEY, "messages": [{"role": "user", "content": QUESTION}], **LIMITS}
    whole = litellm.completion(model=f"openai/{MODEL}", **asked).choices[0].message.content
    stream = litellm.completion(model=f"hosted_vllm/{MODEL}", stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    tool = {"type": "function", "function": {"name": "pet", "parameters": pet_class().model_json_schema()}}
    called = litellm.completion(model=f"openai/{MODEL}", tools=[tool], tool_choice="required", **asked)
    assert pet_class().model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
    answer = litellm.responses(model=f"openai/{MODEL}", api_base=url, api_key=KEY, input=QUESTION)
    assert answer.output[0].content[0].text


def llm(url):
    """The command, with a model in its file of models."""
    with tempfile.TemporaryDirectory() as directory:
        model = f"- model_id: own\n  model_name: {MODEL}\n  api_base: {url}\n"
        Path(directory, "extra-openai-models.yaml").write_text(model)
        command = [sys.executable, "-m", "llm", "-m", "own", "-o", "max_tokens", "20", QUESTION]
        environment = {**os.environ, "LLM_USER_PATH": directory}
        assert subprocess.run(command, env=environment, check=True, capture_output=True).stdout.strip()


def dspy(url):
    import dspy

    class Describe(dspy.Signature):
        """Describe a pet."""

        name: str = dspy.InputField()
        kind: Literal["cat", "dog"] = dspy.OutputField()

    dspy.configure(lm=dspy.LM("openai/local", api_base=url, api_key=KEY))
    assert dspy.Predict(Describe)(name="Mia").kind == "dog"


def llama_index(url):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    pet, settings = pet_class(), {"api_base": url, "api_key": KEY, **LIMITS}
    chat = OpenAILike(model=MODEL, is_chat_model=True, is_function_calling_model=True, **settings)
    asked = [ChatMessage(role="user", content=QUESTION)]
    whole = chat.chat(asked).message.content
    assert "".join(part.delta for part in chat.stream_chat(asked)) == whole
    assert isinstance(chat.as_structured_llm(pet).complete(QUESTION).raw, pet)
    assert OpenAILike(model=MODEL, **settings).complete("Once upon").text


def guidellm(url):
    """Its benchmark: each of 8 requests has as many tokens as were asked for."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out.json")
        options = {
            "--backend": f"kind=openai_http,target={url.removesuffix('/v1')}",
            "--profile": "kind=concurrent,streams=4",
            "--constraint": "kind=max_requests,count=8",
            "--tokenizer": f"kind=hf_auto,model={STORYTELLER}",
            "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=24",
            "--output": f"kind=json,path={out}",
        }
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"]
        subprocess.run([*command, *(word for option in options.items() for word in option)], check=True)
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
        done = benchmark["requests"]["successful"]
        assert len(done) == 8 and {request["output_tokens"] for request in done} == {24}


def evalscope(url):
    """Its load test of chats."""
    with tempfile.TemporaryDirectory() as directory:
        options = {
            "--url": f"{url}/chat/completions",
            "--model": MODEL,
            "--dataset": "random",
            "--tokenizer-path": str(STORYTELLER),
            "--min-prompt-length": "20",
            "--max-prompt-length": "40",
            "--min-tokens": "24",
            "--max-tokens": "24",
            "--number": "8",
            "--parallel": "4",
            "--outputs-dir": directory,
        }
        command = [str(Path(sys.executable).with_name("evalscope")), "perf", "--api", "openai"]
        subprocess.run([*command, *(word for option in options.items() for word in option)], check=True)
        (summary,) = Path(directory).rglob("benchmark_summary.json")
        found = json.loads(summary.read_text())
        assert (found["Success Requests"], found["Avg Output Tokens"]) == (8, 24)


def lm_eval(url):
    """The log-likelihood of answers, from an echo with log-probabilities."""
    task = """
task: pets
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "pets.jsonl")
        row = {"question": "Once upon a time there", "choices": ["was", "xq"], "answer": 0}
        data.write_text(json.dumps(row) + "\n")
        Path(directory, "pets.yaml").write_text(task % data)
        arguments = f"base_url={url}/completions,model={MODEL},tokenizer={STORYTELLER}"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "pets"]
        command += ["--include_path", directory, "--model_args", arguments, "--output_path", directory]
        subprocess.run(command, check=True)
        (found,) = Path(directory).rglob("results*.json")
        assert json.loads(found.read_text())["results"]["pets"]["acc,none"] == 1


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
