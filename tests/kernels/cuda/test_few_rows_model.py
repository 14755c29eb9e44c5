"""Models whose products of few rows are fused, against the same models as separate operations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.few_rows import few_rows_product
from kernels.few_rows_tiles import MOST_ROWS, Tiles, tiles_for
from kernels.paged_attention import CUDA_WIDTHS
from tests.families import MODELS, WITHOUT_STATES, settings_of, some
from tests.gpu.sizes import FirstTiles
from tests.kernels.cuda.test_decode_runner import SETTINGS, random_decoder
from tests.workers.packing import HandPacker, HandSequence, Item, poison
from workers.kv.tensors import KvTensors
from workers.models import few_rows
from workers.models.capture import RowCapture
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.few_rows import Measure
from workers.models.model import new_pages
from workers.models.registry import FAMILIES

# How many of the products of four layers are fused: of each qkv, output, gate_up and down, but for the last
# attention. Experts and an MLP without a gate have none, and a norm behind a sublayer, or a factor, leaves
# only its first one.
FUSED = {
    "arcee": 6,
    **dict.fromkeys(("granitemoe", "granitemoeshared"), 3),
    **dict.fromkeys(("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"), 6),
    "qwen3_moe with dense layers": 12,
    **dict.fromkeys(("gemma2", "gemma3", "granite"), 7),
    **dict.fromkeys(("olmo2", "olmo3"), 0),
    "falcon_h1": 0,
}
# Those with latents or states have tests of their own. Only one of them multiplies what products return.
ON_GPUS = [name for name in WITHOUT_STATES if "kv_lora_rank" not in FAMILIES[MODELS[name][0]].reads]
ON_GPUS += ["falcon_h1"]
# In their products, what comes before and behind them, or their experts. The others differ from one of these
# in positions, windows and widths.
DIFFERING = (
    *("llama with biases", "qwen3", "mixtral", "qwen3_moe with dense layers", "gemma", "gemma2", "granite"),
    *("olmo2", "phi3", "falcon_h1"),
)


def preferring(way: int) -> Measure:
    """Finds the way with this number the fastest: 0 for separate operations, from 1 for the tiles in order.

    Beyond the last one, the others are slower the earlier they come.
    """
    calls = 0

    def measure(run: Callable[[], None]) -> float:
        nonlocal calls
        run()
        # Those of another number of rows begin again.
        calls = 1 if run.__name__ == "separate" else calls + 1
        return 1 + abs(calls - 1 - way)

    return measure


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product that was fused, outside of measurements."""
    rows: list[int] = []

    def note(x: torch.Tensor, *arguments: Any, **others: Any) -> object:
        rows.append(len(x))
        return few_rows_product(x, *arguments, **others)

    monkeypatch.setattr(few_rows, "few_rows_product", note)
    return rows


def decoder_of(name: str, device: str) -> Decoder:
    transformers = pytest.importorskip("transformers")
    family, settings = settings_of(name)
    settings = transformers.AutoConfig.for_model(family, **settings).to_dict()
    if device == "cuda" and ModelConfig.from_settings(settings).head_dim not in CUDA_WIDTHS:
        pytest.skip("there are no kernels for this head width")
    return random_decoder(settings, device)


class Twins:
    """The same sequences in two pools, for a model and its fused twin."""

    def __init__(self, plain: Decoder, other: Decoder) -> None:
        self._decoders = plain, other
        self._kvs = [self._new_kv(each) for each in self._decoders]
        self._packer = HandPacker(16, range(40))

    @staticmethod
    def _new_kv(decoder: Decoder) -> KvTensors:
        kv = new_pages(decoder, 40)
        poison(kv)
        return kv

    def step(self, items: list[Item]) -> None:
        inputs = self._packer.pack_with_states(items, self._kvs[0])
        ours, theirs = (
            decoder.logits(decoder.forward(inputs.to(kv.device), kv))
            for decoder, kv in zip(self._decoders, self._kvs, strict=True)
        )
        assert len(theirs) == sum(len(item.wanted) for item in items)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", some(ON_GPUS, DIFFERING))
def test_every_family(name: str, device: str, fused: list[int]) -> None:
    plain, other = decoder_of(name, device), decoder_of(name, device)
    plain._of_all_rows, plain._of_wanted_rows = plain._parted()
    other.fuse_few_rows(FirstTiles(lambda _: 0.0))
    twins, sequences = Twins(plain, other), [HandSequence() for _ in range(3)]
    twins.step(
        [Item(sequence, range(1, length)) for sequence, length in zip(sequences, (2, 3, 4), strict=True)]
    )
    fused.clear()
    twins.step([Item(sequence, [5]) for sequence in sequences])
    assert fused == [3] * FUSED.get(name, 14), name


