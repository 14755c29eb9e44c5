"""A cache is of the weights it was made with: used with those, or refused; and which weights are served."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.v1 import types_pb2, worker_pb2

from service.caches.requests import Fork, Renew, Truncate
from service.caches.reservations import Limits
from service.pool.model_versions import (
    ModelVersions,
    ServedModel,
    choose_served_model,
    from_model_tag,
    read_served_model,
    to_model_tag,
    write_served_model,
)
from tests.sim.harness import Gateway, answer_of, decode, prefill
from tests.sim.toy_model import next_token

OLD, NEW = 0, 1


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(Limits(default_lease_s=10.0))


def says(gateway: Gateway, cache: str, token: int) -> int:
    return answer_of(gateway.append(decode(cache, token))).outputs[0].token_id


def test_whoever_has_a_cache_of_the_weights_before_can_only_release_it(gateway: Gateway) -> None:
    cache, other = gateway.create(1, 2, request_id="one"), gateway.create(5)
    children = gateway.handles(Fork.of(cache, 1, request_id="fork")).handles
    gateway.replace_weights(NEW, recompute=False)
    new = gateway.create(1, 2)
    assert says(gateway, new, 3) == next_token([1, 2, 3], None, NEW)
    for request in (
        decode(cache, 3),
        Truncate(cache, 1),
        Fork.of(cache, 1),
        Fork.of(cache, 1, request_id="fork"),
        Renew(cache),
        prefill(1, 2, request_id="one"),
        decode(children[0].cache_id, 3),
    ):
        assert gateway.refusal(request).reason == "WEIGHTS_CHANGED", request
    found = [*gateway.dispatcher.caches.index.lookup("one"), *gateway.dispatcher.caches.index.lookup("fork")]
    assert [made and made.weights for made in found] == [0, 0], (
        "whoever asks can tell that they are of others"
    )
    assert gateway.release(cache)
    assert gateway.refusal(decode(cache, 3)).reason == "CACHE_NOT_FOUND"
    assert gateway.refusal(Fork.of(cache, 1, request_id="fork")).reason == "WEIGHTS_CHANGED"
    # Another one can still be released by a fork; and its lease runs out, however often it is asked for.
    assert len(gateway.handles(Fork.of(new, 1, (children[0].cache_id,))).handles) == 1
    gateway.now_s = 11.0
    gateway.dispatcher.expire()
    assert gateway.refusal(decode(other, 3)).reason == "CACHE_NOT_FOUND"


def test_a_worker_that_is_adopted_keeps_only_what_is_of_its_weights(gateway: Gateway) -> None:
    gateway.create(1, 2)
    (number,) = (state.number for state in gateway.machine.ledger)
    gateway.lose_worker("worker-0")
    worker = gateway.start_worker("worker-1.1", {number: 2}, {number: [1, 2]}, weights=NEW)
    gateway.work()
    assert not worker.sequences


# What is served.


def test_what_was_loaded_is_served_until_the_settings_name_something_else(tmp_path: Path) -> None:
    assert read_served_model(tmp_path) is None and read_served_model(None) is None
    assert choose_served_model(None, "a", 0) == ServedModel("a", "a", 0)
    write_served_model(tmp_path, ServedModel("a", "b", 3))
    written = read_served_model(tmp_path)
    assert choose_served_model(written, "a", 3) == written == ServedModel("a", "b", 3)
    assert choose_served_model(written, "a", 2) == written, "the switch was the last that was done"
    assert choose_served_model(written, "b", 3) == ServedModel("b", "b", 3), "its caches go on"
    assert choose_served_model(written, "c", 3) == ServedModel("c", "c", 3)
    # Somebody has lost the file, or has brought an old one back: nobody knows what was loaded.
    assert (
        choose_served_model(None, "a", 3)
        == ServedModel("a", "a", 3)
        == choose_served_model(ServedModel("a", "b", 2), "a", 3)
    )


@pytest.mark.parametrize("content", ["", "[]", "{", '{"configured": "a"}', '{"configured": 1, "model": "b"}'])
def test_a_damaged_file_is_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "weights.json").write_text(content)
    assert read_served_model(tmp_path) is None


def become_ready(versions: ModelVersions, fingerprint: str) -> None:
    """Its only worker can serve, which has found that model."""
    (slot,) = versions.slots
    slot.ready, versions.serving.fingerprint = worker_pb2.WorkerReady(), fingerprint
    versions.worker_ready(slot)


def test_a_gateway_goes_on_with_what_was_served_before(tmp_path: Path) -> None:
    marks: list[str] = []

    def start(configured: str) -> ModelVersions:
        mark = marks[-1] if marks else None
        return ModelVersions(configured, 1, tmp_path, mark, marks.append, lambda number: number == 1)

    first = start("a")
    assert first.expected_fingerprint is None
    become_ready(first, "fa")
    assert marks == ["fa"] and read_served_model(tmp_path) is None, "nothing else was loaded"
    first.next_version("it is not served")
    loaded = first.next_version("b")
    first.persist(loaded)
    assert first.serving.model == "a" and marks == ["fa"], "it is written down, and not yet served"
    first.serve(loaded, types_pb2.ModelDescription(fingerprint="fb"))
    assert marks[-1] == "fb#2" and first.serving.number == 2

    again = start("a")
    assert (again.serving.model, again.serving.number, again.slots[0].worker_id) == ("b", 2, "worker-0.2")
    assert again.expected_fingerprint is None, "nobody has caches of it"
    other = start("c")
    assert (other.serving.model, other.serving.number) == ("c", 2)
    assert read_served_model(tmp_path) == ServedModel("a", "b", 2), "as long as it is not known to work"
    become_ready(other, "fc")
    assert read_served_model(tmp_path) == ServedModel("c", "c", 2)
    marks.append("fd#1")
    write_served_model(tmp_path, ServedModel("d", "d", 1))
    assert start("d").expected_fingerprint == "fd", "there are caches"


def test_a_worker_of_before_that_becomes_ready_does_not_undo_a_switch(tmp_path: Path) -> None:
    versions = ModelVersions("a", 1, tmp_path)
    become_ready(versions, "fa")
    loaded = versions.next_version("b")
    versions.persist(loaded)
    become_ready(versions, "fa")
    versions.serve(loaded, types_pb2.ModelDescription())
    assert read_served_model(tmp_path) == ServedModel("a", "b", 1)


def test_whoever_subscribes_is_told_of_each_change() -> None:
    versions, seen = ModelVersions("a", 1), []
    versions.subscribe(lambda: seen.append(versions.serving.number))
    become_ready(versions, "")
    versions.serve(versions.next_version("b"), types_pb2.ModelDescription())
    assert seen == [0, 1]


def test_a_journal_is_told_of_which_weights_its_caches_are() -> None:
    assert to_model_tag("abc", 0) == "abc", "as ever"
    for fingerprint, weights in (("abc", 0), ("abc", 7), ("", 7)):
        assert from_model_tag(to_model_tag(fingerprint, weights)) == (fingerprint, weights)
    assert from_model_tag(None) == (None, 0)
