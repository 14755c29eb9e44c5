"""The import rules of ARCHITECTURE.md, and what may lie at the top of the repository."""

from __future__ import annotations

import ast
import functools
import graphlib
import shutil
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.checkout import environment
from service.caches.states import MOVED_BY, NEXT, State
from tests import quire_command
from tests.programs import output_of

ROOT = Path(__file__).resolve().parent.parent
STUBS = "quire.v1"

# `make check` runs these tests with its tools alone, and `make test` with all that the code imports.
needs_packages = pytest.mark.skipif(find_spec("torch") is None, reason="needs what `make setup` installs")

# Inside workers a module imports only what stands below it, or beside it on its line.
WORKER_LAYERS = (
    {"__main__"},
    {"pool_member", "follower"},
    {"process", "convert", "weight_receiver"},
    {"server", "wire", "forward_options"},
    {"step_loop"},
    {"other_commands", "answers", "waiting_forwards"},
    {
        "scheduler",
        "forward_queues",
        "service_class",
        "caller_limits",
        "coalescing",
        "inbox",
        "prelaunch",
        "prelaunched_results",
        "steps_in_flight",
        "prefix_wait",
        "kv_disk",
        "drafting",
        "head_drafting",
        "failures",
        "distribution",
        "extra_samples",
        "batch",
        "adoption",
        "executors",
    },
    {"runners"},
    {"adapters"},
    {"models", "row_outputs", "device_sampling"},
    {"sampling", "numpy_choice", "counter_rng", "logit_settings"},
    {"decodes"},
    {"operations"},
    {"outputs"},
    {"kv", "logging", "orphan_timer", "token_trees", "given_experts"},
    {"common", "huge_pages"},
)
# Pure accounting: it must stay testable, and quick to import, without torch.
WITHOUT_TORCH = (
    "workers.coalescing",
    "workers.operations",
    "workers.outputs",
    "workers.forward_queues",
    "workers.scheduler",
    "workers.kv.page_pool",
    "workers.kv.disk_pages",
    "workers.kv.eviction_order",
    "workers.kv.page_directory",
    "workers.kv.page_files",
)

TOP_LEVEL = {
    ".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "ARCHITECTURE.md", "CHANGELOG.md",
    "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md", "benchmarks", "clients",
    "constraints.txt", "deploy", "docs", "kernels", "mkdocs.yml", "protos", "pyproject.toml",
    "requirements.lock", "service", "tests", "workers",
}  # fmt: skip

# Inside the gateway a package or module imports only what stands below it.
SERVICE_LAYERS = (
    {"extensions.gateways"},
    {"cli"},
    {"server"},
    {"gateway"},
    {"core", "extensions.metrics", "extensions.openai", "extensions.providers", "extensions.tracing"},
    {"extension"},
    {"admin"},
    {"runtimes"},
    {"api"},
    {"adapters"},
    {"budgets", "pool", "shard", "text"},
    {
        "auth", "config_sources", "data_directory", "dispatcher", "extensions.conformance", "model_check",
        "turns",
    },
    {"config", "extensions.http", "fair_queue", "journal", "uploads"},
    {"caches", "durable_file", "handshakes", "settings"},
    {"errors", "logging", "setting_rules"},
    {
        "completion", "lease", "listening", "memory", "model_names", "outbound", "printable", "running_clock",
        "temporary_directory", "token_bucket",
    },
)  # fmt: skip
# What is true of the caches is plain data, whoever asks and whatever computes.
WITHOUT_MESSAGES = (
    "service.caches",
    "service.journal",
    "service.dispatcher",
    "service.errors",
    "service.config",
    "service.config_sources",
)


def modules(package: str) -> dict[str, Path]:
    """Every module below a top-level package, by its dotted name."""
    root = ROOT / "clients" / "python" if package == "quire" else ROOT
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names of everything a file imports, wherever in the file; `from a import b` gives a.b."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offenders(package: str, forbidden: tuple[str, ...], allowed_in: tuple[str, ...] = ()) -> list[str]:
    """`module imports name` for each import of something forbidden outside the modules that may."""
    return [
        f"{module} imports {name}"
        for module, path in modules(package).items()
        if not any(within(module, place) for place in allowed_in)
        for name in imports(path)
        if any(within(name, root) for root in forbidden)
    ]


