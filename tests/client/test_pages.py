"""The code and commands of README and the manual, run as they are written there, but without a network.

Each block in Python, TOML or for a shell is run here, or is listed here with the reason why not; a new one
needs either. Paths and addresses are those of the test. In place of a model of the hub there is a copy of the
shipped one with a chat template.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import Cache, Client
from quire._calls import CacheState
from quire.cli.main import complete_parser
from quire.v1 import executor_pb2, runner_pb2

from benchmarks import checkout
from service.config import all_settings
from tests.client.pages import PAGES, Block, blocks, install_command, run_python, run_script
from tests.gateway_process import ROOT, GatewayProcess
from tests.grpcurl import GRPCURL, needs_grpcurl
from tests.http_gateway import HttpGateway
from tests.ports import free_address
from tests.programs import output_of

GRPC, HTTP = "127.0.0.1:50051", "127.0.0.1:8000"
PATHS = {"/var/lib/quire": "data", "/var/backups/quire": "backup"}
# Sums are asked as they are; of anything else it makes one that the model can read.
TEMPLATE = "{% set said = messages[-1].content %}{{ said if said[0] in '0123456789' else '12+34=' }}"

# Blocks that another test runs, or that nothing runs.
ELSEWHERE = {
    "docs/calls.md": "tests/e2e/test_calls_page.py runs each command",
    "docs/clients.md": "tests/e2e/test_calls_page.py runs each command",
    "docs/extensions.md": "tests/service/extensions/test_extensions.py runs each",
    "docs/python.md": "signatures, of which .ci/python_page.py makes the page",
}
PYTHON_AND_TOML = {
    "embedding = quire.floats": "tests/client/test_scoring.py runs it",
    'finish_reason == "uncertain"': "tests/e2e/test_generate.py does the same",
    "routed = b": "tests/e2e/test_experts.py does the same with a mixture of experts",
    "tls=Tls(ca=": "tests/client/test_connection.py does the same with certificates of its own",
    "weights_only=True": "tests/workers/test_checkpoints.py runs it",
    "[tenants.alice]": "test_files_of_tokens",
    "[certificates]": "test_files_of_tokens",
    "from quire import tinker": "tests/client/test_tinker.py does the same",
    "GRPOTrainer": "tests/e2e/test_client_packages.py runs it, where trl is installed",
    "STEERING_VECTOR": "tests/workers/test_steering.py writes such a directory",
    "Tell me a story": "tests/client/test_storyteller.py runs it, and the consoles of all pages",
    "get_weather": "tests/client/test_storyteller.py runs it",
    "dist.broadcast": "tests/e2e/test_weight_transfer.py runs it",
    "import subprocess\nimport ray": "needs Ray; the command is that of tests/e2e/test_remote_workers.py",
}
# Beginnings of commands for a shell.
SERVES = "serves until it is stopped: flags and settings are parsed here, servers with them are in tests/e2e"
OTHER_HOSTS = "needs a cluster, a Docker daemon or root; tests/test_deploy.py checks the files"
DOWNLOADS = "needs a package index or the hub"
LOADS = "takes half a minute each; tests/client/cli/load/test_command.py runs them for a moment"
COMMANDS = {
    "make serve": SERVES,
    ".venv/bin/quire serve": SERVES,
    "quire serve": SERVES,
    "make help": "prints the comments of the Makefile",
    "make test": "runs this test",
    "make check": "is the other half of .ci/run",
    "make fmt": "changes the checkout; `make check` runs the same tools",
    "make dist": "tests/test_dist.py with --thorough: minutes",
    "make cluster": "occupies fixed ports; tests/e2e/test_remote_workers.py runs the same",
    "quire worker": "tests/e2e/test_remote_workers.py",
    ".venv/bin/quire convert": "needs the hub; tests/workers/test_convert.py",
    "docker": OTHER_HOSTS,
    "kubectl": OTHER_HOSTS,
    "systemctl": OTHER_HOSTS,
    "useradd": OTHER_HOSTS,
    "install -m 644 deploy/systemd": OTHER_HOSTS,
    "pip install": DOWNLOADS,
    "uvx": DOWNLOADS,
    "npm ci": DOWNLOADS,
    "npm run": "tests/client/test_node.py, where node and its packages are installed",
    "node examples": "tests/client/test_node.py, where node and its packages are installed",
    ".venv/bin/quire load": LOADS,
    ".venv/bin/quire generate": "needs a model that writes prose; tests/e2e/test_text.py has these flags",
    ".venv/bin/quire top": "tests/client/cli/test_top.py",
    ".venv/bin/quire adapters load": "tests/client/cli/test_adapters.py",
    ".venv/bin/quire adapters unload": "tests/client/cli/test_adapters.py",
    "curl http://127.0.0.1:9464/metrics": "tests/e2e/test_metrics.py",
    "curl http://127.0.0.1:8000": "tests/e2e/test_openai.py",
    ".venv/bin/python clients/python/examples/greedy_loop.py": "tests/client/test_examples.py",
    "python clients/python/examples/trainer/train_policy.py": "tests/client/test_train_policy.py",
    "lm_eval run": "tests/e2e/test_client_packages.py",
}
# Commands of any page that are run below by how they begin.
FILES = ("quire pool init", "quire token")
ASKING = (".venv/bin/quire status", ".venv/bin/quire caches list", ".venv/bin/quire adapters list")
GENERATE = '.venv/bin/quire generate "12+34="'
BY_BEGINNING = (*FILES, *ASKING, GENERATE)

_run: set[Block] = set()


def block(page: str, language: str, part: str) -> Block:
    """The block of a page that has this part. It counts as run."""
    (found,) = [block for block in blocks(page, language) if part in block.text]
    _run.add(found)
    return found


LOOP = block("README.md", "python", "tokenizer.encode")
CACHES = block("docs/tutorial.md", "python", "cache.fork()")
SESSION = block("docs/tutorial.md", "python", "client.session()")
TEXTS = block("docs/tutorial.md", "python", 'client.generate("12+34=")')
DEATH = block("docs/tutorial.md", "python", "subprocess")
OVERLOAD = block("docs/tutorial.md", "python", "ResourceExhausted")
ITEMS = block("docs/runtimes.md", "python", "ITEMS = [")
GENERATION = block("docs/runtimes.md", "python", "cache.generate(")
UPLOAD = block("docs/training.md", "python", "recompute=True")
OPENAI = block("docs/openai.md", "python", "from openai")
REFLECTION = block("README.md", "sh", "Prefill")
EXECUTE = block("docs/runtimes.md", "sh", "Execute")
LOAD = block("docs/training.md", "sh", "LoadWeights")
OPERATE = block("docs/serving.md", "sh", "AdminService")
SETTINGS = block("docs/serving.md", "toml", "drain_grace_s")
CHECK = block("docs/serving.md", "sh", "serve --check")
ROUTING = block("docs/runtimes.md", "toml", "[routing]")
PROVIDER = block("docs/runtimes.md", "toml", "[runtimes.other]")
SAVE = block("docs/upgrades.md", "sh", "cp -a /var/lib/quire /var/backups")
CHECK_ALL = block("docs/upgrades.md", "sh", "serve --check")
RESTORE = block("docs/upgrades.md", "sh", "quire-newer")
COMPLETION = block("docs/operations.md", "sh", "quire completion bash")


def listed(command: str) -> str:
    """The longest beginning in the list. Empty if there is none."""
    return max((start for start in COMMANDS if command.startswith(start)), key=len, default="")


def all_commands() -> Iterator[tuple[str, str]]:
    """Pages with their commands, but for those of blocks that are run whole."""
    for page in PAGES:
        for each in blocks(page, "sh"):
            if page not in ELSEWHERE and each not in _run:
                yield from ((page, line) for line in each.lines())


def test_each_block_is_run_or_listed() -> None:
    commands = [*all_commands()]
    unknown = [
        command for _, command in commands if not command.startswith(BY_BEGINNING) and not listed(command)
    ]
    assert not unknown
    assert set(COMMANDS) <= {*(listed(command) for _, command in commands), "make check", "make fmt"}
    others = {
        each: [part for part in PYTHON_AND_TOML if part in each.text]
        for page in PAGES
        for language in ("python", "toml")
        for each in blocks(page, language)
        if page not in ELSEWHERE and each not in _run
    }
    assert not [each for each, parts in others.items() if not parts]
    assert set(PYTHON_AND_TOML) == {part for parts in others.values() for part in parts}
    for text in (*ELSEWHERE.values(), *PYTHON_AND_TOML.values(), *COMMANDS.values()):
        for test in re.findall(r"tests/\S+\.py", text):
            assert (ROOT / test).exists(), test


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


@pytest.mark.parametrize("page", PAGES)
def test_arguments_are_known(page: str) -> None:
    parser = complete_parser()
    for each in blocks(page, "sh"):
        for command in each.lines():
            if (given := arguments(command)) is not None:
                parser.parse_args(given)


# What asks a server.


class Served(HttpGateway):
    """A server of the model, by both APIs."""

    def replaced(self, text: str) -> str:
        """An example that asks this one."""
        return text.replace(GRPC, self.address).replace(HTTP, f"127.0.0.1:{self.http_port}")

    def printed(self, code: Block, directory: Path) -> str:
        script = directory / "copied.py"
        script.write_text(self.replaced(code.text))
        return run_python(script)

    def asked(self, command: list[str]) -> str:
        """What grpcurl prints."""
        assert command[0] == ".venv/bin/grpcurl"
        return output_of(str(GRPCURL), *map(self.replaced, command[1:]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("models") / "talker"
    shutil.copytree(ROOT / "workers" / "models" / "adder", copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return copy


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with Served(model=str(model)) as served:
        yield served


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with the command, and a home."""
    install_command(tmp_path)
    return tmp_path


