"""docs/errors.md names every reason that a client can see, with its code and its metadata."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from service import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
# The classes whose reason is given where they are raised.
GIVEN = {"InvalidArgument": errors.InvalidArgument.code, "Unauthenticated": errors.Unauthenticated.code}


def told() -> dict[str, tuple[str, set[str]]]:
    """By reason: its code, and the keys of its metadata, as the page has them."""
    rows = {}
    for section in PAGE.split("\n## ")[1:]:
        code = section.partition("\n")[0]
        for reason, keys in re.findall(r"^\| `([A-Z_]+)` \|[^|]*\|([^|]*)\|[^|]*\|$", section, re.MULTILINE):
            assert reason not in rows, f"{reason} is told twice"
            rows[reason] = code, set(re.findall(r"`(\w+)`", keys))
    return rows


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a name in the gateway; of an error with an `__init__` that of `super().__init__` in it.

    What these name beside the delay is metadata.
    """
    for path in sorted((ROOT / "service").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                kind = getattr(errors, node.func.id, None)
                if node.func.id in GIVEN or "__init__" not in vars(kind or object):
                    yield node.func.id, node
            elif isinstance(node, ast.ClassDef) and hasattr(errors, node.name):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                        yield node.name, inner


def raised() -> dict[str, tuple[str, set[str]]]:
    """The same as the code has them."""
    rows: dict[str, tuple[str, set[str]]] = {}
    keys: defaultdict[str, set[str]] = defaultdict(set)
    for name, call in calls():
        first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        if name in GIVEN and first is not None:
            rows[str(first)] = GIVEN[name], set()
        elif name == "too_many" and first is not None:
            rows[f"TOO_MANY_{str(first).upper()}"] = errors.InvalidArgument.code, set()
        keys[name] |= {keyword.arg for keyword in call.keywords if keyword.arg} - {"retry_after_s"}
    for kind in errors.QuireError.__subclasses__():
        if kind is not errors.ProviderFailure and kind.__name__ not in GIVEN:
            rows[kind.reason] = kind.code, keys[kind.__name__]
    for reason, code in errors.PROVIDER_CODES.items():
        rows[reason] = code, {"field"} if reason == "UNSUPPORTED" else set()
    return rows


def test_the_page_tells_every_reason() -> None:
    assert told() == raised()
    assert {"BAD_MASK", "BAD_TOKEN", "TOO_MANY_FIELDS", "KV_EXHAUSTED", "INTERNAL"} <= raised().keys()
