"""Entry point of a rank other than 0: `python -m workers.follower`. Started by rank 0, and ends with it.

Two threads: one answers rank 0's questions, such as to load the model or to read an adapter. The other does
what rank 0 does to its device's memory, in the same order: see `workers.runners.tensor_parallel`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import torch

from workers import process
from workers.common.child_process import open_standard_files, set_death_signal
from workers.common.switching import switch_often
from workers.executors.loading import NATIVE, load_served, read_source
from workers.executors.lora_slots import ModelSlots, on_made
from workers.executors.memory import LoraLimits, StepLimits, allocate_pages, gpu_num_pages, new_runner
from workers.executors.replacement import Served
from workers.kv.sizing import KvSizingError
from workers.kv.tensors import KvTensors
from workers.logging import background_log
from workers.models.decoder import Decoder
from workers.models.lora import PackedLora
from workers.models.model import ModelDescription
from workers.models.weights import copy_weights
from workers.operations import AdapterSource
from workers.runners.base import After, LaunchedStep
from workers.runners.collectives import Collectives
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.rank_plan import ForwardPlan, Message, PlanKind, Way, forward_of, pairs_of, receive
from workers.runners.rank_processes import Questions
from workers.runners.tensor_parallel import REFUSALS
from workers.sampling import SamplingError, SamplingRow

# Not by its name, which is __main__: the lines of `workers` are configured.
_log = logging.getLogger("workers.follower")


class Follower:
    """A rank's model, pages and adapters, as rank 0 has them."""

    def __init__(self, collectives: Collectives) -> None:
        """Nothing is loaded yet."""
        self._collectives = collectives
        self._device = torch.device("cpu")
        self._served: Served
        self._kv: KvTensors
        # On a GPU, what replays decodes.
        self._runner: CudaGraphRunner | None = None
        # The last step that was launched, until rank 0 has read its tokens.
        self._launched: LaunchedStep | None = None
        # None: rank 0 has not asked for room for adapters yet.
        self._lora_slots: ModelSlots | None = None
        # By number, those that were read and are not in place; and up to which number they were dropped.
        self._read_weights: dict[int, Decoder] = {}
        self._dropped = 0
        # By key, those that were read; and the keys of those in slots.
        self._adapters: dict[int, PackedLora] = {}
        self._in_slots: dict[int, int] = {}

    @property
    def _model(self) -> Decoder:
        model = self._served.model
        assert isinstance(model, Decoder)
        return model

    # Questions.

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked. What is refused is part of the answer."""
        method = getattr(self, f"_answer_{question.pop('question')}")
        try:
            result: dict[str, Any] = method(**question) or {}
        except tuple(REFUSALS.values()) as error:
            name = next(name for name, kind in REFUSALS.items() if isinstance(error, kind))
            return {"refused": name, "why": str(error)}
        except torch.OutOfMemoryError as error:
            why = f"rank {self._collectives.rank} has too little memory: {str(error).partition(chr(10))[0]}"
            return {"refused": KvSizingError.__name__, "why": why}
        return result

    def _answer_connect(self, rendezvous: str, device: str) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", (self._device.index or 0) + self._collectives.rank)
            torch.cuda.set_device(self._device)
        self._collectives.connect(Path(rendezvous), self._device)

    def _answer_load(self, threads: int, **settings: Any) -> dict[str, Any]:
        torch.set_num_threads(threads)
        model, description = self._load(self._device, pack=True, **settings)
        self._served, self._lora_slots = Served(model), None
        return {"fingerprint": description.fingerprint, "weight_bytes": description.weight_bytes}

    def _load(
        self, device: torch.device, *, pack: bool, directory: str, dtype: str, **settings: Any
    ) -> tuple[Decoder, ModelDescription]:
        model, description = load_served(
            Path(directory),
            dtype,
            device,
            None,
            backend=NATIVE,
            self_check=False,
            pack=pack,
            group=self._collectives,
            **settings,
        )
        assert isinstance(model, Decoder)
        return model, description

    def _answer_lora_room(self, limits: dict[str, Any]) -> dict[str, Any]:
        if self._lora_slots is None:
            self._lora_slots = ModelSlots(self._served, LoraLimits(**limits), on_made(self._runner))
        return {"slots": self._lora_slots.find_room()}

    def _answer_agree_lora(self, slots: int) -> None:
        assert self._lora_slots is not None, "it was asked for room"
        self._lora_slots.agree(slots)

    def _answer_count_pages(
        self, kv_pages: int | None, limits: dict[str, Any], max_seq_len: int, vocab_size: int
    ) -> dict[str, Any]:
        """On a GPU. Runs a step, as all ranks do now."""
        pages = gpu_num_pages(
            self._model, kv_pages, StepLimits(**limits), max_seq_len=max_seq_len, vocab_size=vocab_size
        )
        return {"pages": pages}

    def _answer_allocate_pages(
        self, pages: int, limits: dict[str, Any], max_seq_len: int, kv_dtype: str
    ) -> None:
        self._kv = allocate_pages(self._model, pages, kv_dtype)
        runner = new_runner(self._model, self._kv, StepLimits(**limits), max_seq_len, self._collectives)
        self._runner = runner if isinstance(runner, CudaGraphRunner) else None

    def _answer_set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def _answer_read_weights(self, number: int, **settings: Any) -> dict[str, Any]:
        on_gpu = self._device.type == "cuda"
        model, description = self._load(torch.device("cpu"), pack=not on_gpu, **settings)
        self._read_weights[number] = model
        self._drop_weights()
        return {"fingerprint": description.fingerprint, "weight_bytes": description.weight_bytes}

    def _answer_read_adapter(self, directory: str, digest: str, key: int, limits: dict[str, Any]) -> None:
        source = AdapterSource(key, directory, digest)
        adapter = read_source(source, self._model, LoraLimits(**limits))
        self._adapters[key] = self._model.pack_lora(adapter.weights)

    # Plans.

    def follow(self, message: Message) -> None:
        """Do what rank 0 does."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # that of a thread, and questions have their own
        match message.kind:
            case PlanKind.FORWARD:
                self._run(forward_of(message))
            case PlanKind.COPY_PAGES:
                self._kv.copy_pages(pairs_of(message))
            case PlanKind.MOVE_SLOTS:
                self._kv.move_slots(pairs_of(message))
            case PlanKind.SET_LORA:
                self._set_lora(*message.numbers)
            case PlanKind.USE_WEIGHTS:
                self._use_weights(*message.numbers)
            case PlanKind.DROP_WEIGHTS:
                self._drop_weights_until(*message.numbers)

    def _run(self, plan: ForwardPlan) -> None:
        """Run a forward. Its logits are rank 0's, and so is the choice of tokens."""
        inputs, runner = plan.inputs, self._runner
        if plan.way is Way.EAGER or runner is None:
            self._model.logits(self._model.forward(inputs.to(self._device), self._kv))
            return
        # A graph chooses tokens of this rank's part of the logits, which nobody reads.
        rows = [SamplingRow()] * len(inputs.wanted_rows)
        with contextlib.suppress(SamplingError):
            if plan.way is Way.AFTER:
                assert self._launched is not None, "rank 0 has launched one"
                self._launched = runner.launch(inputs, rows, after=After(self._launched, plan.places))
                return
            if self._launched is not None:
                launched, self._launched = self._launched, None
                launched.chosen()
        if plan.way is Way.LAUNCH:
            self._launched = runner.launch(inputs, rows)
            assert self._launched is not None, "rank 0 has launched it"
            return
        with contextlib.suppress(SamplingError):
            runner.step(inputs, rows)

    def _drop_weights_until(self, number: int) -> None:
        self._dropped = number
        self._drop_weights()

    def _drop_weights(self) -> None:
        """On both threads."""
        for number in list(self._read_weights):
            if number <= self._dropped:
                self._read_weights.pop(number, None)

    def _use_weights(self, number: int) -> None:
        # By number: questions do not wait for plans, so later ones may have been read by now.
        read = self._read_weights[number]
        self._drop_weights_until(number)
        if self._device.type == "cuda":
            copy_weights(read, self._model)
            return
        self._served.model = read

    def _set_lora(self, slot: int, key: int) -> None:
        assert self._lora_slots is not None, "all ranks have agreed on slots"
        self._lora_slots.make_slots()
        if slot < 0:
            return
        if key < 0:
            self._model.set_lora(slot, None)
            self._in_slots.pop(slot, None)
            return
        self._model.set_lora(slot, self._adapters[key])
        self._in_slots[slot] = key
        # Adapters are read one after the other, so an older one that is in no slot was evicted or dropped.
        for old in [old for old in list(self._adapters) if old < key and old not in self._in_slots.values()]:
            del self._adapters[old]