def test_loops_in_python(served: Served, tmp_path: Path) -> None:
    assert served.printed(LOOP, tmp_path) == "46\n"
    assert served.printed(CACHES, tmp_path).splitlines() == ["6 ['4', '3']", "0 6 7", "6"]
    assert len(served.printed(SESSION, tmp_path).split(", ")) == 2, "a token for each prompt"
    assert served.printed(TEXTS, tmp_path).splitlines() == ["46", "123", "['1', '2', '3']"]
    assert served.printed(OVERLOAD, tmp_path) == "3\n"
    with Client(served.address) as client:
        assert not client.stub.ListCaches(executor_pb2.ListCachesRequest()).kv_caches, "all are released"


def test_what_dies_is_found_again(tmp_path: Path) -> None:
    """It kills a worker, then the server, and goes on with the same cache."""
    script = tmp_path / "copied.py"
    # The real command, not a forked one: the script kills it, and expects that nothing answers afterwards.
    quire = repr(str(Path(sys.executable).with_name("quire")))
    script.write_text(
        DEATH.text.replace('".venv/bin/quire"', quire).replace("127.0.0.1:50052", free_address())
    )
    # Nothing of it in the home of whoever runs it.
    ours = checkout.environment(checkout.ROOT) | {"XDG_STATE_HOME": str(tmp_path / "state")}
    # Not pipes, which its server would keep open if it failed.
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            (sys.executable, str(script)),
            stdout=out, stderr=err, env=ours, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    errors = (tmp_path / "err").read_text()
    assert status == 0, errors
    assert (tmp_path / "out").read_text().strip() == "46 8", errors


