"""A worker whose ranks are processes, against one in one process: the same commands to two step loops."""

from __future__ import annotations

import dataclasses
import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.in_process import LlmExecutor
from tests.commands import (
    ApplyWeights,
    ChangeAdapters,
    Command,
    DiscardWeights,
    Fork,
    ReadWeights,
    Release,
    Truncate,
)
from tests.families import settings_of, some
from tests.forks import ForkedRank
from tests.model_factory import (
    TinyModel,
    float32_losses,
    hf_model,
    make_adapter,
    make_family_model,
    make_model,
)
from tests.recurrent import RECURRENT
from tests.token_trees import random_tree
from tests.workers.stepping import Worker
from tests.workers.test_recurrent_engine import model_of, run_random_operations
from workers.executors.memory import LoraLimits
from workers.given_experts import GivenExperts
from workers.models.errors import ModelError
from workers.models.registry import FAMILIES
from workers.operations import Accept, AdapterSource, Forward, Kind, Result, WeightsRead
from workers.outputs import DataType, HiddenSpec, OutputSpec
from workers.runners import rank_processes
from workers.runners.base import DeviceLostError
from workers.runners.rank_processes import RankProcesses
from workers.runners.tensor_parallel import RankGroup

PAGES = 200
PATIENCE_S = 60
WITH_LOGITS = OutputSpec(logits=DataType.F32)
LORA = LoraLimits(max_adapters=2, max_rank=8, max_bytes=1 << 24)


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "subprocess", SimpleNamespace(Popen=ForkedRank))
        yield


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """Two ranks, which load one model after the other."""
    ended = threading.Event()
    group = RankGroup(RankProcesses(2, [], ended.set))
    yield group
    assert not ended.is_set()
    group.close()


def workers_of(directory: Path, group: RankGroup) -> tuple[Worker, Worker]:
    """In one process and in two, whose steps take few tokens."""
    split, alone = (
        LlmExecutor.load(directory, kv_pages=PAGES, self_check=False, lora=LORA, ranks=ranks)
        for ranks in (group, None)
    )
    return tuple(  # type: ignore[return-value]  # two
        Worker(
            executor.engine, limits=(24, 16, 64), adapters=executor.adapters, replacement=executor.replacement
        )
        for executor in (alone, split)
    )


def random_commands(dice: random.Random, steps: int) -> Iterator[list[Command]]:
    """Prompts in chunks, decodes, verifies, trees, forks, truncations and releases, of up to 4 sequences.

    Which drafts a verify accepts is up to the model, so those keep all, and trees their root.
    """
    lengths: dict[int, int] = {}
    op_id = 0
    for step in range(steps):
        commands: list[Command] = []
        if len(lengths) < 3:
            lengths[step] = 0
        for key in dice.sample(list(lengths), dice.randint(1, len(lengths))):
            op_id += 1
            length, count = lengths[key], dice.choice((1, 1, 3, 40))
            parents: Sequence[int] = ()
            tokens: Sequence[int] = [dice.randrange(97) for _ in range(count)]
            if length and count == 3:
                tree = random_tree(dice, 3, 9, 97)
                tokens, parents = tree.token_ids, tree.parents
            commands.append(
                Forward(
                    op_id,
                    key,
                    length,
                    tokens,
                    rows=len(tokens) if parents or dice.random() < 0.5 else 1,
                    output=WITH_LOGITS,
                    kind=Kind.VERIFY if parents else Kind.PREFILL if count > 1 else Kind.DECODE,
                    accept=Accept.ALL,
                    parents=parents,
                )
            )
            lengths[key] += 1 if parents else len(tokens)
        yield commands
        op_id += 1
        key = dice.choice(list(lengths))
        if len(lengths) < 4 and lengths[key] > 1:
            # Both go on within the page that they share, so that it is copied.
            lengths[100 + step] = lengths[key]
            yield [Fork(op_id, key, [100 + step])]
        elif dice.random() < 0.5 and lengths[key] > 2:
            lengths[key] = dice.randint(1, lengths[key] - 1)
            yield [Truncate(op_id, key, lengths[key])]
        elif len(lengths) == 4 or max(lengths.values()) > 200:
            del lengths[key]
            yield [Release(op_id, [key])]