def _end_with_rank_0() -> None:
    """End this process when its standard input is closed; by the kernel, even while it is stopped."""
    set_death_signal(signal.SIGKILL)

    def watch() -> None:
        ended = select.poll()
        ended.register(0, getattr(select, "POLLRDHUP", 0))  # POLLHUP is always reported
        ended.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="rank-0-watch", daemon=True).start()


def _answer_questions(follower: Follower, questions: Questions) -> None:
    try:
        while True:
            questions.send(follower.answer(questions.receive()))
    except (EOFError, OSError):
        _end(0)
    except BaseException:
        _log.exception("the rank failed")
        _end(process.EXIT_FAILED)


def _end(status: int) -> None:
    background_log().drain(1.0)
    os._exit(status)


def main() -> None:
    """Follow rank 0 until it ends."""
    _end_with_rank_0()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m workers.follower", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--questions", type=int, required=True, help="file descriptor of a socket")
    parser.add_argument("--worker-id", default="")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="json")
    arguments = parser.parse_args()
    # One log for all processes of a worker, whose config has these two fields.
    process.configure_logging(arguments, rank=arguments.rank)  # type: ignore[arg-type]
    switch_often()
    follower = Follower(Collectives(arguments.rank, arguments.ranks))
    questions = Questions(socket.socket(fileno=arguments.questions))
    threading.Thread(
        target=_answer_questions, args=(follower, questions), name="questions", daemon=True
    ).start()
    plans = socket.socket(fileno=0)
    try:
        while True:
            follower.follow(receive(plans))
    except EOFError:
        _end(0)
    except BaseException:
        _log.exception("the rank failed")
        _end(process.EXIT_FAILED)


if __name__ == "__main__":
    open_standard_files()
    main()
