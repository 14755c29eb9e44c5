"""Runs sublayers on few rows with fewer launches on a GPU: products include the operations around them.

A layer takes 10 launches as separate operations, and 7 as products fused with norm, gate and residual. Which
is faster, and with which tiles, depends on the device, the widths and the number of rows. It is measured for
each place in a layer at its first use, outside of a capture, so before CUDA graphs are captured.

Steps with adapters, and models that are batch-invariant or split over ranks, run as separate operations. So
do single sublayers: experts, those without a norm before them, and the last attention.

Dimension letters: T rows; C hidden width; P parts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.few_rows import NormBefore, few_rows_product
from kernels.few_rows_tiles import MOST_ROWS, Tiles, tiles_for
from kernels.gated_activation import OF_THE_GATE, Activation, gated_activation
from kernels.gpu_format import GpuFormat
from kernels.gpu_weight import GpuWeight
from kernels.linear import DenseWeight
from workers.models.latent_attention import LatentAttention
from workers.models.layers import Attention, ForwardContext, GatedMlp, Norm, Projected, Sublayer
from workers.models.linear import Linear

_log = logging.getLogger(__name__)

# The most layers that are measured. Their weights are much larger than the device's cache.
_LAYERS = 32
_REPEATS = 3
# Of ways whose times differ by less than this factor the first is taken, so that all starts choose the same.
_TIE = 1.03
# The numbers of rows that are measured.
_ROW_CLASSES = tuple(1 << exponent for exponent in range(MOST_ROWS.bit_length()))
# The device waits for this long, some milliseconds, while the host launches the measured kernels.
_PAUSE_CYCLES = 10_000_000

# The time of the launches of a function, in any unit.
Measure = Callable[[Callable[[], None]], float]


@dataclass(frozen=True, slots=True)
class Place:
    """The kind of a product in a layer. Equal products of several layers share their tiles."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    biased: bool
    norm_dtype: torch.dtype | None  # None: the residual is added after it
    activation: Activation | None
    form: GpuFormat | None = None  # of a quantised weight
    has_kernel: bool = True  # for its weight, and for what is done to its outputs

    @property
    def tiles(self) -> Sequence[Tiles]:
        """The tiles to choose from. Empty: it runs as separate operations."""
        quantised = self.form is not None
        return tiles_for(self.dtype, self.activation, quantised=quantised) if self.has_kernel else ()


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of one layer with the norm before it. No norm: the residual is added after it."""

    place: Place
    linear: Linear
    norm: Norm | None

    @classmethod
    def of(cls, name: str, linear: Linear, norm: Norm | None, activation: Activation | None) -> _Product:
        weight = linear.weight
        norm_dtype = None if norm is None else norm.weight.dtype
        biased = linear.bias is not None
        place = Place(
            name,
            tuple(weight.shape),
            weight.dtype,
            biased,
            norm_dtype,
            activation,
            weight.quantised.form if isinstance(weight, GpuWeight) else None,
            isinstance(weight, DenseWeight | GpuWeight) and not linear.factors,
        )
        return cls(place, linear, norm)

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the separate operations after the norm."""
        y = self.linear(x, batch_invariant=False)
        return y if self.place.activation is None else gated_activation(y, self.place.activation)

    def whole(
        self, x: torch.Tensor, tiles: Tiles, squares: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the fused product. Without `squares` x is normalised already. See `few_rows_product`."""
        norm = None
        if squares is not None:
            assert self.norm is not None
            norm = NormBefore(self.norm.weight, self.norm.eps, squares)
        weight = self.linear.weight
        return few_rows_product(
            x,
            weight.data,
            self.linear.bias,
            tiles,
            norm=norm,
            activation=self.place.activation,
            residual=residual,
            quantised=weight.quantised if isinstance(weight, GpuWeight) else None,
        )


class TilesOfPlaces:
    """The fastest tiles of each place, by the number of rows rounded up to a power of two."""

    def __init__(self, measure: Measure) -> None:
        """`measure` times launches on the device of the model."""
        self._measure = measure
        self._products: dict[Place, list[_Product]] = {}
        self._fastest: dict[tuple[Place, int], Tiles | None] = {}
        # (name of the place, number of rows) -> the chosen tiles, and their time relative to that of separate
        # operations.
        self.chosen: dict[tuple[str, int], tuple[Tiles | None, float]] = {}
        self._measured: set[Place] = set()

    def add(self, product: _Product) -> None:
        """Register a product, before the first use of any."""
        self._products.setdefault(product.place, []).append(product)

    def of(self, place: Place, rows: int) -> Tiles | None:
        """The tiles for up to MOST_ROWS rows. None: separate operations are faster, or nothing was measured.

        The first use of a place, during the warm-up, measures all numbers of rows, so that no caller's step
        has to.
        """
        if place not in self._measured:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return None
            self._measured.add(place)
            for most in _ROW_CLASSES:
                self._fastest[place, most] = self.choose(place, most)
        return self._fastest[place, 1 << (rows - 1).bit_length()]

    def choose(self, place: Place, rows: int) -> Tiles | None:
        """Measure each way with the weights of several layers in turn, as in a step. Returns the fastest."""
        products = self._products[place][:_LAYERS]
        device = products[0].linear.weight.device
        x = torch.zeros(rows, place.shape[1], dtype=place.dtype, device=device)
        added = place.norm_dtype is None
        residual = x.new_zeros(rows, place.shape[0]) if added else x.clone()
        squares = None if added else torch.ones(MOST_ROWS, MOST_ROWS, device=device)

        def separate() -> None:
            for product in products:
                # The residual is added by the norm that follows.
                product.alone(x if product.norm is None else product.norm.of_sum(x, residual))

        def whole(tiles: Tiles) -> None:
            for product in products:
                product.whole(x, tiles, squares, residual if added else None)

        times: dict[Tiles | None, float] = {None: self._measure(separate)}
        for tiles in place.tiles:
            times[tiles] = self._measure(lambda tiles=tiles: whole(tiles))  # type: ignore[misc]
        least = min(times.values())
        fastest = next(way for way, time in times.items() if time <= least * _TIE)
        self.chosen[place.name, rows] = fastest, times[fastest] / times[None] if times[None] else 1.0
        _log.info(
            "%s of %d rows: %s, in %.2f of the time of separate operations",
            place.name, rows, fastest or "separate operations", self.chosen[place.name, rows][1],
        )  # fmt: skip
        return fastest


class FewRows:
    """Consecutive sublayers. A product normalises the residual stream that the previous one has written."""

    def __init__(self, sublayers: Sequence[Sublayer], tiles: TilesOfPlaces) -> None:
        """Take the sublayers of a model on a GPU. Registers their products in `tiles`."""
        self._sublayers = list(sublayers)
        self._tiles = tiles
        self._pairs = [_products_of(sublayer) for sublayer in sublayers]
        for pair in self._pairs:
            for product in pair or ():
                tiles.add(product)

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext, /
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run the sublayers. The output is None if it was added to the residual stream."""
        # Between a layer's two sublayers the wanted rows may be selected.
        few = len(residual) <= MOST_ROWS and context.lora_slots is None and not context.batch_invariant
        squares: torch.Tensor | None = None
        for sublayer, pair in zip(self._sublayers, self._pairs, strict=True):
            if few and pair is not None and len(residual):
                x, squares = self._run(sublayer, pair, x, residual, squares, context)
            else:
                x, residual = sublayer(x, residual, context)
                squares = None
        return x, residual

    def _run(
        self,
        sublayer: Sublayer,
        pair: tuple[_Product, ...],
        x: torch.Tensor | None,
        residual: torch.Tensor,
        squares: torch.Tensor | None,
        context: ForwardContext,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the output, or the partial sums of squares of the residual stream; the other one is None.

        Mutates `residual`. `squares`: of the residual stream, if x is None; or None.
        """
        into, out = pair[0], pair[1] if len(pair) > 1 else None
        tiles, rows = self._tiles.of(into.place, len(residual)), len(residual)
        if tiles is None or squares is None:
            normed = sublayer.enter(x, residual)  # [T, C]
            inner = into.alone(normed) if tiles is None else into.whole(normed, tiles, None, None)[0]
        else:
            inner, _ = into.whole(residual, tiles, squares, None)
        body = sublayer.body
        assert isinstance(body, Projected)
        if not isinstance(body, GatedMlp):  # whose activation is in the product
            inner = body.between(inner, context)
        tiles = None if out is None else self._tiles.of(out.place, rows)
        if tiles is None:
            return sublayer.leave(body.output(inner, batch_invariant=False)), None
        assert out is not None
        return None, out.whole(inner, tiles, None, residual)[1]


def _products_of(sublayer: Sublayer) -> tuple[_Product, ...] | None:
    """The first product, and the second if it can be added to the residual directly. None: neither."""
    body, norm = sublayer.body, sublayer.before
    if norm is None or sublayer.group is not None:
        return None
    if isinstance(body, GatedMlp) and body.activation in OF_THE_GATE:
        into = _Product.of("gate_up", body.into, norm, body.activation)
        out = _Product.of("down", body.output, None, None)
    elif isinstance(body, Attention | LatentAttention) and not body.is_last:
        into = _Product.of("qkv", body.into, norm, None)
        out = _Product.of("output", body.output, None, None)
    else:
        return None
    return (into, out) if sublayer.after is None and sublayer.scale == 1.0 else (into,)


def device_ms(run: Callable[[], None]) -> float:
    """The least device time of several runs on the current stream. Launches each while the device waits."""
    run()  # compiles
    least = math.inf
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_PAUSE_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001
        begin.record()
        run()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end))
    return least