# What gateway and workers both use. It costs neither of them much to import.
COMMON = "workers.common"


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("service", ("workers", "kernels", "torch", "triton", "tests")),
        ("workers", ("service", "tests")),
        ("kernels", ("service", "workers", "quire", "grpc", "tests")),
        ("benchmarks", ("tests",)),
    ],
)
def test_packages_keep_apart(package: str, forbidden: tuple[str, ...]) -> None:
    assert modules(package)
    found = offenders(package, forbidden)
    assert [one for one in found if not (package == "service" and f"imports {COMMON}." in one)] == []


def test_what_gateway_and_workers_share_needs_nothing_else() -> None:
    """But `regex`, by which patterns of configs take bounded time on both sides, and `psutil`, for memory."""
    allowed = (*sys.stdlib_module_names, "google.protobuf", "psutil", "regex", STUBS, COMMON)
    found = [
        f"{module} imports {name}"
        for module, path in modules("workers").items()
        if within(module, COMMON)
        for name in imports(path)
        if not any(within(name, package) for package in allowed)
    ]
    assert found == []


@pytest.mark.parametrize("package", ["service", "workers", "kernels"])
def test_nothing_imports_itself_by_way_of_others(package: str) -> None:
    """Not for types either."""
    known = modules(package)
    graph = {module: {name for name in imports_of(path) if name in known} for module, path in known.items()}
    graphlib.TopologicalSorter({name: found - {name} for name, found in graph.items()}).prepare()


def imports_of(path: Path) -> set[str]:
    """What a file imports, and the packages and modules that these names are in."""
    return {name.rpartition(".")[0] for name in imports(path)} | {*imports(path)}


# What writes the text of tokens, so that client and gateway write the same.
DETOKENIZER = "quire.detokenizer"


@pytest.mark.parametrize(("package", "used"), [("service", (STUBS, DETOKENIZER)), ("workers", (STUBS,))])
def test_of_the_client_only_little_is_used(package: str, used: tuple[str, ...]) -> None:
    client = [
        name for name in offenders(package, ("quire",)) if not any(f"imports {one}" in name for one in used)
    ]
    assert client == []


SERVERS = ("workers.server", "workers.process", "workers.pool_member")


def test_only_the_servers_of_workers_know_the_wire() -> None:
    assert offenders("workers", ("grpc",), ()) == []
    declared = "quire.v1.sampling_settings"  # plain data
    messages = "workers.common.worker_pb2"
    readers = ("workers.wire", "workers.forward_options", "workers.common.protocol", messages)
    commands = ("workers.operations", "workers.step_loop", "workers.other_commands", "workers.adoption")
    metrics = ("executors.base", "executors.step_stats", "adapters", "kv.table", "kv.disk_pages", "kv_disk")
    users = (*SERVERS, *readers, *commands, *(f"workers.{name}" for name in metrics))
    found = offenders("workers", ("quire", messages), users)
    assert [name for name in found if f"imports {declared}" not in name] == []


