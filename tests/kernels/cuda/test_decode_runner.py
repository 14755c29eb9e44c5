"""The decode runner against the eager one, with launches repeated in place of CUDA graphs.

Here the graphs' own kernels run in Triton's interpreter, the model on the CPU; on a GPU everything runs
there, and graphs are real.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.sizes import ForwardsFirst
from tests.kernels.conftest import SELDOM
from tests.kernels.tree_batches import Tree, with_trees
from tests.workers.packing import HandPacker, HandSequence, Item
from workers.executors.memory import StepLimits, new_runner
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.builder import build_decoder
from workers.models.capture import RowCapture
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.outputs import Sampling, TokenMask
from workers.runners.base import After, DeviceLostError, LaunchedStep
from workers.runners.cuda_graph import CudaGraphRunner, buckets_up_to
from workers.runners.decode_buffers import DecodeBuffers
from workers.runners.device_queue import DeviceQueue
from workers.runners.eager import EagerRunner
from workers.runners.graph_capture import Capture
from workers.sampling import BadLogitsError, SamplingRow

PAGES = 120
VOCAB = 97
FILTERED = Sampling(temperature=2.0, top_k=2, top_p=0.9, seed=7)
SETTINGS = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def make_kv(device: str) -> KvTensors:
    """Unused slots hold NaN."""
    kv = KvTensors(
        [LayerKv(2, 64, 64)] * 2,
        num_pages=PAGES,
        page_size=16,
        dtype=torch.float32,
        device=device,
    )
    for layer in range(2):
        for pages in kv.layer(layer):
            pages.data.fill_(torch.nan)
    return kv


@pytest.fixture
def decoder(device: str) -> Decoder:
    return random_decoder(SETTINGS, device)


def random_decoder(settings: dict[str, object], device: str) -> Decoder:
    made = build_decoder(ModelConfig.from_settings(settings), torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    for target in made.targets().values():
        values = torch.randn(target.tensor.shape, generator=generator)
        target.tensor.copy_(values * (0.3 if values.dim() > 1 else 0.1) + (values.dim() == 1))
    return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step, whether anything was sent to the device."""
    seen: list[bool] = []
    load = DecodeBuffers.load

    def record(self: DecodeBuffers, *arguments: object) -> bool:
        seen.append(load(self, *arguments))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(DecodeBuffers, "load", record)
    return seen


class LateQueue(DeviceQueue):
    """Does nothing before an event is waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.launched: list[Callable[[], object]] = []
        self.done = 0

    def launch(self, run: Callable[[], object]) -> None:
        self.launched.append(run)

    def event(self) -> LateEvent:
        return LateEvent(self)


class LateEvent:
    def __init__(self, queue: LateQueue) -> None:
        self._queue, self._place = queue, 0

    def record(self) -> None:
        self._place = len(self._queue.launched)

    def query(self) -> bool:
        return self._queue.done >= self._place

    def synchronize(self) -> None:
        with torch.inference_mode():
            while not self.query():
                self._queue.launched[self._queue.done]()
                self._queue.done += 1


class Twins:
    """The same sequences in two pools: one for each runner."""

    def __init__(
        self,
        decoder: Decoder,
        device: str,
        max_rows: int = 4,
        capture: Capture | None = None,
        queue: DeviceQueue | None = None,
        *,
        graphs: bool = True,
    ) -> None:
        if graphs:
            capture = capture or (ForwardsFirst(max_rows) if device == "cpu" else None)
        kvs = make_kv(device), make_kv(device)
        self.graph = CudaGraphRunner(
            decoder, kvs[0], max_rows=max_rows, max_seq_len=256, graphs=graphs, capture=capture, queue=queue
        )
        self.eager = EagerRunner(decoder, kvs[1])
        self.packer = HandPacker(16, range(1, PAGES))

    def begin(self, *prompts: Sequence[int]) -> list[HandSequence]:
        """A sequence for each, one after the other."""
        sequences = [HandSequence() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            self.step([Item(sequence, prompt)])
        return sequences

    def step(self, items: list[Item], rows: list[SamplingRow] | None = None) -> list[int]:
        """Run both, compare, and return the chosen tokens."""
        inputs = self.packer.pack(items)
        rows = rows or [SamplingRow() for item in items for _ in item.wanted]
        ours, theirs = self.graph.step(inputs, rows), self.eager.step(inputs, rows)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        assert ours.chosen.tolist() == theirs.chosen.tolist()
        return [int(token) for token in ours.chosen]


def decodes(sequences: Sequence[HandSequence], tokens: Sequence[int]) -> list[Item]:
    """The next token of each."""
    return [Item(sequence, [token]) for sequence, token in zip(sequences, tokens, strict=True)]


# Rows without a sequence are computed of whatever is in memory, and not read.
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_without_graphs_the_launches_are_the_same(
    decoder: Decoder, device: str, sent: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Over the same memory, and ahead. Before, a runner without buffers ran them."""
    twins = Twins(decoder, device, graphs=False)
    assert (twins.graph.name, twins.graph.can_launch) == (EagerRunner.name, True)
    sequences = twins.begin(range(3), range(9), range(12))
    tokens = [1, 2, 3]
    for _ in range(4):
        tokens = twins.step(decodes(sequences, tokens))
    assert sent == [True, False, False, False], "the tokens chosen are in the device's memory"
    inputs = twins.packer.pack(decodes(sequences, tokens))
    step = twins.graph.launch(inputs, [SamplingRow()] * 3, keeps_logits=True)
    assert step is not None, "the next step can be launched while this one runs"
    step.chosen()
    assert not caplog.records


