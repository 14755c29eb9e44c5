"""The self-check of native code: compares a family's decoder with the transformers library's model.

It runs before the weights of a directory are read. The config is read twice, by native code and by the
library, and both results must be equal. Then a scaled-down model, with the same kinds of layers and random
weights, runs in native code over pages and in the library without pages: once in float32, which shows errors
of any size above rounding, and once in the dtype, on the device and with the packing that will serve.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kernels import gpu_format
from kernels.dequantise import dequantised
from kernels.float8_weight import Float8Format
from kernels.group_formats import GroupFormat
from kernels.quantisers import quantise
from kernels.rope import rope_frequencies
from kernels.weight_formats import OnGpu, WeightFormat
from workers.models.builder import build_decoder, is_router
from workers.models.checkpoint import name_of
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.drawn_rows import can_draw, drawn
from workers.models.errors import ModelError
from workers.models.library.errors import library_errors
from workers.models.library.quantised_module import put_values, separate_experts, values_of
from workers.models.library.scaled_down_model import GAIN, INNER_WIDTH, scaled_down_model
from workers.models.library.settings import LibrarySettings, read_settings
from workers.models.parameters import FormatOf
from workers.models.self_check import check_parity
from workers.models.stacked_experts import separated_values
from workers.models.weights import formats_of, names_of

# Fields that do not change a forward. (The files decide whether there is a separate head.)
_NOT_COMPUTED = ("eos_token_ids", "bos_token_id", "dtype", "wrapper", "tie_word_embeddings")
# Two roundings of float32: after 100,000 positions the fastest pair is off by 0.02 radians.
_FREQUENCY_ERROR = 2.0**-22
# A multiple of the block size of every format.
_INNER_WIDTH_OF_BLOCKS = 256
NO_FORMS: Mapping[str, WeightFormat] = MappingProxyType({})


def check_native(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    forms: Mapping[str, WeightFormat] = NO_FORMS,
    rounds_rows: bool = True,
    *,
    batch_invariant: bool = False,
) -> float | None:
    """The relative error of a scaled-down model in float32. The weights are not read.

    None if even the scaled-down model is too large.

    Args:
        directory: The directory of the model.
        config: Its config as native code reads it.
        dtype: The dtype that will serve.
        device: The device that will serve.
        quantization: How its weights are quantised, a name of `workers.models.recipes`; see
            `workers.models.library.quantised_module`.
        forms: The quantised formats in its files, by the names of tensors.
        rounds_rows: See `LoadPlan`.
        batch_invariant: Whether it will serve with the batch-invariant kernels of a GPU.

    Raises:
        ModelError: The library reads the config differently, or the error is too large.
        KvSizingError: Its recurrent states do not fit into memory.
    """
    settings = read_settings(directory)
    _check_same_config(directory, config, settings)
    module = scaled_down_model(settings, _INNER_WIDTH_OF_BLOCKS if forms or quantization else INNER_WIDTH)
    if module is None:
        return None
    _check_same_frequencies(directory, config, module)
    error = _check_logits(directory, module, torch.float32, torch.device("cpu"))
    if dtype != torch.float32 or device.type != "cpu":
        _check_logits(directory, module, dtype, device, batch_invariant=batch_invariant)
    if quantization is not None:
        _check_logits(directory, module, dtype, device, quantization=quantization, rounds_rows=rounds_rows)
    for some in _forms_to_check(module, forms):
        _check_logits(directory, module, dtype, device, forms=some, rounds_rows=rounds_rows)
    return error


def _forms_to_check(
    module: PreTrainedModel, forms: Mapping[str, WeightFormat]
) -> Iterator[dict[str, WeightFormat]]:
    """Formats for the scaled-down model's tensors: as in the files, then each format left out there."""
    config = _config_of(module)
    shapes = {
        name: target.shape for name, target in build_decoder(config, torch.float32, "meta").targets().items()
    }
    left = {form.name: form for form in forms.values()}
    as_there = {name: form for name, form in forms.items() if name in shapes and can_draw(form, shapes[name])}
    everywhere = [
        {name: form for name, shape in shapes.items() if can_draw(form, shape) and not is_router(name)}
        for name, form in sorted(left.items())
        if name not in {there.name for there in as_there.values()}
    ]
    yield from filter(None, (as_there, *everywhere))


def _config_of(module: PreTrainedModel) -> ModelConfig:
    config = ModelConfig.from_settings(copy.deepcopy(module.config).to_dict())
    # The library's model has only its own layout. GGUF's differs in names and the order of rows.
    return dataclasses.replace(config, gguf_layout=False)


