"""Each command of the manual is run by a test, or is listed here with the reason why not.

A new one needs either. Whatever runs them, the flags of each `quire` are parsed here.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from quire.cli.main import complete_parser

from tests.client.pages import blocks, install_command, run_script
from tests.gateway_process import ROOT, GatewayProcess

# Pages of which another test runs every block, and notices new ones.
RUN_ELSEWHERE = {
    "docs/calls.md": "tests/e2e/test_calls_page.py",
    "docs/clients.md": "tests/e2e/test_calls_page.py",
    "docs/commands.md": "tests/client/test_commands_page.py",
    "docs/openai.md": "tests/client/test_docs.py",
    "docs/runtimes.md": "tests/client/test_docs.py",
    "docs/upgrades.md": "tests/client/test_upgrades_page.py",
}
# How many blocks pages of these have in sh, python and toml. Another one needs a test there.
NUM_BLOCKS = {
    "docs/commands.md": (3, 0, 1),
    "docs/openai.md": (1, 1, 0),
    "docs/runtimes.md": (2, 2, 2),
    "docs/upgrades.md": (3, 0, 0),
}
# Beginnings of commands, and what runs them or why nothing does.
SERVES = "serves until it is stopped: flags and settings are parsed here, servers with them are in tests/e2e"
OTHER_HOSTS = "needs a cluster, a Docker daemon or root; tests/test_deploy.py checks the files"
DOWNLOADS = "needs a package index or the hub"
LOADS = "takes half a minute each; tests/client/cli/load/test_command.py runs them for a moment"
LISTED = {
    "make serve": SERVES,
    ".venv/bin/quire serve": SERVES,
    "make setup && .venv/bin/quire serve": SERVES,
    "quire serve": SERVES,
    "make help": "prints the comments of the Makefile",
    "make test": "runs this test",
    "make check": "is the other half of .ci/run",
    "make fmt": "changes the checkout; `make check` runs the same tools",
    "make dist": "tests/test_dist.py with --thorough: minutes",
    "make cluster": "occupies fixed ports; tests/e2e/test_remote_workers.py runs the same",
    "quire worker": "tests/e2e/test_remote_workers.py",
    "docker": OTHER_HOSTS,
    "kubectl": OTHER_HOSTS,
    "systemctl": OTHER_HOSTS,
    "useradd": OTHER_HOSTS,
    "install -m 644 deploy/systemd": OTHER_HOSTS,
    "pip install": DOWNLOADS,
    "npm ci": DOWNLOADS,
    "npm run": "tests/client/test_node.py, where node and its packages are installed",
    "node examples": "tests/client/test_node.py, where node and its packages are installed",
    ".venv/bin/quire load": LOADS,
    '.venv/bin/quire generate "12+34="': "tests/client/test_readme.py",
    ".venv/bin/quire generate": "needs a model that writes prose; tests/e2e/test_text.py has these flags",
    ".venv/bin/quire status --watch": "never ends; tests/client/cli/test_cli.py",
    ".venv/bin/quire adapters load": "tests/client/cli/test_adapters.py",
    ".venv/bin/quire adapters unload": "tests/client/cli/test_adapters.py",
    ".venv/bin/grpcurl": "tests/client/test_readme.py",
    "curl http://127.0.0.1:9464/metrics": "tests/e2e/test_metrics.py",
    "curl http://127.0.0.1:8000": "tests/e2e/test_openai.py",
    ".venv/bin/python clients/python/examples/greedy_loop.py": "tests/client/test_examples.py",
    "python clients/python/examples/trainer/train_policy.py": "tests/client/test_train_policy.py",
    "python clients/python/examples/lm_eval_adapter.py": "tests/client/test_examples.py",
}
# Run below, as they are written.
FILES = ("quire pool init", "quire token")
ASKING = (".venv/bin/quire status", ".venv/bin/quire caches list", ".venv/bin/quire adapters list")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "clients" / "node" / "README.md")
)


def commands(page: str) -> list[str]:
    """One a line, without comments."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [" ".join(re.sub(r"\s+# .*", "", line).split()) for line in lines if line.strip()]


ALL = [(page, command) for page in PAGES for command in commands(page)]


def listed(command: str) -> str:
    """The longest beginning in the list. Empty if there is none."""
    return max((start for start in LISTED if command.startswith(start)), key=len, default="")


def is_run(command: str) -> bool:
    return command.startswith(FILES) or (command.startswith(ASKING) and not listed(command))


def test_each_command_is_run_or_listed() -> None:
    unknown = [
        f"{page}: {command}"
        for page, command in ALL
        if page not in RUN_ELSEWHERE and not is_run(command) and not listed(command)
    ]
    assert not unknown
    used = {listed(command) for page, command in ALL if page not in RUN_ELSEWHERE}
    assert set(LISTED) <= {*used, "make check", "make fmt"}, "nothing begins with it any more"
    for text in (*RUN_ELSEWHERE.values(), *LISTED.values()):
        for test in re.findall(r"tests/\S+\.py", text):
            assert (ROOT / test).exists(), test


def test_each_block_of_pages_that_are_run_elsewhere_is_known_there() -> None:
    found = {page: tuple(len(blocks(page, of)) for of in ("sh", "python", "toml")) for page in NUM_BLOCKS}
    assert found == NUM_BLOCKS
    for page in ("docs/concepts.md", "docs/training.md", "SECURITY.md"):
        assert "```" not in (ROOT / page).read_text(encoding="utf-8")


def arguments(command: str) -> list[str] | None:
    """Those of `quire`, or of what `make serve` runs. None for other programs."""
    if not re.match(r"make (serve|setup &&)|docker run|(\.venv/bin/)?quire ", command):
        return None
    words = shlex.split(re.split(r" [<>|]|;", command)[0])
    if words[:2] == ["make", "serve"]:
        return ["serve", *shlex.split(words[2].removeprefix("ARGS=") if words[2:] else "")]
    start = next(
        index for index, word in enumerate(words) if word in ("quire", ".venv/bin/quire", "quire-cpu")
    )
    return words[start + 1 :]


@pytest.mark.parametrize("page", sorted({page for page, _ in ALL}))
def test_arguments_are_known(page: str) -> None:
    parser = complete_parser()
    for command in commands(page):
        if (given := arguments(command)) is not None:
            parser.parse_args(given)


def test_commands_that_write_files(tmp_path: Path) -> None:
    install_command(tmp_path)
    script = "\n".join({command for _, command in ALL if command.startswith(FILES)})
    said = run_script(re.sub(r"^quire", ".venv/bin/quire", script, flags=re.MULTILINE), tmp_path, {})
    assert (tmp_path / "pool" / "worker-key.pem").exists() and said.count("tenant = ") == 2


def test_commands_that_ask_a_server(shipped_gateway: GatewayProcess, tmp_path: Path) -> None:
    install_command(tmp_path)
    asking = sorted({command for _, command in ALL if command.startswith(ASKING) and not listed(command)})
    script = f"export QUIRE_TARGET={shipped_gateway.address}\n" + "\n".join(asking)
    said = run_script(script, tmp_path, {})
    assert "worker-1" in said and "model adder" in said
