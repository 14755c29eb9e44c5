"""Loading safetensors: into fused parameters, within memory, and refusing what is not whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_factory import TinyModel, load_decoder, make_model
from workers.models import checkpoint
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.model import ModelDescription
from workers.models.weights import load_planned, plan_load

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
SHARDED = TinyModel(max_shard_bytes=60_000)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by the library's own reader."""
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


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
    assert decoder.dtype == getattr(torch, dtype)
    assert_holds(decoder, stored(tmp_path))
    assert (decoder.lm_head is decoder.embedding) == tied
    for asked in (torch.float32, torch.bfloat16, "float16"):
        assert_holds(load_decoder(tmp_path, asked), stored(tmp_path))


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, TinyModel())
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    calls: list[tuple[int, int]] = []
    plan = plan_load(tmp_path)
    decoder, _ = load_planned(plan, lambda done, total: calls.append((done, total)))
    assert_holds(decoder, stored(tmp_path))
    steps = [done for done, _ in calls]
    assert steps == sorted(set(steps)) and max(b - a for a, b in pairwise(steps)) <= 1000
    assert {total for _, total in calls} == {steps[-1]} == {plan.weight_bytes - 4 * 2 * (4 + 2 - 2) * 32}


def test_auto_dtype_without_one_in_the_config(tmp_path: Path) -> None:
    make_model(tmp_path, TinyModel(dtype="float16"))
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert load_decoder(tmp_path).dtype == torch.float16
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
    assert one.num_parameters == sum(tensor.numel() for tensor in stored(tmp_path / "one").values())


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    make_model(tmp_path, TinyModel(tied=True))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
    }
    save_file({**tensors, **extra}, file)
    assert_holds(load_decoder(tmp_path), tensors)


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _change(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Rewrites model.safetensors with changed tensors."""

    def rewrite(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return rewrite


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / "model.safetensors").write_bytes(content)


def _edit_header(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replaces part of the header of model.safetensors by something of any length."""

    def edit(directory: Path) -> None:
        file = directory / "model.safetensors"
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + size]
        assert old in header
        header = header.replace(old, new, 1)
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])

    return edit


def _truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: (directory / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (_change(lambda tensors: tensors.pop(Q_PROJ)), f"tensor {Q_PROJ} is missing"),
        (
            _change(lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64)})),
            rf"model\.safetensors: tensor {Q_PROJ} has shape \[64, 64\], but the config asks for \[128, 64\]",
        ),
        (
            _change(lambda tensors: tensors.update({Q_PROJ: torch.zeros(128, 64, dtype=torch.int8)})),
            f"tensor {Q_PROJ} must be one of F32, BF16, F16, got I8",
        ),
        (
            _change(
                lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)})
            ),
            r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is not part of this qwen3 model",
        ),
        (_truncate, r"model\.safetensors: tensor .* is truncated: the file is 5 bytes too short"),
        (_write(b"\x05\0\0"), r"model\.safetensors: is truncated or not a safetensors file"),
        (_write(b"\xff" * 64), r"model\.safetensors: is truncated or not a safetensors file"),
        (_write(b"\x02" + b"\0" * 7 + b"[]"), "the header must be a JSON object"),
        (_write(b"\x03" + b"\0" * 7 + b"{\xff}"), "the header is not valid JSON"),
        (
            _edit_header(b'"model.norm.weight":', b'"lm_head.weight":'),
            r"the header .* lm_head\.weight occurs twice",
        ),
        (_edit_header(b'"shape":[97,64]', b'"shape":[98,64]'), r"is F32 \[98, 64\] but has 24832 bytes"),
        (_edit_header(b'"shape":[97,64]', b'"shape":[-97,64]'), "has a corrupt header entry"),
        (_edit_header(b'"shape":[97,64]', b'"shape":"97"'), "has a corrupt header entry"),
        (_edit_header(b'"shape":[97,64]', b'"form":[97,64]'), "has a corrupt header entry"),
        (
            _edit_header(b'"data_offsets":[24832,49664]', b'"data_offsets":[0,24832]'),
            r"tensor model\.embed_tokens\.weight overlaps tensor lm_head\.weight",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    make_model(tmp_path, TinyModel())
    damage(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_decoder(tmp_path)


def _copy_tensor_to_another_shard(directory: Path) -> None:
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)


def _edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        file = directory / "model.safetensors.index.json"
        content = json.loads(file.read_text())
        change(content["weight_map"])
        file.write_text(json.dumps(content))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: min(directory.glob("*.safetensors")).unlink(), r"model-00001.*: cannot be read"),
        (_copy_tensor_to_another_shard, "tensor .* is also in model-00001"),
        (
            _edit_index(lambda names: names.update(ghost=next(iter(names.values())))),
            "tensor ghost is missing",
        ),
        (_edit_index(lambda names: names.update(ghost="../model.safetensors")), "in the same directory"),
        (
            lambda directory: (directory / "model.safetensors.index.json").write_text("{}"),
            "must have an object weight_map",
        ),
    ],
)
def test_damage_to_shards_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    make_model(tmp_path, SHARDED)
    damage(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_decoder(tmp_path)


# Prints the peak resident bytes before and after a load, and the bytes of the weights.
MEASURE = """
import sys, torch, safetensors
from workers.models.weights import load_planned, plan_load
from workers.models import checkpoint
torch.set_num_threads(1)
checkpoint.PART_BYTES = int(sys.argv[2])
def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
before = peak()
_, model = load_planned(plan_load(sys.argv[1]))
print(before, peak(), model.weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM from /proc")
def test_peak_memory_of_a_load(tmp_path: Path) -> None:
    """The weights once and a part, not the weights twice."""
    part_bytes = 4 << 20
    spec = TinyModel(
        vocab_size=4000, hidden_size=1024, intermediate_size=4096, num_layers=2, dtype="bfloat16"
    )
    make_model(tmp_path, spec)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(part_bytes)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    before, after, weights = map(int, done.stdout.split())
    assert weights > 60 << 20
    # Allocators round up and the interpreter grows a little: 8 MiB. A second copy would be eight times that.
    assert after - before <= weights + part_bytes + (8 << 20)
