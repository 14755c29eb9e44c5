"""Small random models and adapters in Hugging Face directories, and their libraries as oracles."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from workers.models.decoder import Decoder
from workers.models.weights import load_planned, plan_load

if TYPE_CHECKING:
    from peft import PeftModel

# The default 0.02 makes nearly uniform logits, from which a wrong layer would hardly be seen.
WEIGHT_SCALE = 0.3
# Of `float32_losses`.
_DRAWS = 4

Tensors = dict[str, torch.Tensor]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class TinyModel:
    """A Qwen3 of a few kilobytes.

    Attributes:
        max_shard_bytes: Split the checkpoint in shards of at most this size, with an index; None: one file.
        extra: Further settings of the config.
    """

    vocab_size: int = 97
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 512
    tied: bool = False
    dtype: str = "float32"
    seed: int = 0
    max_shard_bytes: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def hf_config(spec: TinyModel) -> Qwen3Config:
    """The config of a model as transformers has it."""
    return Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tied,
        dtype=spec.dtype,
        **spec.extra,
    )


def make_model(directory: Path, spec: TinyModel) -> Path:
    """Write config.json and safetensors; returns the directory. The same spec gives the same weights."""
    model = AutoModelForCausalLM.from_config(hf_config(spec))  # type: ignore[no-untyped-call]
    return _save_with_random_weights(model, directory, spec.dtype, spec.seed, spec.max_shard_bytes)


def load_decoder(
    directory: Path, dtype: torch.dtype | str = "auto", *, pack: bool = False, **options: Any
) -> Decoder:
    """The model of a directory in native code. `options`: of `plan_load`."""
    return load_planned(plan_load(directory, dtype, **options), pack=pack)[0]


def make_family_model(directory: Path, model_type: str, settings: dict[str, Any], *, seed: int = 0) -> Path:
    """Write a model of any family that transformers has, in shards; returns the directory.

    Settings that are not given are at the library's defaults. The same seed gives the same weights.
    """
    config = AutoConfig.for_model(model_type, dtype="float32", **settings)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return _save_with_random_weights(model, directory, "float32", seed, max_shard_bytes=60_000)


def pooled_by(directory: Path, settings: dict[str, Any], *more: str) -> None:
    """Writes the files of sentence-transformers."""
    names = ["Transformer", "Pooling", *more]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def _save_with_random_weights(
    model: PreTrainedModel, directory: Path, dtype: str, seed: int, max_shard_bytes: int | None
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norm weights lie around 1, so that mixing two of them up shows.
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else WEIGHT_SCALE * noise)
        # Corrections of routers.
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=max_shard_bytes or "50GB")
    return directory


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Put all tensors of a model into one file, after a change."""
    tensors: Tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    for old in directory.glob("model*"):
        old.unlink()
    changed = {name: tensor.contiguous() for name, tensor in change(tensors).items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})


def make_adapter(
    directory: Path, model: Path | PreTrainedModel, *, seed: int = 0, dtype: str = "float32", **settings: Any
) -> Path:
    """Write an adapter with random weights, by PEFT; returns the directory.

    A model in memory is changed. The same seed gives the same weights. `settings`: of its LoraConfig.
    """
    from peft import LoraConfig, get_peft_model  # machines with GPUs may lack it

    if isinstance(model, Path):
        model = copy.deepcopy(_read_model(model))
    adapted = quietly(get_peft_model, model, LoraConfig(task_type="CAUSAL_LM", **settings))
    # A README, whose template is compiled each time.
    vars(adapted)["create_or_update_model_card"] = lambda _: None
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = (WEIGHT_SCALE * noise).to(getattr(torch, dtype))
    quietly(adapted.save_pretrained, str(directory))
    return directory