def test_whole_texts_in_python(served: Served, tmp_path: Path) -> None:
    texts: defaultdict[tuple[str, str], str] = defaultdict(str)
    reasons = {}
    for line in served.printed(ITEMS, tmp_path).splitlines():
        item, sample, _, text, reason = line.split(" ")
        texts[item, sample] += ast.literal_eval(text)
        reasons[item, sample] = reason
    assert set(reasons.values()) == {"stop"}
    assert texts["stop", "0"] == "4" and texts["schema", "0"] == "6" and texts["chat", "0"] == "10"
    assert re.fullmatch("[0-9]{3}", texts["regex", "0"]) and {"samples"} == {
        item for item, sample in texts if sample == "1"
    }


def test_generating_on_a_cache(served: Served, tmp_path: Path) -> None:
    chunk, after = served.printed(GENERATION, tmp_path).splitlines()
    # 4 is appended to the prompt of 6 tokens, and 6 is not.
    assert chunk.endswith("stop") and after.startswith("7 ")


def test_openais_client(served: Served, tmp_path: Path) -> None:
    assert served.printed(OPENAI, tmp_path) == "46"


@needs_grpcurl
def test_grpcurl(served: Served) -> None:
    assert '"cache_id"' in served.asked(REFLECTION.words(".venv/bin/grpcurl"))
    said = served.asked(EXECUTE.words(".venv/bin/grpcurl"))
    assert "".join(re.findall(r'"text": "(.*?)"', said)) == "46"


