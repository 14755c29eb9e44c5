"""Adapters of experts and of DoRA through the gateway: the tokens of PEFT, also after new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.v1 import admin_pb2

from tests.e2e.greedy import PROMPT, STEPS, Text
from tests.e2e.test_adapters import FLAGS, PATIENCE_S, load
from tests.families import settings_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy, make_adapter, make_family_model, peft_model
from tests.workers.test_adapters_of_experts import PARAMETERS, make_dora


def tokens_of(model: Path, adapter: Path, directory: Path) -> list[int]:
    """Those of the model that PEFT merges an adapter into."""
    peft_model(model, adapter).merge_and_unload().save_pretrained(directory)
    return hf_greedy(directory, PROMPT, STEPS)


def test_they_have_the_tokens_of_peft(tmp_path: Path) -> None:
    models = [
        make_family_model(tmp_path / f"model-{seed}", *settings_of("qwen3_moe"), seed=seed) for seed in (7, 8)
    ]
    experts: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": PARAMETERS}
    adapters = {
        "experts": make_adapter(tmp_path / "experts", models[0], r=6, lora_alpha=3, **experts),
        "dora": make_dora(tmp_path / "dora", models[0], target_modules=["q_proj", "v_proj", "o_proj"]),
    }
    expected = [
        {name: tokens_of(model, adapter, tmp_path / f"{name}-{index}") for name, adapter in adapters.items()}
        for index, model in enumerate(models)
    ]
    tokens = [tokens for of_model in expected for tokens in of_model.values()]
    assert len({tuple(each) for each in tokens}) == 4, "all differ"
    with GatewayProcess(model=str(models[0]), workers=1, flags=FLAGS) as gateway:
        for name, adapter in adapters.items():
            load(gateway, name, adapter)
        assert {name: Text(gateway, name).finish() for name in adapters} == expected[0]
        request = admin_pb2.LoadWeightsRequest(source=str(models[1]))
        assert [*gateway.admin.LoadWeights(request, timeout=PATIENCE_S)]
        assert {name: Text(gateway, name).finish() for name in adapters} == expected[1]