def peft_model(model: Path, adapter: Path) -> PeftModel:
    """A model of transformers with an adapter, as PEFT reads it, in evaluation mode."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    adapted: PeftModel = quietly(PeftModel.from_pretrained, base, str(adapter)).eval()
    return adapted


@functools.lru_cache(maxsize=4)
def _read_model(model: Path) -> PreTrainedModel:
    """For copies: to read it takes ten times as long."""
    read: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model)
    return read


def quietly(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of a call into PEFT, which warns of patterns that match no module, and causes warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


@functools.lru_cache(maxsize=4)
def hf_model(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a directory in transformers, with eager attention, in evaluation mode."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    return model


def hf_logits(directory: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of every position [len(tokens), vocab_size] float32, by transformers, without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = hf_model(directory, dtype)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()


def hf_states(directory: Path, tokens: list[int]) -> list[torch.Tensor]:
    """What transformers calls hidden_states, [len(tokens), hidden_size] each, and last the logits."""
    with torch.inference_mode():
        states = _states(hf_model(directory), torch.tensor([tokens]))
    return [layer[0] for layer in states]


def _states(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states and logits of [B, T], numbered as in all families but Mamba's.

    These leave out the embeddings, and have the last layer with and without the norm.
    """
    result = model(tokens, use_cache=False, output_hidden_states=True)
    states = [*result.hidden_states]
    if isinstance(model, PreTrainedModel) and "mamba" in model.config.model_type.split("_")[-1]:
        states = [model.get_input_embeddings()(tokens), *states[:-2], states[-1]]
    return [*states, result.logits]


def float32_losses(
    model: torch.nn.Module, texts: Sequence[list[int]], *, with_states: bool = True
) -> torch.Tensor:
    """How far two correct computations in float32 may be apart: the bound for a comparison with transformers.

    It differs by model and text, since each layer amplifies the rounding errors of those before it, so it is
    measured. Of a sum of n terms of size s the partial sums grow as sqrt(k) s. An addition rounds its result
    by up to 2^-24 of it, in root mean square by 2^-24 / sqrt(3), and n of them by n / sqrt(6) 2^-24 s in all.
    Random relative errors of sqrt(n / 6) 2^-24 in the weights change an exact sum as much. That is for terms
    added one after the other; in any other order the error is smaller. Both sides have it: sqrt(2). And one
    more draw may err twice as much as the largest of a few: all in all a factor of 3.

    Returns:
        [len(texts), num_layers + 2]: the largest absolute difference, in each of transformers' hidden_states
        and, last, in the logits. Without hidden states [len(texts), 1].
    """
    generator = torch.Generator().manual_seed(0)
    # Later tokens do not matter to earlier ones.
    padded = [text + [0] * (max(map(len, texts)) - len(text)) for text in texts]

    def run() -> list[torch.Tensor]:
        if with_states:
            return _states(model, torch.tensor(padded))
        return [model(torch.tensor(padded), use_cache=False).logits]

    with torch.no_grad():
        parameters = {parameter: parameter.double() for parameter in model.parameters()}
        exact, losses = run(), []
        for _ in range(_DRAWS):
            for parameter, weight in parameters.items():
                noise = torch.randn(weight.shape, generator=generator).double()
                parameter.copy_(weight * (1 + (weight.shape[-1] / 6) ** 0.5 * 2**-24 * noise))
            differences = [(found - truth).abs() for found, truth in zip(run(), exact, strict=True)]
            losses.append([[float(d[i, : len(t)].max()) for d in differences] for i, t in enumerate(texts)])
        for parameter, weight in parameters.items():
            parameter.copy_(weight)
    bounds = 3 * torch.tensor(losses).amax(0)
    # Where two experts are all but equal, a wrong one would pass.
    assert (bounds < 1e-3 * torch.tensor([float(each.abs().max()) for each in exact])).all(), bounds
    return bounds


def hf_greedy(directory: Path, tokens: list[int], count: int) -> list[int]:
    """The next `count` tokens that transformers finds most likely, end tokens ignored.

    Without its cache: some families compute single tokens otherwise than prompts.
    """
    model, text = hf_model(directory), list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(tokens) :]
