"""Loading safetensors: into fused parameters, within memory, and refusing what is not whole."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkout import ROOT, environment
from tests.adapter_factory import model_weights
from tests.bad_directories import edited
from tests.forks import WORKERS, Forked, fork_server
from tests.model_factory import Tensors, TinyModel, load_decoder, make_model, rewrite
from workers.models import checkpoint, weights
from workers.models.checkpoint import Staging
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.linear import LoadTarget
from workers.models.model import ModelDescription, new_pages
from workers.models.weights import load_planned, plan_load

SHARDED = TinyModel(max_shard_bytes=60_000)


def assert_holds(decoder: Decoder, tensors: dict[str, torch.Tensor]) -> None:
    """Every target holds the rounded tensor of the checkpoint."""
    targets = decoder.targets()
    assert targets.keys() == tensors.keys()
    for name, target in targets.items():
        expected = tensors[name].to(target.tensor.dtype).expand(target.tensor.shape)
        assert torch.equal(target.tensor, expected), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [None, 60_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_kind_of_file(tmp_path: Path, dtype: str, max_shard_bytes: int | None, tied: bool) -> None:
    spec = TinyModel(dtype=dtype, tied=tied, max_shard_bytes=max_shard_bytes)
    make_model(tmp_path, spec)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_bytes is not None)
    decoder = load_decoder(tmp_path)
    # A CPU has no products of float16; float32 holds the same values.
    assert decoder.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    assert_holds(decoder, model_weights(tmp_path))
    assert (decoder.lm_head is decoder.embedding) == tied
    for asked in (torch.float32, torch.bfloat16, "float16"):
        assert_holds(load_decoder(tmp_path, asked), model_weights(tmp_path))


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, TinyModel())
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    calls: list[tuple[int, int]] = []
    plan = plan_load(tmp_path)
    decoder, _ = load_planned(plan, lambda done, total: calls.append((done, total)))
    assert_holds(decoder, model_weights(tmp_path))
    steps = [done for done, _ in calls]
    assert steps == sorted(set(steps)) and max(b - a for a, b in pairwise(steps)) <= 1000
    assert {total for _, total in calls} == {steps[-1]} == {plan.weight_bytes - 4 * 2 * (4 + 2 - 2) * 32}


def test_auto_dtype_without_one_in_the_config(tmp_path: Path) -> None:
    make_model(tmp_path, TinyModel(dtype="bfloat16"))
    edited("config.json", lambda settings: settings.pop("dtype"))(tmp_path)
    assert load_decoder(tmp_path).dtype == torch.bfloat16


def test_only_a_cpu_and_only_auto_make_float16_float32() -> None:
    def chosen(asked: str, device: str) -> torch.dtype:
        return checkpoint.choose_dtype(asked, "float16", "F16", torch.device(device))

    assert chosen("auto", "cpu") == torch.float32
    assert chosen("auto", "cuda") == chosen("float16", "cpu") == torch.float16


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, TinyModel())
    with pytest.raises(
        ModelError, match="dtype: must be auto or one of bfloat16, float16, float32, got 'int8'"
    ):
        load_decoder(tmp_path, "int8")


def test_fingerprint_is_of_the_model_not_of_the_files(tmp_path: Path) -> None:
    def describe(name: str, spec: TinyModel, dtype: str = "auto") -> ModelDescription:
        return load_planned(plan_load(make_model(tmp_path / name, spec), dtype))[1]

    one, sharded = describe("one", TinyModel()), describe("sharded", SHARDED, "bfloat16")
    other, longer = describe("other", TinyModel(seed=1)), describe("longer", TinyModel(max_positions=1024))
    assert one.fingerprint == sharded.fingerprint
    assert len({one.fingerprint, other.fingerprint, longer.fingerprint}) == 3
    assert one.num_parameters == sum(tensor.numel() for tensor in model_weights(tmp_path / "one").values())


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    make_model(tmp_path, TinyModel(tied=True))
    before = model_weights(tmp_path)
    extra = {
        "lm_head.weight": before["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
    }
    rewrite(tmp_path, lambda tensors: tensors | extra)
    assert_holds(load_decoder(tmp_path), before)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs a kernel with huge pages"
)
def test_large_weights_and_kv_are_in_memory_that_asks_for_huge_pages(tmp_path: Path) -> None:
    spec = TinyModel(vocab_size=3000, hidden_size=512, intermediate_size=2048, num_layers=1)
    decoder = load_decoder(make_model(tmp_path, spec))
    kv = new_pages(decoder, 16384)
    smaps = Path("/proc/self/smaps").read_text()
    mappings = re.findall(r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", smaps, re.MULTILINE | re.DOTALL)
    large = [t.tensor for t in decoder.targets().values() if t.tensor.nbytes >= 2 << 20]
    assert len(large) == 5

    def asks(address: int) -> bool:
        (flags,) = [f for low, high, f in mappings if int(low, 16) <= address < int(high, 16)]
        return "hg" in flags.split()

    assert all(asks(tensor.data_ptr()) for tensor in large)
    keys = kv.layer(0)[0].data
    # Each layer's keys and values: were their first pages huge, a short text would take 2 MiB of each.
    assert [asks(keys.data_ptr() + offset) for offset in (0, keys.nbytes - 1)] == [False, True]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM from /proc")
@pytest.mark.parametrize("quantization", [None, "q8_0", pytest.param("q4_0", marks=pytest.mark.thorough)])
def test_peak_memory_of_a_load(tmp_path: Path, quantization: str | None) -> None:
    """The weights once and a part, not the weights twice; and of those that are quantised only the result."""
    part_bytes = 4 << 20
    spec = TinyModel(
        vocab_size=4000, hidden_size=1024, intermediate_size=4096, num_layers=2, dtype="bfloat16"
    )
    directories = [tmp_path / "large", tmp_path / "small"]
    for directory, each in zip(directories, (spec, TinyModel(dtype="bfloat16")), strict=True):
        directory.mkdir()
        make_model(directory, each)
    before, after, weights = loaded_bytes(directories[0], directories[1], part_bytes, quantization)
    assert weights > {None: 60, "q8_0": 32, "q4_0": 17}[quantization] << 20
    # Allocators round up and the interpreter grows a little: 8 MiB. A second copy would be eight times that.
    assert after - before <= weights + part_bytes + (8 << 20)


def loaded_bytes(model: Path, small: Path, part_bytes: int, how: str | None = None) -> tuple[int, int, int]:
    """The peak before and after a load, and the bytes of the weights; see `tests.workers.peak_memory`."""
    command = [sys.executable, "-m", "tests.workers.peak_memory", str(model), str(small), str(part_bytes)]
    command += [] if how is None else [how]
    with tempfile.TemporaryFile() as said, Path(os.devnull).open("rb") as nothing:
        # A process of its own, which has imported what it needs.
        files = (nothing.fileno(), said.fileno(), said.fileno())
        child = Forked(fork_server(*WORKERS), command, env=environment(ROOT), cwd=str(ROOT), files=files)
        assert child.wait(120) == 0
        said.seek(0)
        before, after, weights = map(int, said.read().split())
    return before, after, weights


class LateCopies:
    """In place of a GPU's queue: copies are carried out when somebody waits for them, or asks for a value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[Callable[[], object]] = []
        self.events = self.checks = self.waits = 0
        fill, check = LoadTarget.fill, checkpoint.check_finite

        def late(target: LoadTarget, part: torch.Tensor, first: int = 0) -> list[torch.Tensor]:
            self.queued.append(lambda: fill(target, part, first))
            return []

        def checked(tensor: torch.Tensor, where: str) -> None:
            self.checks += 1
            self.carry_out(len(self.queued))
            check(tensor, where)

        monkeypatch.setattr(LoadTarget, "fill", late)
        monkeypatch.setattr(checkpoint, "check_finite", checked)

    def carry_out(self, count: int) -> None:
        for copy in self.queued[:count]:
            copy()
        del self.queued[:count]

    def event(self) -> Any:
        copies, self.events = self, self.events + 1

        class Event:
            noted = 0

            def record(self) -> None:
                self.noted = len(copies.queued)

            def synchronize(self) -> None:
                copies.waits += bool(copies.queued)
                copies.carry_out(self.noted)
                self.noted = 0

        return Event()