def rows_of(forward: object) -> torch.Tensor:
    assert isinstance(forward, Forward), forward
    return torch.stack([numbers(output.logits) for output in forward.outputs])


def bound_of(directory: Path) -> float:
    """How far the logits of two correct computations may be apart; see `float32_losses`."""
    dice = random.Random(2)
    texts = [[dice.randrange(97) for _ in range(length)] for length in (60, 150, 240)]
    return float(float32_losses(hf_model(directory), texts, with_states=False).max())


# Ranks in one process, by which these are split: test_tensor_parallel.py, for more families.
@pytest.mark.parametrize(
    ("name", "layers", "steps"),
    [
        ("mixtral", 2, 30),
        *(
            pytest.param(name, 4, 60, marks=pytest.mark.thorough)
            for name in ("mixtral", "qwen3", "llama with biases", "olmo2", "gemma3")
        ),
    ],
)
def test_any_commands(name: str, layers: int, steps: int, group: RankGroup, tmp_path: Path) -> None:
    family, settings = settings_of(name)
    directory = make_family_model(tmp_path, family, settings | {"num_hidden_layers": layers}, seed=7)
    bound, compared = bound_of(directory), 0
    alone, split = workers_of(directory, group)
    for commands in random_commands(random.Random(name), steps):
        expected, found = (worker.answers(*commands) for worker in (alone, split))
        assert expected.keys() == found.keys()
        for op_id, answer in expected.items():
            if isinstance(answer, Forward):
                assert (rows_of(answer) - rows_of(found[op_id])).abs().max() < bound
                compared += 1
        assert alone.lengths() == split.lengths()
    assert compared > steps


@pytest.mark.parametrize(
    "model_type",
    some(sorted(RECURRENT.keys() & FAMILIES.keys()), ("granitemoehybrid", "qwen3_next")),
)
def test_recurrent_states(model_type: str, group: RankGroup, tmp_path: Path) -> None:
    """Each rank has a part of each state, after appends, verifies, forks and cuts too.

    Replays of what a killed rank has lost: tests/e2e/test_recurrent.py, with --thorough.
    """
    model_of(model_type).module.save_pretrained(tmp_path)
    executor = LlmExecutor.load(tmp_path, kv_pages=PAGES, self_check=False, ranks=group)
    run_random_operations(model_type, executor.engine)


def test_trees_move_what_they_accept(group: RankGroup, tmp_path: Path) -> None:
    """The accepted path becomes consecutive, on every rank, and the text goes on behind it."""
    directory = make_model(tmp_path, TinyModel())
    alone, split = workers_of(directory, group)
    prompt = list(range(20))
    for worker in (alone, split):
        worker.answers(Forward(1, 1, 0, prompt))
    chosen = alone.answers(Forward(2, 1, 20, [5], kind=Kind.DECODE))[2]
    assert isinstance(chosen, Forward)
    after = chosen.outputs[-1].token_id
    tree = Forward(
        3, 1, 20, [5, 96 - after, after], rows=3, kind=Kind.VERIFY, accept=Accept.CHOSEN, parents=[0, 0]
    )
    rows = []
    for worker in (alone, split):
        done = worker.answers(tree)[3]
        assert isinstance(done, Forward) and list(done.kept_path) == [0, 2]
        rows.append(rows_of(worker.answers(Forward(4, 1, 22, [9], output=WITH_LOGITS, kind=Kind.DECODE))[4]))
    assert (rows[0] - rows[1]).abs().max() < bound_of(directory)