@needs_grpcurl
def test_grpcurl_for_operators(model: Path) -> None:
    drain, shutdown = (shlex.split(line) for line in OPERATE.lines())
    load = LOAD.words(".venv/bin/grpcurl")
    request = json.loads(load[load.index("-d") + 1])
    assert request["source"] == "adder"
    load[load.index("-d") + 1] = json.dumps({**request, "source": str(model)})
    with Served(model=str(model)) as served:
        phases = re.findall(r'"phase": "LOAD_WEIGHTS_PHASE_(\w+)"', served.asked(load))
        assert list(dict.fromkeys(phases)) == ["LOADING", "SERVING"]
        with Client(served.address) as client:
            worker = client.status().workers[0].worker_id
        drain[drain.index("-d") + 1] = drain[drain.index("-d") + 1].replace("worker-0", worker)
        assert '"new_pid"' in served.asked(drain)
        shutdown[shutdown.index("-d") + 1] = "{}"  # No test leaves workers behind.
        served.asked(shutdown)
        assert served.process.wait(60) == 0


def test_weights_on_a_stream_in_python(model: Path, tmp_path: Path) -> None:
    with Served(model=str(model)) as served, Client(served.address) as client:
        fingerprint = client.model_info().model.fingerprint
        (*_, last) = served.printed(UPLOAD, tmp_path).splitlines()
        assert last == fingerprint, "the same weights"
        assert client.generate("12+30=") == "42"


def test_providers_by_files(served: Served, model: Path, tmp_path: Path) -> None:
    # Nobody is asked for credentials until somebody asks the provider.
    (tmp_path / "runtimes.toml").write_text(served.replaced(ROUTING.text + PROVIDER.text))
    with (
        Served(model=str(model), flags=["--runtimes", str(tmp_path / "runtimes.toml")]) as second,
        Client(second.address) as client,
    ):
        listed = client.runner_stub.ListRuntimes(runner_pb2.ListRuntimesRequest()).runtimes
        assert [runtime.name for runtime in listed] == ["local", "gpt", "other"]
        answered = client.execute("12+30=", runtime="other")
        assert "".join(chunk.text for chunk in answered) == "42"
        assert answered.started is not None and answered.started.runtime == "other"


def test_files_of_tokens(here: Path) -> None:
    """Those of the page on security, with a certificate and a token."""
    page = "docs/security.md"
    hashed = "".join(each.text for each in blocks(page, "toml")).replace("<SHA-256 of the token>", "0" * 64)
    (here / "tokens.toml").write_text(hashed)
    said = run_script(".venv/bin/quire serve --check --tokens tokens.toml", here, {})
    assert "no problems" in said


def test_commands_that_ask_a_server(shipped_gateway: GatewayProcess, here: Path) -> None:
    asking = sorted({line for _, line in all_commands() if line.startswith(ASKING) and not listed(line)})
    script = f"export QUIRE_TARGET={shipped_gateway.address}\n" + "\n".join([*asking, GENERATE])
    said = run_script(script, here, {})
    assert "worker-1" in said and re.search(r"^model +adder ", said, re.MULTILINE)
    assert said.splitlines()[-1] == "46"


