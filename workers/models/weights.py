"""Loads a model into a decoder.

Before any allocation, the headers of the files are compared with the config, and the needed memory with the
free memory. Parameters are allocated once, fused and in the final dtype, and filled part by part. So the peak
of memory is the weights plus one part of a tensor, never the weights twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels import gpu_format
from kernels.float8_weight import Float8Format
from kernels.weight_formats import OnGpu, WeightFormat, unrounded
from workers.common.machine_limits import available_bytes
from workers.kv.sizing import check_fits
from workers.models import checkpoint
from workers.models.builder import build_decoder, is_router
from workers.models.checkpoint import AUTO, Staging, StoredTensor
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.errors import UnsupportedError
from workers.models.linear import LoadTarget
from workers.models.model import ModelDescription
from workers.models.model_tensors import EMBEDDING, checked_targets, tensors_of
from workers.models.parameters import FormatOf
from workers.models.parts import Part
from workers.models.recipes import recipe
from workers.models.shard import Group
from workers.models.source import source_of

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of the files after every part. In the last call both are equal."""

# A part of the seed of fingerprints.
UNROUNDED = " with unrounded rows"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A directory that passed all checks before its weights are read.

    Attributes:
        config: The config of the model.
        dtype: The dtype of the parameters.
        device: The device of the parameters.
        entries: The tensors of the files, by their names in a text model.
        num_parameters: See `ModelDescription`.
        weight_bytes: See `ModelDescription`. In a group, of this rank.
        group: The ranks over which the model is split; None: it is not.
        quantization: How matrices are quantised while they are read, a name of `RECIPES`; None: they are not.
        forms: The formats of matrices that the files have quantised, by their names in a text model.
        rounds_rows: Whether a CPU rounds the inputs of products with quantised integers to 8 bits in groups.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    entries: Mapping[str, StoredTensor]
    num_parameters: int
    weight_bytes: int
    group: Group | None = None
    quantization: str | None = None
    forms: Mapping[str, WeightFormat] = field(default_factory=dict)
    rounds_rows: bool = True

    @property
    def formats(self) -> FormatOf | None:
        """The format of each matrix, for `build_decoder`."""
        return formats_of(
            self.quantization, self.forms, self.config, self.device, rounds_rows=self.rounds_rows
        )

    @property
    def is_quantised(self) -> bool:
        """Whether some matrices are quantised. Their products have the same bits on every CPU."""
        return self.quantization is not None or bool(self.forms)

    @property
    def format_names(self) -> str:
        """The recipe, or the names of the files' formats; "": nothing is quantised."""
        return self.quantization or names_of(self.forms)


def names_of(forms: Mapping[str, WeightFormat]) -> str:
    """The distinct names of formats, as "q4_k; q6_k"."""
    return "; ".join(sorted({form.name for form in forms.values()}))


def forms_of(entries: Mapping[str, StoredTensor]) -> dict[str, WeightFormat]:
    """The formats of the matrices that the files have quantised, by name."""
    return {name: entry.form for name, entry in entries.items() if entry.form is not None}


def formats_of(
    quantization: str | None,
    forms: Mapping[str, WeightFormat],
    config: ModelConfig,
    device: torch.device,
    *,
    rounds_rows: bool = True,
) -> FormatOf | None:
    """The format of each matrix, for `build_decoder`, from the fields of a `LoadPlan`.

    Raises UnsupportedError for a model with recurrent layers on a GPU: that was never tested.
    """
    if not forms and quantization is None:
        return None
    format_of = forms.get if quantization is None else recipe(quantization, config)
    if gpu_format.is_gpu(device) and config.is_recurrent:
        raise UnsupportedError("quantised weights of a model with recurrent layers need device = cpu")
    if not gpu_format.is_gpu(device):
        return format_of if rounds_rows else lambda name: unrounded(format_of(name))

    def on_gpu(name: str) -> OnGpu | None:
        form = format_of(name)
        return None if form is None or isinstance(form, OnGpu) else OnGpu(form)

    return on_gpu


