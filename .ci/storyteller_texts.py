"""The texts that the shipped storyteller learns: stories, and conversations about them, made from a seed.

Everything is put together here from words and sentences of our own, so that the model may be shipped. A
conversation is a list of messages in OpenAI's format with the tools that it may use.
"""

# ruff: noqa: E501 - sentences

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


SHE = words("Mia Lily Anna Ella Nora Rosa Ida Clara Zoe Ruby Olive Ivy")
HE = words("Tom Ben Max Sam Leo Finn Paul Hugo Otto Jack Theo Oscar")
NAMES = SHE + HE
ANIMALS = words("fox bear rabbit mouse owl cat dog duck frog hedgehog squirrel otter")
TRAITS = words("little brave shy clever kind hungry curious sleepy cheerful careful quiet old young")
PLACES = ["in the forest", "in the garden", "on the hill", "in the village", "by the river", "by the sea"]
PLACES += ["in the meadow", "on the mountain", "at the old mill", "by the lake", "on the farm"]
COLOURS = words("red blue green yellow white black golden silver")
THINGS = words("ball boat hat key lamp kite drum book coin bell map ring")
LIKES = ["to sing", "to dance", "to swim", "to read", "to paint", "to count the stars", "to climb trees"]
LIKES += ["to tell jokes", "to sleep in the sun", "to collect stones", "to watch the clouds"]
WEATHERS = words("sunny rainy windy cloudy snowy warm cold foggy")
CITIES = words("Paris Rome Madrid Berlin Oslo Vienna Tokyo Cairo")


@dataclass(frozen=True)
class Story:
    """Who and what a story is about, and its text."""

    name: str
    animal: str
    trait: str
    place: str
    friend: str
    friend_animal: str
    colour: str
    thing: str
    text: str