def test_a_server_that_is_ready_says_what_to_try_next(shipped_gateway: GatewayProcess) -> None:
    shipped_gateway.wait_until(
        lambda: any(record["event"] == "ready" for record in shipped_gateway.records())
    )
    (ready,) = (record for record in shipped_gateway.records() if record["event"] == "ready")
    assert ready["listen"] == shipped_gateway.address
    program, *words = shlex.split(str(ready["try_next"]))
    assert program == "quire"
    assert output_of(sys.executable, "-m", "quire.cli", *words, cwd=ROOT).strip() == "46"


# What reads and writes files.


def test_commands_that_write_files(here: Path) -> None:
    script = "\n".join({line for _, line in all_commands() if line.startswith(FILES)})
    said = run_script(re.sub(r"^quire", ".venv/bin/quire", script, flags=re.MULTILINE), here, {})
    assert (here / "pool" / "worker-key.pem").exists() and said.count("tenant = ") == 2


def test_completion(here: Path) -> None:
    run_script(COMPLETION.text, here, {})
    assert "worker" in (here / ".local/share/bash-completion/completions/quire").read_text()


def test_a_file_of_settings(here: Path) -> None:
    settings = SETTINGS.text.replace(GRPC, free_address()).replace("/var/lib/quire", str(here / "data"))
    (here / "quire.toml").write_text(settings)
    said = run_script(CHECK.text, here, {})
    page = (ROOT / CHECK.page).read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(model = .+?)```", page, flags=re.MULTILINE | re.DOTALL)
    assert [line.split()[0] for line in shown.splitlines()] == [line.split()[0] for line in said.splitlines()]
    assert "workers = 2  # quire.toml\n" in said
    # How many settings there are changes too often to be compared.
    assert re.sub(r"\d+", "", said.splitlines()[-1]) == re.sub(r"\d+", "", shown.splitlines()[-1])
    for name, value in tomllib.loads(settings).items():
        setting = all_settings()[name]
        assert setting.is_path or setting.parse(value, "page", text=False) == value


def test_a_server_goes_back_to_what_was_saved(here: Path) -> None:
    (here / "quire.toml").write_text(f'model = "adder"\ndata_dir = "{here / "data"}"\n')
    flags = ["--data-dir", str(here / "data")]
    with GatewayProcess(model="adder", flags=flags) as server, Client(server.address) as client:
        saved = client.prefill([1, 2, 3])
        assert "no problems" in run_script(CHECK_ALL.text, here, PATHS)
    run_script(SAVE.text, here, PATHS)
    with GatewayProcess(model="adder", flags=flags) as server, Client(server.address) as client:
        continued = client.cache(saved.cache_id).decode(4)
        later = client.prefill([1, 2])
    run_script(RESTORE.text, here, PATHS)
    assert (here / "data-newer" / "journal").exists()
    with GatewayProcess(model="adder", flags=flags) as server, Client(server.address) as client:
        caches = client.stub.ListCaches(executor_pb2.ListCachesRequest())
        found = {cache.cache_id: cache.seq_len for cache in caches.kv_caches}
        assert found == {saved.cache_id: 3} and later.cache_id not in found
        assert client.cache(saved.cache_id).decode(4).token_id == continued.token_id


# Pages that are made of the code.


def test_the_page_of_all_settings_is_up_to_date() -> None:
    written = runpy.run_path(str(ROOT / ".ci" / "settings_page.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == written, "run make stubs"


def test_the_reference_of_the_python_client_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / ".ci" / "python_page.py"))
    assert (ROOT / "docs" / "python.md").read_text(encoding="utf-8") == page["page"](), "run make stubs"
    assert not page["undocumented"]()


def test_a_cache_has_the_attributes_that_the_reference_names() -> None:
    told = str(Cache.__doc__).partition("Attributes:")[2].partition("Each call")[0]
    cache = CacheState(executor_pb2.PrefillResponse(), is_owned=False)
    assert [name for name in re.findall(r"`(\w+)`", told) if not hasattr(cache, name)] == []
