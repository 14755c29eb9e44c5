"""Writes quantised model directories as the tools of each format do, and says what their weights are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
# Where AutoAWQ puts the outputs of a word: in its halves of bytes from the lowest on.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_FLOAT8_MOST = 448.0
# Those that bitsandbytes 0.50.2 writes as quant_map.
_TABLES = {
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    "fp4": [
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204,
        0.25, 0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5,
        -0.1666666716337204, -0.25,
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Integers:
    """A matrix [O, I] in integers.

    Attributes:
        values: [O, I] int64, from 0 on.
        scales: [O, G].
        zeros: [O, G] int64.
        groups: [I] int64, the group of each input.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    @property
    def weights(self) -> torch.Tensor:
        """[O, I] float32: scale * (value - zero point)."""
        moved = (self.values - self.zeros[:, self.groups]).float()
        return self.scales.float()[:, self.groups] * moved


def integers(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    order: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> Integers:
    """Round a matrix to the nearest integers. `order`: the inputs of groups, one group after the other."""
    inputs, most = weight.shape[1], (1 << bits) - 1
    order = torch.arange(inputs) if order is None else order
    group = inputs if group == -1 else group
    groups = torch.empty(inputs, dtype=torch.int64)
    groups[order] = torch.arange(inputs) // group
    scales, zeros = [], []
    for number in range(int(groups.max()) + 1):
        part = weight[:, groups == number]
        if symmetric:
            scales.append(part.abs().amax(1) / (most / 2))
            zeros.append(torch.full((len(weight),), 1 << (bits - 1)))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append((high - low) / most)
            zeros.append((-low / scales[-1]).round().long().clamp(1, most))
    scale, zero = torch.stack(scales, 1).to(scale_dtype), torch.stack(zeros, 1)
    values = (weight / scale.float()[:, groups]).round().long() + zero[:, groups]
    return Integers(values.clamp(0, most), scale, zero, groups)


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Values along the first dimension as words of 32 bits: [n, m] -> int32 [n * bits / 32, m]."""
    stream = (values[:, None] >> torch.arange(bits)[:, None] & 1).flatten(0, 1)  # [n * bits, m]
    stream = torch.nn.functional.pad(stream, (0, 0, 0, -len(stream) % 32))
    return _as_int32((stream.view(-1, 32, values.shape[1]) << torch.arange(32)[:, None]).sum(1))


def awq_words(values: torch.Tensor) -> torch.Tensor:
    """Values of 4 bits along the last dimension as AutoAWQ's words: [m, n] -> int32 [m, n / 8]."""
    found = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for column in range(found.shape[1]):
        for place, output in enumerate(_AWQ_ORDER):
            found[:, column] |= values[:, column * 8 + output] << (place * 4)
    return _as_int32(found)


def _as_int32(unsigned: torch.Tensor) -> torch.Tensor:
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).int()