def test_hidden_states_and_given_experts(group: RankGroup, tmp_path: Path) -> None:
    """Only rank 0 returns them. The other rank computes with the experts that a caller gives."""
    directory = make_family_model(tmp_path, *settings_of("qwen3_moe"), seed=7)
    dice, generator = random.Random(2), np.random.default_rng(1)
    text = [dice.randrange(97) for _ in range(50)]
    every = OutputSpec(logits=DataType.F32, hidden=HiddenSpec((0, 2, 4)), experts=True)
    ids = np.stack([generator.permuted(range(6)) for _ in range(50 * 4)])[:, :2].reshape(50, 4, 2)
    found = []
    for ranks in (None, group):
        executor = LlmExecutor.load(directory, kv_pages=PAGES, self_check=False, ranks=ranks)
        plain, given = executor.forward(text, every), executor.forward(text, every, GivenExperts(0, ids))
        found.append([*plain, *given])
    (*losses,) = float32_losses(hf_model(directory), [text])[0]
    for expected, split in zip(*found, strict=True):
        assert expected.experts == split.experts
        for layer, one, other in zip((0, 2, 4), expected.hidden, split.hidden, strict=True):
            assert (numbers(one) - numbers(other)).abs().max() <= losses[layer]
        assert (numbers(expected.logits) - numbers(split.logits)).abs().max() < losses[-1]
    routed, replayed = (numbers(found[1][index].logits) for index in (49, 99))
    assert (routed - replayed).abs().max() > 100 * losses[-1]


def numbers(row: bytes | None) -> torch.Tensor:
    return torch.frombuffer(bytearray(row or b""), dtype=torch.float32)


def read_weights(worker: Worker, op_id: int, directory: Path, *before: Command) -> Result:
    answers = worker.round(*before, ReadWeights(op_id, str(directory)))
    if not answers:
        worker.loop.take()  # waits for what the reading thread reports
        worker.loop.flush()
        answers = worker.round()
    (answer,) = answers
    return answer


def test_adapters_and_other_weights(group: RankGroup, tmp_path: Path) -> None:
    """Adapters are read by all ranks and evict each other; weights are replaced, and adapters stay."""
    models = [make_model(tmp_path / f"model-{seed}", TinyModel(seed=seed)) for seed in range(2)]
    sources = [
        AdapterSource(
            number,
            str(
                make_adapter(
                    tmp_path / f"adapter-{number}",
                    models[0],
                    seed=number,
                    r=4,
                    target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
                )
            ),
        )
        for number in (1, 2, 3)
    ]
    alone, split = workers_of(models[0], group)
    rows: dict[int, list[torch.Tensor]] = {}
    for worker in (alone, split):
        worker.answers(ChangeAdapters(1, sources))
        for op_id, adapter in enumerate((1, 2, 3, 1, 0), start=2):
            forward = Forward(op_id, op_id, 0, [1, 2, 3], output=WITH_LOGITS, adapter=adapter)
            rows.setdefault(op_id, []).append(rows_of(worker.answers(forward)[op_id]))
        worker.answers(Release(20, list(range(2, 7))))
        # What was read first is discarded while the ranks read again.
        assert isinstance(read_weights(worker, 21, models[1]), WeightsRead)
        discard = DiscardWeights(22)
        assert isinstance(read_weights(worker, 23, models[1], discard), WeightsRead)
        worker.round(ApplyWeights(24))
        for op_id, adapter in ((30, 1), (31, 0)):
            forward = Forward(op_id, op_id, 0, [1, 2, 3], output=WITH_LOGITS, adapter=adapter)
            rows.setdefault(op_id, []).append(rows_of(worker.answers(forward)[op_id]))
    # An adapter adds a product to each: see `test_lora_model`.
    bound = 2 * max(bound_of(model) for model in models)
    for expected, found in rows.values():
        assert (expected - found).abs().max() < bound
    firsts = [expected for expected, _ in rows.values()]
    for index, one in enumerate(firsts):
        for other in firsts[:index]:
            same = torch.equal(one, other)
            assert same == (index == 3 and other is firsts[0])


class LatePlans:
    """What is sent arrives when it is let through. In place of a socket."""

    def __init__(self, plans: socket.socket) -> None:
        self._plans, self._late = plans, list[bytes]()

    def sendall(self, message: bytes) -> None:
        self._late.append(message)

    def let_through(self) -> None:
        for message in self._late:
            self._plans.sendall(message)
        self._late = []


