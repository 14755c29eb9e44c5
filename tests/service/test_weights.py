"""A cache is of the weights it was made with: used with those, or refused; and which weights are served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from quire.v1 import types_pb2

from service import model_names
from service.caches.admission import Limits
from service.caches.ledger import Ledger
from service.extensions.conformance import commit, created
from service.journal.values import StoredValues
from service.model_names import shipped_model_dir
from service.pool.model_versions import ModelVersions
from tests.service.journal_traffic import open_journal
from tests.sim.harness import Gateway
from workers.common import worker_pb2


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(Limits(default_lease_s=10.0))


# What is served.


def become_ready(versions: ModelVersions, fingerprint: str) -> None:
    """Its only worker can serve, which has found that model."""
    (slot,) = versions.slots
    slot.ready, versions.serving.fingerprint = worker_pb2.WorkerReady(), fingerprint
    versions.worker_ready(slot)


def stored(values: StoredValues) -> tuple[str, str, int, str]:
    """What the settings named, and what the next gateway serves."""
    found = json.loads(values.get("weights"))
    return found["configured"], found["model"], found["number"], found["fingerprint"]


async def test_a_gateway_goes_on_with_what_was_served_before() -> None:
    values = StoredValues()

    def start(configured: str) -> ModelVersions:
        return ModelVersions(configured, 1, values, lambda number: number == 1)

    first = start("a")
    assert first.expected_fingerprint is None
    become_ready(first, "fa")
    assert stored(values) == ("a", "a", 0, "fa")
    first.next_version("it is not served")
    loaded = first.next_version("b")
    await first.persist(loaded, "fb")
    assert first.serving.model == "a" and stored(values) == ("a", "b", 2, "fb"), "written, and not yet served"
    first.serve(loaded, types_pb2.ModelDescription(fingerprint="fb"))
    assert first.serving.number == 2 and stored(values) == ("a", "b", 2, "fb")

    again = start("a")
    assert (again.serving.model, again.serving.number, again.slots[0].worker_id) == ("b", 2, "worker-0.2")
    assert again.expected_fingerprint is None, "nobody has caches of it"
    assert start("b").serving.model == "b", "its caches go on"
    other = start("c")
    assert (other.serving.model, other.serving.number) == ("c", 2)
    assert stored(values) == ("a", "b", 2, "fb"), "as long as it is not known to work"
    become_ready(other, "fc")
    assert stored(values) == ("c", "c", 2, "fc")
    assert ModelVersions("d", 1, values, lambda number: number == 2).expected_fingerprint == "fc"


async def test_a_shipped_model_is_the_same_one_of_another_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, it was taken for another one: a start warned, and did not serve what was loaded last."""
    values, adder = StoredValues(), shipped_model_dir("adder")
    with monkeypatch.context() as patched:
        patched.setattr(model_names, "_SHIPPED", Path("/elsewhere"))
        become_ready(ModelVersions("/elsewhere/adder", 1, values), "fa")
    versions = ModelVersions(str(adder), 1, values)
    assert versions.serving.model == str(adder) and "not what was loaded last" not in capsys.readouterr().out
    loaded = versions.next_version("b")
    await versions.persist(loaded, "fb")
    with monkeypatch.context() as patched:
        patched.setattr(model_names, "_SHIPPED", Path("/elsewhere"))
        assert ModelVersions("/elsewhere/adder", 1, values).serving.model == "b"


async def test_a_copy_of_the_journal_alone_has_the_weights_of_its_caches(tmp_path: Path) -> None:
    """Before, a file beside it had them: without it, caches were of a model that nobody knew."""
    ledger, source, copy = Ledger(), tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    journal = open_journal(source, ledger=ledger)
    versions = ModelVersions("a", 1, StoredValues(journal, ledger))
    become_ready(versions, "fa")
    loaded = versions.next_version("b")
    await versions.persist(loaded, "fb")
    versions.serve(loaded, types_pb2.ModelDescription(fingerprint="fb"))
    assert await commit(journal, created(1, weights=1), to=ledger)
    journal.close()
    shutil.copytree(source / "journal", copy / "journal")
    ledger = Ledger()
    journal = open_journal(copy, ledger=ledger)
    again = ModelVersions("a", 1, StoredValues(journal, ledger), lambda number: number == 1)
    journal.close()
    assert (again.serving.model, again.serving.number, again.expected_fingerprint) == ("b", 1, "fb")