def plan_load(
    directory: Path | str,
    dtype: torch.dtype | str = AUTO,
    device: torch.device | str = "cpu",
    group: Group | None = None,
    quantization: str | None = None,
    *,
    rounds_rows: bool = True,
    in_memory: bool = True,
    mtp_head: bool = False,
) -> LoadPlan:
    """Check a directory without reading its weights.

    Args:
        directory: A Hugging Face model directory, or another `ModelSource`.
        dtype: A torch dtype or its name (float32, bfloat16, float16); "auto": the dtype that the config
            names, else that of the embedding in the files; on a CPU float32 for float16, and where all
            matrices are quantised.
        device: The device of the parameters.
        group: Only the part of `group.rank` is loaded; None: all of it.
        quantization: See `LoadPlan`.
        rounds_rows: See `LoadPlan`.
        in_memory: Whether they have to fit into memory.
        mtp_head: Whether the model's MTP head is loaded.

    Raises:
        ModelError: The model is not supported or not complete, or cannot be split over the group; the message
            names the file and the setting or tensor.
        KvSizingError: The weights do not fit into memory.
    """
    directory, device = Path(directory), torch.device(device)
    config = ModelConfig.from_directory(directory)
    config = config.with_mtp_head if mtp_head else config
    source = source_of(directory)
    has_head = not config.tie_word_embeddings
    config, entries = tensors_of(source, config)
    if has_head and config.tie_word_embeddings:
        _log.warning("%s has no head, so only its embeddings mean something, and no token does", directory)
    for note in source.notes():
        _log.info("%s: %s", source.config_file.name, note)
    forms = forms_of(entries)
    if mtp_head and device.type != "cpu":
        raise UnsupportedError("draft_model = mtp needs device = cpu")
    if quantization is not None and forms:
        first = min(forms)
        where = f"{entries[first].file}: tensor {entries[first].name}"
        raise UnsupportedError(f"{where} is quantised already ({forms[first].name}): leave out quantization")
    stored = entries[EMBEDDING].dtype if EMBEDDING in entries else None
    chosen = checkpoint.choose_dtype(dtype, config.dtype, stored, device)
    config, targets = checked_targets(config, directory, entries)
    num_parameters = sum(math.prod(target.shape) for target in targets.values())
    on_cpu = not gpu_format.is_gpu(device)
    # A GPU never rounds rows, so the setting must not distinguish results there.
    rounds_rows = rounds_rows or not on_cpu
    formats = formats_of(quantization, forms, config, device, rounds_rows=rounds_rows)
    if dtype == AUTO and on_cpu and formats is not None and _are_integers(targets, formats):
        # float32 only makes activations larger, and bfloat16 would lose more than 8-bit weights do.
        chosen = torch.float32
    own = build_decoder(config, chosen, "meta", group, formats).targets()
    for name in forms.keys() & own.keys():
        if own[name].is_plain:  # such as a router in float32
            where = f"{entries[name].file}: tensor {entries[name].name}"
            raise UnsupportedError(f"{where} is quantised, and native code needs it as it was")
    weight_bytes = sum(target.nbytes for target in own.values())
    if in_memory:
        _check_memory(directory, weight_bytes, device, group)
    quantised = quantization, forms, rounds_rows
    return LoadPlan(config, chosen, device, entries, num_parameters, weight_bytes, group, *quantised)


def _check_memory(directory: Path, weight_bytes: int, device: torch.device, group: Group | None) -> None:
    """Raises KvSizingError if the weights of a rank, or of the whole model, do not fit into memory."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    # On the CPU all ranks share the memory, and some may have allocated their part before another checks.
    shares = group.ranks if group is not None and group.rank == 0 and device.type == "cpu" else 1
    check_fits(f"the weights of {directory}", shares * weight_bytes, free_bytes)


def _are_integers(targets: Mapping[str, LoadTarget], formats: FormatOf) -> bool:
    """Whether all matrices except routers are integers in groups."""
    matrices = (name for name, target in targets.items() if len(target.shape) == 2 and not is_router(name))
    return not any(isinstance(formats(name), Float8Format | None) for name in matrices)


def check_gpu_formats(directory: Path, config: ModelConfig, quantization: str | None) -> None:
    """Raises UnsupportedError if a GPU does not support the formats of a model's weights. Reads headers."""
    config, entries = tensors_of(source_of(directory), config)
    forms = forms_of(entries)
    formats = formats_of(quantization, forms, config, torch.device("cuda"))
    build_decoder(config, torch.float32, "meta", formats=formats)