def test_a_late_rank_uses_the_weights_that_were_meant(group: RankGroup, tmp_path: Path) -> None:
    """It has read the next ones before it hears that it is to use those before."""
    models = [make_model(tmp_path / f"model-{seed}", TinyModel(seed=seed)) for seed in range(3)]
    found = []
    for worker in workers_of(models[0], group):
        (other,) = group.processes.others
        late = LatePlans(other.plans)
        group.processes.others[:] = [dataclasses.replace(other, plans=cast("Any", late))]
        assert isinstance(read_weights(worker, 1, models[1]), WeightsRead)
        worker.round(ApplyWeights(2))
        assert isinstance(read_weights(worker, 3, models[2]), WeightsRead)
        late.let_through()
        group.processes.others[:] = [other]
        first = worker.answers(Forward(4, 4, 0, [1, 2, 3], output=WITH_LOGITS))[4]
        worker.round(ApplyWeights(5))
        then = worker.answers(Forward(6, 6, 0, [1, 2, 3], output=WITH_LOGITS))[6]
        found.append([rows_of(first), rows_of(then)])
    for alone, split, model in zip(*found, models[1:], strict=True):
        assert (alone - split).abs().max() < bound_of(model)


@pytest.mark.parametrize(
    ("settings", "backend", "why"),
    [
        ({"num_attention_heads": 3, "head_dim": 32, "num_key_value_heads": 1, "hidden_size": 96}, "auto",
         "tensor_parallel = 2 must divide the model's num_attention_heads, which is 3"),
        ({}, "transformers", "tensor_parallel = 2 needs a model that native code runs"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(
    settings: dict[str, int], backend: str, why: str, group: RankGroup, tmp_path: Path
) -> None:
    """Before it is loaded; the ranks can load another model."""
    family, sizes = settings_of("llama")
    directory = make_family_model(tmp_path, family, sizes | settings)
    with pytest.raises(ModelError, match=why):
        LlmExecutor.load(directory, kv_pages=PAGES, self_check=False, backend=backend, ranks=group)


def test_what_another_rank_refuses_is_refused(group: RankGroup, tmp_path: Path) -> None:
    """A value that is not finite, in a part of a tensor that only rank 1 reads."""
    directory = make_family_model(tmp_path, *settings_of("llama"))
    (file,) = (
        f for f in directory.glob("*.safetensors") if b"model.layers.3.self_attn.q_proj" in f.read_bytes()
    )
    spoil(file, "model.layers.3.self_attn.q_proj.weight")
    with pytest.raises(ModelError, match=r"tensor model\.layers\.3\.self_attn\.q_proj\.weight is not finite"):
        LlmExecutor.load(directory, kv_pages=PAGES, self_check=False, ranks=group)


def spoil(file: Path, name: str) -> None:
    """Write NaN into the last element of a tensor."""
    tensors = load_file(file)
    tensors[name][-1, -1] = torch.nan
    save_file(tensors, file, {"format": "pt"})


def test_a_rank_that_ends_ends_the_group(tmp_path: Path) -> None:
    """Rank 0 is told, and its next step fails, instead of waiting for the dead one."""
    ended = threading.Event()
    group = RankGroup(RankProcesses(2, [], ended.set))
    executor = LlmExecutor.load(
        make_model(tmp_path, TinyModel()), kv_pages=PAGES, self_check=False, ranks=group
    )
    executor.prefill(1, [1, 2, 3])
    group.processes.others[0].process.kill()
    assert ended.wait(PATIENCE_S)
    with pytest.raises(DeviceLostError):
        executor.decode(1, 4)
    group.close()


def test_a_rank_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is stopped, or whose device hangs."""
    monkeypatch.setattr(rank_processes, "_END_TIMEOUT_S", 1.0)
    processes = RankProcesses(2, [], threading.Event().set)
    (other,) = processes.others
    other.process.send_signal(signal.SIGSTOP)
    closing = threading.Thread(target=processes.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    is_alive = closing.is_alive()
    other.process.kill()  # also if it was not
    assert not is_alive and other.process.wait() == -signal.SIGKILL
