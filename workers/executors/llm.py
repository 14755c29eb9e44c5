"""The executor of decoder-only language models, loaded from a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from workers.adapters.table import AdapterTable
from workers.common.draft_models import MTP_HEAD
from workers.executors.base import ModelExecutor
from workers.executors.draft_model import load_draft_model
from workers.executors.engine import Engine
from workers.executors.loading import (
    AUTO,
    NATIVE,
    Choice,
    check_ranks,
    check_same_config,
    choose_backend,
)
from workers.executors.lora_slots import adapter_table
from workers.executors.memory import (
    LoraLimits,
    StepLimits,
    allocate_pages,
    gpu_num_pages,
    new_runner,
    new_table,
)
from workers.executors.ranks import connect, load_on_all, ranked_adapters, ranked_pages
from workers.executors.replacement import Served, WeightsReplacement
from workers.kv.sizing import KvSizingError, choose_num_pages
from workers.kv.tensors import KvTensors
from workers.models.active_kernels import check_cuda_device
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.model import (
    AUTO_KV,
    Model,
    ModelDescription,
    kv_dtype_of_quantised,
    page_bytes,
    state_sizes,
)
from workers.models.source import source_of
from workers.models.text import ModelText
from workers.models.tokenizer import MAX_BYTES
from workers.models.weights import copy_weights
from workers.runners.base import Runner
from workers.runners.eager import EagerRunner
from workers.runners.tensor_parallel import LeadingRunner, RankGroup

# The path of a snapshot of ORG/NAME in a cache of the Hugging Face hub. Names contain no double dashes.
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[0-9a-f]{40}(/.*)?")


class LlmExecutor(ModelExecutor):
    """Any decoder-only model that `workers/models` supports."""

    name = "llm"
    # Over which the model is split; None: it is not.
    ranks: RankGroup | None = None

    @classmethod
    def load(  # noqa: PLR0913 - the settings of a worker
        cls,
        directory: Path,
        *,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        kv_pages: int | None = None,
        limits: StepLimits | None = None,
        lora: LoraLimits | None = None,
        backend: str = AUTO,
        self_check: bool = True,
        batch_invariant: bool = False,
        quantization: str | None = None,
        rounds_rows: bool = True,
        kv_dtype: str = AUTO_KV,
        head_dtype: str = AUTO,
        max_text_bytes: int = MAX_BYTES,
        progress: Callable[[int, int], None] | None = None,
        ranks: RankGroup | None = None,
        draft: Path | None = None,
    ) -> Self:
        """Loads the weights and allocates the pool.

        dtype: "bfloat16", "float16" or "float32", for weights and KV; "auto": the model's own, but on a CPU
            float32 for float16.
        kv_pages: pages of 16 tokens; None sizes the pool from free memory.
        limits: the largest step; on a GPU it determines the memory that is left for the pool.
        lora: None: no adapters. Models of the transformers library have none.
        backend: "native", "transformers" or "auto"; see `loading`.
        self_check: whether to check the model's outputs before it is served, with either backend.
        batch_invariant: refuse a model whose rows depend on the rest of the batch. On a GPU this selects
            other, slower kernels.
        quantization: a format to which native weights are quantised on a CPU; None: they are not.
        rounds_rows: see `LoadPlan`.
        kv_dtype: how keys and values are stored; other than "auto" on a CPU only.
        head_dtype: "float32", or "auto" for the model's: that in which logits are computed.
        max_text_bytes: tokenizer.json and the chat template are omitted if they are larger.
        progress: called with (done_bytes, total_bytes) while weights are read.
        ranks: over which the model is split; None: this process runs all of it.
        draft: a smaller model that drafts, as it is in its files, or MTP_HEAD; None: nothing is drafted.

        Raises ModelError for a directory that cannot be served, KvSizingError if memory is too small.
        """
        device = _prepared(device)
        limits, mtp_head = limits or StepLimits(), draft == Path(MTP_HEAD)
        source = source_of(directory)
        source.check()
        choice = choose_backend(directory, backend, on_cuda=device.type == "cuda")
        backend = choice.backend
        # Before the weights, which take longer to load.
        text = source.text(choice.vocab_size, max_text_bytes)
        if ranks is not None:
            _connect(ranks, directory, choice, device, batch_invariant=batch_invariant)
        with _weights_fit(directory, device):
            model, description = load_on_all(
                ranks,
                "load",
                directory,
                dtype,
                device,
                progress,
                backend=backend,
                reason=choice.reason,
                self_check=self_check,
                batch_invariant=batch_invariant,
                quantization=quantization,
                rounds_rows=rounds_rows,
                mtp_head=mtp_head,
            )
        if batch_invariant:
            _make_batch_invariant(model, directory, backend)
        use_head_dtype(model, head_dtype)
        served, asked_kv_dtype = Served(model), kv_dtype
        if dtype == kv_dtype == AUTO and description.quantization:
            kv_dtype = kv_dtype_of_quantised(model)
        drafting = load_draft_model(None if mtp_head else draft, text, dtype, device, self_check=self_check)
        beside_bytes = 0 if drafting is None else page_bytes(drafting[0], asked_kv_dtype)
        kv = _pages(model, description, kv_pages, limits, ranks, beside_bytes, kv_dtype)
        group = None if ranks is None else ranks.collectives
        own = new_runner(model, kv, limits, description.max_seq_len, group)
        runner = own if ranks is None else LeadingRunner(own, ranks)
        adapters = _adapters(served, lora if backend == NATIVE else None, own, ranks)
        described = _described(description, directory, text)
        engine = _engine(model, description, kv, runner)
        executor = cls(described, engine, text, adapters, backend_reason=choice.reason)
        executor.ranks = ranks
        if drafting is not None:
            drafter = cls._with_own_pages(*drafting, kv.num_pages, limits, asked_kv_dtype)
            executor.use_draft_model(drafter, limits.max_tokens)
        if mtp_head:
            executor.use_mtp_head()
        # On a GPU they are copied into place, which only dense native weights can be.
        if device.type != "cuda" or (backend == NATIVE and not description.quantization):
            executor.replacement = executor._new_replacement(
                served, description, backend, dtype, quantization, head_dtype
            )
        return executor

    @classmethod
    def _with_own_pages(
        cls, model: Model, description: ModelDescription, num_pages: int, limits: StepLimits, kv_dtype: str
    ) -> Self:
        """The executor of another model than the one that is served, with pages of its own."""
        kv = allocate_pages(model, num_pages, kv_dtype)
        runner = new_runner(model, kv, limits, description.max_seq_len)
        return cls(description, _engine(model, description, kv, runner))

    def _new_replacement(
        self,
        served: Served,
        description: ModelDescription,
        backend: str,
        dtype: str,
        quantization: str | None,
        head_dtype: str,
    ) -> WeightsReplacement[Model]:
        """What replaces the weights of `served`, which has this description, and whose format they get.

        `dtype` and the rest are the settings with which `served` was loaded.
        """
        ranks, rounds_rows = self.ranks, description.rounds_rows
        mtp_head = isinstance(served.model, Decoder) and bool(served.model.mtp_head)

        def read(source: Path) -> tuple[Model, ModelDescription]:
            other = choose_backend(source, backend)
            # On a GPU they are read into main memory, and copied into place.
            on_gpu = served.model.device.type == "cuda"
            own_dtype = str(served.model.dtype).removeprefix("torch.")
            read_model, read_description = load_on_all(
                ranks,
                "read_weights",
                source,
                own_dtype,
                torch.device("cpu"),
                None,
                backend=other.backend,
                reason=other.reason,
                self_check=False,
                pack=not on_gpu,
                quantization=quantization,
                rounds_rows=rounds_rows,
                mtp_head=mtp_head,
            )
            # With "auto" a worker that starts later takes the config's.
            free = () if dtype == AUTO else ("dtype",)
            check_same_config(served.model, description, read_model, read_description, free)
            use_head_dtype(read_model, head_dtype)
            # Ranks take part in a step only together, and what a GPU computes a CPU may not, or not soon.
            if ranks is None and not on_gpu:
                self._with_own_pages(read_model, read_description, 1, StepLimits(), AUTO_KV).run_first_step()
            # The tokenizer stays.
            return read_model, _described(read_description, source, self.text)

        replacement = WeightsReplacement(read, functools.partial(self.use, served))
        if ranks is not None:
            replacement.on_discard = ranks.drop_weights
        return replacement

    def set_threads(self, threads: int) -> None:
        """Sets the compute threads of each rank."""
        torch.set_num_threads(threads)
        if self.ranks is not None:
            with self.ranks.asking("set_threads", threads=threads):
                pass

    def use(self, served: Served, other: Model, description: ModelDescription) -> None:
        """Puts other weights of the same config into place, between two steps.

        Args:
            served: The model that runs. On a GPU its memory stays; on the CPU `other` takes its place.
            other: Where they are now, on the CPU.
            description: What is reported of them.
        """
        if self.ranks is not None:
            self.ranks.use_weights()
        if served.model.device.type == "cuda":
            assert isinstance(served.model, Decoder) and isinstance(other, Decoder)
            copy_weights(other, served.model)
        else:
            runner = self.engine.runner
            assert isinstance(runner, EagerRunner | LeadingRunner)
            runner.use(other)
            served.model = other
            if self.adapters is not None:
                self.adapters.move()
        self._model = description


def use_head_dtype(model: Model, head_dtype: str) -> None:
    """Makes a model that was loaded compute its logits in a dtype. Raises ModelError."""
    if head_dtype == AUTO:
        return
    if not isinstance(model, Decoder) or not model.use_float32_head():
        raise ModelError("head_dtype = float32 needs a native model, device = cpu and tensor_parallel = 1")


def _prepared(device: torch.device | str) -> torch.device:
    """A device that can be used. Raises ModelError."""
    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # kernels are launched on the thread's current device
        check_cuda_device(device)
    return device


def _connect(
    ranks: RankGroup, directory: Path, choice: Choice, device: torch.device, *, batch_invariant: bool
) -> None:
    """Lets the ranks meet. Raises ModelError if they cannot run the model."""
    check_ranks(directory, choice, ranks.ranks)
    if batch_invariant and device.type == "cuda":
        raise ModelError("batch_invariant = on needs tensor_parallel = 1 on a GPU")
    connect(ranks, device)


@contextmanager
def _weights_fit(directory: Path, device: torch.device) -> Iterator[None]:
    """Raises KvSizingError if the body finds too little memory on a GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        raise KvSizingError(
            f"the weights of {directory.name} do not fit on {device}, which has {total_bytes >> 20} MiB;"
            f" {free_bytes >> 20} MiB of them were left"
        ) from error