def test_a_worker_needs_no_more_than_images_for_gpus_have() -> None:
    """Nothing can be installed on some of them. What transformers needs itself is there, too."""
    of_transformers = {"torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "regex"}
    known = {"workers", "kernels", "quire", "google", "grpc", "psutil", "triton", "uvloop", "_typeshed"}
    for module, path in (modules("workers") | modules("kernels")).items():
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert outside <= of_transformers | known, module


def test_only_models_their_kv_random_numbers_and_what_runs_on_a_gpu_use_kernels() -> None:
    allowed = ("workers.models", "workers.kv.tensors", "workers.counter_rng")
    # One compiled call chooses the tokens of all rows, or finds the probabilities of some.
    rows = tuple(
        f"workers.{name}"
        for name in ("sampling", "numpy_choice", "distribution", "extra_samples", "row_outputs")
    )
    on_a_gpu = ("workers.device_sampling", "workers.runners")
    assert offenders("workers", ("kernels",), (*allowed, *rows, *on_a_gpu)) == []
    assert [
        found
        for found in offenders("workers", ("kernels",), (*allowed, *rows))
        if " kernels.cuda" not in found
    ] == []


@needs_packages
def test_a_worker_on_the_cpu_never_loads_triton() -> None:
    """What tests fork workers from has all of a worker's modules."""
    modules_of_a_cpu_worker = "workers.executors.llm, workers.executors.weightless, workers.step_loop"
    code = f"import {modules_of_a_cpu_worker}, sys; print('triton' in sys.modules)"
    timed = quire_command.module("timeit", "-n1", "-r1", code)
    assert output_of(*timed, cwd=ROOT, env=environment(ROOT)).startswith("False\n")


def test_accounting_is_without_torch() -> None:
    known = modules("workers")
    found = [
        f"{module} imports {name}"
        for module in WITHOUT_TORCH
        for name in imports(known[module])
        if within(name, "torch") or within(name, "kernels")
    ]
    assert found == []


def out_of_order(package: str, layers: Sequence[AbstractSet[str]], *, beside: bool) -> list[str]:
    """Imports of what stands above; or beside, unless that may be."""
    rank = {f"{package}.{part}": depth for depth, layer in enumerate(layers) for part in layer}
    wrong = []
    for module, path in modules(package).items():
        part = part_of(module)
        if module in (package, "service.extensions"):
            continue
        assert part in rank, f"{module} has no layer: give it one in tests/test_architecture.py"
        used = {part_of(name) for name in imports_of(path)} & rank.keys() - {part}
        wrong += [f"{module} imports {name}" for name in used if rank[name] < rank[part] + (not beside)]
    return wrong


def part_of(module: str) -> str:
    return ".".join(module.split(".")[: 3 if within(module, "service.extensions") else 2])


def test_layers_of_the_worker() -> None:
    assert out_of_order("workers", WORKER_LAYERS, beside=True) == []


def test_layers_of_the_gateway() -> None:
    assert out_of_order("service", SERVICE_LAYERS, beside=False) == []


def test_the_core_knows_no_extension() -> None:
    assert offenders("service", ("service.extensions",), ("service.extensions",)) == []


def test_the_caches_know_no_messages() -> None:
    found = offenders("service", ("quire", "grpc", "grpc_status", "grpc_health", "google"))
    assert [one for one in found if part_of(one.split()[0]) in WITHOUT_MESSAGES] == []


def test_the_states_of_an_operation_are_described_as_they_are() -> None:
    rows = [line.split(" | ") for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines()]
    told = {row[0].removeprefix("| "): row for row in rows if row[0].removeprefix("| ") in State.__members__}
    assert told.keys() == State.__members__.keys()
    for name, state in State.__members__.items():
        _, moved_by, _, *to = told[name]
        assert moved_by == MOVED_BY[state]
        assert set("".join(to).strip(" |").replace(",", "").split()) == {after.name for after in NEXT[state]}


def test_only_the_pool_speaks_with_workers() -> None:
    """Others read the answers and descriptions that pass through them, or write the options that do.

    The loader of adapters describes them to the pool as workers are told of them.
    """
    readers = (
        "service.adapters.loader",
        "service.api.append_codec",
        "service.api.server_state",
        "service.text.text_model",
    )
    assert offenders("service", ("workers.common.worker_pb2",), ("service.pool", *readers)) == []


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    path = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'clients' / 'python')]!r}\n"
    return set(output_of(sys.executable, "-c", path + script).split())


@needs_packages
def test_the_gateway_never_loads_torch() -> None:
    every_module = "\n".join(f"import {module}" for module in modules("service"))
    loaded = loaded_after(every_module)
    assert {"service", "grpc"} <= loaded
    assert not {"torch", "triton", "kernels", "transformers"} & loaded


def test_the_client_needs_only_what_it_declares() -> None:
    for module, path in modules("quire").items():
        if within(module, STUBS):
            continue
        # Its extras; tests/client/test_imports.py sees that nothing loads them by itself.
        extra = {"tokenizers"} if module == "quire.text" else set()
        if within(module, "quire.cli"):
            extra = {"numpy", "psutil", "rich", "shtab", "tokenizers", "uvloop"}
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert outside <= {"quire", "grpc", "google"} | extra, module


def test_top_level_holds_only_what_belongs_there() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = output_of(git, "ls-files", cwd=ROOT)
    assert {line.split("/")[0] for line in listed.splitlines()} <= TOP_LEVEL
