"""LoRA adapters through the gateway: each cache has the tokens of its own version, whatever happens."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf import duration_pb2
from quire.v1 import admin_pb2, runner_pb2
from quire.v1 import executor_pb2 as pb

from tests.adapter_factory import make_adapter, merge
from tests.e2e.greedy import PROMPT, STEPS, Text
from tests.error_details import reason_of, refused
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, hf_greedy, make_model

# Far more than anything takes.
PATIENCE_S = 60
FLAGS = ["--dtype", "float32", "--kv-pages", "128", "--max-lora-adapters", "2"]


class Adapted:
    """A model, adapters of it, and what each makes of the prompt. Index 0 is the model itself."""

    def __init__(self, directory: Path, adapters: int) -> None:
        self.model = make_model(directory / "model", TinyModel(seed=5))
        self.adapters = [directory / f"adapter-{seed}" for seed in range(1, adapters + 1)]
        self.tokens = [hf_greedy(self.model, PROMPT, STEPS)]
        for seed, adapter in enumerate(self.adapters, start=1):
            make_adapter(adapter, self.model, seed)
            merged = merge(directory / f"merged-{seed}", self.model, adapter)
            self.tokens.append(hf_greedy(merged, PROMPT, STEPS))
        assert len({tuple(tokens) for tokens in self.tokens}) == adapters + 1, "all differ"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"), 4)


@pytest.fixture(scope="module")
def gateway(adapted: Adapted) -> Iterator[GatewayProcess]:
    with GatewayProcess(model=str(adapted.model), workers=1, flags=FLAGS) as process:
        yield process


def load(gateway: GatewayProcess, adapter_id: str, source: Path | str) -> admin_pb2.Adapter:
    request = admin_pb2.LoadAdapterRequest(adapter_id=adapter_id, source=str(source))
    return gateway.admin.LoadAdapter(iter([request]), timeout=PATIENCE_S).adapter


def upload(gateway: GatewayProcess, adapter_id: str, directory: Path, part: int = 1000) -> admin_pb2.Adapter:
    def requests() -> Iterator[admin_pb2.LoadAdapterRequest]:
        yield admin_pb2.LoadAdapterRequest(adapter_id=adapter_id)
        for file in sorted(directory.iterdir()):
            data = file.read_bytes()
            for at in range(0, len(data), part):
                piece = admin_pb2.AdapterFile(name=file.name, data=data[at : at + part])
                yield admin_pb2.LoadAdapterRequest(file=piece)

    return gateway.admin.LoadAdapter(requests(), timeout=PATIENCE_S).adapter


def unload(gateway: GatewayProcess, adapter_id: str) -> bool:
    request = admin_pb2.UnloadAdapterRequest(adapter_id=adapter_id)
    return gateway.admin.UnloadAdapter(request, timeout=PATIENCE_S).unloaded


def ids(gateway: GatewayProcess) -> dict[str, admin_pb2.Adapter]:
    listed = gateway.admin.ListAdapters(admin_pb2.ListAdaptersRequest(), timeout=PATIENCE_S)
    return {adapter.adapter_id: adapter for adapter in listed.adapters}


def test_each_cache_has_the_tokens_of_its_adapter(gateway: GatewayProcess, adapted: Adapted) -> None:
    """More adapters than slots, in batches of all of them: they are evicted and read again."""
    for index, directory in enumerate(adapted.adapters, start=1):
        loaded = load(gateway, f"a{index}", directory)
        assert (loaded.adapter_id, loaded.rank, loaded.caches) == (f"a{index}", 4, 0)
        assert loaded.size_bytes > 0
    texts = [Text(gateway, "" if index == 0 else f"a{index}") for index in range(5)]
    assert all(text.reused == 0 for text in texts), "adapters share no KV"
    for _ in range(STEPS - 1):
        items = [pb.DecodeRequest(cache_id=text.cache_id, token_id=text.tokens[-1]) for text in texts]
        response = gateway.stub.BatchDecode(pb.BatchDecodeRequest(items=items), timeout=PATIENCE_S)
        for text, result in zip(texts, response.results, strict=True):
            text.tokens.append(result.response.output.token_id)
    assert [text.tokens for text in texts] == adapted.tokens
    assert Text(gateway, "a1").reused > 0, "the caches of an adapter share"
    (worker,) = gateway.stub.GetLoraMetrics(pb.GetLoraMetricsRequest(), timeout=PATIENCE_S).workers
    by_id = {metrics.adapter_id: metrics for metrics in worker.adapters}
    assert by_id.keys() == {"a1", "a2", "a3", "a4"}
    assert sum(metrics.resident for metrics in by_id.values()) == 2
    assert all(metrics.operations >= STEPS and metrics.loads for metrics in by_id.values())
    assert sum(metrics.evictions for metrics in by_id.values()) > 0
    assert by_id["a1"].sequences == 2
    executor = gateway.capabilities().executor
    assert executor.supports_lora and executor.max_lora_adapters == 2


def test_forks_scorings_and_unified_items_have_it_too(gateway: GatewayProcess, adapted: Adapted) -> None:
    load(gateway, "mine", adapted.adapters[0])
    text = Text(gateway, "mine")
    text.cache_id = gateway.fork(text.cache_id)[0].cache_id
    assert text.finish() == adapted.tokens[1]
    whole = PROMPT + adapted.tokens[1]
    for adapter_id, is_its_own in (("mine", True), ("", False)):
        scored = gateway.forward(whole, score_from=len(PROMPT), adapter_id=adapter_id)
        assert all(scored.token_is_argmax) == is_its_own
    item = pb.UnifiedForwardItem(token_ids=PROMPT, adapter_id="mine")
    response = gateway.stub.UnifiedForward(pb.UnifiedForwardRequest(items=[item]), timeout=PATIENCE_S)
    assert response.results[0].response.output.token_id == adapted.tokens[1][0]


def test_a_cache_keeps_its_version_until_it_is_released(gateway: GatewayProcess, adapted: Adapted) -> None:
    first = load(gateway, "versions", adapted.adapters[0])
    before = Text(gateway, "versions", request_id="before")
    second = upload(gateway, "versions", adapted.adapters[1])
    assert second.version > first.version
    after = Text(gateway, "versions")
    again = Text(gateway, "versions", request_id="before")
    assert (again.cache_id, again.tokens) == (before.cache_id, before.tokens)
    assert refused(lambda: Text(gateway, "of nobody", request_id="before")) == "ADAPTER_NOT_FOUND"
    assert refused(lambda: Text(gateway, "", request_id="before")) == "REQUEST_ID_REUSED"
    load(gateway, "other", adapted.adapters[1])
    assert refused(lambda: Text(gateway, "other", request_id="before")) == "REQUEST_ID_REUSED"
    assert ids(gateway)["versions"].version == second.version and ids(gateway)["versions"].caches == 1
    assert unload(gateway, "versions") and not unload(gateway, "versions")
    assert refused(lambda: Text(gateway, "versions")) == "ADAPTER_NOT_FOUND"
    again = Text(gateway, "versions", request_id="before")
    assert (again.cache_id, again.tokens) == (before.cache_id, before.tokens), "its version is there"
    assert "versions" not in ids(gateway)
    assert before.finish() == adapted.tokens[1]
    assert after.finish() == adapted.tokens[2]


def test_pinned_versions_give_their_places_up_when_they_are_replaced(
    gateway: GatewayProcess, adapted: Adapted
) -> None:
    """As a trainer loads them: more than there are slots, one after the other."""
    for index, directory in enumerate(adapted.adapters, start=1):
        request = admin_pb2.LoadAdapterRequest(adapter_id="trained", source=str(directory), pinned=True)
        assert gateway.admin.LoadAdapter(iter([request]), timeout=PATIENCE_S).adapter.pinned
        text = Text(gateway, "trained")
        assert text.finish() == adapted.tokens[index]
    assert unload(gateway, "trained")


def test_what_cannot_be_loaded_changes_nothing(
    gateway: GatewayProcess, adapted: Adapted, tmp_path: Path
) -> None:
    load(gateway, "kept", adapted.adapters[0])
    broken = tmp_path / "broken"
    shutil.copytree(adapted.adapters[1], broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    other = make_model(tmp_path / "model", TinyModel(head_dim=48, seed=9))
    others = make_adapter(tmp_path / "others", other, 1)
    # In the place of a file.
    (tmp_path / "odd" / "adapter_config.json").mkdir(parents=True)
    nameless = admin_pb2.LoadAdapterRequest(adapter_id="kept", file=admin_pb2.AdapterFile(data=b"x"))
    bad = "BAD_ADAPTER"
    before, files = ids(gateway), psutil.Process(gateway.process.pid).num_fds()
    for _ in range(20):
        assert refused(lambda: load(gateway, "kept", tmp_path / "odd")) == bad
        assert refused(lambda: gateway.admin.LoadAdapter(iter([nameless]), timeout=PATIENCE_S)) == bad
    # Connections may come and go.
    assert psutil.Process(gateway.process.pid).num_fds() < files + 10, "they are not left open"
    assert refused(lambda: load(gateway, "kept", broken)) == bad
    assert refused(lambda: load(gateway, "kept", others)) == bad
    assert refused(lambda: upload(gateway, "kept", broken)) == bad
    assert refused(lambda: load(gateway, "kept", tmp_path / "nothing")) == bad
    assert refused(lambda: load(gateway, "kept", "relative")) == "BAD_SOURCE"
    assert refused(lambda: load(gateway, "../up", adapted.adapters[0])) == bad
    assert refused(lambda: load(gateway, "", adapted.adapters[0])) == bad
    assert refused(lambda: gateway.admin.LoadAdapter(iter(()), timeout=PATIENCE_S)) == bad
    assert ids(gateway) == before
    assert Text(gateway, "kept").finish() == adapted.tokens[1]
    text = Text(gateway)
    assert refused(lambda: gateway.prefill(PROMPT, cache_id=text.cache_id, adapter_id="kept")) == bad


def texts_of_versions(gateway: GatewayProcess, adapted: Adapted) -> list[Text]:
    """Begun with no adapter, with an "a", with a "b" that is unloaded since, and with a later "a"."""
    load(gateway, "a", adapted.adapters[0])
    load(gateway, "b", adapted.adapters[1])
    texts = [Text(gateway, adapter_id) for adapter_id in ("", "a", "b")]
    load(gateway, "a", adapted.adapters[2])
    texts.append(Text(gateway, "a"))
    unload(gateway, "b")
    for text in texts:
        text.decode(3)
    return texts


def test_kills_of_workers_and_of_the_gateway_change_no_token(adapted: Adapted, home: Path) -> None:
    """A replaced and an unloaded version, and none, survive; new numbers are never old ones."""
    flags = [*FLAGS, "--data-dir", str(home), "--orphan-grace-s", "0"]
    with GatewayProcess(model=str(adapted.model), workers=2, flags=flags) as gateway:
        texts = texts_of_versions(gateway, adapted)
        version = ids(gateway)["a"].version
        for worker in gateway.status().workers:
            os.kill(worker.pid, signal.SIGKILL)
        for text in texts:
            text.decode(2)
        gateway.kill()
    with GatewayProcess(model=str(adapted.model), workers=2, flags=flags) as gateway:
        for text in texts:
            text.gateway = gateway
            text.finish()
        assert [text.tokens for text in texts] == [adapted.tokens[index] for index in (0, 1, 2, 3)]
        assert list(ids(gateway)) == ["a"]
        assert refused(lambda: Text(gateway, "b")) == "ADAPTER_NOT_FOUND"
        assert load(gateway, "b", adapted.adapters[3]).version > version
        assert Text(gateway, "b").finish() == adapted.tokens[4]


def test_an_execution_goes_on_with_its_version_after_a_restart(adapted: Adapted, home: Path) -> None:
    """Whatever its adapter's id names by then, and if it names none."""
    flags = [*FLAGS, "--data-dir", str(home), "--orphan-grace-s", "0"]
    items = [
        runner_pb2.ExecuteItem(
            item_id=name, tokens=runner_pb2.TokenPrompt(token_ids=PROMPT), max_tokens=80, tokens_only=True,
            ignore_eos=True, adapter_id=name, n=n,
        )
        for name, n in (("replaced", 2), ("unloaded", 1))
    ]  # fmt: skip
    keep = duration_pb2.Duration(seconds=PATIENCE_S)
    request = runner_pb2.ExecuteRequest(request_id="kept", items=items, keep=keep)
    with GatewayProcess(model=str(adapted.model), workers=1, flags=flags) as gateway:
        for name in ("replaced", "unloaded"):
            load(gateway, name, adapted.adapters[0])
        call = gateway.runner.Execute(request, timeout=PATIENCE_S)
        seen: set[tuple[str, int]] = set()
        for response in call:
            seen |= {(chunk.item_id, chunk.sample) for chunk in response.chunks if chunk.position > 1}
            if len(seen) == 3:
                break
        gateway.process.kill()
    with GatewayProcess(model=str(adapted.model), workers=1, flags=flags) as gateway:
        load(gateway, "replaced", adapted.adapters[1])
        assert unload(gateway, "unloaded")
        tokens: dict[tuple[str, int], list[int]] = {}
        for response in gateway.runner.Execute(request, timeout=PATIENCE_S):
            for chunk in response.chunks:
                assert not chunk.HasField("error"), chunk.error
                tokens.setdefault((chunk.item_id, chunk.sample), []).extend(chunk.token_ids)
        # As many as the references have: the others make it last until the gateway is killed.
        assert {key: found[:STEPS] for key, found in tokens.items()} == dict.fromkeys(
            [("replaced", 0), ("replaced", 1), ("unloaded", 0)], adapted.tokens[1]
        )
        assert {len(found) for found in tokens.values()} == {80}


