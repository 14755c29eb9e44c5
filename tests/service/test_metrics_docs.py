"""docs/operations.md, the alerts and the dashboard name the metrics that there are, and all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.service.metrics_server import serving
from tests.service.test_errors import ERRORS
from tests.test_links import anchors

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
OPERATIONS = DOCS / "operations.md"
ALERTS = DOCS / "monitoring" / "alerts.yaml"
DASHBOARD = DOCS / "monitoring" / "dashboard.json"
Known = dict[str, tuple[str, set[str]]]
# What Prometheus and the library for a process's own figures add.
OTHERS: Known = {
    "up": ("gauge", set()),
    **{f"process_{name}": ("gauge", set()) for name in ("open_fds", "max_fds", "start_time_seconds")},
}
TARGET_LABELS = {"job", "instance", "le"}


@pytest.fixture
async def known(tmp_path: Path) -> Known:
    """All metrics by the names that Prometheus stores, with their types and labels."""
    async with serving(tmp_path) as server:
        families = [*server.exporter.registry.collect()]
    return {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            set(getattr(family, "_labelnames", ())),
        )
        for family in families
    }


def documented() -> Known:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*)\|", OPERATIONS.read_text(), flags=re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


async def test_every_metric_is_documented(known: Known) -> None:
    assert documented() == {name: one for name, one in known.items() if not name.startswith("process_")}


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts())
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


# Words of PromQL that look like names.
WORDS = {"sum", "by", "rate", "increase", "histogram_quantile", "absent", "changes"}
# Other services can have metrics of these names.
SHARED = re.compile("up|process_|grpc_server_")
# What only Quire's have.
OURS = re.compile(r'job="quire"|job=~"\$job"|grpc_service=~"quire\.\*"')


async def test_alerts_and_panels_name_what_there_is(known: Known) -> None:
    known = {**OTHERS, **known}
    used = set()
    for expression in expressions():
        bare = re.sub(r'"[^"]*"', "", expression)
        grouped = {name for names in re.findall(r"by \(([^)]*)\)", bare) for name in names.split(", ")}
        rest = re.sub(r"\[[^\]]*\]|by \([^)]*\)", "", bare)
        metrics = re.findall(r"(?<![\w$.])([a-z_][a-z_0-9]*)(\{[^}]*\})?", rest)
        assert any(name not in WORDS for name, _ in metrics), expression
        for name, selector in metrics:
            if name in WORDS:
                continue
            base = re.sub(r"_(bucket|sum|count)$", "", name) if name not in known else name
            assert base in known, f"{name} in {expression}"
            kind, labels = known[base]
            used.add(base)
            assert (kind == "histogram") == (base != name), f"{name} in {expression}"
            # A counter is meaningless but as a rate.
            assert kind != "counter" or re.search(rf"(rate|increase)\({name}\b", expression), expression
            assert not SHARED.match(name) or OURS.search(expression), f"of others too: {expression}"
            assert "worker" not in grouped or "instance" in grouped, f"adds instances: {expression}"
            chosen = set(re.findall(r"(\w+)=", selector))
            assert chosen | grouped <= labels | TARGET_LABELS, f"{name} in {expression}"
    assert len(used) > len(known) / 2, "most figures are shown"


def test_alerts_have_an_entry_in_the_runbook() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    text = OPERATIONS.read_text()
    entries = re.findall(r"^### (Quire\w+)$", text, flags=re.MULTILINE)
    assert entries == list(dict.fromkeys(entries)) and set(entries) == set(names)
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, "what Prometheus knows"
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "runbook_url"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert DOCS.parent / page == OPERATIONS and anchor in anchors(OPERATIONS)


async def test_reasons_of_alerts_are_shown_before_they_occur(tmp_path: Path) -> None:
    """increase() does not see the first value of a series."""
    async with serving(tmp_path) as server:
        families = {one.name: one for one in server.exporter.registry.collect()}
    shown = {one.labels["reason"]: one.value for one in families["quire_appends_failed"].samples}
    assert not any(shown.values())
    named = [name for rule in alerts() for name in re.findall(r'reason=~"([^"]*)"', rule["expr"])]
    assert named and {reason for listed in named for reason in listed.split("|")} <= shown.keys() & {
        error.reason for error in ERRORS
    }