def _check_same_config(directory: Path, ours: ModelConfig, settings: LibrarySettings) -> None:
    """Raises ModelError for the first field that the library reads differently from the config.json."""
    theirs = ModelConfig.from_settings(settings.config.to_dict())
    for field in dataclasses.fields(ModelConfig):
        found, expected = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in _NOT_COMPUTED and found != expected:
            raise ModelError(
                f"{directory}: {field.name} is read as {found!r}, and as {expected!r} by the transformers"
                " library: the results would be wrong; set model_backend = transformers to use the library"
            )


def _check_same_frequencies(directory: Path, config: ModelConfig, module: PreTrainedModel) -> None:
    """Raises ModelError for a rotary embedding whose frequencies differ from those of the library's model.

    The sequences of the parity check are too short to show errors in slow pairs, or small ones in fast pairs.
    """
    theirs = [
        buffer
        for name, buffer in module.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    for rope in config.ropes:
        ours, _ = rope_frequencies(rope, config.rotary_dim)  # [R / 2]
        if not any(
            len(ours) == len(one) and torch.allclose(ours, one, rtol=_FREQUENCY_ERROR, atol=0)
            for one in theirs
        ):
            raise ModelError(
                f"{directory}: the frequencies of {rope} are not those of the transformers library:"
                " the results would be wrong"
            )


def _check_logits(
    directory: Path,
    module: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch_invariant: bool = False,
    quantization: str | None = None,
    forms: Mapping[str, WeightFormat] = NO_FORMS,
    rounds_rows: bool = True,
) -> float:
    """The relative error of native code with the weights of `module`, which is moved to dtype and device."""
    with library_errors("run a scaled-down model"):
        module.to(device=device, dtype=dtype)  # type: ignore[call-arg]  # the library wraps a method as a function
        module.set_attn_implementation("eager")
        # In the layout of checkpoints: separate experts, and projections fused as there.
        tensors = revert_weight_conversion(module, module.state_dict())
    config = _config_of(module)
    tensors = {config.family.renamed_tensor(name): tensor for name, tensor in tensors.items()}
    if config.family.experts is not None and config.family.experts.stacked is not None:
        tensors = separated_values(tensors, config.family.experts)
    formats = formats_of(quantization, forms, config, device, rounds_rows=rounds_rows)
    decoder = build_decoder(config, dtype, device, formats=formats)
    for name in decoder.targets().keys() - tensors.keys():
        raise ModelError(f"{directory}: the transformers library has no tensor {name} for this model")
    values, orders = _fill(decoder, tensors, forms, formats)
    decoder.pack()
    if formats is not None:
        # In float32, because the dtype cannot represent all values of the format.
        module.to(dtype=torch.float32)  # type: ignore[call-arg]  # as above
    if device.type == "cuda":
        decoder.batch_invariant = batch_invariant

    def plain(token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = module(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits

    # 8-bit floats, and on a GPU all formats, are multiplied with inputs in the dtype.
    is_float8 = quantization is None and all(isinstance(form, Float8Format) for form in forms.values())
    rounds = rounds_rows and not is_float8 and not gpu_format.is_gpu(device)
    names = names_of(forms) or quantization or name_of(dtype)
    with library_errors("run a scaled-down model"), ExitStack() as until_checked:
        if formats is not None:
            parameters = until_checked.enter_context(separate_experts(module, config.family))
            until_checked.enter_context(put_values(module, parameters, values, orders if rounds else {}))
        return check_parity(
            decoder,
            plain,
            what=f"{directory}: native code for {config.model_type} in {names}",
            vocab_size=config.vocab_size,
            max_seq_len=config.max_position_embeddings,
            rounds_rows=rounds,
        )


@torch.inference_mode()
def _fill(
    decoder: Decoder,
    tensors: Mapping[str, torch.Tensor],
    forms: Mapping[str, WeightFormat],
    formats: FormatOf | None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    """Fill a decoder with random rows where `forms` has a format, else with these tensors.

    Returns:
        For `put_values`: the dequantised matrices; and for those whose inputs a CPU rounds, the order in
        which the inputs are grouped.
    """
    values, orders = dict[str, torch.Tensor](), dict[str, torch.Tensor | None]()
    for seed, (name, target) in enumerate(decoder.targets().items()):
        if name in forms:
            rows = drawn(forms[name], target.shape, GAIN * target.shape[1] ** -0.5, seed)
            values[name] = values_of(forms[name], rows, target.shape[1])
            if not isinstance(forms[name], Float8Format):
                orders[name] = getattr(rows, "order", None)
            target.fill_quantised(rows)
            continue
        form = None if formats is None or target.is_plain else formats(name)
        if isinstance(form, OnGpu):
            form = form.within
        if isinstance(form, GroupFormat):
            values[name] = dequantised(form, quantise(tensors[name].cpu(), form))[:, : target.shape[1]]
            orders[name] = None
        target.fill(tensors[name])
    return values, orders
