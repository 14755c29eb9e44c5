"""Directories whose weights are quantised already, in each format: what is loaded is what the files say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel

from tests import quantised_directories as make
from tests.families import settings_of
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import TinyModel, load_decoder, make_family_model, make_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages, random_texts
from tests.workers.test_quantised_models import LENGTHS, add_adapters
from workers.executors.llm import LlmExecutor
from workers.executors.loading import AUTO, NATIVE, TRANSFORMERS, choose_backend, load_served
from workers.executors.memory import LoraLimits
from workers.models.decoder import Decoder
from workers.models.errors import ModelError, UnsupportedError
from workers.models.library.library_model import LibraryModel
from workers.models.native_parity_check import check_native
from workers.models.registry import FAMILIES
from workers.models.source import source_of
from workers.models.stacked_experts import separated_values
from workers.models.weights import plan_load

torch.set_num_threads(1)

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
BLOCKS = FLOAT8 | {"strategy": "block", "block_structure": [32, 32]}
ROUNDED = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}

# Eight roundings of bfloat16, as a self-check allows.
ROUNDED_LOSS = 6.2e-2

# As AutoRound 0.6 and ModelOpt say what others have in the same tensors.
_AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "data_type": "int",
    "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
}
_AS_GPTQ = {"packing_format": "auto_round:auto_gptq", "sym": True}
_AS_AWQ = {"packing_format": "auto_round:auto_awq", "sym": False}


def said_as(meant: make.Tensors, directory: Path, says: dict[str, Any]) -> make.Tensors:
    settings = json.loads((directory / "config.json").read_text()) | {"quantization_config": says}
    (directory / "config.json").write_text(json.dumps(settings))
    return meant


Make = Callable[[Path], make.Tensors]
DIRECTORIES: dict[str, Make] = {
    "gptq": make.gptq,
    "gptq with zero points": lambda directory: make.gptq(directory, symmetric=False),
    "gptq of 3 bits in another order": lambda directory: make.gptq(directory, bits=3, ordered=True),
    "gptq of 3 bits with zero points": lambda directory: make.gptq(
        directory, bits=3, symmetric=False, version=2
    ),
    "gptq of 2 bits with zero points": lambda directory: make.gptq(directory, bits=2, symmetric=False),
    "gptq of 8 bits": lambda directory: make.gptq(directory, bits=8, group=-1, version=2),
    "gptq of 8 bits with zero points": lambda directory: make.gptq(directory, bits=8, symmetric=False),
    "gptq in another order": lambda directory: make.gptq(directory, ordered=True),
    "gptq in another order with zero points and a head": lambda directory: make.gptq(
        directory, ordered=True, symmetric=False, version=2, also=["lm_head"]
    ),
    "awq": make.awq,
    "awq in part": lambda directory: make.awq(directory, left=["v_proj", "0.mlp.up_proj"]),
    "w4a16": lambda directory: make.compressed(directory, "pack-quantized", INT4),
    "w4a16 with zero points": lambda directory: make.compressed(
        directory, "pack-quantized", INT4 | {"symmetric": False}
    ),
    "w4a16 in another order": lambda directory: make.compressed(
        directory, "pack-quantized", INT4, ordered=True, scale_dtype=torch.float32
    ),
    "w8a16": lambda directory: make.compressed(directory, "pack-quantized", INT8),
    "w8a8": lambda directory: make.compressed(directory, "int-quantized", INT8, inputs=ROUNDED),
    "w8a8 with zero points and a head": lambda directory: make.compressed(
        directory, "int-quantized", INT8 | {"symmetric": False}, inputs=ROUNDED, also=["lm_head"], ignore=[]
    ),
    "w4a8": lambda directory: make.compressed(directory, "int-quantized", INT4, inputs=ROUNDED),
    "float8 of compressed-tensors": lambda directory: make.compressed(directory, "float-quantized", FLOAT8),
    "float8 with a scale for a matrix": lambda directory: make.compressed(
        directory, "naive-quantized", FLOAT8 | {"strategy": "tensor"}
    ),
    "float8 in blocks of compressed-tensors": lambda directory: make.compressed(
        directory, "float-quantized", BLOCKS
    ),
    "float8 in blocks": make.float8,
    "float8 in large blocks with an embedding": lambda directory: make.float8(
        directory, block=(128, 128), also=["lm_head", "model.embed_tokens"]
    ),
    "float8 with one scale": lambda directory: make.float8(directory, block=None),
    "nf4": lambda directory: make.bitsandbytes(directory, "nf4", block=32),
    "nf4 with nested scales, in part": lambda directory: make.bitsandbytes(
        directory, "nf4", nested=True, left=["v_proj", "0.mlp.up_proj"]
    ),
    "fp4 as bfloat16": lambda directory: make.bitsandbytes(
        directory, "fp4", block=128, storage=torch.bfloat16
    ),
    "llm.int8": lambda directory: make.bitsandbytes(directory, "int8"),
    "mlx": make.mlx,
    "mlx of 8 bits": lambda directory: make.mlx(directory, bits=8, dtype=torch.float16),
    "mlx of 2 and 5 bits": lambda directory: make.mlx(
        directory, bits=2, others={"lm_head": 5, "model.layers.0.mlp.down_proj": 5}, also=["lm_head"]
    ),
    "mlx of 3 and 6 bits": lambda directory: make.mlx(
        directory, bits=3, others={f"model.layers.{layer}.self_attn.v_proj": 6 for layer in range(4)}
    ),
    "mlx of floats": make.mlx_of_floats,
    "auto-round": lambda directory: said_as(make.gptq(directory), directory, _AUTO_ROUND | _AS_GPTQ),
    "auto-round as awq": lambda directory: said_as(make.awq(directory), directory, _AUTO_ROUND | _AS_AWQ),
    "float8 of modelopt": lambda directory: said_as(
        make.float8(directory, block=None),
        directory,
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    ),
}
# Relative. NF4's numbers are rounded to integers; scales of bitsandbytes are divided by one, in float32.
LOSSES = {"nf4": 3.4e-5, "fp4": 2**-22, "llm": 2**-22}


def made(directory: Path, name: str, dtype: str = "float32") -> make.Tensors:
    """Writes a directory. Returns what its weights are."""
    make_model(directory, TinyModel(dtype=dtype))
    return DIRECTORIES[name](directory)


def matrices(decoder: Decoder) -> make.Tensors:
    """What a decoder has in memory, by the names in a checkpoint."""
    found = {}
    for name, target in decoder.targets().items():
        if target.taken is not None and len(target.shape) == 2:
            found[name] = target.into.dense()[target.first : target.first + target.taken.num_rows]
    return found


@pytest.mark.parametrize("name", DIRECTORIES)
def test_the_weights_are_those_of_the_files_exactly(name: str, tmp_path: Path) -> None:
    meant = made(tmp_path, name)
    loaded = matrices(load_decoder(tmp_path))
    assert loaded.keys() == {tensor for tensor, values in meant.items() if values.dim() == 2}
    for tensor, values in loaded.items():
        loss = LOSSES.get(re.split(r"\W", name)[0], 0.0)
        torch.testing.assert_close(values, meant[tensor], rtol=loss, atol=0, msg=tensor)


def test_rows_of_a_single_word(tmp_path: Path) -> None:
    """Of 8 inputs, whose transposed words have one column."""
    make_model(tmp_path, TinyModel(hidden_size=8, heads=1, kv_heads=1))
    meant = make.gptq(tmp_path, group=-1)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(matrices(load_decoder(tmp_path))[name], meant[name])


# One of each format in memory. The check knows nothing of how files have it.
PROVEN = (
    *(
        "gptq with zero points",
        "gptq of 8 bits",
        "w8a8",
        "float8 in blocks",
        "float8 with a scale for a matrix",
    ),
    *("nf4", "fp4 as bfloat16", "llm.int8", "mlx", "mlx of 8 bits"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PROVEN else pytest.mark.thorough) for name in DIRECTORIES]
)
def test_it_proves_itself(name: str, tmp_path: Path) -> None:
    made(tmp_path, name, "bfloat16")
    for dtype, rounds_rows in (("float32", True), ("bfloat16", True), ("float32", False)):
        plan = plan_load(tmp_path, dtype)
        checked = tmp_path, plan.config, plan.dtype, plan.device
        assert check_native(*checked, forms=plan.forms, rounds_rows=rounds_rows) is not None


# Those that the transformers library reads itself. For the others it gets what they stand for.
READ_BY_THE_LIBRARY = {name for name in DIRECTORIES if "float8" in name or "w4" in name or "w8" in name} - {
    "w4a16 with zero points",
    "w4a16 in another order",
    "float8 with one scale",
    "float8 of modelopt",
}


# What the library does not read is the weights exactly, as above.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in READ_BY_THE_LIBRARY else pytest.mark.thorough)
        for name in DIRECTORIES
    ],
)
def test_logits_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    """With integers within what rounding inputs to 8 bits changes: see ADR 60."""
    meant = made(tmp_path, name)
    tokens = random_texts(1, (40,))[0]
    with torch.inference_mode():
        expected = library_model(tmp_path, name, meant)(torch.tensor([tokens])).logits[0]
    found = logits(load_decoder(tmp_path, pack=True), tokens)
    rows = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert rows.median() < (1e-4 if "float8" in name else ROUNDED_LOSS)


def library_model(directory: Path, name: str, meant: make.Tensors) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(directory)
    said: dict[str, Any] = config.quantization_config
    model: PreTrainedModel
    if name not in READ_BY_THE_LIBRARY:
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        model.load_state_dict(meant)
        return model
    if said["quant_method"] == "fp8":
        block = said["weight_block_size"]
        dense = FineGrainedFP8Config(dequantize=True, weight_block_size=block)
        model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=dense)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory)
    return model


def logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    inputs = new_packer(1).pack([Item(HandSequence(), tokens, range(len(tokens)))])
    return decoder.logits(decoder.forward(inputs, poisoned_pages(decoder))).float()


@pytest.mark.parametrize(
    "name", ["gptq in another order", "mlx", "w8a8 with zero points and a head", "float8 in blocks", "nf4"]
)
def test_bits_depend_on_nothing_else_in_the_batch(name: str, tmp_path: Path) -> None:
    """Nor on chunks; with adapters and without."""
    need_compiled()
    made(tmp_path, name, "bfloat16")
    decoder = load_decoder(tmp_path, pack=True)
    assert decoder.batch_invariant
    assert_same_bits(decoder, random_texts(4, LENGTHS), "plain")
    add_adapters(decoder)
    assert_same_bits(decoder, random_texts(4, LENGTHS), "adapters", lora_slots=(1, -1, 0, 1, -1))


def test_other_weights_have_to_be_quantised_alike(tmp_path: Path) -> None:
    directories = []
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        directories.append(make_model(tmp_path / f"{number}", TinyModel(seed=number)))
    served, alike, other, _ = directories
    make.gptq(served)
    make.gptq(alike)
    make.awq(other)
    executor = LlmExecutor.load(served, kv_pages=4, lora=LoraLimits(4, 16, 1 << 20))
    assert executor.replacement is not None
    _, description = executor.replacement._read(alike)
    assert description.fingerprint != executor.info().fingerprint
    for directory, held in (
        (directories[3], ""),
        (other, "int4, groups of 32, scales of float16, zero points"),
    ):
        with pytest.raises(
            ModelError, match=rf"(weight_bytes|quantization) is ({held}|\d+), and that of the"
        ):
            executor.replacement._read(directory)


def test_what_quantised_weights_cannot_do_is_refused(tmp_path: Path) -> None:
    made(tmp_path, "gptq")
    with pytest.raises(UnsupportedError, match=r"down_proj\.qweight is quantised already \(int4, "):
        plan_load(tmp_path, quantization="q8_0")
    assert choose_backend(tmp_path, AUTO).backend == NATIVE


# Each kind of weight in memory, among experts too.
OF_LIBRARY = (
    "gptq in another order",
    "awq",
    "w4a16",
    "w8a8",
    "float8 in blocks",
    "float8 with one scale",
    "nf4",
    "mlx",
    "mlx of floats",
)


@pytest.mark.parametrize("name", OF_LIBRARY)
def test_the_library_serves_them_as_they_are(name: str, tmp_path: Path) -> None:
    """Families without native code: projections and experts stay quantised."""
    need_compiled()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
    }
    more = {"num_hidden_layers": 2, "n_routed_experts": 8, "first_k_dense_replace": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0}
    source = make_family_model(tmp_path / "source", "glm4_moe", sizes | more | heads)
    directory = make.in_one_file(source, tmp_path / "model")
    meant = DIRECTORIES[name](directory)
    model, description = load_served(
        directory,
        "float32",
        torch.device("cpu"),
        None,
        backend=choose_backend(directory, AUTO).backend,
        self_check=True,
        rounds_rows=False,
    )
    assert isinstance(model, LibraryModel) and description.quantization
    assert description.weight_bytes < 0.6 * sum(values.nbytes for values in meant.values())
    tokens = torch.tensor(random_texts(1, (40,))[0])
    save_file(meant, directory / "model.safetensors", {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    del settings["quantization_config"]
    (directory / "config.json").write_text(json.dumps(settings))
    plain, _ = load_served(
        directory, "float32", torch.device("cpu"), None, backend=TRANSFORMERS, self_check=False
    )
    assert isinstance(plain, LibraryModel)
    found, expected = (each.plain_logits(tokens) for each in (model, plain))
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).median() < 1e-4


Tensors = make.Tensors
UP = "model.layers.1.mlp.up_proj"


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    """A change of a tensor of a projection; None: it goes."""

    def damage(tensors: Tensors) -> None:
        made = change(tensors.pop(f"{UP}.{part}"))
        if made is not None:
            tensors[f"{UP}.{part}"] = made

    return damage


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def nan_byte(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.uint8).view(-1)[5] = 0x7F
    return tensor


def saying(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a matrix of bitsandbytes says of itself."""

    def change(said: torch.Tensor) -> torch.Tensor:
        content = json.dumps(json.loads(bytes(said.tolist())) | changes)
        return torch.tensor([*content.encode()], dtype=torch.uint8)

    return change