def test_what_switches_graphs_off_keeps_the_buffers() -> None:
    """As the model's device says, which has no GPU behind it here."""
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), graphable=True, has_hidden_states=True, state_shapes=()
    )
    for graphs, name in ((True, "cuda_graph"), (False, "eager")):
        limits = StepLimits(max_items=6, cuda_graphs=graphs)
        runner = new_runner(model, make_kv("cpu"), limits, max_seq_len=256)
        assert isinstance(runner, CudaGraphRunner)
        assert (runner.name, runner.can_launch) == (name, True)


def test_buckets() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(5) == (1, 2, 4, 5)
    assert buckets_up_to(1000)[-1] == 256 and len(buckets_up_to(1000)) == 15


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SELDOM) for seed in (1, 2))])
def test_any_schedule_of_decodes_prefills_and_settings(decoder: Decoder, device: str, seed: int) -> None:
    random_ = random.Random(seed)
    twins = Twins(decoder, device, max_rows=6)
    tokens = [random_.randrange(VOCAB) for _ in range(8)]
    prompts = [[random_.randrange(VOCAB) for _ in range(random_.randint(1, 40))] for _ in tokens]
    sequences = twins.begin(*prompts)
    allowed = TokenMask(allowed=tuple(range(0, VOCAB, 3)))
    for _ in range(12):
        picked = random_.sample(range(8), random_.choice([1, 2, 3, 5, 6, 7]))
        items, rows = [], []
        for index in picked:
            long = random_.random() < 0.05
            items.append(Item(sequences[index], [tokens[index]] * (3 if long else 1)))
            spec = random_.choice(
                [
                    None,
                    Sampling(temperature=0.8, seed=7),
                    Sampling(temperature=1.5, top_k=5, seed=-1),
                    Sampling(temperature=0.9, top_p=0.7, min_p=0.05, seed=2**64 - 1),
                    Sampling(temperature=0.9, repetition_penalty=1.3, seed=4),
                ]
            )
            mask = allowed if random_.random() < 0.2 else None
            rows.append(SamplingRow(spec, mask, position=sequences[index].length + len(items[-1].tokens)))
        chosen = twins.step(items, rows)
        for index, token in zip(picked, chosen, strict=True):
            tokens[index] = token if random_.random() < 0.8 else random_.randrange(VOCAB)


