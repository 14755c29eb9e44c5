"""The time to the first token of agents whose contexts grow: `python -m benchmarks.agents [--chart FILE]`.

Some agents work side by side. A turn of each is a call of a tool, which the model writes, and the tool's
result, which is appended to its context. All agents have the same system prompt. The traces are made here, by
a seed: the lengths are drawn, and the tokens are random, which makes no difference to the time.

The KV of about one and a half contexts fits the memory, so that between two turns of an agent the others'
contexts push out its own (`--kv-pages` of the servers). Three servers take each turn one after another: one
that computes again what is gone, one that reads it from disk (`--kv-disk`), and one with memory for all. Each
is asked in two ways: with the whole context as a prompt of Execute, as stateless APIs are, and with what is
new on a held cache (`cache.generate`). Prints JSON, and draws the medians over the agents.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import quire
from quire.cli.load import plots

from benchmarks import machine
from benchmarks.gateway_process import GatewayProcess
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES
from benchmarks.weights import make_model

_PAGE_TOKENS = 16
_SYSTEM_TOKENS = 512
_TASK_TOKENS = range(32, 96)
_CALL_TOKENS = range(12, 32)
_RESULT_TOKENS = range(96, 512)
_VOCABULARY = 8192
_TIMEOUT_S = 3600.0
_STYLE = """
text { fill: #66707c; font: 12px sans-serif; } .back { fill: #fff; } .tip { opacity: 0; }
.grid { stroke: #e3e7ec; } .axis { stroke: #66707c; } .line { stroke-width: 2; fill: none; }
.k { font-weight: 600; } .c1 { fill: #d9480f; } .c2 { fill: #1f6feb; } .c3 { fill: #0c8a6a; }
.line.c1 { stroke: #d9480f; fill: none; } .line.c2 { stroke: #1f6feb; fill: none; }
.line.c3 { stroke: #0c8a6a; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #98a3b0; } .back { fill: #1a2027; } .grid { stroke: #2b333d; }
}
"""
_SERVERS = {"memory only": "c1", "KV on disk": "c2", "memory for all": "c3"}
# Takes what is new, and how many tokens are wanted. Seconds to the first of them.
Ask: TypeAlias = Callable[[Sequence[int], int], float]
# By server, turn and agent.
Times: TypeAlias = dict[str, list[list[float]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What an agent's context gets before the model writes, and how many tokens that writes then."""

    added: Sequence[int]
    call_tokens: int


def traces(agents: int, turns: int, seed: int) -> list[list[Turn]]:
    """The turns of each agent."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(_VOCABULARY) for _ in range(count)]

    system = tokens(_SYSTEM_TOKENS)
    found = []
    for _ in range(agents):
        added = [[*system, *tokens(rng.choice(_TASK_TOKENS))]]
        added += [tokens(rng.choice(_RESULT_TOKENS)) for _ in range(turns - 1)]
        found.append([Turn(own, rng.choice(_CALL_TOKENS)) for own in added])
    return found


def whole_prompts(client: quire.Client) -> Ask:
    """An agent that sends all of its context each time."""
    context: list[int] = []

    def ask(added: Sequence[int], count: int) -> float:
        context.extend(added)
        began_s = time.perf_counter()
        made = quire.item(context, max_tokens=count, ignore_eos=True)
        first_s, tokens = _read(client.execute([made], timeout_s=_TIMEOUT_S), began_s)
        context.extend(tokens)
        return first_s

    return ask


def held_cache(client: quire.Client) -> Ask:
    """An agent that has a cache, and sends what is new."""
    cache: list[quire.Cache] = []
    last: list[int] = []

    def ask(added: Sequence[int], count: int) -> float:
        began_s = time.perf_counter()
        if not cache:
            cache.append(client.prefill(added, timeout_s=_TIMEOUT_S))
            first_s, first = time.perf_counter() - began_s, cache[0].output.token_id
            _, tokens = _read(cache[0].generate(first, max_tokens=count - 1, ignore_eos=True), began_s)
        else:
            made = cache[0].generate([*last, *added], max_tokens=count, ignore_eos=True, timeout_s=_TIMEOUT_S)
            first_s, tokens = _read(made, began_s)
        # The last token of a call is not in the cache yet.
        last[:] = tokens[-1:]
        return first_s

    return ask


def _read(chunks: Iterable[Any], began_s: float) -> tuple[float, list[int]]:
    first_s, tokens = 0.0, list[int]()
    for chunk in chunks:
        if chunk.token_ids and not tokens:
            first_s = time.perf_counter() - began_s
        tokens += chunk.token_ids
    return first_s, tokens


_WAYS: Mapping[str, Callable[[quire.Client], Ask]] = {
    "whole prompts": whole_prompts,
    "held caches": held_cache,
}


def replayed(
    clients: dict[str, quire.Client], new: Callable[[quire.Client], Ask], turns: Sequence[list[Turn]]
) -> Times:
    """The seconds to the first token, of each turn those of all agents, by server."""
    found: Times = {name: [[] for _ in turns[0]] for name in clients}
    agents = {name: [new(client) for _ in turns] for name, client in clients.items()}
    for number in range(len(turns[0])):
        for at, trace in enumerate(turns):
            for name in clients:
                turn = trace[number]
                found[name][number].append(agents[name][at](turn.added, turn.call_tokens))
        medians = {name: round(statistics.median(times[number]), 2) for name, times in found.items()}
        print(f"turn {number + 1}: {medians}", file=sys.stderr, flush=True)
    return found


def contexts(turns: Sequence[list[Turn]]) -> list[int]:
    """The median length of a context at each turn."""
    lengths: list[list[int]] = [[] for _ in turns[0]]
    for trace in turns:
        length = 0
        for number, turn in enumerate(trace):
            length += len(turn.added)
            lengths[number].append(length)
            length += turn.call_tokens
    return [round(statistics.median(own)) for own in lengths]


def chart(found: Mapping[str, tuple[Sequence[int], Times]]) -> str:
    """An SVG: for each way the seconds to the first token over the length of the context."""
    keys = " ".join(f'<tspan class="k {colour}" dx="10">{name}</tspan>' for name, colour in _SERVERS.items())
    parts = []
    for at, (way, (lengths, own)) in enumerate(found.items()):
        lines = [
            plots.Line(name, colour, [statistics.median(times) for times in own[name]])
            for name, colour in _SERVERS.items()
        ]
        drawn = plots.against(lengths, lines, "tokens of the context", "s")
        drawn = drawn.replace("<svg", f'<svg x="{at * 570}" y="24" width="560" height="250"', 1)
        title = f"{way}, seconds to the first token: {keys}"
        parts.append(f'<text x="{at * 570 + 14}" y="20">{title}</text>{drawn}')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1140 280"><style>{_STYLE}</style>'
        f'<rect class="back" width="1140" height="280" rx="10"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default=DEFAULT_SHAPE)
    parser.add_argument("--layers", type=int, default=8, help="of the shape's; with a vocabulary of 8,192")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chart", type=Path, help="write the picture there")
    options = parser.parse_args()
    # Of each way other tokens, so that none finds the pages of another.
    turns = {
        way: traces(options.agents, options.turns, options.seed + number) for number, way in enumerate(_WAYS)
    }
    longest = max(
        sum(len(turn.added) + turn.call_tokens for turn in trace) for own in turns.values() for trace in own
    )
    few, for_all = (
        ["--kv-pages", str(round(factor * longest / _PAGE_TOKENS))] for factor in (1.5, 2 * options.agents)
    )
    with machine.report() as result, ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agents-")))
        shape = replace(
            SHAPES[options.shape],
            name=f"{options.shape}-{options.layers}",
            num_hidden_layers=options.layers,
            vocab_size=_VOCABULARY,
        )
        model = str(make_model(shape, scratch))
        disk = ["--kv-disk", str(scratch / "kv"), "--kv-disk-gb", "50"]
        flags = dict(zip(_SERVERS, (few, [*few, *disk], for_all), strict=True))
        gateways = {
            name: stack.enter_context(GatewayProcess(model=model, flags=own)) for name, own in flags.items()
        }
        clients = {
            name: stack.enter_context(quire.Client(gateway.address)) for name, gateway in gateways.items()
        }
        found = {
            way: (contexts(turns[way]), replayed(clients, new, turns[way])) for way, new in _WAYS.items()
        }
        if options.chart is not None:
            options.chart.write_text(chart(found), encoding="utf-8")
        result["context_tokens"] = {way: lengths for way, (lengths, _) in found.items()}
        result["first_token_s"] = {
            way: {name: [[round(one, 3) for one in times] for times in own] for name, own in servers.items()}
            for way, (_, servers) in found.items()
        }


if __name__ == "__main__":
    main()
