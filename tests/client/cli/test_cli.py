"""The command line against a fake server: what is printed, what is sent, and how it ends."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from quire.cli import connecting
from quire.cli.main import main
from quire.cli.status import _COLUMNS, render
from quire.v1 import executor_pb2, types_pb2
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.checkout import environment
from tests.chat_templates import QWEN, byte_tokenizer
from tests.client.conftest import Quire
from tests.fake_executor import EOS, FakeExecutor, rich_status
from tests.http_proxy import http_proxy
from tests.quire_command import run

ROOT = Path(__file__).resolve().parents[3]


TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@pytest.fixture
def executor() -> FakeExecutor:
    executor = FakeExecutor()
    executor.tokenizer_json = TOKENIZER.to_str().encode()
    return executor


def test_generate_continues_a_text(quire: Quire, executor: FakeExecutor) -> None:
    executor.script = [*ids("46 é€"), EOS]
    assert quire("generate", "12+34=") == (0, "46 é€\n", "")
    assert executor.prompts == [ids("12+34=")], "one call for all tokens"
    assert executor.caches == {}


def test_generate_reads_the_prompt_from_standard_input(
    quire: Quire, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n=\n".encode())))
    assert quire("generate", "-", "--max-tokens", "1").status == 0
    assert executor.prompts == [ids("é\n=")], "as from a shell's $(...), without the last newline"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert quire("generate", "-") == (2, "", "quire: the prompt holds bytes that are not UTF-8\n")


def test_generate_stops_at_max_tokens_and_at_the_end_of_the_context(
    quire: Quire, executor: FakeExecutor
) -> None:
    executor.script = ids("abcdefgh")
    assert quire("generate", "x", "--max-tokens", "3") == (0, "abc\n", "")
    executor.max_seq_len = 3
    assert quire("generate", "x") == (0, "abc\n", "")


def test_generate_warns_of_what_the_tokenizer_does_not_know(quire: Quire, executor: FakeExecutor) -> None:
    letters = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    executor.tokenizer_json = letters.to_str().encode()
    executor.script = [1, EOS]
    assert quire("generate", "ab") == (0, " a\n", "")
    warning = "quire: warning: the model's tokenizer does not know: x é \\x1b\n"
    assert quire("generate", "abxé\x1bx") == (0, " a\n", warning)


def test_generate_takes_and_shows_token_ids(quire: Quire, executor: FakeExecutor) -> None:
    executor.tokenizer_json = b""
    executor.script = [5, 6, 7]
    assert quire("generate", "--tokens", "1,2,3", "--max-tokens", "3") == (0, "5 6 7 \n", "")
    assert executor.prompts == [[1, 2, 3]]
    executor.script = [5, EOS]
    # The token that only says that it ends is not shown.
    assert quire("generate", "--tokens", "1,2,3") == (0, "5 \n", "")


def test_generate_shows_logprobs(quire: Quire, executor: FakeExecutor) -> None:
    executor.script = ids("aé")
    a, first, second = ids("aé")
    lines = f"{a}\t-0.5000\t'a'\n{first}\t-0.5000\t''\n{second}\t-0.5000\t'é'\n"
    assert quire("generate", "x", "--max-tokens", "3", "--logprobs") == (0, lines, "")
    assert executor.calls["Execute"][0].items[0].logprobs
    executor.script = [first, EOS]
    assert quire("generate", "x", "--logprobs") == (0, f"{first}\t-0.5000\t''\n\t\t'\ufffd'\n", "")


def test_generate_draws_as_the_models_makers_do_but_for_what_was_given(
    quire: Quire, executor: FakeExecutor
) -> None:
    own = types_pb2.SamplingParams(temperature=0.5, top_k=20, top_p=0.25, repetition_penalty=1.5)
    executor.sampling_defaults = own
    assert quire("generate", "x", "--max-tokens", "1").status == 0
    assert quire("generate", "x", "--max-tokens", "1", "--temperature", "0", "--seed", "3").status == 0
    assert quire("generate", "x", "--max-tokens", "1", "--top-k", "0", "--typical-p", "0.5").status == 0
    plain, greedy, other = (request.items[0].sampling for request in executor.calls["Execute"])
    assert plain == own
    own.temperature, own.seed = 0, 3
    assert greedy == own
    expected = types_pb2.SamplingParams(
        temperature=0.5, top_k=0, top_p=0.25, typical_p=0.5, repetition_penalty=1.5
    )
    assert other == expected


NO_TEMPLATE = "this model has no chat template: without --chat and --system it continues text"


def test_the_help_of_status_explains_each_column(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    explained = capsys.readouterr().out.partition("each worker:")[2]
    assert not [name for name in _COLUMNS if name not in explained and name not in ("worker", "state")]


USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("flags", "prompt"),
    [
        ([], USER.format("2 < 3?")),
        (["--chat"], USER.format("2 < 3?")),
        (["--system", "Be kind."], "<|im_start|>system\nBe kind.<|im_end|>\n" + USER.format("2 < 3?")),
        (["--system", ""], "<|im_start|>system\n<|im_end|>\n" + USER.format("2 < 3?")),
        (["--raw"], "2 < 3?"),
    ],
)
def test_generate_writes_a_message_as_the_chat_template_says(
    quire: Quire, executor: FakeExecutor, flags: list[str], prompt: str
) -> None:
    executor.chat_template = types_pb2.ChatTemplate(sources={"default": QWEN})
    assert quire("generate", "2 < 3?", "--max-tokens", "1", *flags).status == 0
    assert executor.prompts == [ids(prompt)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--chat"], NO_TEMPLATE),
        (["x", "--system", "y"], NO_TEMPLATE),
        (["x", "--system", "y", "--raw"], "--system goes with a message, not with --raw or --tokens"),
        (["--tokens", "1", "--system", "y"], "--system goes with a message, not with --raw or --tokens"),
        (["--tokens", "1", "--chat"], "--chat goes with a message, not with --tokens"),
        (["\udcff"], "the prompt holds bytes that are not UTF-8"),
        (["x", "--system", "\udcff"], "the prompt holds bytes that are not UTF-8"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused(
    quire: Quire, executor: FakeExecutor, arguments: list[str], said: str
) -> None:
    assert quire("generate", *arguments) == (2, "", f"quire: {said}\n")
    assert executor.calls["Execute"] == []


def test_a_template_that_refuses_is_told_in_a_line(quire: Quire, executor: FakeExecutor) -> None:
    executor.chat_template = types_pb2.ChatTemplate(sources={"default": "{{ raise_exception('no\x1b[2J') }}"})
    said = "quire: the model's chat template failed: no\\x1b[2J; --raw sends the text as it is\n"
    assert quire("generate", "x") == (2, "", said)
    assert quire("generate", "x", "--raw", "--max-tokens", "1").status == 0


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        ({"type": "Bogus"}, ["x"]),
        ({"type": "Bogus"}, ["--tokens", "1"]),
        ({"type": "WordLevel", "vocab": {"a": 0}}, ["x"]),
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"}, ["x"]),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_told_in_a_line(
    quire: Quire, executor: FakeExecutor, model: dict[str, object], prompt: list[str]
) -> None:
    executor.tokenizer_json = json.dumps({"model": model}).encode()
    status, _, said = quire("generate", *prompt)
    assert status == 1
    assert said.startswith("quire: the model's tokenizer.json cannot be used: ") and said.count("\n") == 1


def test_a_failure_is_told_in_a_line(quire: Quire, executor: FakeExecutor) -> None:
    executor.fail("Step", rich_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_EXHAUSTED", "no pages"))
    assert quire("generate", "x") == (1, "", "quire: RESOURCE_EXHAUSTED KV_EXHAUSTED no pages\n")
    executor.fail("Execute", rich_status(grpc.StatusCode.INVALID_ARGUMENT, "BAD_SAMPLING", "top_p"))
    assert quire("generate", "x") == (1, "", "quire: INVALID_ARGUMENT BAD_SAMPLING top_p\n")
    assert executor.ended.wait(timeout=60)
    assert executor.caches == {}


def test_generate_waits_for_a_worker(
    quire: Quire, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_worker = rich_status(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "no worker is ready")
    monkeypatch.setattr(connecting, "_POLL_INTERVAL_S", 0.0)
    executor.script = [*ids("46"), EOS]
    for method in ("GetModelInfo", "GetModelInfo", "Execute"):
        executor.fail(method, no_worker)
    waiting = "quire: waiting for a worker: loading 42%\n"
    assert quire("generate", "x") == (0, "46\n", waiting * 2), "told once for each wait"
    executor.fail("GetModelInfo", no_worker)
    executor.fail("GetStatus", rich_status(grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING"))
    said = "quire: waiting for a worker to load\n"
    assert quire("generate", "x") == (0, "46\n", said), "a token that may not ask how far it is waits, too"
    monkeypatch.setattr(connecting, "_WORKER_TIMEOUT_S", -1.0)
    executor.fail("GetModelInfo", no_worker)
    assert quire("generate", "x") == (1, "", "quire: UNAVAILABLE NO_WORKER no worker is ready\n")


@pytest.mark.parametrize("flag", ["--cert", "--key"])
def test_a_certificate_is_not_left_out_without_tls(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status"], ["caches", "list"], ["load"]):
        assert main([*command, flag, "/nowhere"]) == 2
        assert capsys.readouterr().err == "quire: --cert and --key are used with --ca only\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve --wrokers 2", "quire serve: error: --wrokers is not known; did you mean --workers?"),
        ("generate x --lgprobs=1", "quire generate: error: --lgprobs is not known; did you mean --logprobs?"),
        ("serve --max-model-len 9", "--max-model-len is not known (see quire serve --help)"),
        ("generate x y", "quire generate: error: y is not known; did you mean a PROMPT in quotes?"),
        ("generate x = y", "quire generate: error: = is not known; did you mean a PROMPT in quotes?"),
        ("serve --port 8000", "serve: error: --port is not known; did you mean --listen HOST:PORT?"),
        ("serve storyteller", "serve: error: storyteller is not known; did you mean --model storyteller?"),
        ("generate x --max-tokens 0", "--max-tokens: '0' is refused: must be a whole number from 1"),
        ("generate x --max-tokens 4294967296", "refused: must be a whole number from 1 to 4294967295"),
        ("generate x --top-k 4294967296", "refused: must be a whole number from 0 to 4294967295"),
        ("generate x --seed -1", "refused: must be a whole number from 0 to 18446744073709551615"),
        ("generate x --top-p hot", "--top-p: 'hot' is refused: must be a number"),
        ("generate --tokens 1,x", "'1,x' is refused: must be whole numbers of 32 bits with commas between"),
        (
            "status --target http://h:1",
            "--target: 'http://h:1' is refused: must be HOST:PORT, without http://",
        ),
        ("status --target=", "--target: '' is refused: must be HOST:PORT"),
        ("status --target h:99999", "--target: 'h:99999' is refused: must have a port up to 65535"),
        ("status --target [::1]:65536", "is refused: must have a port up to 65535"),
        ("top --interval nan", "--interval: 'nan' is refused: must be a number of seconds above 0"),
        ("top --interval 0", "--interval: '0' is refused: must be a number of seconds above 0"),
        ("generate", "quire generate: error: "),
        ("generate x --tokens 1", "quire generate: error: "),
        ("generate --tokens -1", "quire generate: error: "),
        ("caches", "required: list|release"),
        ("adapters", "required: list|load|unload"),
        ("adapters load sql", "required: DIRECTORY"),
        ("caches release", "one of the arguments CACHE_ID --all is required"),
        ("caches release kv_1 --all", "not allowed with argument"),
        ("generat 12+34=", "quire: error: generat is no command; did you mean generate?"),
        ("--verson", "quire: error: --verson is not known; did you mean --version?"),
        ("dance", "dance is no command; the commands are serve, status, top, generate, load, caches,"),
        ("", "status|top|generate|load|caches|adapters|completion|token"),
    ],
)
def test_wrong_usage_is_told_in_a_sentence(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    error = capsys.readouterr().err
    assert caught.value.code == 2 and said in error
    assert error.startswith("quire") and error.endswith(" --help)\n") and error.count("\n") == 1


NOT_INSTALLED = "comes with the server (quire-llm-server); in a checkout of Quire: `pip install ./clients"


@pytest.mark.parametrize("command", ["serve", "worker", "token", "pool"])
def test_where_the_server_is_not_installed_its_commands_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
    with pytest.raises(SystemExit) as caught:
        main([command])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and f"quire: error: {command} {NOT_INSTALLED}" in error


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"quire {metadata.version('quire-llm')}\n"


def test_what_only_the_server_can_tell_exits_with_2_too(quire: Quire, executor: FakeExecutor) -> None:
    executor.tokenizer_json = b""
    status, _, said = quire("generate", "text")
    assert status == 2 and "give token ids with --tokens" in said


@pytest.mark.parametrize(
    "command", [["status"], ["top"], ["top", "--once"], ["generate", "x"], ["load", "--callers", "1"]]
)
def test_nobody_there(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--target", "127.0.0.1:1"]) == 1
    failure, hint = capsys.readouterr().err.splitlines()
    assert failure.startswith("quire: UNAVAILABLE ") and failure.endswith("(is a server running there?)")
    assert hint == "quire: --target or QUIRE_TARGET selects the server; with TLS it needs --ca"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("localhost", "localhost:50051"),
        ("[::1]", "[::1]:50051"),
        ("localhost:1234", "localhost:1234"),
        ("[::1]:1234", "[::1]:1234"),
        ("unix:/run/quire", "unix:/run/quire"),
        ("localhost,[::1]:1234", "localhost:50051,[::1]:1234"),
    ],
)
def test_a_target_without_a_port_means_the_default_port(
    target: str, monkeypatch: pytest.MonkeyPatch, given: str, meant: str
) -> None:
    connect, asked = grpc.insecure_channel, []

    def channel(address: str, options: object = None) -> grpc.Channel:
        asked.append(address)
        return connect(target)

    monkeypatch.setattr(grpc, "insecure_channel", channel)
    monkeypatch.setenv("QUIRE_TARGET", given)
    assert main(["status"]) == main(["generate", "--tokens", "1", "--target", given]) == 0
    assert asked == 2 * meant.split(",")


def test_status_shows_a_table(quire: Quire) -> None:
    summary, *in_use, header, worker, starting, products = quire("status").out.splitlines()
    assert summary.startswith("serving  version 9.9.9  up 1m01s")
    assert in_use[0].startswith("0 connections  0 sessions") and in_use[-1].endswith("0 refused")
    cells = dict(zip(split(header), split(worker), strict=True))
    assert cells == {
        "worker": "worker-0", "pid": "4711", "epoch": "3", "device": "cpu", "runner": "eager",
        "state": "ready", "seqs": "5", "used": "25", "free": "60", "cached": "15", "pages": "100",
        "running": "2", "prefills": "10",
        "decodes": "100", "prefill ms": "12.3", "decode ms": "1.3", "batch": "3.0",
        "memory": "300.0 MiB", "disk": "-",
    }  # fmt: skip
    assert "starting 42%" in starting
    assert products == "matrix products of worker-0: torch: this CPU has no AVX2"


def test_status_counts_the_adapters_in_memory_if_there_are_any(quire: Quire, executor: FakeExecutor) -> None:
    executor.resident = {"worker-0": ["sql", "chat"], "worker-1": [], "worker-2": ["sql"]}
    assert quire("status").out.splitlines()[-1] == "LoRA adapters in memory: 2 (worker-0), 1 (worker-2)"
    executor.resident = {"worker-0": [], "worker-1": []}
    status, shown, _ = quire("status")
    assert status == 0 and "LoRA" not in shown


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_table_fits_the_terminal_and_cuts_nothing(width: int) -> None:
    status = executor_pb2.GetStatusResponse()
    for index in range(2):
        worker = status.workers.add(worker_id=f"worker-{index}", pid=104_711, state=1 + index)
        worker.pool.pages_total, worker.memory_bytes = 16_384, 1 << 30
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(status, {}))
    _, header, starting, ready = capture.get().splitlines()[-4:]
    assert max(map(len, (header, starting, ready))) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in capture.get()
    kept = ["worker", "state", "seqs", "used", "pages", "running", "decode ms", "batch", "pid", "memory"]
    assert all(name in header for name in kept)
    assert "starting 0%" in starting and "ready" in ready and "16384" in ready
    assert ("prefill ms" in header) == (width == 200)


def split(row: str) -> list[str]:
    """The cells of a row; columns are at least two blanks apart where names have one blank."""
    for name in ("prefill ms", "decode ms", "300.0 MiB"):
        row = row.replace(name, name.replace(" ", "\0"))
    return [cell.replace("\0", " ") for cell in row.split()]


def test_an_interrupted_generate_leaves_nothing(target: str, executor: FakeExecutor) -> None:
    executor.decode_delay_s = 0.3
    with run("generate", "x", "--target", target) as process:
        assert executor.decoding.wait(timeout=60)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 1
        _, error = process.communicate()
    assert error.strip() == ""
    assert executor.ended.wait(timeout=60)
    assert executor.caches == {}


def test_a_reader_that_leaves_is_not_an_error(target: str, executor: FakeExecutor) -> None:
    executor.decode_delay_s = 0.05
    with run("generate", "x", "--target", target) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        assert process.wait(timeout=30) == 1
        _, error = process.communicate()
    assert error == ""
    assert executor.ended.wait(timeout=60)
    assert executor.caches == {}


ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\r[bold]"


def test_what_a_server_sends_does_not_move_the_terminal(quire: Quire, executor: FakeExecutor) -> None:
    executor.script = [*ids("a\x1b[31mb\r\n\tc\x07"), EOS]
    assert quire("generate", "x") == (0, "a[31mb\n\tc\n", "")
    for method in ("Execute", "Step"):
        executor.fail(method, rich_status(grpc.StatusCode.INTERNAL, ATTACK, ATTACK))
        status, _, said = quire("generate", "x")
        assert status == 1 and said[:-1].isprintable()


def test_a_status_does_not_move_the_terminal_either(capsys: pytest.CaptureFixture[str]) -> None:
    status = executor_pb2.GetStatusResponse(version=ATTACK)
    status.workers.add(worker_id=ATTACK).executor.device = ATTACK
    Console(width=500).print(render(status, {}))
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable() and out.count("[bold]") == 3, "markup is shown, too"


def test_the_token_goes_with_every_call(
    quire: Quire, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.script = [*ids("a"), EOS]
    assert quire("generate", "x", "--token", "secret").status == 0
    assert executor.authorizations == {"Bearer secret"}
    executor.authorizations.clear()
    monkeypatch.setenv("QUIRE_TOKEN", "other")
    assert quire("generate", "x").status == 0
    assert executor.authorizations == {"Bearer other"}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_fails_with_one_line(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "quire.cli", "completion", "bash"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(ROOT) | {"PYTHONUNBUFFERED": unbuffered},
            cwd=ROOT,
        )
    assert done.returncode == 1
    assert done.stderr == "quire: the output cannot be written: No space left on device\n"


def test_nobody_there_because_of_a_proxy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_proxy() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        for command in (["status"], ["generate", "x"]):
            assert main([*command, "--target", "quire.example:1"]) == 1
            *_, asked, named = capsys.readouterr().err.splitlines()
            assert asked.startswith("quire: --target or QUIRE_TARGET selects the server")
            assert f"through the proxy {proxy.address} of http_proxy" in named and "secret" not in named
