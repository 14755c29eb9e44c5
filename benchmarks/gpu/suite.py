"""The parts of a run, the most important first, and what happens to those for which no time is left."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu import parts_kernels, parts_machine, parts_model, parts_peer, parts_workload
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Part, Roof, Row
from benchmarks.gpu.timing import Timer

MACHINE = "machine"
# Told of each part when it has ended.
Report = Callable[[Part], None]


class Suite:
    """Runs parts one after the other. What goes wrong in one is noted, and the others go on."""

    def __init__(self, plan: Plan, report: Report) -> None:
        self._plan, self._report = plan, report
        self._timer = Timer(plan.device, plan.repeats)
        self.roof: Roof | None = None
        self.parts: list[Part] = []

    @staticmethod
    def names(plan: Plan) -> list[str]:
        """The parts in their order."""
        first, *others = (shape.name for shape in plan.shapes)
        later = others[1:]
        return [MACHINE, first, *others[:1], "attention", "workload", "rows", "sampling", *later, "peer"]

    def run(self, names: Sequence[str], end_s: float) -> None:
        """Run the named parts, and skip what has not begun by `end_s`, a time.monotonic()."""
        for name in names:
            began_s = time.monotonic()
            part = Part(name=name, seconds=0.0, rows=[], notes=[])
            if began_s >= end_s:
                part["problem"] = "skipped: no time was left"
            else:
                try:
                    self._run(part, end_s)
                except Exception as error:
                    traceback.print_exc()
                    part["problem"] = f"{type(error).__name__}: {error}"[:500]
            self._clean_up(part)
            part["seconds"] = round(time.monotonic() - began_s, 2)
            self.parts.append(part)
            self._report(part)

    @property
    def failed(self) -> bool:
        """Whether some part went wrong; being skipped is not wrong."""
        return any("problem" in part and not part["problem"].startswith("skipped") for part in self.parts)

    def _run(self, part: Part, end_s: float) -> None:
        plan, name = self._plan, part["name"]
        if name == MACHINE:
            self.roof, part["rows"] = parts_machine.measure(plan, self._timer)
        elif name == "workload":
            part["rows"] = parts_workload.measure(plan)
        elif name == "peer":
            part["rows"], part["notes"] = parts_peer.measure(plan, self.parts, end_s)
        else:
            part["rows"] = self._against_roof(name)

    def _against_roof(self, name: str) -> list[Row]:
        plan, timer, roof = self._plan, self._timer, self.roof
        if roof is None:
            raise RuntimeError(f"part {name} needs part {MACHINE}")
        kernels = {
            "attention": parts_kernels.attention_kernels,
            "rows": parts_kernels.rows_kernels,
            "sampling": parts_kernels.sampling_kernels,
        }
        if name in kernels:
            return kernels[name](plan, timer, roof)
        shape = next(shape for shape in plan.shapes if shape.name == name)
        return parts_model.measure(plan, timer, roof, shape)

    def _clean_up(self, part: Part) -> None:
        """Give the memory of a part back before the next one measures how much it may take."""
        gc.collect()
        if self._plan.device.type == "cuda":
            try:
                part["notes"].append(
                    f"at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB were allocated"
                )
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.empty_cache()
            except RuntimeError as error:  # after an error from which the device does not recover
                part["notes"].append(f"the device failed: {error}"[:200])