def _adapters(
    served: Served, lora: LoraLimits | None, own: Runner, ranks: RankGroup | None
) -> AdapterTable[Any] | None:
    if lora is None:
        return None
    return adapter_table(served, lora, own) if ranks is None else ranked_adapters(served, lora, ranks, own)


def _engine(model: Model, description: ModelDescription, kv: KvTensors, runner: Runner) -> Engine:
    return Engine(
        new_table(kv),
        kv,
        runner,
        takes_trees=model.takes_trees,
        batch_invariant=model.batch_invariant,
        num_experts=description.num_experts,
    )


def _make_batch_invariant(model: Model, directory: Path, backend: str) -> None:
    """Select the kernels for it. Raises ModelError if there are none for the model."""
    if model.device.type == "cuda" and backend == NATIVE:
        model.batch_invariant = True
    if not model.batch_invariant:
        raise ModelError(
            f"{directory}: batch_invariant is on, which the {backend} backend does not guarantee with"
            f" {model.dtype} on {model.device}"
        )


def _described(description: ModelDescription, directory: Path, text: ModelText) -> ModelDescription:
    """The description, with what is neither in the config nor in the weights."""
    return dataclasses.replace(
        description,
        model_id=model_id_of(directory),
        eos_token_ids=text.with_own_end(description.eos_token_ids),
    )


