"""Models that are quantised while they are loaded, against the library's with the dequantised weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cpu import library
from kernels.group_formats import FORMATS, integer_groups
from kernels.group_layout import Parts
from kernels.grouped_weight import GroupedWeight
from tests.families import paired, settings_of
from tests.kernels.grouped_weights import random_weight
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import TinyModel, load_decoder, make_family_model, make_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import random_texts, rows_of_text
from workers.executors.llm import LlmExecutor
from workers.executors.loading import NATIVE, TRANSFORMERS, load_served
from workers.executors.memory import LoraLimits
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.lora import LoraPair
from workers.models.native_parity_check import check_native
from workers.models.recipes import RECIPES
from workers.models.weights import formats_of

CPU = torch.device("cpu")
# The last has more rows than a gated MLP computes at a time.
LENGTHS = (20, 33, 1, 50, 177)


def run_check(directory: Path, format_name: str, dtype: torch.dtype = torch.float32) -> float | None:
    config = ModelConfig.from_directory(directory)
    return check_native(directory, config, dtype, CPU, quantization=format_name)


# Tied and not, with biases, with two norms around a sublayer, with projections that are fused in files, and
# with experts beside a shared one, which has a gate or none.
PROVEN = (
    *("qwen3", "llama with biases", "gemma2", "phi3", "olmo2", "qwen2_moe", "granitemoeshared"),
    # With recurrent layers, whose other parameters are not quantised.
    *("lfm2", "granite hybrid", "jamba", "falcon_mamba", "qwen3_next"),
    # Whose error in bfloat16 is the largest, as that of the library's own forward is.
    *("kimi_linear", "kimi_linear with latent queries"),
)


@pytest.mark.parametrize(("name", "format_name"), paired(PROVEN, ["q8_0", "q4_0", "q4_k_m"]))
def test_families_prove_themselves(name: str, format_name: str, model_of: Callable[[str], Path]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert run_check(model_of(name), format_name, dtype) is not None


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe", "lfm2"])
def test_families_prove_themselves_as_dense_ones_do_if_rows_are_not_rounded(
    name: str, tmp_path: Path
) -> None:
    """In float32 within its own tolerance."""
    make_family_model(tmp_path, *settings_of(name))
    config = ModelConfig.from_directory(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert check_native(tmp_path, config, dtype, CPU, "q4_k_m", rounds_rows=False) is not None


def scales_of_other_groups(parts: Parts) -> None:
    parts.scales.copy_(parts.scales.roll(1, dims=1))


def values_of_other_outputs(parts: Parts) -> None:
    parts.values.copy_(parts.values.roll(1, dims=0))


def halves_swapped(parts: Parts) -> None:
    parts.values.copy_(parts.values.roll(16, dims=2))


@pytest.mark.parametrize("mistake", [scales_of_other_groups, values_of_other_outputs, halves_swapped])
def test_a_mistake_is_noticed(
    mistake: Callable[[Parts], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family_model(tmp_path, *settings_of("qwen3"))
    right = GroupedWeight.write

    def write(self: GroupedWeight, first: int, rows: torch.Tensor) -> torch.Tensor:
        scales = right(self, first, rows)
        parts = self.parts(torch.arange(first, first + len(rows)))
        mistake(parts)
        self.write_parts(first, parts)
        return scales

    monkeypatch.setattr(GroupedWeight, "write", write)
    with pytest.raises(ModelError, match=r"native code for qwen3 in q4_0: .*the results would be wrong"):
        run_check(tmp_path, "q4_0")


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_head_and_description(tied: bool, tmp_path: Path) -> None:
    make_model(tmp_path, TinyModel(tied=tied))
    plain = load_decoder(tmp_path)
    fingerprints = {plan_and_describe(tmp_path, None)[1].fingerprint}
    for format_name in ("q8_0", "q4_0"):
        form, bits = FORMATS[format_name], FORMATS[format_name].bits
        made, description = plan_and_describe(tmp_path, format_name)
        assert (made.lm_head is made.embedding) == tied
        for name in ("embedding", "lm_head"):
            weight, before = getattr(made, name), getattr(plain, name).dense()
            assert isinstance(weight, GroupedWeight) and weight.form == form
            assert torch.equal(weight.rows(torch.tensor([96, 3, 3])), weight.dense()[[96, 3, 3]])
            assert (weight.dense() - before).norm() < {8: 0.01, 4: 0.12}[bits] * before.norm()
        assert description.quantization == format_name and description.dtype == "float32"
        assert description.weight_bytes < plain_bytes(plain) * (bits + 2) / 32
        fingerprints.add(description.fingerprint)
    fingerprints.add(plan_and_describe(tmp_path, "q4_0", rounds_rows=False)[1].fingerprint)
    assert len(fingerprints) == 4, "KV of one could be taken for that of another"


def plan_and_describe(
    directory: Path, format_name: str | None, *, rounds_rows: bool = True
) -> tuple[Decoder, Any]:
    made, description = load_served(
        directory,
        "auto",
        CPU,
        None,
        backend=NATIVE,
        self_check=False,
        quantization=format_name,
        rounds_rows=rounds_rows,
    )
    assert isinstance(made, Decoder)
    return made, description


def plain_bytes(decoder: Decoder) -> int:
    return sum(target.nbytes for target in decoder.targets().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("format_name", "rounds_rows"), [("q8_0", True), ("q4_k_m", True), ("q4_k_m", False)]
)
def test_bits_depend_on_nothing_else_in_the_batch(
    format_name: str, rounds_rows: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Nor on chunks, nor on whether sublayers run one by one; with adapters and without."""
    need_compiled()
    make_family_model(tmp_path, *settings_of("llama with biases"))
    decoder = load_decoder(tmp_path, dtype, pack=True, quantization=format_name, rounds_rows=rounds_rows)
    assert decoder.batch_invariant
    assert_same_bits(decoder, random_texts(4, LENGTHS), "plain")
    add_adapters(decoder)
    assert_same_bits(decoder, random_texts(4, LENGTHS), "adapters", lora_slots=(1, -1, 0, 1, -1))


