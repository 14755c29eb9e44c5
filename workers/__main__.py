"""Entry point of a worker process: `python -m workers`. A gateway starts it; it does not outlive it long."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import grpc
import psutil
import structlog
import uvloop
from google.protobuf import json_format
from quire.v1 import worker_pb2_grpc
from quire.v1.worker_pb2 import WorkerConfig

from workers.executors.base import ModelExecutor
from workers.leash import Leash
from workers.logging import background_log
from workers.server import Progress, WorkerServer

# sysexits.h EX_CONFIG: starting again with the same configuration cannot help.
EXIT_CONFIG = 78
EXIT_FAILED = 1
_HOP_SLACK_BYTES = 16 << 20
# What a GetModelInfoResponse holds beside tokenizer and chat template, generously.
_REST_OF_MODEL_INFO_BYTES = 64 << 10
_STOP_TIMEOUT_S = 1.0
# What a gateway has to show to connect. Not on the command line, which everybody on the machine can read.
SECRET_VARIABLE = "QUIRE_WORKER_SECRET"  # noqa: S105 - a name
# By it the gateway ends a worker; SIGTERM also reaches those that it still needs.
END_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
WEIGHTLESS_MODEL = "paged-attention"
# A step of a smaller model is over before another thread is awake, and idle threads spin for a while.
_LEAST_PARAMETERS_PER_THREAD = 2_000_000

_log = structlog.get_logger("workers")


class ConfigurationError(Exception):
    """What was asked for cannot be had on this machine or with this model."""


def _parse_arguments() -> tuple[str, WorkerConfig, str]:
    """The address to serve on, what to serve, and the secret of whom to serve."""
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="unix:/path or host:port")
    parser.add_argument("--config", required=True, metavar="JSON", help="a quire.v1.WorkerConfig")
    arguments = parser.parse_args()
    secret = os.environ.pop(SECRET_VARIABLE, "")
    if not secret:
        parser.error(f"{SECRET_VARIABLE} is not in the environment")
    try:
        return arguments.listen, json_format.Parse(arguments.config, WorkerConfig()), secret
    except json_format.ParseError as error:
        parser.error(f"--config: {error}")


def _configure_logging(config: WorkerConfig) -> None:
    """Lines like the gateway's, on the same standard error."""
    pretty = config.log_format == "pretty" or (config.log_format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(pretty=pretty),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        # In one piece: the gateway and other workers write to the same pipe.
        logger_factory=structlog.WriteLoggerFactory(background_log()),  # type: ignore[arg-type]  # a stream
    )
    ours = logging.getLogger("workers")
    ours.setLevel(config.log_level.upper())
    ours.addHandler(_ToOurLog())


class _ToOurLog(logging.Handler):
    """Lines of modules that do without structlog: machines with a GPU may lack it."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger(record.name).log(record.levelno, record.getMessage())


def _renderers(*, pretty: bool) -> list[structlog.typing.Processor]:
    # Plain tracebacks: structlog's others print local variables, which hold callers' tokens.
    if pretty:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _end_with_the_gateway() -> None:
    """The gateway holds the other end of our standard input; when that closes, however it did, we end.

    On Linux the kernel also kills us when the gateway's main thread, which started us, is gone: even while we
    are stopped. What died before that was asked for has closed our standard input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="gateway-watch", daemon=True).start()