def test_callers_who_take_the_chosen_tokens_send_nothing(
    decoder: Decoder, device: str, sent: list[bool]
) -> None:
    twins = Twins(decoder, device)
    sequences = twins.begin(range(3), range(9), range(12))
    tokens = [1, 2, 3]
    for _ in range(10):
        tokens = twins.step(decodes(sequences, tokens))
    # The first batch, and where the third sequence (at 16 tokens) and the second get another page. The first
    # sequence does not get that far.
    assert [step for step, was_sent in enumerate(sent) if was_sent] == [0, 4, 7]


def test_another_token_another_batch_and_another_draw_are_sent(
    decoder: Decoder, device: str, sent: list[bool]
) -> None:
    twins = Twins(decoder, device)
    first, second = twins.begin([5, 6], [5, 6])
    (token,) = twins.step([Item(first, [1])])
    twins.step([Item(first, [token + 1 if token < 50 else token - 1])])
    tokens = twins.step([Item(first, [1]), Item(second, [1])])
    twins.step([Item(second, [tokens[1]]), Item(first, [tokens[0]])])
    drawn = SamplingRow(Sampling(temperature=1.0, seed=3), position=first.length + 1)
    (token,) = twins.step([Item(first, [2])], [drawn])
    drawn = SamplingRow(Sampling(temperature=1.0, seed=3), position=first.length + 1)
    (token,) = twins.step([Item(first, [token])], [drawn])
    masked = SamplingRow(mask=TokenMask(allowed=(4,)))
    assert twins.step([Item(first, [token])], [masked]) == [4]
    twins.step([Item(first, [4])])
    assert all(sent) and len(sent) == 8


def rows_of(
    specs: Sequence[Sampling | None], sequences: Sequence[HandSequence], ahead: int = 0
) -> list[SamplingRow]:
    """Of packed sequences, or of what follows them."""
    both = zip(specs, sequences, strict=True)
    return [SamplingRow(spec, position=each.length + ahead) for spec, each in both]


