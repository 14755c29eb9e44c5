"""The recipes: run as their docstrings say, and their functions against transformers."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from quire import AsyncClient, Client
from quire.v1 import executor_pb2

from tests.chat_templates import byte_tokenizer
from tests.client.pages import run_python
from tests.gateway_process import ROOT, GatewayProcess
from tests.model_factory import TinyModel, hf_greedy, hf_logits, hf_model, make_model
from tests.programs import output_of

# The references run beside servers and other tests, where more threads wait for one another.
torch.set_num_threads(1)

EXAMPLES = ROOT / "clients" / "python" / "examples"
SHIPPED = ROOT / "workers" / "models" / "adder"
PROMPT = [1, 2, 10, 3, 4, 11]
END = 12
ANSWER = "12+34=46"
# Of both random models, so that they can speculate for one another, and read what the shipped model reads.
VOCAB = 16
ROOM = 64
TOLERANCE = 1e-4


def tiny(directory: Path, seed: int) -> Path:
    """A random model with the shipped model's tokenizer."""
    ends = {"bos_token_id": 3, "eos_token_id": END}
    spec = TinyModel(vocab_size=VOCAB, max_positions=ROOM, seed=seed, extra=ends)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, directory)
    return make_model(directory, spec)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny(tmp_path_factory.mktemp("model"), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def gateways(models: list[Path]) -> Iterator[list[GatewayProcess]]:
    """Serve the random models in float32."""
    flags = ["--dtype", "float32", "--kv-pages", "256"]
    with (
        GatewayProcess(model=str(models[0]), flags=flags) as first,
        GatewayProcess(model=str(models[1]), flags=flags) as second,
    ):
        yield [first, second]


@pytest.fixture
def client(gateways: list[GatewayProcess]) -> Iterator[Client]:
    with Client(gateways[0].address, timeout_s=120) as connected:
        yield connected
        assert_released(connected)


def assert_released(client: Client) -> None:
    assert not client.stub.ListCaches(executor_pb2.ListCachesRequest()).kv_caches


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def texts_of(lines: list[str]) -> list[str]:
    return [line.split()[-1] for line in lines]


def is_best_of(lines: list[str]) -> bool:
    scores = [float(line.split()[0]) for line in lines]
    texts = texts_of(lines)
    return texts[0] == ANSWER and scores == sorted(scores, reverse=True) and len({*texts}) > 1


def is_beams(lines: list[str]) -> bool:
    return texts_of(lines)[0] == ANSWER and len(set(texts_of(lines))) == 4


def is_choices(lines: list[str]) -> bool:
    return texts_of(lines)[0] == "46" and sorted(texts_of(lines)) == ["45", "46", "47", "64"]


def is_agent(lines: list[str]) -> bool:
    *refused, taken = lines
    answer = re.fullmatch(r"'(\d+)' yes", taken)
    return (
        lines[0] == "'46' no"
        and all(line.endswith(" no") for line in refused)
        and answer is not None
        and int(answer[1]) % 5 == 0
    )


def is_rollouts(lines: list[str]) -> bool:
    found = [json.loads(line) for line in lines]
    return [one["seed"] for one in found] == [0, 1, 2] and all(
        len(one["tokens"]) == len(one["logprobs"]) == len(one["sampled_logprobs"])
        and max(one["sampled_logprobs"]) <= 0
        for one in found
    )


def is_perplexity(lines: list[str]) -> bool:
    found = re.fullmatch(r"1048 tokens scored, perplexity ([0-9.]+)", lines[0])
    return found is not None and float(found[1]) > 1


def is_(*expected: str) -> Callable[[list[str]], bool]:
    return lambda lines: lines == [*expected]


@pytest.mark.parametrize(
    ("name", "arguments", "is_right"),
    [
        ("greedy_loop", [], is_(ANSWER)),
        ("greedy_loop", ["100+23="], is_("100+23=123")),
        ("best_of_n", ["12+34=", "3"], is_best_of),
        ("beam_search", [], is_beams),
        ("speculative", [], is_(ANSWER, "3 tokens, 1 verifies")),
        ("ngram_drafts", [], is_(ANSWER, "3 tokens, 2 forwards")),
        ("token_tree", [], is_(ANSWER, "3 tokens, 1 verifies")),
        ("json_schema", [], is_("4")),
        ("json_schema", ['{"enum": [13, 47, 99]}'], is_("47")),
        ("perplexity", ["FILE"], is_perplexity),
        ("choices", [], is_choices),
        ("choices", ["5+5=", "10", "11"], lambda lines: texts_of(lines) == ["10", "11"]),
        ("backtracking_agent", [], is_agent),
        ("rollouts", ["12+34=", "3", "4"], is_rollouts),
    ],
)
def test_it_runs_and_says_the_same_again(
    shipped_gateway: GatewayProcess,
    tmp_path: Path,
    name: str,
    arguments: list[str],
    is_right: Callable[[list[str]], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "FILE").write_text("12+34=46\n" * 131 + "1", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    script, arguments = EXAMPLES / f"{name}.py", [shipped_gateway.address, *arguments]

    def lines() -> list[str]:
        if name == "greedy_loop":
            # As all are started.
            return output_of(sys.executable, str(script), *arguments).splitlines()
        return run_python(script, *arguments).splitlines()

    first = lines()
    assert is_right(first), first
    if name == "best_of_n":
        assert texts_of(lines()) == texts_of(first), "the seeds are the same"
    with Client(shipped_gateway.address) as client:
        assert_released(client)


def test_every_recipe_says_what_it_costs() -> None:
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        docstring = text.split('"""')[1]
        assert "Cost: " in docstring and "Shares steps: " in docstring, path.name
        assert f"examples/{path.name} " in docstring, path.name
        assert f"({Path('../clients/python/examples') / path.name})" in table, path.name


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("has_end", [False, True])
def test_beams_are_those_of_transformers(
    client: Client, models: list[Path], width: int, has_end: bool
) -> None:
    end = [END] if has_end else []
    for prompt in (PROMPT, [3], [7, 7, 1, 0, 5]):
        top = min((1 + len(end)) * width, VOCAB)
        beams = recipe("beam_search").beam_search(client, prompt, width, 12, end, top)
        model = hf_model(models[0])
        told = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            do_sample=False,
            early_stopping=True,
            eos_token_id=END if has_end else None,
            pad_token_id=END,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [row.tolist() for row in told.sequences[:, len(prompt) :]]
        texts = [row[: row.index(END) + 1] if has_end and END in row else row for row in rows]
        assert [text for _, text in beams] == texts
        if width > 1:
            assert [score for score, _ in beams] == pytest.approx(told.sequences_scores.tolist(), abs=1e-3)


def test_another_model_drafts_and_nothing_changes(gateways: list[GatewayProcess], models: list[Path]) -> None:
    with Client(gateways[0].address, timeout_s=120) as target, Client(gateways[1].address) as draft:
        text, verifies = recipe("speculative").speculate(target, draft, PROMPT, 24, [], temperature=0.0)
        assert text == hf_greedy(models[0], PROMPT, 24) and verifies <= 24
        own, fewer = recipe("speculative").speculate(target, target, PROMPT, 24, [], temperature=0.0)
        assert own == text and fewer == 5, "each verify gives the four drafts and one more"
        drawn, _ = recipe("speculative").speculate(target, draft, PROMPT, 24, [], temperature=0.8)
        again, _ = recipe("speculative").speculate(target, draft, PROMPT, 24, [], temperature=0.8)
        assert drawn == again and len(drawn) == 24
        assert_released(target)
        assert_released(draft)


@pytest.mark.parametrize("draws", [60, pytest.param(120, marks=pytest.mark.thorough)])
def test_speculation_draws_what_the_model_draws(
    gateways: list[GatewayProcess], models: list[Path], draws: int
) -> None:
    """How often each second token comes, against the model's own probabilities."""
    temperature = 2.0
    with Client(gateways[0].address) as target, Client(gateways[1].address) as draft:
        counts = torch.zeros(VOCAB)
        for seed in range(draws):
            text, _ = recipe("speculative").speculate(
                target, draft, PROMPT, 2, [], temperature=temperature, seed=2 * seed, width=1
            )
            counts[text[1]] += 1
    first = torch.softmax(hf_logits(models[0], PROMPT)[-1] / temperature, -1)
    behind = torch.stack([hf_logits(models[0], [*PROMPT, token])[-1] for token in range(VOCAB)])
    truth = first @ torch.softmax(behind / temperature, -1)
    # Five standard deviations of each share.
    assert ((counts / draws - truth).abs() <= 5 * (truth * (1 - truth) / draws).sqrt() + 1e-3).all()


def test_drafts_that_are_looked_up_change_nothing(client: Client, models: list[Path]) -> None:
    text, forwards = recipe("ngram_drafts").generate(client, PROMPT, 50, [])
    assert text == hf_greedy(models[0], PROMPT, 50)
    assert forwards < 50
    again, fewer = recipe("ngram_drafts").generate(client, [*PROMPT, *text[:20], *PROMPT], 10, [])
    assert again == hf_greedy(models[0], [*PROMPT, *text[:20], *PROMPT], 10) and fewer <= 10


def test_trees_of_drafts_change_nothing(gateways: list[GatewayProcess], models: list[Path]) -> None:
    with Client(gateways[0].address, timeout_s=120) as target, Client(gateways[1].address) as draft:
        text, verifies = recipe("token_tree").generate(target, draft, PROMPT, 24, [])
        assert text == hf_greedy(models[0], PROMPT, 24) and verifies < 24
        own, fewer = recipe("token_tree").generate(target, target, PROMPT, 24, [])
        assert own == text and fewer == 6, "each verify gives a token of every level and one more"
        assert_released(target)
        assert_released(draft)


def test_perplexity_in_windows(client: Client, models: list[Path]) -> None:
    tokens = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    found = recipe("perplexity").logprobs(client, tokens, 40, 25)
    truth = []
    for at in range(1, len(tokens)):
        # A window begins 25 tokens after the one before it, and scores what that one did not reach.
        begin = 0 if at < 40 else 25 * ((at - 40) // 25 + 1)
        logits = hf_logits(models[0], tokens[begin:at])[-1]
        truth.append(torch.log_softmax(logits, -1)[tokens[at]].item())
    assert found == pytest.approx(truth, abs=TOLERANCE)


def test_the_agent_tries_everything_once_best_first(client: Client, models: list[Path]) -> None:
    tried = list(recipe("backtracking_agent").answers(client, PROMPT, 3, []))
    assert len(tried) == 4**3 == len({tuple(text) for text in tried})
    assert tried[0] == hf_greedy(models[0], PROMPT, 3)
    best = hf_logits(models[0], [*PROMPT, *tried[0][:2]])[-1].topk(4).indices.tolist()
    assert tried[:4] == [[*tried[0][:2], token] for token in best]


async def test_rollouts_say_how_likely_they_were(gateways: list[GatewayProcess], models: list[Path]) -> None:
    temperature = 1.7
    async with AsyncClient(gateways[0].address, timeout_s=120) as client:
        found = await recipe("rollouts").rollouts(client, PROMPT, 6, 8, [END], temperature)
        alone = await recipe("rollouts").rollouts(client, PROMPT, 2, 8, [END], temperature)
        assert [one.tokens for one in alone] == [one.tokens for one in found[:2]]
        assert not (await client.stub.ListCaches(executor_pb2.ListCachesRequest())).kv_caches
    assert len({tuple(one.tokens) for one in found}) > 1
    for one in found:
        logits = hf_logits(models[0], [*PROMPT, *one.tokens])[len(PROMPT) - 1 : -1]
        for values, scale in ((one.logprobs, 1.0), (one.sampled_logprobs, temperature)):
            truth = torch.log_softmax(logits / scale, -1)[range(len(one.tokens)), one.tokens]
            assert values == pytest.approx(truth.tolist(), abs=TOLERANCE)


def test_grammars_of_a_tokenizer_of_bytes() -> None:
    """The shipped model's tokenizer is of the other kind, which llguidance is told token by token."""
    module = recipe("json_schema")
    tokenizer = byte_tokenizer()
    end = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<end>"])
    vocabulary = module.grammar_tokenizer(tokenizer, end + 1, end)
    schema = '{"type": "object", "properties": {"é": {"type": "boolean"}}, "required": ["é"]}'
    matcher = module.LLMatcher(vocabulary, module.LLMatcher.grammar_from_json_schema(schema))
    for token in [*tokenizer.encode('{"é":true}').ids, end]:
        mask = matcher.compute_bitmask()
        assert mask[token >> 3] >> (token & 7) & 1, tokenizer.id_to_token(token)
        matcher.consume_token(token)
    assert matcher.is_stopped()