def in_one_file(source: Path, directory: Path) -> Path:
    """The model of a directory, in another one and in one file; returns that."""
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    tensors = {
        name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def change(directory: Path, name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a tensor of a model in one file."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: how(tensors[name])}, file)


Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Quantises a matrix: its name and content to tensors by their last names, and to what they stand for."""


def rewrite(
    directory: Path,
    config: Mapping[str, Any],
    write: Writer,
    also: Iterable[str] = (),
    left: Iterable[str] = (),
) -> Tensors:
    """Quantise the projections of a directory in place. Mutates its files.

    Args:
        directory: An ordinary model in one file.
        config: The quantization_config.
        write: Quantises a matrix.
        also: Modules besides the projections of layers.
        left: Modules that stay as they are.

    Returns:
        What all tensors stand for in float32, by their names in an ordinary model.
    """
    file, settings = directory / "model.safetensors", directory / "config.json"
    made: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        projection = tensor.dim() == 2 and (".layers." in name or module in also)
        if projection and not any(module.endswith(one) for one in left):
            tensors, meant[name] = write(module, tensor.float())
            made |= {f"{module}.{part}": one.contiguous() for part, one in tensors.items()}
        else:
            made[name], meant[name] = tensor, tensor.float()
    save_file(made, file, {"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"quantization_config": config}))
    return meant


def gptq(
    directory: Path,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    ordered: bool = False,
    version: int = 1,
    also: Iterable[str] = (),
    left: Iterable[str] = (),
) -> Tensors:
    """As GPTQModel writes it, and AutoGPTQ with version 1."""
    generator = torch.Generator().manual_seed(1)

    def write(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=generator) if ordered else None
        made = integers(weight, bits, group, symmetric=symmetric, order=order)
        zeros = made.zeros - (1 if version == 1 else 0)
        return {
            "qweight": words(made.values.T, bits),
            "qzeros": words(zeros, bits).T,
            "scales": made.scales.T,
            "g_idx": made.groups.int(),
        }, made.weights

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": "lm_head" in also,
        "damp_percent": 0.01,
        "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }
    return rewrite(directory, config, write, also, left)


def awq(directory: Path, *, group: int = 32, left: Iterable[str] = ()) -> Tensors:
    """As AutoAWQ writes it."""

    def write(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        made = integers(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": awq_words(made.values.T),
            "qzeros": awq_words(made.zeros.T),
            "scales": made.scales.T,
        }
        return tensors, made.weights

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": [*left] or None,
    }
    return rewrite(directory, config, write, left=left)


def compressed(
    directory: Path,
    form: str,
    weights: Mapping[str, Any],
    *,
    inputs: Mapping[str, Any] | None = None,
    ignore: Iterable[str] = ("lm_head",),
    left: Iterable[str] = (),
    also: Iterable[str] = (),
    ordered: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Tensors:
    """As the compressed-tensors library writes it, by its own code.

    `ordered`: as its older versions did with actorder = group.
    """
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=arguments,
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
        format=form,
    )
    compressor = BaseCompressor.get_value_from_registry(form)
    generator = torch.Generator().manual_seed(2)

    def write(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        order = torch.randperm(columns, generator=generator) if ordered else torch.arange(columns)
        state = {"weight": weight[:, order]} | _parameters(weight[:, order], arguments, scale_dtype)
        made = compressor.compress(state, scheme)
        again = {name: one.float() if name == "weight_scale" else one for name, one in made.items()}
        meant = compressor.decompress(again, scheme)["weight"][:, order.argsort()]
        if ordered:
            values = unpack_from_int32(made["weight_packed"], arguments.num_bits, weight.shape)
            made["weight_packed"] = pack_to_int32(values[:, order.argsort()], arguments.num_bits)
            made["weight_g_idx"] = (order.argsort() // arguments.group_size).int()
        return made, meant

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, ignore=[*ignore], quantization_status="compressed"
    )
    said = json.loads(config.model_dump_json())
    if ordered:
        said["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return rewrite(directory, said, write, also, left)


def _parameters(weight: torch.Tensor, arguments: QuantizationArgs, scale_dtype: torch.dtype) -> Tensors:
    """The scales and zero points of a matrix as an observer finds them."""
    outputs, columns = weight.shape
    found: Tensors = {}
    if arguments.strategy == "block":
        rows, width = arguments.block_structure or (1, 1)
        blocks = weight.view(outputs // rows, rows, columns // width, width)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        group = arguments.group_size if arguments.strategy == "group" else columns
        parts = weight.view(outputs, -1, group)
        low, high = parts.amin(2), parts.amax(2)
        if arguments.strategy == "tensor":
            low, high = low.amin().view(1), high.amax().view(1)
    scale, zero = calculate_qparams(low, high, arguments)
    found["weight_scale"] = scale.to(scale_dtype)
    found["weight_zero_point"] = zero
    return found


def float8(
    directory: Path,
    *,
    block: tuple[int, int] | None = (32, 32),
    also: Iterable[str] = (),
    left: Iterable[str] = (),
) -> Tensors:
    """As DeepSeek and Qwen have it: 8-bit floats with a scale for each block, or one for a matrix."""

    def write(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = block or weight.shape
        outputs, inputs = weight.shape
        of_row, of_column = torch.arange(outputs) // rows, torch.arange(inputs) // columns
        scales = torch.zeros(int(of_row[-1]) + 1, int(of_column[-1]) + 1)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                scales[row, column] = weight[of_row == row][:, of_column == column].abs().max() / _FLOAT8_MOST
        spread = scales[of_row][:, of_column]
        values = (weight / spread).to(torch.float8_e4m3fn)
        if block is None:
            return {"weight": values, "weight_scale": scales.view(())}, values.float() * spread
        return {"weight": values, "weight_scale_inv": scales}, values.float() * spread

    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": None if block is None else [*block],
        "modules_to_not_convert": ["lm_head"],
    }
    return rewrite(directory, config, write, also, left)


def mlx(
    directory: Path,
    *,
    bits: int = 4,
    group: int = 32,
    others: Mapping[str, int] = MappingProxyType({}),
    dtype: torch.dtype = torch.bfloat16,
    also: Iterable[str] = ("model.embed_tokens", "lm_head"),
    left: Iterable[str] = (),
) -> Tensors:
    """As mlx-lm writes it, experts of layers together. `others`: bits of modules that have others."""

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        levels = (1 << others.get(module, bits)) - 1
        groups = weight.view(len(weight), -1, group)
        low, high = groups.amin(2), groups.amax(2)
        edge = torch.where(low.abs() > high.abs(), low, high)
        scales = (high - low).clamp(min=1e-7) / levels * -edge.sign()
        places = (edge / scales).round()
        scales, minima = (edge / places).to(dtype), edge.to(dtype)
        whole = (groups - minima.float()[..., None]) / scales.float()[..., None]
        values = whole.round().clamp(0, levels).long()
        packed = words(values.flatten(1).T, others.get(module, bits)).T
        meant = scales.float()[..., None] * values + minima.float()[..., None]
        tensors = {"weight": packed.contiguous().view(torch.uint32), "scales": scales, "biases": minima}
        return tensors, meant.view_as(weight)

    config: dict[str, Any] = {"group_size": group, "bits": bits, "mode": "affine"}
    config |= {module: {"group_size": group, "bits": own} for module, own in others.items()}
    file, settings = directory / "model.safetensors", directory / "config.json"
    whole = [
        name.removesuffix(".weight")
        for name, tensor in load_file(file).items()
        if not name.endswith(".weight") or tensor.shape[-1] % group
    ]
    meant = rewrite(directory, config, write, also, [*left, *whole])
    said = json.loads(settings.read_text()) | {"quantization": config, "quantization_config": config}
    settings.write_text(json.dumps(said))
    save_file(_with_experts_together(load_file(file)), file, {"format": "mlx"})
    return meant


# The names of mixtral's matrices there.
_MLX_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _with_experts_together(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, is_of_expert, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        module, _, kind = part.partition(".")
        if is_of_expert:
            together = f"{before}.switch_mlp.{_MLX_NAMES.get(module, module)}.{kind}"
            experts.setdefault(together, {})[int(number)] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([*dict(sorted(own.items())).values()]) for name, own in experts.items()}


def mlx_of_floats(directory: Path, *, left: Iterable[str] = ()) -> Tensors:
    """As mlx-lm writes MXFP4."""

    def write(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        bits, exponents = floats4(weight)
        words = (bits[..., ::2] | bits[..., 1::2] << 4).flatten(1).view(torch.uint32)
        values = torch.where(bits >= 8, -1, 1) * _FLOATS4[bits.long() & 7]
        meant = values * torch.exp2(exponents.float() - 127)[..., None]
        return {"weight": words, "scales": exponents}, meant.view_as(weight)

    config = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    file, settings = directory / "model.safetensors", directory / "config.json"
    meant = rewrite(directory, config, write, left=left)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"quantization": config}))
    save_file(_with_experts_together(load_file(file)), file, {"format": "mlx"})
    return meant


def mlx_of_gpt_oss(directory: Path) -> None:
    """A directory in `mxfp4` as mlx-lm converts it: gate and up apart, and other matrices as they were."""
    file, settings = directory / "model.safetensors", directory / "config.json"
    made: Tensors = {}
    for name, tensor in load_file(file).items():
        layer, is_of_experts, part = name.partition(".experts.")
        projection, _, kind = part.replace("_bias", ".bias").replace("_proj_", "_proj.").partition(".")
        kind = {"blocks": "weight"}.get(kind, kind)
        values = tensor.flatten(2).view(torch.uint32) if kind == "weight" else tensor
        turns = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        if not is_of_experts:
            made[name] = tensor
        elif projection == "gate_up_proj":
            for own, rows in turns.items():
                made[f"{layer}.experts.{own}.{kind}"] = values[:, rows].contiguous()
        else:
            made[f"{layer}.experts.{projection}.{kind}"] = values
    save_file(made, file, {"format": "mlx"})
    config = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    said = json.loads(settings.read_text()) | {"quantization": config, "quantization_config": config}
    settings.write_text(json.dumps(said))


# Positive 4-bit floats (e2m1), by their bits.
_FLOATS4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_STACKS = ("gate_up_proj", "down_proj")


def floats4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of 4-bit floats [..., G, 32], and the exponents [..., G] of groups plus 127."""
    groups = weight.float().reshape(*weight.shape[:-1], -1, 32)
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(min=-127)
    scaled = groups / torch.exp2(exponents)[..., None]
    bits = (scaled.abs()[..., None] - _FLOATS4).abs().argmin(-1) + (scaled < 0) * 8
    return bits.to(torch.uint8), (exponents + 127).to(torch.uint8)


def mxfp4(directory: Path) -> None:
    """The experts of gpt_oss as its makers write them. Mutates the files of a directory."""
    file, settings = directory / "model.safetensors", directory / "config.json"
    made: Tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith(_STACKS):
            bits, exponents = floats4(tensor.transpose(1, 2))  # [E, outputs, inputs]
            made[f"{name}_blocks"] = bits[..., ::2] | bits[..., 1::2] << 4
            made[f"{name}_scales"] = exponents
        else:
            made[name] = tensor
    save_file(made, file, {"format": "pt"})
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"quantization_config": config}))