def load_planned(
    plan: LoadPlan, progress: Progress | None = None, *, pack: bool = False
) -> tuple[Decoder, ModelDescription]:
    """Load the weights of a plan.

    Args:
        plan: The result of `plan_load`.
        progress: Called with the progress; see `Progress`.
        pack: Pack the weights for the CPU's kernels; see `Decoder.pack`.

    Raises:
        ModelError: A tensor cannot be read, or has a value that is not finite.
    """
    config = plan.config
    decoder = build_decoder(config, plan.dtype, plan.device, plan.group, plan.formats)
    _load_weights(decoder, plan.entries, progress, _staging_for(plan.device))
    # The parsed config is hashed, so two spellings of a config have the same fingerprint. Quantised weights
    # have another one, since their KV differs.
    quantised = "" if plan.quantization is None else f" as {plan.quantization}"
    if plan.is_quantised and not plan.rounds_rows:
        quantised += UNROUNDED
    head = f"model.layers.{config.num_hidden_layers}."  # the MTP head, which changes no text
    of_body = {name: entry for name, entry in plan.entries.items() if not name.startswith(head)}
    digest = checkpoint.fingerprint(of_body, repr(config.body) + quantised)
    if pack:
        decoder.pack()
    return decoder, ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads if config.attends else 0,
        num_kv_heads=config.num_key_value_heads if config.attends else 0,
        head_dim=config.head_dim if config.attends else 0,
        dtype=checkpoint.name_of(plan.dtype),
        num_parameters=plan.num_parameters,
        weight_bytes=plan.weight_bytes,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        fingerprint=digest,
        moe_layers=sum(layer.sparse for layer in config.body_layers),
        moe_layer_ids=tuple(index for index, layer in enumerate(config.body_layers) if layer.sparse),
        num_experts=0 if config.experts is None else config.experts.count,
        experts_per_token=0 if config.experts is None else config.experts.per_token,
        quantization=plan.format_names,
        rounds_rows=plan.rounds_rows,
    )


@torch.inference_mode()
def _load_weights(
    decoder: Decoder,
    entries: Mapping[str, StoredTensor],
    progress: Progress | None,
    staging: Staging | None = None,
) -> None:
    """Fill the parameters of a decoder. `entries` were checked against its targets.

    With `staging` copies are only queued, and a tensor is checked when all its copies are queued. Without it,
    or if the weight is quantised, each part is checked while it is in the CPU's cache.

    Raises ModelError if a tensor cannot be read, or has a value that is not finite.
    """
    targets = decoder.targets()
    total_bytes = sum(_read_bytes(entries[name], target) for name, target in targets.items())
    done_bytes = 0
    # In the order of the files, so that reads are sequential.
    for name in sorted(targets, key=lambda name: (entries[name].file.name, entries[name].begin)):
        target, entry = targets[name], entries[name]
        where = f"{entry.file}: tensor {entry.name}"
        taken = None if target.taken is None else target.taken.covered
        queued = staging if target.is_plain else None
        for first, part in entry.parts(taken, queued):
            filled = _fill(target, part, first, is_quantised=entry.form is not None)
            done_bytes += part.nbytes
            del part  # so that its buffer is freed before the next tensor's is allocated
            if queued is None:
                for written in filled:
                    checkpoint.check_finite(written, where)
            if progress is not None:
                progress(done_bytes, total_bytes)
        if queued is not None:
            checkpoint.check_finite(target.tensor, where)


def _fill(target: LoadTarget, part: Part, first: int, *, is_quantised: bool) -> list[torch.Tensor]:
    if is_quantised:
        return target.fill_quantised(part, first)
    assert isinstance(part, torch.Tensor)
    return target.fill(part, first)


def _staging_for(device: torch.device) -> Staging | None:
    return Staging(torch.cuda.Event, pinned=True) if device.type == "cuda" else None


def _read_bytes(entry: StoredTensor, target: LoadTarget) -> int:
    """The number of bytes of a tensor that are read for a target."""
    if target.taken is None:
        return entry.nbytes
    return entry.nbytes // entry.shape[0] * len(target.taken.covered)


def copy_weights(source: Decoder, into: Decoder) -> None:
    """Replace the weights of a model in place.

    Args:
        source: A model of the same config and dtype, not packed.
        into: Mutated. Not packed.
    """
    targets = into.targets()
    for name, target in source.targets().items():
        targets[name].tensor.copy_(target.tensor, non_blocking=True)
    into.renew()
    if into.device.type == "cuda":
        torch.cuda.synchronize(into.device)