def test_random_steps_with_any_number_of_rows(device: str, fused: list[int]) -> None:
    """More rows than a product takes, and wanted rows that are few among many."""
    plain, other = (random_decoder(SETTINGS, device) for _ in range(2))
    plain._of_all_rows, plain._of_wanted_rows = plain._parted()
    other.fuse_few_rows(FirstTiles(lambda _: 0.0))
    dice, twins = random.Random(1), Twins(plain, other)
    sequences = [HandSequence() for _ in range(6)]
    for count in (1, 6, 4, 6, 2):
        lengths = [dice.choice((1, 1, 2, 9)) for _ in range(count)]
        twins.step([Item(each, [3] * length) for each, length in zip(sequences, lengths, strict=False)])
    assert max(fused) <= MOST_ROWS and len(set(fused)) > 3


@pytest.mark.parametrize("place", ["qkv", "output", "gate_up", "down"])
def test_places_that_are_faster_as_separate_operations(place: str, device: str) -> None:
    """Whichever one is not fused, the next one gets its norm."""

    class AllBut(FirstTiles):
        def choose(self, of: few_rows.Place, rows: int) -> Tiles | None:
            return None if of.name == place else super().choose(of, rows)

    plain, other = (random_decoder(SETTINGS | {"num_hidden_layers": 2}, device) for _ in range(2))
    plain._of_all_rows, plain._of_wanted_rows = plain._parted()
    other.fuse_few_rows(AllBut(lambda _: 0.0))
    twins, sequence = Twins(plain, other), HandSequence()
    for tokens in ([1, 2, 3], [4]):
        twins.step([Item(sequence, tokens)])


@pytest.mark.parametrize("reason", ["adapters", "batch-invariant", "hidden states"])
def test_what_is_not_fused(reason: str, device: str, fused: list[int]) -> None:
    decoder = random_decoder(SETTINGS, device)
    if reason == "adapters":
        decoder.allocate_lora(2, 4)
    decoder.fuse_few_rows(FirstTiles(lambda _: 0.0))
    decoder.batch_invariant = reason == "batch-invariant"
    kv = Twins._new_kv(decoder)
    sequence = HandSequence(lora_slot=1 if reason == "adapters" else -1)
    inputs = HandPacker(16, range(40)).pack([Item(sequence, [1, 2])])
    capture = RowCapture({0: [0]}, expert_rows=None) if reason == "hidden states" else None
    decoder.forward(inputs.to(kv.device), kv, capture)
    # With hidden states the last MLP has none behind it.
    assert len(fused) == (2 if reason == "hidden states" else 0)


@pytest.mark.parametrize("way", range(3))
def test_the_fastest_way_is_taken_and_measured_once(
    way: int, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = random_decoder(SETTINGS, device)
    tiles = few_rows.TilesOfPlaces(preferring(way))
    few_rows.FewRows(decoder._sublayers()[:-1], tiles)
    (place,) = [place for place in tiles._products if place.name == "down"]
    caplog.set_level("INFO")
    expected = None if way == 0 else tiles_for(torch.float32, None)[way - 1]
    for rows in (3, 4, 3, 1, 16):
        assert tiles.of(place, rows) == expected
    # All numbers of rows with the first, which is in the warm-up: none is measured within a caller's step.
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        f"down of {rows} rows: {expected or 'separate operations'}".partition(",")[0]
        for rows in (1, 2, 4, 8, 16)
    ]


def test_two_starts_choose_alike(device: str) -> None:
    """Though times differ a little from one measurement to the next."""
    found = []
    for seed in range(8):
        dice, order = random.Random(seed), itertools.count()
        # The last way is 1 % faster than the others.
        times = (1.0, 1.0, 0.99)
        tiles = few_rows.TilesOfPlaces(lambda _: times[next(order) % 3] * dice.uniform(0.995, 1.005))  # noqa: B023
        few_rows.FewRows(random_decoder(SETTINGS, device)._sublayers()[:-1], tiles)
        (place,) = [place for place in tiles._products if place.name == "down"]
        found.append([tiles.of(place, rows) for rows in (1, 2, 4, 8, 16)])
    assert all(each == found[0] for each in found) and found[0] == [None] * 5


def test_nothing_is_measured_within_a_capture(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is run: whatever is fused, is faster.
    tiles = few_rows.TilesOfPlaces(lambda run: 1.0 if run.__name__ == "separate" else 0.5)
    few_rows.FewRows(random_decoder(SETTINGS, device)._sublayers()[:-1], tiles)
    place = next(iter(tiles._products))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tiles.of(place, 2) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tiles.of(place, 2) is not None