def test_steps_are_launched_before_the_tokens_of_the_last_one_are_read(decoder: Decoder, device: str) -> None:
    """Rows that are greedy, drawn and filtered; pages that end at different steps; and then as ever."""
    dice = random.Random(0)
    twins = Twins(decoder, device, queue=LateQueue() if device == "cpu" else None)
    drawn = Sampling(temperature=1.2, seed=3)
    for specs_of_batch in ([None] * 4, [drawn, None], [FILTERED, None, drawn]):
        specs = specs_of_batch
        sequences = twins.begin(*([dice.randrange(VOCAB)] * dice.randint(9, 16) for _ in specs))
        tokens = [dice.randrange(VOCAB) for _ in specs]
        step: LaunchedStep | None = None
        for turn in range(7):
            inputs = twins.packer.pack([Item(each, [0]) for each in sequences])
            known = dataclasses.replace(inputs, token_ids=torch.tensor(tokens))
            rows = rows_of(specs, sequences)
            step = step or twins.graph.launch(known, rows, keeps_logits=True)
            assert step is not None
            theirs = twins.eager.step(known, rows)
            places, rows_ahead = list(range(len(sequences))), list[SamplingRow]()
            if turn == 3 and len(sequences) > 1:
                # A text ends, and the others go on.
                places = [at for at in range(len(sequences)) if at != 1]
                sequences, specs = [sequences[at] for at in places], [specs[at] for at in places]
                rows_ahead = rows_of(specs, sequences, 1)
            ahead = [HandSequence(each.pages, each.length) for each in sequences]
            following = twins.graph.launch(
                twins.packer.pack([Item(each, [0]) for each in ahead]),
                rows_ahead,
                keeps_logits=True,
                after=After(step, np.array(places) if rows_ahead else None),
            )
            assert device != "cpu" or not step.is_done()
            tokens = step.chosen().tolist()
            assert tokens == theirs.chosen.tolist()
            with step.logits() as logits:
                torch.testing.assert_close(logits, theirs.logits, rtol=1e-4, atol=1e-4)
            tokens = [tokens[at] for at in places]
            step = following
        assert step is not None and len(step.chosen()) == len(specs)
        tokens = twins.step(decodes(sequences, tokens))
        twins.step(decodes(sequences, tokens))
        kvs = [runner._kv.layer(1)[0].data for runner in (twins.graph, twins.eager)]
        torch.testing.assert_close(*kvs, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_step_ahead_uses_the_tokens_on_the_device(decoder: Decoder, device: str) -> None:
    twins = Twins(decoder, device)
    (sequence,) = twins.begin(range(5))
    (token,) = twins.step([Item(sequence, [1])])
    twins.graph.replay_last(3)
    kv_ahead = twins.graph._kv.layer(1)[0].data.clone()
    for _ in range(3):
        inputs = twins.packer.pack([Item(sequence, [token])])
        token = int(twins.eager.step(inputs, [SamplingRow()]).chosen)
    torch.testing.assert_close(
        kv_ahead, twins.eager._kv.layer(1)[0].data, equal_nan=True, rtol=1e-4, atol=1e-4
    )
    twins.step([Item(sequence, [token])])


def test_unusable_logits_name_their_rows(decoder: Decoder, device: str) -> None:
    twins = Twins(decoder, device)
    sequences = twins.begin([5, 6], [5, 6], [5, 6])
    page = sequences[1].pages[0]
    for layer in range(2):
        for pages in twins.graph._kv.layer(layer):
            pages.data[page, 0] = torch.nan
    inputs = twins.packer.pack([Item(sequence, [1]) for sequence in sequences])
    with pytest.raises(BadLogitsError) as caught:
        twins.graph.step(inputs, [SamplingRow()] * 3)
    assert caught.value.rows == (1,)
    for sequence in sequences:
        sequence.length -= 1
    for kept in (sequences[0], sequences[2]):
        twins.step([Item(kept, [1])])


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_step_with_unusable_logits_is_sent_again_when_it_is_repeated(
    decoder: Decoder, device: str, sent: list[bool], is_ahead: bool
) -> None:
    """The device has advanced its buffers, though nothing was sent for that step either."""
    twins = Twins(decoder, device)
    (sequence,), rows = twins.begin([5, 6]), [SamplingRow()]
    (token,) = twins.step([Item(sequence, [1])])
    inputs = twins.packer.pack([Item(sequence, [token])])
    step: LaunchedStep | None = None
    if is_ahead:
        step = twins.graph.launch(inputs, rows)
        token = int(twins.eager.step(inputs, rows).chosen)
        inputs = twins.packer.pack([Item(sequence, [token])])
    data = twins.graph._kv.layer(0)[1].data
    before = data.clone()
    data[sequence.pages[0], 0] = torch.nan
    following = step and twins.graph.launch(inputs, (), after=After(step))
    assert step is None or step.chosen().tolist() == [token]
    with pytest.raises(BadLogitsError):
        following.chosen() if following else twins.graph.step(inputs, rows)
    data.copy_(before)
    sequence.length -= 1
    twins.step([Item(sequence, [token])])
    assert sent == [True, False, True]


def test_larger_batches_and_longer_sequences_run_eagerly(
    decoder: Decoder, device: str, sent: list[bool]
) -> None:
    twins = Twins(decoder, device, max_rows=2)
    sequences = [HandSequence() for _ in range(3)]
    twins.step([Item(sequence, [1, 2]) for sequence in sequences])
    twins.step([Item(sequence, [1]) for sequence in sequences])
    twins.step([Item(sequences[0], [1], wanted=()), Item(sequences[1], [1])])
    assert not sent
    twins.step([Item(sequence, [1]) for sequence in sequences[:2]])
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLostError),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
            DeviceLostError,
        ),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), DeviceLostError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("planted"), RuntimeError),
    ],
)
def test_an_error_of_the_device_is_told_apart(
    decoder: Decoder, device: str, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise error

    twins = Twins(decoder, device)
    monkeypatch.setattr(Decoder, "forward", fail)
    inputs = twins.packer.pack([Item(HandSequence(), [1, 2])])
    with pytest.raises(kind, match=r"CUDA|planted") as raised:
        twins.graph.step(inputs, [SamplingRow()])
    assert raised.type is kind


def test_hidden_states_are_read_beside_graphs(decoder: Decoder, device: str) -> None:
    """A step of which somebody reads them runs eagerly, and the next ones are replayed as ever."""
    twins = Twins(decoder, device)
    sequences = [HandSequence(), HandSequence()]
    tokens = twins.step([Item(sequence, [4, 5, 6]) for sequence in sequences])
    for turn in range(6):
        items = decodes(sequences, tokens)
        if turn % 3 == 1:
            inputs, rows = twins.packer.pack(items), [SamplingRow(), SamplingRow()]
            ours, theirs = RowCapture({0: [1], 2: [0, 1]}), RowCapture({0: [1], 2: [0, 1]})
            tokens = twins.graph.step(inputs, rows, ours).chosen.tolist()
            assert twins.eager.step(inputs, rows, theirs).chosen.tolist() == tokens
            assert ours.found.keys() == theirs.found.keys() == {0, 2}
            for layer, states in ours.found.items():
                torch.testing.assert_close(states, theirs.found[layer], rtol=1e-4, atol=1e-4)
        else:
            tokens = twins.step(items)


def test_experts_are_read_from_what_a_graph_leaves(device: str) -> None:
    """By rows that ask, without another launch; steps with given experts run beside graphs."""
    decoder = random_decoder(
        {**SETTINGS, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "norm_topk_prob": True},
        device,
    )
    twins = Twins(decoder, device)
    sequences = [HandSequence() for _ in range(3)]
    tokens = twins.step([Item(sequence, [4, 5, 6 + at]) for at, sequence in enumerate(sequences)])
    for asking in ([1], [0, 2], [0, 1, 2], [2]):
        inputs = twins.packer.pack(decodes(sequences, tokens))
        if asking == [0, 2]:
            inputs = dataclasses.replace(
                inputs, experts=torch.tensor([[[3, 1]] * 2, [[-1, -1]] * 2, [[0, 5]] * 2])
            )
        rows = [SamplingRow()] * 3
        ours, theirs = RowCapture({}, asking), RowCapture({}, asking)
        tokens = twins.graph.step(inputs, rows, ours).chosen.tolist()
        assert twins.eager.step(inputs, rows, theirs).chosen.tolist() == tokens
        assert len(ours.experts) == 2
        assert all(map(torch.equal, ours.experts, theirs.experts))
        assert all(ids.shape == (len(asking), 2) for ids in ours.experts)
        if asking == [0, 2]:
            assert ours.experts[1].tolist() == [[3, 1], [0, 5]]


def test_a_batch_that_could_not_be_sent_is_sent_when_tried_again(
    decoder: Decoder, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before must not be taken for the one that the device would run next."""
    twins = Twins(decoder, device)
    first, second = twins.begin([5, 6], [5, 6])
    (token,) = twins.step([Item(first, [1])])
    send = DecodeBuffers._send_tables
    monkeypatch.setattr(DecodeBuffers, "_send_tables", lambda *_: 1 / 0)
    both = twins.packer.pack([Item(second, [3]), Item(first, [token])])
    with pytest.raises(ZeroDivisionError):
        twins.graph.step(both, [SamplingRow()] * 2)
    monkeypatch.setattr(DecodeBuffers, "_send_tables", send)
    for sequence in (first, second):
        sequence.length -= 1
    twins.step([Item(first, [token])])
    twins.step([Item(second, [3])])


def test_a_part_of_a_tree_is_no_decode(decoder: Decoder, device: str, sent: list[bool]) -> None:
    """Though it may be a single token whose row is wanted."""
    twins = Twins(decoder, device)
    (sequence,) = twins.begin([5, 6])
    inputs = twins.packer.pack([Item(sequence, [7])])
    tree = dataclasses.replace(inputs, attention=with_trees(inputs.attention, [Tree(())]))
    chosen = [runner.step(tree, [SamplingRow()]).chosen.tolist() for runner in (twins.graph, twins.eager)]
    assert chosen[0] == chosen[1] and sent == []
