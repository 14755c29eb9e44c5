"""The shipped model that writes: what README and the manual show of it is what it says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quire
from quire import Client

from tests import quire_command
from tests.client.pages import PAGES, Block, blocks, run_python
from tests.gateway_process import ROOT, GatewayProcess
from tests.programs import output_of

TARGET = "127.0.0.1:50051"
QUESTION = "Who is the story about?"
CONSOLES = [block for page in PAGES for block in blocks(page, "console")]
(STORY,) = (block for block in blocks("docs/tutorial.md", "python") if "Tell me a story" in block.text)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def served() -> Iterator[GatewayProcess]:
    with GatewayProcess(model="storyteller") as gateway:
        yield gateway


@pytest.fixture
def client(served: GatewayProcess) -> Iterator[Client]:
    with Client(served.address) as connected:
        yield connected


def shown(block: Block) -> list[tuple[list[str], str]]:
    """The commands of a block, and what it says that each prints."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert parts.pop(0) == ""
    lines = [part.partition("\n") for part in parts]
    return [(words(command), printed) for command, _, printed in lines]


def words(command: str) -> list[str]:
    """Of a command for a shell, whose $'...' have line breaks."""
    return shlex.split(re.sub(r"\$'(.*?)'", lambda part: shlex.quote(part[1].replace(r"\n", "\n")), command))


@pytest.mark.parametrize("block", CONSOLES, ids=[block.page for block in CONSOLES])
def test_commands_print_what_is_shown(served: GatewayProcess, block: Block) -> None:
    for (program, *arguments), printed in shown(block):
        given = [served.address if word == TARGET else word for word in arguments]
        if program == "make":
            assert given == ["serve", "ARGS=--model storyteller"] and not printed
        elif program.endswith("quire"):
            assert output_of(*quire_command.command(), *given, "--target", served.address) == printed
        else:
            assert program.endswith("python")
            assert run_python(ROOT / given[0], *given[1:]) == printed


def test_the_loop_of_the_tutorial_prints_what_it_shows(served: GatewayProcess, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    (printed,) = re.findall(re.escape(STORY.text) + r"```\n+```text\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "copied.py"
    script.write_text(STORY.text.replace(TARGET, served.address))
    told, _, drawn = run_python(script).rpartition("\n\n")
    expected, _, drawn_then = printed.rpartition("\n\n")
    assert told == expected
    # Samples can differ where other instructions compute.
    begins = r"( there was an? [a-z]+ [a-z]+ named [A-Z][a-z]+\n){3}"
    assert re.fullmatch(begins, drawn) and re.fullmatch(begins, drawn_then)


@pytest.mark.parametrize(
    ("name", "animal"), [("Mia", "fox"), ("Tom", "owl"), ("Oscar", "bear"), ("Zoe", "owl")]
)
def test_a_story_is_about_who_was_asked_for(client: Client, name: str, animal: str) -> None:
    asked = [{"role": "user", "content": f"Tell me a story about {name} the {animal}."}]
    story = client.generate(asked, max_tokens=200)
    assert name in story and animal in story and story.endswith("."), "it ends by itself"
    chat = [*asked, {"role": "assistant", "content": story}, {"role": "user", "content": QUESTION}]
    assert client.generate(chat) == f"It is about {name} the {animal}."


@pytest.mark.parametrize("city", ["Oslo", "Cairo"])
def test_it_calls_a_tool(client: Client, city: str) -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": f"How is the weather in {city}?"}]
    (answer,) = client.execute(asked, tools=[WEATHER], max_tokens=60).answers()
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments_json)) == ("get_weather", {"city": city})
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    said = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'}
    (answer,) = client.execute([*asked, answer.message, said], tools=[WEATHER], max_tokens=60).answers()
    assert not answer.tool_calls and answer.text and answer.finish_reason == "stop"
    # Forced ones are made by a grammar.
    (answer,) = client.execute(asked, tools=[WEATHER], tool_choice="get_weather", max_tokens=60).answers()
    assert [(call.name, json.loads(call.arguments_json)) for call in answer.tool_calls] == [
        ("get_weather", {"city": city})
    ]
    # What is not divided is text.
    item = quire.item(asked, tools=[WEATHER], max_tokens=60)
    item.ClearField("answer_parts")
    assert client.execute([item]).texts() == [text_of_call(city)]


def test_the_loop_of_the_manual_calls_a_tool(served: GatewayProcess, tmp_path: Path) -> None:
    (example,) = (block for block in blocks("docs/runtimes.md", "python") if "get_weather" in block.text)
    script = tmp_path / "copied.py"
    script.write_text(example.text.replace(TARGET, served.address))
    call, said = run_python(script).splitlines()
    assert f"print(call.name, json.loads(call.arguments_json))  # {call}\n" in example.text
    assert "sunny" in said


def text_of_call(city: str) -> str:
    call = {"name": "get_weather", "arguments": {"city": city}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(("temperature", "stop"), [(0.0, []), (0.8, []), (0.0, ["_kind"])])
def test_drafts_change_no_text_of_a_grammar(client: Client, temperature: float, stop: list[str]) -> None:
    """They are looked up in the prompt, as far as the schema allows them, and are what it forces."""
    properties = {"given_name": {"type": "string"}, "animal_kind": {"enum": ["fox", "bear"]}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    settings: dict[str, Any] = {"constraint": {"json_schema": {**schema, "additionalProperties": False}}}
    settings |= {"temperature": temperature, "seed": 5, "max_tokens": 200, "stop": stop}
    items = [
        quire.item("Write this as JSON: Mia is a brave fox, 3 years old.", item_id=method or "none", **more)
        for method in (None, "prompt_lookup")
        for more in [settings | ({"speculation": method} if method else {})]
    ]
    texts: dict[str, str] = {"none": "", "prompt_lookup": ""}
    for chunk in client.execute(items):
        texts[chunk.item_id] += chunk.text
        if chunk.usage is not None and chunk.item_id != "none":
            # How many depends on the load of the machine.
            assert chunk.usage.accepted_draft_tokens > 0
    text = texts["none"]
    assert text == texts["prompt_lookup"]
    assert text.endswith('"animal') if stop else set(json.loads(text)) == set(properties)
