"""The self-check of native code: it passes for every family, and notices whatever changes the mathematics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.rope import rope_frequencies
from tests.families import MODELS, settings_of
from tests.model_factory import make_family_model
from workers.executors.llm import LlmExecutor
from workers.models import builder, config, native_parity_check
from workers.models.config import ModelConfig
from workers.models.errors import ModelError
from workers.models.layers import Attention
from workers.models.linear import LoadTarget
from workers.models.native_parity_check import check_native
from workers.models.rope_settings import read_ropes

CPU = torch.device("cpu")


def run_check(directory: Path, dtype: torch.dtype = torch.float32) -> float | None:
    return check_native(directory, ModelConfig.from_directory(directory), dtype, CPU)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_passes(name: str, model_of: Callable[[str], Path]) -> None:
    error = run_check(model_of(name), torch.bfloat16)
    assert error is not None and error < 2e-5


def swap_norms(patch: pytest.MonkeyPatch) -> None:
    """The weight of q_norm goes where that of k_norm belongs."""
    right = Attention.targets

    def targets(self: Attention, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        other = {"q_norm": "k_norm", "k_norm": "q_norm"}
        for name, target in right(self, prefix):
            found = next((norm for norm in other if norm in name), None)
            yield (name.replace(found, other[found]) if found else name), target

    patch.setattr(Attention, "targets", targets)


def change(**fields: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The decoder is built from a config that differs in some fields."""

    def build(patch: pytest.MonkeyPatch) -> None:
        right = builder._Parts.__init__

        def init(self: Any, made: ModelConfig, *rest: Any) -> None:
            changes = {name: value(made) if callable(value) else value for name, value in fields.items()}
            right(self, dataclasses.replace(made, **changes), *rest)

        patch.setattr(builder._Parts, "__init__", init)

    return build


def with_layers(**fields: Any) -> Callable[[ModelConfig], Any]:
    return lambda made: tuple(dataclasses.replace(layer, **fields) for layer in made.layers)


def twice_the_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        config,
        "read_ropes",
        lambda *args: {
            kind: dataclasses.replace(rope, theta=2 * rope.theta) for kind, rope in read_ropes(*args).items()
        },
    )


MISTAKES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "q and k norms swapped": ("qwen3", swap_norms),
    "a window of some layers ignored": ("gemma3", change(layers=with_layers(window=None))),
    "scores not capped": ("gemma2", change(attention_softcap=None)),
    "another rotary base": ("llama", twice_the_base),
    "weights of experts not normalised": (
        "qwen3_moe",
        change(experts=lambda made: dataclasses.replace(made.experts, normalized=False)),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(
    mistake: str, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make = MISTAKES[mistake]
    make(monkeypatch)
    with pytest.raises(ModelError, match=r"the results would be wrong|differs from its plain forward"):
        run_check(model_of(name))


def test_a_config_that_the_library_reads_differently_is_refused(tmp_path: Path) -> None:
    make_family_model(tmp_path, *settings_of("mistral"))
    read = ModelConfig.from_directory(tmp_path)
    with pytest.raises(ModelError, match=r"rms_norm_eps is read as 0\.1, and as 1e-06 by the transformers"):
        check_native(tmp_path, dataclasses.replace(read, rms_norm_eps=0.1), torch.float32, CPU)


@pytest.mark.parametrize(("pair", "share"), [(-1, 1e-2), (0, 1e-6)], ids=["slow", "fast"])
def test_a_pair_that_turns_otherwise_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: int, share: float
) -> None:
    """In the short texts of the check it would hardly show."""
    make_family_model(tmp_path, *settings_of("llama3"))
    assert run_check(tmp_path) is not None

    def faster(*arguments: Any) -> tuple[torch.Tensor, float]:
        frequencies, factor = rope_frequencies(*arguments)
        frequencies[pair] *= 1 + share
        return frequencies, factor

    monkeypatch.setattr(native_parity_check, "rope_frequencies", faster)
    with pytest.raises(ModelError, match=r"the frequencies of RopeSpec.* are not those of the transformers"):
        run_check(tmp_path)


def test_a_worker_refuses_a_model_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_family_model(tmp_path, *settings_of("qwen3"))
    swap_norms(monkeypatch)
    with pytest.raises(ModelError, match=r"native code for qwen3 in float32: .* differs .* by [0-9.e-]+"):
        LlmExecutor.load(tmp_path, kv_pages=8)
    # Who asks for it gets it.
    assert LlmExecutor.load(tmp_path, kv_pages=8, self_check=False).info().vocab_size == 97