NF4, NESTED = "nf4", "nf4 with nested scales, in part"
STATE = "weight.quant_state.bitsandbytes__nf4"
HOSTILE: list[tuple[str, Callable[[Tensors], None], str]] = [
    (NF4, changed(STATE, lambda _: None), "bitsandbytes__nf4 is missing"),
    (NF4, changed(STATE, lambda said: said[:-1]), "bitsandbytes__nf4 is not|not valid"),
    (NF4, changed(STATE, lambda said: said.repeat(99)), "has more than 4096 bytes"),
    (NF4, changed(STATE, saying(shape=[1 << 20, 1 << 20])), r"says \[1048576, 1048576\], which \S+ does not"),
    (NF4, changed(STATE, saying(shape=[-96, -64])), "shape: must be two positive integers"),
    (NF4, changed(STATE, saying(shape=[384, 16])), "shape: a row must have a multiple of 32, got 16"),
    (NF4, changed(STATE, saying(blocksize=48)), "blocksize: must be one of 32, .*, got 48"),
    (NF4, changed(STATE, saying(blocksize=64)), r"absmax has shape \[192\], but must have \[96\]"),
    (NF4, changed(STATE, saying(quant_type="fp4")), "quant_type: must be nf4, got 'fp4'"),
    (NF4, changed("weight.quant_map", lambda codes: codes.flip(0)), "is another table than that of bitsandb"),
    (NF4, changed("weight.absmax", set_first(float("nan"))), r"weight\.absmax is not finite"),
    (NF4, changed("weight.absmax", lambda _: None), r"up_proj\.weight"),
    (
        NF4,
        changed("weight", lambda values: values[:-1]),
        r"says \[96, 64\], which \S+up_proj\.weight does not",
    ),
    (NESTED, changed("weight.nested_absmax", lambda _: None), "nested_absmax is missing"),
    (NESTED, changed("weight.nested_absmax", set_first(float("inf"))), "nested_absmax is not finite"),
    (NESTED, changed("weight.nested_quant_map", lambda codes: codes[:255]), r"must have \[256\]"),
    (NESTED, changed(STATE, saying(nested_offset="3")), "nested_offset: must be a number, got '3'"),
    (NESTED, changed(STATE, saying(nested_offset=10**400)), "nested_offset: must be a number, got"),
    (NESTED, changed(STATE, saying(nested_offset=3e38)), r"absmax is not finite|too large"),
    (NESTED, changed(STATE, saying(nested_blocksize=True)), "nested_blocksize: must be a positive integer"),
    ("llm.int8", changed("SCB", lambda scales: scales[1:]), r"SCB has shape \[95\], but must have \[96\]"),
    ("llm.int8", changed("SCB", lambda _: None), r"up_proj\.weight(_format is not part| must be one)"),
    ("llm.int8", changed("weight_format", lambda order: order + 1), "weight_format must be 0"),
    ("gptq", changed("scales", lambda _: None), r"tensor .*up_proj\.scales is missing"),
    ("gptq", changed("qzeros", lambda _: None), r"tensor .*up_proj\.qzeros is missing"),
    ("gptq", changed("scales", set_first(float("nan"))), r"up_proj\.scales is not finite"),
    ("gptq", changed("scales", set_first(float("inf"))), r"up_proj\.scales is not finite"),
    (
        "gptq",
        changed("scales", lambda scales: scales[:1]),
        r"scales has shape \[1, 96\], but must have \[2, 96\]",
    ),
    (
        "gptq",
        changed("scales", lambda scales: scales.to(torch.float64)),
        "must be F32 or BF16 or F16, got F64",
    ),
    ("gptq", changed("qweight", lambda words: words[:4]), r"shape \[1, 96\]|must have \[1, 96\]"),
    ("gptq", changed("qweight", lambda words: words.view(-1)), "must be a matrix"),
    ("gptq", changed("qweight", lambda words: words.long()), "must be I32, got I64"),
    ("gptq", changed("qzeros", set_first(0)), "qzeros is not 8 everywhere, but sym is true"),
    ("gptq", changed("g_idx", lambda groups: groups.flip(0)), "has an order, but desc_act is false"),
    ("gptq in another order", changed("g_idx", lambda _: None), r"up_proj\.g_idx is missing"),
    ("gptq in another order", changed("g_idx", set_first(2)), "names a group that is not from 0 to 1"),
    ("gptq in another order", changed("g_idx", set_first(-1)), "names a group that is not from 0 to 1"),
    (
        "gptq in another order",
        changed("g_idx", lambda groups: groups * 0),
        "has groups that are not of 32 inputs",
    ),
    ("gptq in another order", changed("g_idx", lambda groups: groups[:9]), r"g_idx has shape \[9\]"),
    ("mlx", changed("biases", lambda _: None), r"tensor .*up_proj\.biases is missing"),
    ("mlx", changed("biases", set_first(float("nan"))), r"up_proj\.biases is not finite"),
    ("mlx", changed("scales", lambda scales: scales[:, :1]), r"scales has shape \[96, 1\]"),
    ("mlx of 3 and 6 bits", changed("weight", lambda words: words[:, 1:]), "which are no values of 3 bits"),
    (
        "gptq of 3 bits in another order",
        changed("qweight", lambda words: words[1:]),
        "not for multiples of 32",
    ),
    ("awq", changed("qzeros", lambda words: words[:, :3]), r"qzeros has shape \[2, 3\]"),
    ("awq", changed("scales", set_first(float("-inf"))), r"up_proj\.scales is not finite"),
    ("w4a16", changed("weight_shape", lambda shape: shape * 1000), r"weight_shape says \[96000, 64000\]"),
    ("w4a16", changed("weight_shape", set_first(-7)), r"weight_shape says \[-7, 64\]"),
    ("w4a16", changed("weight_scale", lambda scales: scales.view(-1)), "weight_scale has shape"),
    ("w4a16 with zero points", changed("weight_zero_point", lambda _: None), "weight_zero_point is missing"),
    ("w8a8", changed("weight_scale", lambda _: None), "weight_scale is missing"),
    ("w4a8", changed("weight", set_first(99)), "has values that are not of 4 bits"),
    ("float8 in blocks", changed("weight_scale_inv", lambda _: None), "weight_scale_inv is missing"),
    ("float8 in blocks", changed("weight_scale_inv", lambda scales: scales[:1]), r"must have \[3, 2\]"),
    (
        "float8 in blocks",
        changed("weight_scale_inv", set_first(float("nan"))),
        "weight_scale_inv is not finite",
    ),
    ("float8 in blocks", changed("weight", nan_byte), r"up_proj\.weight is not finite"),
    (
        "float8 in blocks",
        lambda tensors: tensors.update({f"{UP}.weight_scale": torch.ones(())}),
        "two scales",
    ),
]