def test_cancelled_loads_leave_no_file(home: Path) -> None:
    model = make_model(home / "model", TinyModel(hidden_size=512, intermediate_size=1024))
    large = make_adapter(home / "large", model, 1, rank=256)
    copies = home / "data" / "adapters"
    rng = random.Random(1)
    with GatewayProcess(model=str(model), flags=[*FLAGS, "--data-dir", str(home / "data")]) as gateway:
        for _ in range(30):
            request = admin_pb2.LoadAdapterRequest(adapter_id="a", source=str(large))
            call = gateway.admin.LoadAdapter.future(iter([request]), timeout=PATIENCE_S)
            # A load takes some 100 ms.
            time.sleep(rng.random() * 0.06)
            call.cancel()
        unload(gateway, "a")
        gateway.wait_until(lambda: not copies.is_dir() or not any(copies.iterdir()))
        assert not ids(gateway)


def test_a_directory_of_adapters(adapted: Adapted, home: Path) -> None:
    directory = home / "adapters"
    shutil.copytree(adapted.adapters[0], directory / "one")
    flags = [*FLAGS, "--adapters", str(directory), "--data-dir", str(home / "data"), "--orphan-grace-s", "0"]
    with GatewayProcess(model=str(adapted.model), workers=1, flags=flags) as gateway:
        assert list(ids(gateway)) == ["one"] and ids(gateway)["one"].shared
        version = ids(gateway)["one"].version
        text = Text(gateway, "one")
        text.decode(3)
        shutil.rmtree(directory / "one")
        shutil.copytree(adapted.adapters[1], directory / "one")
        # In memory it is still there; then it is lost, and never another one's.
        text.decode(2)
        os.kill(gateway.status().workers[0].pid, signal.SIGKILL)
        assert refused(lambda: text.decode(1)) == "ADAPTER_LOST"
        text.release()
        gateway.wait_until(lambda: ids(gateway)["one"].version > version)
        assert Text(gateway, "one").finish() == adapted.tokens[2]


def test_a_lost_adapter_says_what_to_do(adapted: Adapted, home: Path) -> None:
    flags = [*FLAGS, "--data-dir", str(home), "--orphan-grace-s", "0"]
    with GatewayProcess(model=str(adapted.model), workers=1, flags=flags) as gateway:
        version = load(gateway, "gone", adapted.adapters[0]).version
        # They take its place in memory.
        for index in (1, 2):
            load(gateway, f"other-{index}", adapted.adapters[index])
        shutil.rmtree(home / "adapter-versions" / str(version))
        with pytest.raises(grpc.RpcError) as error:
            Text(gateway, "gone")
        assert reason_of(error.value) == "ADAPTER_LOST"
        details = str(error.value.details())
        assert "adapter_config.json" in details and "load the adapter again" in details
        assert str(home) not in details
        load(gateway, "gone", adapted.adapters[0])
        assert Text(gateway, "gone").finish() == adapted.tokens[1]