@pytest.mark.parametrize("rounds_rows", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_may_have_different_formats(dtype: torch.dtype, rounds_rows: bool, tmp_path: Path) -> None:
    """Also those that are fused, as in files of llama.cpp; against the same numbers in plain matrices."""
    need_compiled()
    config = ModelConfig.from_directory(make_family_model(tmp_path, *settings_of("llama with biases")))
    plain = load_decoder(tmp_path, dtype)
    names = [name for name, target in plain.targets().items() if len(target.shape) == 2]
    choices = [None, *FORMATS.values(), integer_groups(4, 64, torch.bfloat16, zeros=True)]
    forms = dict(zip(names, itertools.cycle(choices), strict=False))
    quantised = {name: form for name, form in forms.items() if form is not None}
    formats = formats_of(None, quantised, config, CPU, rounds_rows=rounds_rows)
    mixed = build_decoder(config, dtype, formats=formats)
    for name, target in mixed.targets().items():
        of_plain = plain.targets()[name]
        form, into = forms.get(name), target.into
        if form is None:
            target.fill(of_plain.tensor)
            continue
        assert isinstance(into, GroupedWeight)
        outputs, width = target.shape
        parts = random_weight(form, outputs, width).parts(torch.arange(outputs))
        parts.scales.mul_(1 / 4096)
        if parts.minima is not None:
            parts.minima.mul_(1 / 4096)
        into.write_parts(target.first, parts)
        of_plain.fill(into.rows(torch.arange(target.first, target.first + outputs)))
    mixed.pack(), plain.pack()
    assert_same_bits(mixed, random_texts(4, LENGTHS), "plain")
    (text,) = random_texts(1, (40,))
    found, expected = (rows_of_text(decoder, text) for decoder in (mixed, plain))
    if dtype is torch.float32 and not rounds_rows:
        assert torch.equal(found, expected)
    # Else rows are rounded to 8 bits before each product, or weights to bfloat16.
    rows = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert rows.median() < 0.05


def add_adapters(decoder: Decoder) -> None:
    decoder.allocate_lora(2, 16)
    for slot in range(2):
        generator = torch.Generator().manual_seed(slot)
        pairs = {
            name: LoraPair(*(torch.randn(*size, generator=generator) for size in ((4, inputs), (outputs, 4))))
            for name, (outputs, inputs) in decoder.adaptable().modules.items()
        }
        decoder.set_lora(slot, decoder.pack_lora(pairs))


def test_an_adapter_adds_to_a_quantised_projection_what_it_adds_to_another(tmp_path: Path) -> None:
    """Of one projection: what the adapter adds is not quantised."""
    make_model(tmp_path, TinyModel())
    plain, quantised = (load_decoder(tmp_path, pack=True, quantization=name) for name in (None, "q8_0"))
    x, added = torch.randn(5, 64), []
    for decoder in (plain, quantised):
        add_adapters(decoder)
        projection = decoder.layers[0][0].body.into  # type: ignore[attr-defined]
        slots = torch.tensor([1, 0, -1, 1, 0], dtype=torch.int32)
        with_adapters, without = (projection(x, each, batch_invariant=False) for each in (slots, None))
        added.append(with_adapters - without)
        assert torch.equal(with_adapters[2], without[2])
    torch.testing.assert_close(added[0], added[1], rtol=0, atol=1e-5 * float(added[0].abs().max()))


def test_without_compiled_kernels_the_results_are_the_same_ones_nearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products have the same bits in torch; norms and attention add up in another order."""
    need_compiled()
    make_model(tmp_path, TinyModel())
    found = []
    for compiled in (True, False):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(library, "available", lambda: False)
            decoder = load_decoder(tmp_path, pack=True, quantization="q8_0")
            (text,) = random_texts(1, (40,))
            found.append(rows_of_text(decoder, text))
    rows = (found[0] - found[1]).norm(dim=1) / found[0].norm(dim=1)
    assert rows.median() < 0.03


def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    make_model(tmp_path, TinyModel())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for wrong in (float("nan"), float("inf"), 1e30):
        tensors["model.layers.1.mlp.down_proj.weight"][5, 7] = wrong
        save_file(tensors, file)
        with pytest.raises(
            ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight is not finite"
        ):
            load_decoder(tmp_path, quantization=random.choice(RECIPES))


def test_what_cannot_be_quantised_yet_is_refused(tmp_path: Path) -> None:
    dense = make_model(tmp_path, TinyModel())
    with pytest.raises(ModelError, match="quantization needs a model that native code runs"):
        load_served(dense, "auto", CPU, None, backend=TRANSFORMERS, self_check=False, quantization="q8_0")


@pytest.mark.parametrize("rounds_rows", [True, False])
def test_other_weights_get_the_same_format(rounds_rows: bool, tmp_path: Path) -> None:
    directories = []
    for seed in (0, 1):
        (tmp_path / f"{seed}").mkdir()
        directories.append(make_model(tmp_path / f"{seed}", TinyModel(seed=seed)))
    executor = LlmExecutor.load(
        directories[0],
        kv_pages=4,
        lora=LoraLimits(4, 16, 1 << 20),
        quantization="q8_0",
        rounds_rows=rounds_rows,
    )
    inputs = "inputs of 8 bits in groups of 32" if rounds_rows else "float32 inputs"
    assert f"(q8_0 weights, {inputs}," in executor.capabilities().products or not library.available()
    assert executor.replacement is not None
    model, description = executor.replacement._read(directories[1])
    assert isinstance(model, Decoder) and isinstance(model.lm_head, GroupedWeight)
    assert model.lm_head.form.rounds_rows is rounds_rows
    assert description.quantization == "q8_0" and description.fingerprint != executor.info().fingerprint