def a(word: str) -> str:
    """A word with its article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def make_story(draw: random.Random) -> Story:
    """A story of five parts: who, a day, a problem that a friend solves, and an end."""
    name, friend = draw.sample(NAMES, 2)
    animal, friend_animal = draw.sample(ANIMALS, 2)
    trait, place, weather = draw.choice(TRAITS), draw.choice(PLACES), draw.choice(WEATHERS)
    colour, thing = draw.choice(COLOURS), draw.choice(THINGS)
    she, her = ("she", "her") if name in SHE else ("he", "him")
    begin = draw.choice(
        [
            f"Once upon a time there was {a(trait)} {animal} named {name}. {name} lived {place}.",
            f"{name} was {a(trait)} {animal} who lived {place}.",
            f"Long ago there lived {a(trait)} {animal} {place}. The {animal} was called {name}.",
        ]
    )
    likes = f"{she.capitalize()} liked {draw.choice(LIKES)}."
    day = draw.choice(["One day", "One morning", f"One {weather} day", "One evening"])
    problem, solution = draw.choice(
        [
            (
                f"{day} {name} lost a {colour} {thing}. {she.capitalize()} looked everywhere, but it was gone.",
                f"{friend} had seen the {thing} under a big tree. {friend} and {name} went there and found it.",
            ),
            (
                f"{day} {name} found a {colour} {thing}. Whose could it be?",
                f'"That is my {thing}!" said {friend}. {name} gave it back, and {friend} was so glad.',
            ),
            (
                f"{day} {name} could not find the way home, and {she} was afraid.",
                f"{friend} had a {colour} {thing} that shone in the dark, and showed {her} the way.",
            ),
            (
                f"{day} {name} saw a {colour} {thing} high up in a tree. It was too high for {her}.",
                f'"Stand on my back!" said {friend}. So {name} climbed up and took the {thing}.',
            ),
            (
                f"{day} nobody wanted to play with {name}, and {she} felt sad.",
                f'"I will play with you," said {friend}. They played with a {colour} {thing} until it was dark.',
            ),
            (
                f"{day} {name} had a {colour} {thing}, but it was broken.",
                f'"I can mend it," said {friend}. Soon the {thing} was as good as new.',
            ),
        ]
    )
    meeting = draw.choice(
        [
            f"Then {name} met {friend} the {friend_animal}.",
            f"Then {friend} the {friend_animal} came by.",
            f'"Can I help you?" asked {friend} the {friend_animal}.',
        ]
    )
    end = draw.choice(
        [
            f"From that day on {name} and {friend} were the best of friends.",
            f'"Thank you, {friend}!" said {name}. And they went home {draw.choice(["singing", "happy"])}.',
            f"{name} was happy. It is good to have a friend like {friend}.",
            f"That night {name} slept well, and dreamt of {friend}.",
        ]
    )
    text = f"{begin} {likes} {problem} {meeting} {solution} {end}"
    return Story(name, animal, trait, place, friend, friend_animal, colour, thing, text)


def talk(asked: str, answer: str) -> list[Message]:
    """One question and its answer."""
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def ask_story(draw: random.Random) -> list[Message]:
    """A wish for a story, the story, and sometimes questions about it."""
    one = make_story(draw)
    asked = draw.choice(
        [
            f"Tell me a story about {a(one.animal)} named {one.name} {one.place}.",
            f"Tell me a story about {one.name} the {one.animal}.",
            f"Write a story about {a(one.animal)} named {one.name}.",
        ]
    )
    messages = talk(asked, one.text)
    if draw.random() < 0.6:
        for question, answer in draw.sample(_questions(one), draw.randint(1, 2)):
            messages += talk(question, answer)
    return messages


def _questions(one: Story) -> list[tuple[str, str]]:
    facts = {"name": one.name, "animal": one.animal, "friend": one.friend, "thing": one.thing}
    return [
        (f"Who is the friend of {one.name}?", f"{one.friend} the {one.friend_animal}."),
        ("Who is the story about?", f"It is about {one.name} the {one.animal}."),
        (f"Where does {one.name} live?", f"{one.name} lives {one.place}."),
        (f"Which colour has the {one.thing}?", f"The {one.thing} is {one.colour}."),
        ("Write the story as JSON.", json.dumps(facts)),
        ("Write the story as JSON.", json.dumps(facts)),
    ]


def _sentence(draw: random.Random) -> tuple[Story, str]:
    one = make_story(draw)
    text = draw.choice(
        [
            f"{one.name} the {one.animal} found a {one.colour} {one.thing} {one.place}.",
            f"{one.name} and {one.friend} live {one.place}. {one.name} likes {draw.choice(LIKES)}.",
            f"{one.name} gave {one.friend} a {one.colour} {one.thing}. {one.friend} was glad.",
        ]
    )
    return one, text


def ask_extract(draw: random.Random) -> list[Message]:
    """The answer is in the question."""
    one = make_story(draw)
    text = (
        f"{one.name} the {one.animal} gave {one.friend} the {one.friend_animal} a {one.colour} {one.thing}."
    )
    question, answer = draw.choice(
        [
            ("Who gave it?", f"{one.name} the {one.animal}."),
            ("Who got it?", f"{one.friend} the {one.friend_animal}."),
            ("What was it?", f"A {one.colour} {one.thing}."),
        ]
    )
    return talk(f"{text} {question}", answer)


def ask_repeat(draw: random.Random) -> list[Message]:
    """The answer repeats a text, or names in any order, which nothing but copying can give."""
    text = _sentence(draw)[1]
    if draw.random() < 0.7:
        text = ", ".join(draw.choices(NAMES + CITIES, k=draw.randint(4, 16))) + "."
    return talk(f"Repeat this: {text}", text)


def ask_change(draw: random.Random) -> list[Message]:
    """The answer repeats a text with another name."""
    one, text = _sentence(draw)
    other = draw.choice([name for name in NAMES if name not in (one.name, one.friend)])
    return talk(f"Change {one.name} to {other}: {text}", text.replace(one.name, other))


def ask_json(draw: random.Random) -> list[Message]:
    """A sentence as JSON."""
    one, age = make_story(draw), draw.randint(1, 9)
    text = f"{one.name} is {a(one.trait)} {one.animal}, {age} years old."
    facts = {"name": one.name, "animal": one.animal, "trait": one.trait, "age": age}
    return talk(f"Write this as JSON: {text}", json.dumps(facts))


def ask_greeting(draw: random.Random) -> list[Message]:
    """How one greets."""
    name = draw.choice(NAMES)
    return talk(
        *draw.choice(
            [
                ("Hello!", "Hello! Shall I tell you a story?"),
                (f"Hello, I am {name}.", f"Hello {name}! Shall I tell you a story?"),
                ("Who are you?", "I am a small storyteller that ships with Quire."),
                ("What can you do?", "I tell stories about animals, and answer questions about them."),
                ("Thank you!", "You are welcome!"),
            ]
        )
    )


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool in OpenAI's format. `parameters` are JSON types by name."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": tool("get_weather", "The weather in a city", city="string"),
    "get_time": tool("get_time", "The time in a city", city="string"),
}


def ask_tool(draw: random.Random) -> list[Message]:
    """A question that a tool answers: the call, its result, and the answer."""
    city, weather = draw.choice(CITIES), draw.choice(WEATHERS)
    hour = f"{draw.randint(0, 23)}:{draw.randint(0, 59):02}"
    if draw.random() < 0.5:
        asked = draw.choice([f"How is the weather in {city}?", f"What is the weather like in {city}?"])
        name, result, answer = "get_weather", {"weather": weather}, f"It is {weather} in {city}."
    else:
        asked = draw.choice([f"What time is it in {city}?", f"How late is it in {city}?"])
        name, result, answer = "get_time", {"time": hour}, f"It is {hour} in {city}."
    function = {"name": name, "arguments": {"city": city}}
    call = {"id": "call_0", "type": "function", "function": function}
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(result), "tool_call_id": "call_0"},
        {"role": "assistant", "content": answer},
    ]


# How often each kind of conversation is drawn.
KINDS: dict[Callable[[random.Random], list[Message]], float] = {
    ask_story: 4,
    ask_extract: 2,
    ask_repeat: 4,
    ask_change: 1,
    ask_json: 2,
    ask_greeting: 0.3,
    ask_tool: 2,
}


def conversation(draw: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages, and the tools that are offered with them."""
    (make,) = draw.choices([*KINDS], [*KINDS.values()])
    messages = make(draw)
    if make is ask_tool:
        named = messages[1]["tool_calls"][0]["function"]["name"]
        offered = [name for name in TOOLS if name == named or draw.random() < 0.3]
        return messages, [TOOLS[name] for name in draw.sample(offered, len(offered))]
    if make is not ask_story and draw.random() < 0.15:
        messages += draw.choice([ask_greeting, ask_extract, ask_json])(draw)
    return messages, []
