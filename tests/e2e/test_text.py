"""A model of the hub through a real gateway: its description, chats, and constrained output."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import Client, item
from quire.v1 import executor_pb2, runner_pb2, types_pb2

from tests.chat_templates import QWEN
from tests.gateway_process import GatewayProcess
from tests.hub_server import Hub, cached, serving
from tests.model_factory import TinyModel
from tests.talkers import VOCAB, make_talker

MODEL = "org/tiny-model"
SAMPLING = {"do_sample": True, "temperature": 0.5, "top_k": 20, "top_p": 0.75}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("hub")
    spec = TinyModel(vocab_size=VOCAB, max_shard_bytes=100_000)
    return cached(scratch / "cache", MODEL, make_talker(scratch / "model", spec, **SAMPLING))


@pytest.fixture(scope="module")
def gateway(snapshot: Path) -> Iterator[GatewayProcess]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_CACHE", str(snapshot.parents[2]))
        environment.setenv("HF_HUB_OFFLINE", "1")
        gateway = GatewayProcess(model=MODEL, flags=["--dtype", "float32", "--kv-pages", "64"])
    with gateway:
        yield gateway


def test_model_info_has_the_name_on_the_hub_and_the_files_for_callers(
    gateway: GatewayProcess, snapshot: Path
) -> None:
    with Client(gateway.address) as client:
        info = client.model_info(include_tokenizer=True, include_chat_template=True)
        assert client.model_info() == executor_pb2.GetModelInfoResponse(
            model=info.model,
            sampling_defaults=info.sampling_defaults,
            device="cpu",
            special_tokens={"eos_token": "<|im_end|>"},
        )
    assert info.model.model_id == MODEL
    assert info.tokenizer_json == (snapshot / "tokenizer.json").read_bytes()
    assert dict(info.chat_template.sources) == {"default": QWEN}
    assert dict(info.chat_template.special_tokens) == {"eos_token": "<|im_end|>"}
    assert info.sampling_defaults == types_pb2.SamplingParams(temperature=0.5, top_k=20, top_p=0.75)


def test_a_download_is_served(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(MODEL, {file.name: file.read_bytes() for file in snapshot.iterdir()})
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serving(hub) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with (
            GatewayProcess(model=MODEL, flags=["--kv-pages", "16"]) as gateway,
            Client(gateway.address) as client,
        ):
            assert client.model_info().model.model_id == MODEL
            assert f"quire: downloading {MODEL} from " in gateway.log()
    assert set(hub.fetched) == set(hub.files)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "counts": {
            "type": "array",
            "items": {"type": "integer", "minimum": -99, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["name", "size", "counts"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("times", [1, pytest.param(64, marks=pytest.mark.thorough)])
def test_json_of_a_random_model_always_matches_its_schema(gateway: GatewayProcess, times: int) -> None:
    hot = types_pb2.SamplingParams(temperature=1.5)
    constraint = runner_pb2.Constraint(json_schema=json.dumps(SCHEMA))
    with Client(gateway.address) as client:
        for number in range(times):
            items = [
                item(f"{number} {n}", item_id=str(n), n=8, sampling=hot, constraint=constraint)
                for n in range(2)
            ]
            texts: dict[tuple[str, int], str] = defaultdict(str)
            for delta in client.execute(items):
                texts[delta.item_id, delta.sample] += delta.text
            assert len(texts) == 16 and len(set(texts.values())) > 8
            for text in texts.values():
                found = json.loads(text)
                assert list(found) == ["name", "size", "counts"]
                assert len(found["name"]) <= 8 and found["size"] in ("small", "large")
                assert all(-99 <= count <= 99 for count in found["counts"]) and len(found["counts"]) <= 3
