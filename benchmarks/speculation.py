"""What drafts gain, and cost where they are wrong: `python -m benchmarks.speculation`.

One server; texts with and without `speculation` take turns, and have to be equal. A text of one token (a
mask) has the drafts that are always right: the most that can be gained. One that is drawn from all tokens
hardly ever repeats some, and has no drafts; one that is drawn from few repeats some all the time without its
drafts being right, so that they can only cost.

With `--draft-layers` the first layers of the model are its draft model instead (`draft_pair`), which is often
right. At a high temperature it nearly always is: the draws are the same, and the models hardly matter. With
`--wrong-draft` all layers of the model count, so that its drafts are hardly ever right, and can only cost.

With `--model` it is a trained model with a head for multi-token prediction, which drafts (`.ci/train_head.py`
makes one). It is asked for stories, another one in each round.

Prints JSON: tokens a second without, the ratio of the times of each round, drafts, the tokens of a step with
and without, and those of a step that verified a draft. Times decide how much is drafted, and so these counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from quire.v1 import runner_pb2, runner_pb2_grpc, types_pb2

from benchmarks import machine
from benchmarks.draft_pair import make_pair
from benchmarks.gateway_process import GatewayProcess
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES
from benchmarks.weights import make_model
from workers.common.draft_models import MTP_HEAD

_PROMPT_TOKENS = 128
_TIMEOUT_S = 600.0
_DRAWN = types_pb2.SamplingParams(temperature=1.0, seed=7)
_ONE = runner_pb2.Constraint(mask=types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[100])))
_FEW = runner_pb2.Constraint(mask=types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=range(100, 132))))
# The texts, by what their drafts are.
_TEXTS: dict[str, dict[str, Any]] = {
    "right": {"constraint": _ONE},
    "none": {"sampling": _DRAWN},
    "wrong": {"sampling": _DRAWN, "constraint": _FEW},
}

# The same with a draft model.
_TEXTS_OF_MODEL: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"sampling": types_pb2.SamplingParams(temperature=0.6, seed=7)},
    "hot": {"sampling": types_pb2.SamplingParams(temperature=50.0, seed=7)},
}


_TEXTS_OF_HEAD = {name: _TEXTS_OF_MODEL[name] for name in ("greedy", "drawn")}
# Whom the stories of a trained model are about.
_ANIMALS, _NAMES = ("fox", "owl", "cat", "dog", "bear", "duck", "mouse"), ("Mia", "Tom", "Nora", "Leo", "Ivy")


def _item(number: int, turn: int, vocab_size: int, options: argparse.Namespace) -> runner_pb2.ExecuteItem:
    made = runner_pb2.ExecuteItem(item_id=f"text {number}", max_tokens=options.tokens, tokens_only=True)
    if options.model:
        index = turn * options.sequences + number
        animal, name = _ANIMALS[index % len(_ANIMALS)], _NAMES[index % len(_NAMES)]
        asked = f"Tell me a story about a {animal} named {name} by the sea."
        made.chat.messages.add(role=runner_pb2.CHAT_ROLE_USER, content=asked)
    else:
        rng = random.Random(1)
        prompt = [rng.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)]
        made.tokens.token_ids.extend([number, *prompt[1:]])
        made.ignore_eos = True
    return made


def _run(stub: Any, items: list[runner_pb2.ExecuteItem]) -> tuple[float, list[list[int]], runner_pb2.Usage]:
    """Seconds from when all have a token to the last of all, the tokens of each, and the drafts of all."""
    texts: dict[str, list[int]] = {item.item_id: [] for item in items}
    usage, began_s = runner_pb2.Usage(), 0.0
    for response in stub.Execute(runner_pb2.ExecuteRequest(items=items), timeout=_TIMEOUT_S):
        for chunk in response.chunks:
            assert not chunk.HasField("error"), chunk.error
            texts[chunk.item_id] += chunk.token_ids
            if chunk.HasField("usage"):
                usage.draft_tokens += chunk.usage.draft_tokens
                usage.accepted_draft_tokens += chunk.usage.accepted_draft_tokens
        if not began_s and all(texts.values()):
            began_s = time.perf_counter()
    return time.perf_counter() - began_s, list(texts.values()), usage


def _counts(server: GatewayProcess) -> tuple[int, int]:
    """How many steps the worker has taken, and how many drafts it has verified."""
    (worker,) = server.status().workers
    return worker.counts.steps, worker.counts.verify_operations


def _compare(
    server: GatewayProcess, vocab_size: int, options: argparse.Namespace, **settings: Any
) -> dict[str, Any]:
    assert server.channel is not None
    stub = runner_pb2_grpc.ModelRunnerServiceStub(server.channel)
    ratios: list[float] = []
    plain_s: list[float] = []
    tokens, steps, verifies, usage = 0, {False: 0, True: 0}, 0, runner_pb2.Usage()
    for turn in range(options.rounds):
        took: dict[bool, float] = {}
        texts: dict[bool, list[list[int]]] = {}
        for speculates in (True, False) if turn % 2 else (False, True):
            items = []
            for number in range(options.sequences):
                made = _item(number, turn, vocab_size, options)
                made.MergeFrom(runner_pb2.ExecuteItem(**settings))
                if speculates:
                    made.speculation.method = _method(options)  # type: ignore[assignment]  # an enum
                items.append(made)
            before = _counts(server)
            took[speculates], texts[speculates], found = _run(stub, items)
            after = _counts(server)
            steps[speculates] += after[0] - before[0]
            verifies += after[1] - before[1]
            usage.draft_tokens += found.draft_tokens
            usage.accepted_draft_tokens += found.accepted_draft_tokens
        assert texts[True] == texts[False], "drafts have changed a text"
        ratios.append(took[False] / took[True])
        plain_s.append(took[False])
        tokens += sum(map(len, texts[True]))
    return {
        "tokens_per_s": round(tokens / sum(plain_s), 1),
        "speedup": {
            "median": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        },
        "draft_tokens": usage.draft_tokens,
        "accepted_draft_tokens": usage.accepted_draft_tokens,
        "tokens_per_step": {name: round(tokens / steps[name == "with"], 2) for name in ("without", "with")},
        "tokens_per_verify": round(1 + usage.accepted_draft_tokens / max(1, verifies), 2),
    }


def _method(options: argparse.Namespace) -> int:
    if options.draft_layers or options.model:
        return runner_pb2.SPECULATION_METHOD_DRAFT_MODEL
    return runner_pb2.SPECULATION_METHOD_PROMPT_LOOKUP


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="a trained model with a head")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=DEFAULT_SHAPE)
    parser.add_argument("--quantization", default="", help="as of `quire serve`")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="at a time")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of each text")
    parser.add_argument("--draft-layers", type=int, default=0, metavar="N", help="of a draft model")
    parser.add_argument("--wrong-draft", action="store_true", help="a draft model of no use")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--cache", type=Path, default=Path("build/benchmarks/models"), help="where models are kept"
    )
    options = parser.parse_args()
    if options.wrong_draft and not options.draft_layers:
        parser.error("--wrong-draft needs --draft-layers")
    options.cache.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[options.shape]
    flags = ["--quantization", options.quantization] if options.quantization else []
    cache, texts = options.cache.resolve(), _TEXTS
    if options.model:
        model, texts = options.model.resolve(), _TEXTS_OF_HEAD
        flags += ["--draft-model", MTP_HEAD]
    elif options.draft_layers:
        model, draft, shape = make_pair(shape, options.draft_layers, cache)
        texts = _TEXTS_OF_MODEL
        if options.wrong_draft:
            model, texts = make_model(shape, cache), {"greedy": {}}
        flags += ["--draft-model", str(draft)]
    else:
        model = make_model(shape, cache)
    with machine.report() as found, GatewayProcess(model=str(model), flags=flags) as server:
        for name, settings in texts.items():
            found[name] = _compare(server, shape.vocab_size, options, **settings)


if __name__ == "__main__":
    main()
