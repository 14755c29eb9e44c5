"""The length of the code: lines, logical lines, files and classes, without generated code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkout import ROOT

PRODUCT = ("service", "workers", "kernels", "clients")
PACKAGES = (*PRODUCT, "tests", "benchmarks")
_SUFFIXES = (".py", ".cpp", ".h", ".ts")
_GENERATED = (
    "clients/python/quire/v1",
    "workers/common/worker_pb2.py",
    "clients/python/quire/client.py",
    "clients/python/quire/_caches.py",
    "clients/python/quire/_server.py",
    "clients/node/src/gen",
)
_NOT_OURS = ("build", "dist", "node_modules", "__pycache__")


@dataclass(frozen=True, slots=True)
class Length:
    """The length of some code. Logical lines are Python statements without docstrings."""

    files: int
    lines: int
    logical_lines: int


def source_files(package: str) -> list[Path]:
    """The files that are not generated."""
    return [
        path
        for path in sorted((ROOT / package).rglob("*"))
        if path.suffix in _SUFFIXES
        and not set(_NOT_OURS).intersection(path.relative_to(ROOT).parts)
        and not any(path.is_relative_to(ROOT / generated) for generated in _GENERATED)
    ]


def length(*packages: str) -> Length:
    """The total length of some packages."""
    paths = [path for package in packages for path in source_files(package)]
    logical_lines = sum(_logical_lines(path) for path in paths if path.suffix == ".py")
    return Length(len(paths), num_lines(*packages), logical_lines)


def num_lines(*packages: str) -> int:
    """The lines of some packages."""
    return sum(_num_lines(path) for package in packages for path in source_files(package))


def longest_file() -> tuple[int, str]:
    """The longest file of the product: its lines and its name."""
    return max((_num_lines(path), str(path.relative_to(ROOT))) for path in _product())


def most_methods() -> tuple[int, str]:
    """The class of the product with the most methods, including properties: their number, and its name."""
    return max(
        (sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body), node.name)
        for path in _product()
        if path.suffix == ".py"
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.ClassDef)
    )


def _product() -> Iterator[Path]:
    return (path for package in PRODUCT for path in source_files(package))


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def _logical_lines(path: Path) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(_parsed(path)))


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