def bitsandbytes(
    directory: Path,
    kind: str,
    *,
    block: int = 64,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
    left: Iterable[str] = (),
) -> Tensors:
    """As transformers with bitsandbytes writes it. `kind`: "nf4", "fp4" or "int8"."""

    def rows(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        most = weight.abs().amax(1)
        values = (weight * (127 / most)[:, None]).round().to(torch.int8)
        tensors = {"weight": values, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, values * most[:, None] / 127

    def table(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, flat = torch.tensor(_TABLES[kind]), weight.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
        most = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32"}
        state["shape"] = [*weight.shape]
        tensors = {"weight.quant_map": codes, "weight.absmax": most}
        if nested:
            offset, levels = most.mean(), torch.linspace(-1, 1, 256)
            outer = (most - offset).abs().amax().repeat(-(-len(most) // 256))
            places = ((most - offset) / outer[0] * 127.5 + 127.5).round().to(torch.uint8)
            most = levels[places.int()] * outer[0] + offset
            tensors |= {"weight.absmax": places, "weight.nested_absmax": outer}
            tensors["weight.nested_quant_map"] = levels
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        indices = (
            (blocks / most[:, None])[:, :, None].sub(codes).abs().argmin(2).byte().flatten()[: len(flat)]
        )
        tensors["weight"] = (indices[::2] << 4 | indices[1::2]).view(storage)[:, None]
        said = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*said], dtype=torch.uint8)
        scales = most.repeat_interleave(block)[: len(flat)]
        return tensors, (codes[indices.int()] * scales).view(weight.shape)

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
        "bnb_4bit_quant_type": kind if kind != "int8" else "fp4",
        "bnb_4bit_use_double_quant": nested,
        "llm_int8_skip_modules": ["lm_head", *left],
    }
    return rewrite(directory, config, rows if kind == "int8" else table, left=left)