@pytest.mark.parametrize(("name", "damage", "says"), HOSTILE)
def test_hostile_tensors_are_refused_by_name(
    name: str, damage: Callable[[Tensors], None], says: str, tmp_path: Path
) -> None:
    made(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file({one: tensor.contiguous() for one, tensor in tensors.items()}, file)
    with pytest.raises(ModelError, match=says) as raised:
        load_decoder(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said", "says"),
    [
        ("gptq", {"bits": 5}, "bits: must be 2, 3, 4 or 8, got 5"),
        (
            "gptq",
            {"bits": 3, "sym": False},
            "sym: must be true with 3 bits, unless checkpoint_format is gptq_",
        ),
        ("gptq", {"bits": True}, "bits: must be an integer, got True"),
        ("gptq", {"group_size": 0}, "group_size: must be -1 or positive, got 0"),
        ("gptq", {"group_size": 1 << 40}, "group_size: must be -1 or positive"),
        ("gptq", {"group_size": 48}, "has shape|groups of 48 inputs are not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: must be gptq or gptq_v2, got 'marlin'"),
        ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "dynamic: must only leave modules out"),
        ("awq", {"version": "gemv"}, "version: must be gemm, got 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point: must be True, got False"),
        ("w4a16", {"ignore": ["re:(a{9}){9}"]}, r"ignore: the pattern \(a\{9\}\)\{9\} is not supported"),
        ("w4a16", {"ignore": ["re:["]}, r"ignore: the pattern \[ is not valid"),
        ("w4a16", {"ignore": "lm_head"}, "ignore: must be a list of names"),
        ("w4a16", {"ignore": ["re:.*up_proj"]}, "is quantised, and the config says that .*up_proj is not"),
        ("w4a16", {"config_groups": {}}, "config_groups: must be 1 to 64 groups"),
        (
            "w4a16",
            {"quantization_status": "calibration"},
            "quantization_status: must be compressed or frozen, got 'calibration'",
        ),
        ("w4a16", {"transform_config": {"r": 1}}, "transform_config: transformed weights are not supported"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not supported"),
        (
            "float8 in blocks",
            {"weight_block_size": [128]},
            "weight_block_size: must be two positive integers",
        ),
        ("float8 in blocks", {"weight_block_size": [32, 48]}, "has shape|scales must be of multiples of 32"),
        ("float8 in blocks", {"fmt": "e5m2"}, "fmt: must be e4m3 or float8_e4m3fn, got 'e5m2'"),
        ("mlx", {"bits": 7}, r"quantization \(mlx\): bits: must be 2 or 3 or 4 or 5 or 6 or 8, got 7"),
        ("mlx", {"mode": "nvfp4"}, "mode: must be affine or mxfp4, got 'nvfp4'"),
        ("mlx of floats", {"group_size": 64}, "group_size: must be 32, got 64"),
        ("mlx", {"group_size": 16}, "group_size: must be 32 or 64 or 128, got 16"),
        ("mlx", {UP: False}, "is quantised, and the config says that .*up_proj is not"),
        ("mlx", {UP: {"bits": 4}}, "'.*up_proj': group_size: must be 32 or 64 or 128, got None"),
        ("mlx", {"rotation": "hadamard"}, "'rotation': is not known, got 'hadamard'"),
        (NF4, {"load_in_4bit": False}, "load_in_4bit: either this or load_in_8bit must be true"),
        (NF4, {"load_in_8bit": True}, "load_in_4bit: either this or load_in_8bit must be true"),
        (NF4, {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type: must be fp4 or nf4, got 'nf3'"),
        ("float8 in blocks", {"quant_method": "quark"}, "quant_method must be one of .*, got 'quark'"),
        ("float8 in blocks", {"quant_method": "x" * 9999}, r"got 'x{59}\.\.\."),
    ],
)
def test_what_is_not_understood_in_a_config_is_refused_by_name(
    name: str, said: dict[str, Any], says: str, tmp_path: Path
) -> None:
    made(tmp_path, name)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    settings["quantization" if "mlx" in name else "quantization_config"] |= said
    file.write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=says):
        load_decoder(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_a_file_of_the_tool_says_counts_if_the_config_says_nothing(method: str, tmp_path: Path) -> None:
    """As AutoGPTQ and AutoAWQ had it in 2023, and the names that the first gave to weights."""
    meant = made(tmp_path, method)
    config = tmp_path / "config.json"
    settings = json.loads(config.read_text())
    said = settings.pop("quantization_config")
    old: dict[str, Any] = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, "damp_percent": 0.01}
    if method == "awq":
        old = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    file = tmp_path / ("quantize_config.json" if method == "gptq" else "quant_config.json")
    file.write_text(json.dumps(old))
    config.write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(matrices(load_decoder(tmp_path))[name], meant[name])
    file.write_text("{")
    with pytest.raises(ModelError, match=rf"{file}: "):
        load_decoder(tmp_path)
    config.write_text(json.dumps(settings | {"quantization_config": said}))
    load_decoder(tmp_path)


def test_an_embedding_that_mlx_has_quantised_is_the_head_too(tmp_path: Path) -> None:
    make_model(tmp_path, TinyModel(tied=True))
    meant = make.mlx(tmp_path)
    decoder = load_decoder(tmp_path)
    assert decoder.lm_head is decoder.embedding
    name = "model.embed_tokens.weight"
    assert torch.equal(matrices(decoder)[name], meant[name])


# What mlx-lm names otherwise.
OTHER_NAMES = {
    "lfm2_moe": ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")),
    "nemotron_h with experts": (
        (".switch_mlp.up_proj.", ".switch_mlp.fc1."),
        (".switch_mlp.down_proj.", ".switch_mlp.fc2."),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_5", "lfm2", "lfm2_moe", "mamba", "mamba2", "jamba"),
        *("granite hybrid with experts", "nemotron_h with experts"),
    ],
)
def test_what_mlx_has_in_another_form_is_that_of_the_original(name: str, tmp_path: Path) -> None:
    """Convolutions, names, and norms that multiply by 1 more in the library."""
    model_type, settings = settings_of(name)
    settings |= {"block_auto_adjust_ff_dim": False, "linear_value_head_dim": 16, "moe_intermediate_size": 64}
    settings |= {"intermediate_size": 64} | ({"moe_latent_size": 32} if "moe_latent_size" in settings else {})
    source = make_family_model(tmp_path / "source", model_type, settings)
    directory = make.in_one_file(source, tmp_path / "model")
    file = directory / "model.safetensors"
    names = FAMILIES[model_type].experts
    plain = load_file(file)
    if names is not None and names.stacked is not None:
        plain = {tensor: values.contiguous() for tensor, values in separated_values(plain, names).items()}
        save_file(plain, file)
    make.mlx(directory, left=["mixer.gate"])
    tensors = load_file(file)
    for tensor, values in plain.items():
        if "conv" in tensor and values.dim() == 3:
            tensors[tensor] = values.movedim(2, 1).contiguous()
        elif name == "qwen3_5" and values.dim() == 1 and "norm" in tensor and "linear_attn" not in tensor:
            tensors[tensor] = values + 1
    for before, after in OTHER_NAMES.get(name, ()):
        tensors = {tensor.replace(before, after): values for tensor, values in tensors.items()}
    save_file(tensors, file)
    load_decoder(directory)
    found = source_of(directory).tensors()
    others = {tensor: values for tensor, values in plain.items() if values.dim() != 2}
    assert any(not torch.equal(values, tensors[tensor]) for tensor, values in others.items())
    for tensor, values in others.items():
        read = torch.cat(
            [part.clone() for _, part in found[tensor].parts() if isinstance(part, torch.Tensor)]
        )
        torch.testing.assert_close(read, values, rtol=0, atol=2.0**-23)  # of the sum with 1


@pytest.mark.parametrize("how", [make.mlx, make.mlx_of_floats])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
def test_keys_and_values_of_latents_are_apart_in_mlx(name: str, how: Any, tmp_path: Path) -> None:
    model_type, settings = settings_of(name)
    settings |= {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 96, "moe_intermediate_size": 64}
    source = make_family_model(tmp_path / "source", model_type, settings | {"q_lora_rank": 64})
    directory = make.in_one_file(source, tmp_path / "model")
    file = directory / "model.safetensors"
    heads, keys, values = settings["num_attention_heads"], "embed_q", "unembed_out"
    plain = load_file(file)
    merged = [tensor for tensor in plain if ".kv_b_proj." in tensor]
    for tensor in merged:
        of_heads = plain.pop(tensor).view(heads, 32 + 96, 64)
        plain[tensor.replace("kv_b_proj", keys)] = of_heads[:, :32].mT.flatten(0, 1).contiguous()
        plain[tensor.replace("kv_b_proj", values)] = of_heads[:, 32:].flatten(0, 1).contiguous()
    save_file(plain, file)
    meant = how(directory, left=["mlp.gate"])
    tensors = {
        tensor: each.view(heads, -1, each.shape[1])
        if f".{keys}." in tensor or f".{values}." in tensor
        else each
        for tensor, each in load_file(file).items()
    }
    save_file(tensors, file)
    load_decoder(directory)
    found = source_of(directory).tensors()
    assert len(merged) == settings["num_hidden_layers"]
    for tensor in merged:
        read = torch.cat([part for _, part in found[tensor].parts() if isinstance(part, torch.Tensor)])
        of_keys, of_values = (
            (whole := meant[tensor.replace("kv_b_proj", part)]).view(heads, -1, whole.shape[1])
            for part in (keys, values)
        )
        assert torch.equal(read, torch.cat([of_keys.mT, of_values], dim=1).flatten(0, 1))
    make.change(directory, merged[0].replace("kv_b_proj.weight", f"{keys}.scales"), lambda one: one[:-1])
    with pytest.raises(ModelError, match=rf"{keys}\.scales has shape .* not of 1 to 4096 matrices"):
        load_decoder(directory)


@pytest.mark.parametrize(
    ("name", "there", "also"),
    [
        ("qwen3_moe", ".mlp.switch_mlp.up_proj.", ".mlp.experts.up_proj."),
        ("qwen3_moe", ".mlp.switch_mlp.up_proj.", ".mlp.experts.0.up_proj."),
        ("lfm2_moe", ".feed_forward.w1.", ".feed_forward.gate_proj."),
    ],
)
def test_a_matrix_that_a_directory_of_mlx_has_under_two_names_is_refused(
    name: str, there: str, also: str, tmp_path: Path
) -> None:
    model_type, settings = settings_of(name)
    settings |= {"moe_intermediate_size": 64, "block_auto_adjust_ff_dim": False}
    source = make_family_model(tmp_path / "source", model_type, settings)
    directory = make.in_one_file(source, tmp_path / "model")
    make.mlx(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    more = {
        tensor.replace(there, also): (each[0] if ".0." in also else each).clone()
        for tensor, each in tensors.items()
        if there in tensor
    }
    assert more
    save_file(tensors | more, file)
    with pytest.raises(ModelError, match="is also there as"):
        source_of(directory).tensors()


def test_a_router_that_stays_in_float32_must_not_be_quantised(tmp_path: Path) -> None:
    model_type, settings = settings_of("deepseek_v3")
    source = make_family_model(tmp_path / "source", model_type, settings | {"moe_intermediate_size": 64})
    directory = make.in_one_file(source, tmp_path / "model")
    make.mlx(directory)
    with pytest.raises(
        UnsupportedError, match=r"mlp\.gate\.weight is quantised, and native code needs it as it was"
    ):
        load_decoder(directory)


def test_models_of_2024_are_read(tmp_path: Path) -> None:
    """Their status is another, and AutoFP8 wrote one scale for keys and values."""
    made(tmp_path, "float8 with a scale for a matrix")
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    settings = json.loads(config.read_text())
    settings["quantization_config"]["quantization_status"] = "frozen"
    config.write_text(json.dumps(settings))
    save_file(load_file(file) | {"model.layers.0.self_attn.kv_scale": torch.ones(())}, file)
    load_decoder(tmp_path)
    # Not compressed: the values are rounded, and have their dtype still.
    dense = load_file(file)[f"{UP}.weight"].float()
    save_file(load_file(file) | {f"{UP}.weight": dense}, file)
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight_scale is not part of this qwen3 model"):
        load_decoder(tmp_path)


def test_biases_that_are_zero_are_ignored_where_a_model_has_none(tmp_path: Path) -> None:
    """AutoGPTQ wrote them."""
    made(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {f"{UP}.bias": torch.zeros(96, dtype=torch.float16)}
    save_file(tensors, file)
    load_decoder(tmp_path)
    tensors[f"{UP}.bias"][3] = 1e-4
    save_file(tensors, file)
    with pytest.raises(UnsupportedError, match=r"up_proj\.bias is not part of this qwen3 model"):
        load_decoder(tmp_path)
