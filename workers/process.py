"""The process of a worker: how it is configured, loads, serves and ends.

`pool_member` runs it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from workers.common.child_process import set_death_signal
from workers.common.machine_limits import threads_of
from workers.common.protocol import EXIT_CONFIG
from workers.common.worker_pb2 import WorkerConfig
from workers.logging import background_log, configure, get_logger
from workers.orphan_timer import OrphanTimer
from workers.runners.rank_processes import RankProcesses
from workers.server import Progress, WorkerServer

if TYPE_CHECKING:
    from workers.executors.base import ModelExecutor
    from workers.executors.memory import LoraLimits

EXIT_FAILED = 1
# An upper bound for a GetModelInfoResponse without tokenizer and chat template.
_REST_OF_MODEL_INFO_BYTES = 64 << 10
STOP_TIMEOUT_S = 1.0
WEIGHTLESS_MODEL = "paged-attention"
# With fewer parameters per thread, waking the threads takes longer than a step, and idle threads spin.
LEAST_PARAMETERS_PER_THREAD = 2_000_000

_log = get_logger("workers")


class ConfigurationError(Exception):
    """This machine or this model does not support the configuration."""


def configure_logging(config: WorkerConfig, **more: object) -> None:
    """Log as the configuration says, to the standard error of the gateway. `more`: fields of all lines."""
    # A worker on another host gets its id with its first lease.
    origin = {"worker_id": config.worker_id, "pid": os.getpid()} if config.worker_id else {"pid": os.getpid()}
    configure(config.log_level, config.log_format, origin | more)


class Parent:
    """Ends this process when its parent ends, which closes the parent's end of standard input.

    On Linux the kernel also kills this process when the parent's main thread ends, even while this process is
    stopped. If the parent ended before that was set up, standard input is closed already.
    """

    def __init__(self) -> None:
        self._ends_this = True
        set_death_signal(signal.SIGKILL)
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def outlive(self) -> None:
        """From now on, does not end with its parent."""
        self._ends_this = False
        set_death_signal(0)

    def _watch(self) -> None:
        while os.read(0, 4096):
            pass
        if self._ends_this:
            os.kill(os.getpid(), signal.SIGKILL)


def _choose_device(config: WorkerConfig) -> str:
    """The device as torch names it. With "auto" a GPU, if there is one that can run the model.

    Each worker has its own GPU: each sizes its pool for all of a GPU's memory.
    """
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigurationError("device = cuda, and this machine has no CUDA device")
    if config.device == "auto" and (setting := _without_gpu_kernels(config)):
        _log.info("the model runs on the CPU: there are no GPU kernels for it", because_of=setting)
        return "cpu"
    count, ranks = torch.cuda.device_count(), max(1, config.tensor_parallel)
    if (config.device_index + 1) * ranks > count:
        raise ConfigurationError(
            f"workers = {config.device_index + 1} or more"
            + (f" of tensor_parallel = {ranks} each" if ranks > 1 else "")
            + f", and this machine has {count} CUDA devices:"
            " each worker needs its own; set device = cpu, or fewer workers"
        )
    if problem := triton_problem():
        raise ConfigurationError(problem)
    first = config.device_index * ranks
    torch.cuda.set_device(first)  # kernels are launched on the thread's current device
    return f"cuda:{first}"


def triton_problem() -> str:
    """Why Triton cannot compile kernels on this machine. Empty: it can."""
    # As Triton looks for it. It would say so in the middle of a warm-up, in a traceback.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "GPU kernels need a C compiler, and there is none: install gcc or clang, or set CC"
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111 - this one never raises
    cache = os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache"
    try:
        Path(cache).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        return f"GPU kernels are stored in {cache}, which fails ({error.strerror}): set TRITON_CACHE_DIR"
    return ""


def _without_gpu_kernels(config: WorkerConfig) -> str:
    """The part or setting of the model for which there are no GPU kernels. Empty: there is none."""
    from workers.executors.loading import lacks_on_gpu

    if _kv_dtype(config) != "auto":
        return "kv_cache_dtype"
    if config.model == WEIGHTLESS_MODEL:
        return "head_dim"
    return lacks_on_gpu(Path(config.model), config.model_backend or "auto", _quantization(config))


def _start_ranks(config: WorkerConfig) -> RankProcesses | None:
    """Starts the other ranks. On the main thread: they end with the thread that has started them."""

    def end() -> None:
        background_log().drain(STOP_TIMEOUT_S)
        os._exit(EXIT_FAILED)

    if config.tensor_parallel <= 1 or config.model == WEIGHTLESS_MODEL:
        return None
    arguments = ["--worker-id", config.worker_id, "--log-level", config.log_level]
    return RankProcesses(config.tensor_parallel, [*arguments, "--log-format", config.log_format], end)


def _make_executor(
    config: WorkerConfig, progress: Progress, ranks: RankProcesses | None = None
) -> ModelExecutor:
    # Imported on the compute thread: torch takes seconds to import, and the stream must answer meanwhile.
    import torch

    from workers.models.active_kernels import check_instruction_set

    check_instruction_set()
    threads = config.threads or threads_of(config.workers)
    threads = max(1, threads // max(1, config.tensor_parallel))
    torch.set_num_threads(threads)
    device = _choose_device(config)
    if config.model == WEIGHTLESS_MODEL:
        # Operations are too short for a second thread.
        torch.set_num_threads(1)
        return _stored(_make_weightless(config, device), None, config)
    from workers.executors.llm import LlmExecutor
    from workers.executors.memory import StepLimits
    from workers.models.files import unchanged_settings
    from workers.runners.tensor_parallel import RankGroup

    if config.no_self_check == "on":
        _log.warning("the model is served without its self-check: no_self_check is on")
    directory = Path(config.model)
    with unchanged_settings(directory):
        executor = LlmExecutor.load(
            directory,
            dtype=config.dtype,
            device=device,
            kv_pages=_kv_pages(config),
            limits=StepLimits(
                _step_tokens(config, device),
                config.max_batch_items,
                config.gpu_memory_utilization,
                cuda_graphs=config.cuda_graphs != "off",
            ),
            lora=_lora_limits(config, device),
            backend=config.model_backend or "auto",
            self_check=config.no_self_check != "on" and not config.model_was_proved,
            batch_invariant=config.batch_invariant == "on",
            quantization=_quantization(config),
            rounds_rows=config.activation_quantization != "none",
            kv_dtype=_kv_dtype(config),
            head_dtype=config.head_dtype or "auto",
            max_text_bytes=config.max_response_bytes - _REST_OF_MODEL_INFO_BYTES,
            progress=lambda done, total: progress("weights", done, total),
            ranks=None if ranks is None else RankGroup(ranks),
            draft=Path(config.draft_model) if config.draft_model else None,
        )
    parameters = executor.info().num_parameters // max(1, config.tensor_parallel)
    executor.set_threads(min(threads, max(1, parameters // LEAST_PARAMETERS_PER_THREAD)))
    return _stored(executor, directory, config)


def _make_weightless(config: WorkerConfig, device: str) -> ModelExecutor:
    from workers.executors.weightless import PagedAttentionExecutor

    if config.tensor_parallel > 1:
        raise ConfigurationError(
            f"tensor_parallel = {config.tensor_parallel}, and {WEIGHTLESS_MODEL} cannot be split"
        )
    return PagedAttentionExecutor.create(device=device, kv_pages=_kv_pages(config))


def _stored(executor: ModelExecutor, model: Path | None, config: WorkerConfig) -> ModelExecutor:
    """Lets an executor store its KV, if that is configured. Reads the weights at `model` again."""
    if config.kv_disk:
        from workers.executors.stored_kv import open_kv_disk

        executor.kv_disk = open_kv_disk(
            executor,
            model,
            Path(config.kv_disk),
            max_bytes=int(config.kv_disk_gb * 1e9),
            write_bytes_per_s=config.kv_disk_write_mb_per_s * 1e6,
        )
    return executor


def _quantization(config: WorkerConfig) -> str | None:
    return config.quantization if config.quantization not in ("", "none") else None


def _kv_dtype(config: WorkerConfig) -> str:
    return config.kv_cache_dtype or "auto"


def _kv_pages(config: WorkerConfig) -> int | None:
    return config.kv_pages if config.HasField("kv_pages") else None


def _lora_limits(config: WorkerConfig, device: str) -> LoraLimits | None:
    """None: the model takes no adapters."""
    from workers.executors.memory import GPU_LORA_RANK, LoraLimits

    if not config.max_lora_adapters:
        return None
    max_rank = config.max_lora_rank or (256 if device == "cpu" else GPU_LORA_RANK)
    return LoraLimits(config.max_lora_adapters, max_rank, config.max_lora_bytes)


def _step_tokens(config: WorkerConfig, device: str) -> int:
    """The most tokens of a step."""
    from workers.executors.memory import CPU_STEP_TOKENS, GPU_STEP_TOKENS

    return config.max_batch_tokens or (CPU_STEP_TOKENS if device.startswith("cpu") else GPU_STEP_TOKENS)


def make_worker(config: WorkerConfig, orphan_timer: OrphanTimer | None) -> WorkerServer:
    """A worker with this configuration, which has not started to load. Needs a running event loop."""
    from workers.scheduler import Scheduler

    ranks = _start_ranks(config)
    return WorkerServer(
        lambda progress: _make_executor(config, progress, ranks),
        lambda executor: Scheduler(
            _step_tokens(config, executor.engine.kv.device.type),
            config.max_batch_items,
            max_rows=config.max_batch_items,
            page_size=executor.engine.kv.page_size,
            max_mixed_prefill_tokens=(
                config.max_mixed_prefill_tokens if config.HasField("max_mixed_prefill_tokens") else None
            ),
        ),
        orphan_timer=orphan_timer,
        explain=lambda error: _for_clients(error, config.model),
    )


async def run_worker(worker: WorkerServer, orphan_timer: OrphanTimer | None) -> int:
    """Loads and runs the worker until it ends. Returns the exit status."""
    ticking = asyncio.create_task(orphan_timer.run()) if orphan_timer is not None else None
    worker.start()
    status = 0
    try:
        await worker.ended
    except BaseException as error:
        # Panics of Rust libraries are no Exceptions.
        status = report(error)
    if ticking is not None:
        ticking.cancel()
    worker.stop(STOP_TIMEOUT_S)
    return status


def report(error: BaseException) -> int:
    """Log why the worker ends. Returns the exit status."""
    if (why := _refusal(error)) is not None:
        _log.error("cannot serve with this configuration", error=why)
        return EXIT_CONFIG
    _log.error("the worker failed", exc_info=error)
    return EXIT_FAILED


def _refusal(error: BaseException) -> str | None:
    """Why the configuration cannot be served. None: the error says nothing about it."""
    from workers.kv.sizing import KvSizingError
    from workers.models.errors import ModelError

    return str(error) if isinstance(error, ConfigurationError | ModelError | KvSizingError) else None


def _for_clients(error: BaseException, model: str) -> str:
    """As `_refusal`, without paths; "" if there is none."""
    from workers.models.errors import for_clients

    why = _refusal(error)
    return "" if why is None else for_clients(why, Path(model))
