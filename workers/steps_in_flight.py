"""Launches the next step of plain decodes on a GPU before the results of the running one are read.

So the device does not wait for the host between two steps (ADR 43). A step is *in flight* from its launch
until its results are read. Meanwhile the step loop takes commands. Requests for prelaunched decodes that are
running are answered with the step. When all of its decodes were requested, the next step is launched with

- the next decodes to prelaunch: the device already has their tokens;
- other plain decodes that were requested meanwhile, which *join*: the host has their tokens. Among them are
  sequences whose caller sends something new with each token, such as a mask. They are in every second step,
  and the others do not wait for them;
- chunks of prompts, in the same forward; but not the last chunk of a prompt, whose row is read: then the step
  in flight is finished first, and decodes and chunks run in a step that is not launched ahead (ADR 67).

Anything else waits until the step in flight is finished, and then shares a step with the decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workers.decodes import NO_DECODES, Decodes
from workers.executors import launched_steps
from workers.executors.engine import Engine
from workers.executors.launched_steps import StepInFlight
from workers.forward_queues import Begin
from workers.logging import get_logger
from workers.operations import Chunk
from workers.prelaunch import Prelauncher
from workers.runners.base import DeviceLostError
from workers.scheduler import Scheduler

_log = get_logger(__name__)


class StepsInFlight:
    """Owner of the step in flight. Its decodes are `Scheduler.running`."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        prelauncher: Prelauncher,
        *,
        on_done: Callable[[Decodes, Decodes], None],
        on_failed: Callable[[Decodes, Exception], None],
        on_end: Callable[[Sequence[Chunk]], None],
    ) -> None:
        """Set what to call when a step ends.

        on_done: Called with the step's decodes, and with the prelaunched decodes that run already.
        on_failed: Called with the step's decodes and the error.
        on_end: Called after either, with the step's chunks.
        """
        self._engine, self._scheduler, self._prelauncher = engine, scheduler, prelauncher
        self._on_done, self._on_failed, self._on_end = on_done, on_failed, on_end
        self.step: StepInFlight | None = None

    def launch(self, decodes: Decodes, chunks: Sequence[Chunk]) -> bool:
        """Launch the step that the scheduler has chosen. False: it has to be executed instead."""
        self.step = None
        if decodes.may_be_launched and all(chunk.may_be_launched for chunk in chunks):
            self.step = self._launched(launched_steps.launch(self._engine, decodes, chunks))
        return self.step is not None

    def _launched(self, step: StepInFlight | None) -> StepInFlight | None:
        """Note that a step was launched. Its chunks are done for the scheduler: they have no results."""
        for chunk in step.chunks if step is not None else ():
            self._scheduler.advance(chunk)
        return step

    @property
    def has_to_end(self) -> bool:
        """Whether something in the scheduler waits for the end of the step in flight."""
        return self._scheduler.has_queued and not self._may_run_on

    @property
    def _may_run_on(self) -> bool:
        """Whether what is in the scheduler allows the next step to be launched."""
        if self.step is None or not self._scheduler.has_others:
            return self.step is not None
        # No prelaunched decode may take pages that another forward waits for.
        return not self._prelauncher.has_to_wait and self._scheduler.may_run_on(self.step.decodes.size)

    @property
    def waits_for_requests(self) -> bool:
        """Whether a step is running of which not all decodes were requested."""
        step = self.step
        return step is not None and any(step.decodes.prelaunched.tolist()) and not step.launched.is_done()

    def consume(self, requests: Decodes) -> Decodes:
        """Answer requests with the step in flight. Returns the others.

        If one is for a sequence in that step but not as expected, finishes the step and returns all.
        """
        if self.step is None:
            return requests
        running = set(self.step.decodes.sequences)
        found = np.array([sequence in running for sequence in requests.sequences])
        # A request for a ready result is not for the running decode.
        found &= ~self._prelauncher.are_ready(requests)
        if not any(found.tolist()):
            return requests
        if self._prelauncher.consume_running(self.step.decodes, requests.take(found)):
            return requests.take(~found)
        self.finish()
        return requests

    def finish_for(self, sequence: int) -> None:
        """Finish the step in flight if it has this sequence."""
        if self.step is not None and sequence in self.step.decodes.sequences:
            self.finish()

    def advance(self, begin: Begin, *, has_other_work: bool) -> None:
        """Finish the step in flight. If nothing else has to run before it, launch the next one first.

        Has no effect while requests for the step may still come, and nothing waits for its end.

        begin: Begins forwards.
        has_other_work: Whether there is work outside the scheduler.
        """
        has_to_end = has_other_work or self.has_to_end
        if self.step is None or (not has_to_end and self.waits_for_requests):
            return
        following = None
        may_run_on = self._may_run_on and not has_other_work
        if may_run_on and not any(self.step.decodes.prelaunched.tolist()):
            following = self._launch_next(self.step, begin)
        self.finish(following)

    def _launch_next(self, step: StepInFlight, begin: Begin) -> StepInFlight | None:
        decodes = self._prelauncher.next_decodes(step.decodes)
        if not decodes.size:
            # Decodes that could join wait for the callers of this step: together they need fewer steps.
            return None
        chunks: list[Chunk] = []
        if self._scheduler.has_queued:
            self._prelauncher.all_requested()
            chunks = self._scheduler.next_chunks(begin, decodes.size)
            if not all(chunk.may_be_launched for chunk in chunks):
                return None
        joining, following = self._scheduler.take_joining(self._prelauncher.begin, decodes.size), None
        try:
            following = self._launched(
                launched_steps.launch_after(self._engine, step, decodes, joining, chunks)
            )
        except DeviceLostError:
            raise
        except Exception:
            _log.exception("a step could not be launched before the last one was done")
        if following is None:
            self._take_back(joining)
        return following

    def _take_back(self, joined: Decodes) -> None:
        """Let decodes wait again: the step that they joined is not run, or its tokens are dropped."""
        if joined.size:
            is_taken = self._scheduler.add_decodes(joined)
            assert is_taken, "nothing of their sequences was added meanwhile"

    def finish(self, following: StepInFlight | None = None) -> None:
        """Wait for the step in flight, if any, and end it. `following`: the step launched after it."""
        step, self.step = self.step, None
        if step is None:
            return
        try:
            launched_steps.finish(self._engine, step, following)
        except DeviceLostError:
            raise
        except Exception as error:
            if following is not None:
                self._take_back(following.joined)
            self._on_failed(step.decodes, error)
            self._on_end(step.chunks)
            return
        self.step, ahead = following, NO_DECODES
        if following is not None:
            ahead = following.decodes.take(following.decodes.prelaunched)
        self._on_done(step.decodes, ahead)
        self._on_end(step.chunks)
        if following is not None:
            self._scheduler.run_next(following.decodes)