def _outlive_the_gateway(grace_s: float) -> Leash:
    """Without a stream for that long we end; and at once if the gateway ends before others can find us.

    It writes to our standard input when it has written us down.
    """

    def watch() -> None:
        if not os.read(0, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    standard_input = select.poll()
    standard_input.register(0, 0)
    # One that is there waits until all is imported; one that is not may have gone when that began.
    is_gone = bool(standard_input.poll(0))
    age_s = max(0.0, time.time() - psutil.Process().create_time())
    leash = Leash(grace_s, spent_s=age_s if is_gone else 0.0)
    threading.Thread(target=watch, name="gateway-watch", daemon=True).start()
    return leash


def _choose_device(config: WorkerConfig) -> str:
    """The device as torch names it. With "auto" a GPU, if there is one that can run the model.

    Each worker has a GPU of its own: two of them would each take what the other counts on.
    """
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigurationError("device = cuda was asked for, and this machine has no CUDA device")
    if config.device == "auto" and not _runs_on_cuda(config):
        _log.info("the GPU has no kernels for this model's head_dim, which is run on the CPU")
        return "cpu"
    count = torch.cuda.device_count()
    if config.device_index >= count:
        raise ConfigurationError(
            f"workers = {config.device_index + 1} or more, and this machine has {count} CUDA devices:"
            " each worker takes one of its own; set device = cpu, or fewer workers"
        )
    torch.cuda.set_device(config.device_index)  # kernels are launched on the thread's current device
    return f"cuda:{config.device_index}"


def _runs_on_cuda(config: WorkerConfig) -> bool:
    from workers.executors.loading import runs_on_cuda

    return config.model != WEIGHTLESS_MODEL and runs_on_cuda(
        Path(config.model), config.model_backend or "auto"
    )


def _make_executor(config: WorkerConfig, progress: Progress) -> ModelExecutor:
    # Imported here, on the compute thread: torch takes seconds, and the stream should answer meanwhile.
    import torch

    from workers.models.active_kernels import check_instruction_set

    check_instruction_set()
    torch.set_num_threads(config.threads)
    device = _choose_device(config)
    if config.model == WEIGHTLESS_MODEL:
        from workers.executors.weightless import PagedAttentionExecutor

        # Its operations are over before another thread is awake, which would only take a core from others.
        torch.set_num_threads(1)
        return PagedAttentionExecutor.create(device=device, kv_pages=_kv_pages(config))
    from workers.executors.llm import LlmExecutor, StepLimits
    from workers.models.files import unchanged_settings

    if config.no_self_check == "on":
        _log.warning("the model is served without having proved itself: no_self_check is on")
    directory = Path(config.model)
    with unchanged_settings(directory):
        executor = LlmExecutor.load(
            directory,
            dtype=config.dtype,
            device=device,
            kv_pages=_kv_pages(config),
            limits=StepLimits(
                config.max_batch_tokens,
                config.max_batch_items,
                config.gpu_memory_utilization,
                cuda_graphs=config.cuda_graphs != "off",
            ),
            backend=config.model_backend or "auto",
            self_check=config.no_self_check != "on" and not config.model_was_proved,
            max_text_bytes=config.max_response_bytes - _REST_OF_MODEL_INFO_BYTES,
            progress=lambda done, total: progress("weights", done, total),
        )
    useful = max(1, executor.info().num_parameters // _LEAST_PARAMETERS_PER_THREAD)
    torch.set_num_threads(min(config.threads, useful))
    return executor


def _kv_pages(config: WorkerConfig) -> int | None:
    return config.kv_pages if config.HasField("kv_pages") else None


async def _serve(address: str, config: WorkerConfig, secret: str, leash: Leash | None) -> int:
    from workers.scheduler import Scheduler

    worker = WorkerServer(
        lambda progress: _make_executor(config, progress),
        lambda executor: Scheduler(
            config.max_batch_tokens,
            config.max_batch_items,
            max_rows=config.max_batch_items,
            page_size=executor.engine.kv.page_size,
            max_mixed_prefill_tokens=(
                config.max_mixed_prefill_tokens if config.HasField("max_mixed_prefill_tokens") else None
            ),
        ),
        secret=secret,
        leash=leash,
    )
    asyncio.get_running_loop().add_signal_handler(END_SIGNAL, worker.end)
    beating = asyncio.create_task(leash.run()) if leash is not None else None
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", config.max_request_bytes + _HOP_SLACK_BYTES),
            ("grpc.max_send_message_length", config.max_response_bytes + _HOP_SLACK_BYTES),
        ]
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    server.add_insecure_port(address)
    await server.start()
    worker.start()
    status = 0
    try:
        await worker.ended
    except BaseException as error:
        # A library's panic is no Exception.
        status = report(error, config.model)
    if beating is not None:
        beating.cancel()
    worker.stop(_STOP_TIMEOUT_S)
    return status


def report(error: BaseException, model: str) -> int:
    """Logs why no model is served. Returns the exit status."""
    from workers.kv.sizing import KvSizingError
    from workers.models.errors import ModelError
    from workers.sampling import BadLogitsError

    if isinstance(error, BadLogitsError):  # of the warm-up: those of an operation are its caller's
        error = ModelError(f"{model}: its answers are not finite, though its weights are: they overflow")
    if isinstance(error, ConfigurationError | ModelError | KvSizingError):
        _log.error("cannot serve with this configuration", error=str(error))
        return EXIT_CONFIG
    _log.error("the worker failed", exc_info=error)
    return EXIT_FAILED


def main() -> int:
    """Runs a worker until its gateway ends it, or goes away and does not come back in time."""
    address, config, secret = _parse_arguments()
    _configure_logging(config)
    structlog.contextvars.bind_contextvars(worker_id=config.worker_id, pid=os.getpid())
    # Ctrl-C reaches the whole process group; the gateway drains first and then ends its workers.
    # A service manager's SIGTERM reaches all processes of the service; so may the SIGUSR2 that leaves us.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    leash = None
    if config.orphan_grace_s:
        leash = _outlive_the_gateway(config.orphan_grace_s)
    else:
        _end_with_the_gateway()
    # Neither the server nor the loop is closed, the end of the process does that: both would cancel the
    # gateway's stream, and of one that is in its last lines gRPC prints a traceback.
    return uvloop.new_event_loop().run_until_complete(_serve(address, config, secret, leash))


if __name__ == "__main__":
    sys.stdout.flush()
    # Not sys.exit: a compute thread inside a long step must not hold up the end.
    status = main()
    background_log().drain(_STOP_TIMEOUT_S)
    os._exit(status)