def test_parts_for_a_gpu_are_read_while_others_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two buffers by turns, and one check for each tensor: each waits for the device."""
    make_model(tmp_path, TinyModel(max_shard_bytes=60_000))
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    copies = LateCopies(monkeypatch)
    most = [0]
    staging = Staging(copies.event, pinned=False)
    monkeypatch.setattr(weights, "_staging_for", lambda _: staging)
    parts = 0

    def count(_done: int, _total: int) -> None:
        nonlocal parts
        parts += 1
        most[0] = max(most[0], len(copies.queued))

    decoder, _ = load_planned(plan_load(tmp_path), count)
    assert_holds(decoder, model_weights(tmp_path))
    assert (copies.events, copies.checks) == (2, len(decoder.targets())) and copies.checks < parts / 3
    assert most[0] == 2, "as many as there are buffers"


def test_a_value_that_is_not_finite_is_found_by_the_check_of_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, TinyModel())
    name = "model.layers.1.mlp.down_proj.weight"

    def spoiled(tensors: Tensors) -> Tensors:
        tensors[name][3, 5] = torch.nan
        return tensors

    rewrite(tmp_path, spoiled)
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    staging = Staging(LateCopies(monkeypatch).event, pinned=False)
    monkeypatch.setattr(weights, "_staging_for", lambda _: staging)
    with pytest.raises(ModelError, match=rf"tensor {re.escape(name)} is not finite"):
        load_planned(plan_load(tmp_path))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_large_values_are_finite_and_others_are_found(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_CHECKED_ELEMENTS", 8)
    tensor = torch.full((7, 5), 3e38)
    checkpoint.check_finite(tensor, "x")
    checkpoint.check_finite(tensor[0], "x")
    tensor[6, 4] = value
    for bad in (tensor, tensor[6]):
        with pytest.raises(ModelError, match="x is not finite as float32"):
            checkpoint.check_finite(bad, "x")