def model_id_of(directory: Path) -> str:
    """The name of a model: as on the hub for a snapshot in the hub's cache, else that of the path."""
    directory = Path(os.path.abspath(directory))  # noqa: PTH100 - gives "." a name, and keeps that of a link
    found = _SNAPSHOT.fullmatch(directory.as_posix())
    if found is None:
        return directory.name
    # Repositories with several models have a file for each, which gives it a name of its own.
    return found[1].replace("--", "/") + (found[2] or "")


def _pages(
    model: Model,
    description: ModelDescription,
    kv_pages: int | None,
    limits: StepLimits,
    ranks: RankGroup | None,
    beside_bytes: int,
    kv_dtype: str,
) -> KvTensors:
    """A pool that fits the memory of the device, or of all ranks.

    `beside_bytes`: what is allocated with each page; with ranks nothing is. Raises KvSizingError, and
    ModelError if there are no pages of this `kv_dtype` for the model.
    """
    if kv_dtype != AUTO_KV and model.device.type != "cpu":
        raise ModelError(f"kv_cache_dtype = {kv_dtype} needs device = cpu")
    if ranks is not None:
        return ranked_pages(model, description, kv_pages, limits, ranks, kv_dtype)
    if model.device.type != "cuda":
        fixed_bytes = state_sizes(model, kv_dtype).fixed_bytes
        bytes_per_page = page_bytes(model, kv_dtype) + beside_bytes
        num_pages = choose_num_pages(kv_pages, bytes_per_page, fixed_bytes)
    else:
        sizes = {
            "max_seq_len": description.max_seq_len,
            "vocab_size": description.vocab_size,
            "beside_bytes": beside_bytes,
        }
        num_pages = gpu_num_pages(model, kv_pages, limits, **sizes)
    return allocate_pages(model, num_pages, kv_dtype)
