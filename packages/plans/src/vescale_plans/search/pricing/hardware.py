"""Hardware profiles: what a device and its links can do, as data.

A profile of a data sheet has rates alone. One that `vescale calibrate` measured has, besides, the terms of a matrix
product's time and curves of operators and collectives, which then count instead.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from math import gcd, log, prod
from typing import Any

from ..._plan.parts import PlanError

GIB = 2**30
VERSION = 1
"""Version of the JSON text of a profile."""
ATTENTION = 0.6
"""Share of `flops` that a fused attention kernel reaches where nothing was measured."""
SHARED = ("all_gather", "all_reduce", "reduce_scatter", "broadcast")
"""Collectives in which ranks of a node receive the same, or add up the same."""


@dataclass(frozen=True)
class Curve:
    """Seconds by size, measured: straight between the points, the last slope beyond, the first time before.

    Arguments:
        points: (size, seconds), sizes rising.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """Seconds for `size`."""
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        after = min(max(1, bisect_left(points, (size,))), len(points) - 1)
        (low, first), (high, last) = points[after - 1], points[after]
        return max(0.0, first + (last - first) * (size - low) / (high - low))


@dataclass(frozen=True)
class Link:
    """Between devices of one level.

    Arguments:
        latency: seconds before the first byte of a collective of two ranks.
        bandwidth: bytes per second that each rank receives.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Product:
    """Terms of the seconds that a matrix product [m, k] x [k, n] takes, fitted to measurements.

    Arguments:
        launch: seconds, whatever the size.
        flop: seconds per floating point operation.
        left, right, result: seconds per element of [m, k], [k, n] and [m, n].
    """

    launch: float
    flop: float
    left: float
    right: float
    result: float

    def seconds(self, m: float, n: float, k: float) -> float:
        return self.launch + self.flop * 2 * m * n * k + self.left * m * k + self.right * k * n + self.result * m * n


@dataclass(frozen=True)
class Numbers:
    """Bytes per parameter that a system holds; by default as this one does, and steps by AdamW.

    Arguments:
        parameters: as they are held, and gathered.
        states: of the optimizer, with a copy of narrower parameters that it steps.
        gradients: as they are summed.
        sums: of gradients that several backwards add up, how many are held: the sum, and, of 2, all that a backward
            has reduced, which is added to it when the backward is through; of 1 each unit's are as they come.
        stepping: what an optimizer that goes over all parameters at once makes on the way; 0 of a fused one.
        summed_sharded: from ZeRO-2 on, a pipeline's sums are sharded as well; ours are whole.
        everywhere: ZeRO shards experts over their copies, and the rest over all replicas; ours shards both over the
            neighbours that share the experts, and so no expert.
    """

    parameters: int = 4
    states: int = 8
    gradients: int = 4
    sums: int = 2
    stepping: int = 4
    summed_sharded: bool = False
    everywhere: bool = False


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and how devices are joined.

    Arguments:
        name: of the profile.
        flops: dense matrix multiplications per second that a large one reaches, in the training dtype.
        small: size of a dimension at which a matrix multiplication reaches half of that.
        bandwidth: memory, bytes per second.
        memory: bytes of one device.
        launch: seconds per operator of eager code on the device.
        host: seconds that the host takes per operator: Python, dispatch, autograd. On a CPU they come on top; a GPU
            computes beside them.
        node: devices joined by `inside`, any number; across nodes by `across`.
        host_link: bytes per second between a device and its host, each way; None if the host is the device.
        host_bandwidth: of the host's memory, a device's share.
        segment: of these, how many a job of whole segments takes in each node, if it takes more than one node; 0 for
            all. A scheduler gives such a job 64 of an NVL72's 72, so that groups of powers of two cross no boundary.
        itemsize: bytes of a number of that dtype, and so of an activation.
        at_once: devices that compute at full speed at the same time; None for all. Cores, where ranks share a host.
        stream: reads and writes of a stream's width per group of matrices and direction, by elementwise operators and
            norms: 17 of eager code, 8 of fused kernels.
        hidden: share of a computation beside which a reduction of gradients or a gather of parameters is free; negative
            where these take so much longer beside one.
        product: measured terms of a matrix product, in place of `flops` and `small`.
        operators: operator ("aten.gelu") -> its curve over bytes read and written ("attention" over operations).
        collectives: kind -> ranks -> its curve over bytes received by each.
        device: what was measured, in words.
        backend: of the collectives, as `dry_run` takes it.
        wide: `flops` in float32, where `itemsize` is less; None for the same.
        once: rows for experts are sent to a node once, and each tensor rank sends its share of them to experts that
            are whole, as Megatron's dispatcher does; ours sends each row to every rank that has a part of its expert.
            Also, what is gathered from positions is gathered anew in backward; ours is kept.
        numbers: that a system holds per parameter.
        attention: share of `flops` that attention reaches, forward and backward together.
        scores: reads and writes of attention's scores by memory in each direction, per position that one meets and
            feature, by kernels that are not fused; 0 for a fused one.
        peak: dense products per second of the data sheet in that dtype, of which utilisation is a share; None if
            it is not known.
        waits: seconds that a rank waits, on average, at a collective that all come to after so many seconds of
            computation, since none computes as fast as it did before; None for nothing.
    """

    name: str
    flops: float
    small: int
    bandwidth: float
    memory: int
    launch: float
    node: int
    inside: Link
    across: Link
    itemsize: int = 2
    at_once: int | None = None
    stream: int = 17
    hidden: float = 0.7
    host: float = 0.0
    product: Product | None = None
    operators: Mapping[str, Curve] = field(default_factory=dict, hash=False, repr=False)
    collectives: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict, hash=False, repr=False)
    device: str = ""
    backend: str = "nccl"
    wide: float | None = None
    waits: Curve | None = field(default=None, repr=False)
    peak: float | None = None
    once: bool = False
    numbers: Numbers = Numbers()
    attention: float = ATTENTION
    scores: float = 0.0
    segment: int = 0
    host_link: float | None = None
    host_bandwidth: float = 0.0

    def computing(self, itemsize: int) -> Hardware:
        """The same device at work in numbers of so many bytes: float32 beyond the profile's; nothing that was measured
        in wider numbers is said to be faster in narrower ones, but for the bytes."""
        return self if itemsize == self.itemsize else _computing(self, itemsize)

    def link(self, stride: int, size: int) -> Link:
        """Link of a mesh axis of `size` ranks that lie `stride` ranks apart: inside if no group of it crosses a node's
        boundary. Ranks fill one node after the other, and groups begin at multiples of their extent."""
        return self.across if self.crosses(stride, size) else self.inside

    def crosses(self, stride: int, size: int) -> bool:
        """True if a group of that axis has ranks in two nodes."""
        return self.node % (stride * size) != 0

    def links(self, stride: int, size: int) -> int:
        """Links to other nodes that a group of that axis has in a node, one for each of its ranks there; where groups
        lie askew, at the fewest."""
        return gcd(self.node // stride, size) if self.node % stride == 0 else 1

    def joining(self, ranks: int) -> Hardware:
        """The same for a world of so many ranks: one that fits in a node crosses no boundary, one of whole segments
        has these for nodes."""
        if ranks <= self.node:
            return replace(self, node=ranks)
        return replace(self, node=self.segment) if self.segment and ranks % self.segment == 0 else self

    def product_seconds(self, m: float, n: float, k: float) -> float:
        """Seconds of one matrix product [m, k] x [k, n]: as measured, or by a roofline that small sizes do not
        reach."""
        if min(m, n, k) <= 0:
            return 0.0
        if self.product is not None:
            return self.product.seconds(m, n, k)
        reached = self.flops * prod(size / (size + self.small) for size in (m, n, k))
        moved = self.itemsize * (m * k + k * n + m * n)
        return max(2 * m * n * k / reached, moved / self.bandwidth) + self.launch

    def stacked_seconds(self, count: int, m: float, n: float, k: float) -> float:
        """Seconds of `count` products of one size by one operator, which a device other than a CPU launches once."""
        each = self.product_seconds(m, n, k)
        if self.at_once is not None or not each:
            return count * each
        launch = self.launch if self.product is None else self.product.launch
        return launch + count * (each - launch)

    def operator_seconds(self, name: str, moved: float) -> float:
        """Seconds of one operator that reads and writes `moved` bytes; `moved` 0 is a view."""
        curve = self.operators.get(name) or self.operators.get(name.rstrip("_")) or self.operators.get("aten.add")
        if curve is None or not moved:
            return self.launch + moved / self.bandwidth
        return curve.at(moved)

    def attention_seconds(self, name: str, flops: float) -> float:
        """Seconds of a fused attention kernel ("attention", "attention_backward", ".causal" of either) by its
        operations."""
        curve = self.operators.get(name) or self.operators.get(name.partition(".")[0])
        return curve.at(flops) if curve is not None else self.launch + flops / (self.flops * self.attention)

    def collective_seconds(self, kind: str, size: int, received: float, stride: int = 1) -> float:
        """Seconds of a collective over an axis of `size` ranks that lie `stride` apart; each receives `received` bytes.

        Across nodes what one rank of a group receives in a gather or a sum, all of its node have: it comes over the
        links of all of them together, and goes on inside, one after the other. (Tensor parallelism over two nodes of
        H100 took 1.7 times as long in its communication as in one, by nanotron's Ultra-Scale Playbook: 1.9 here.)
        """
        if size < 2:
            return 0.0
        curves = self.collectives.get(kind)
        if curves:
            return curves[min(curves, key=lambda ranks: abs(log(ranks / size)))].at(received)
        link = self.link(stride, size)
        each = 1 / link.bandwidth
        if link is self.across and kind in SHARED and (links := self.links(stride, size)) > 1:
            each = min(each, each / links + 1 / self.inside.bandwidth)
        return link.latency * (size - 1) ** 0.5 + received * each

    def wait_seconds(self, computed: float) -> float:
        """Seconds that a rank waits for the others, after so many seconds of computation."""
        return self.waits.at(computed) if self.waits is not None else 0.0

    def to_json(self) -> str:
        """JSON text that `from_json` and `hardware="PATH"` read."""
        curves = ("operators", "collectives", "waits")
        values = {name: value for name, value in asdict(self).items() if name not in curves}
        values["operators"] = {name: curve.points for name, curve in self.operators.items()}
        values["collectives"] = {
            kind: {str(ranks): curve.points for ranks, curve in curves.items()}
            for kind, curves in self.collectives.items()
        }
        values["waits"] = self.waits and self.waits.points
        return json.dumps({"vescale hardware": VERSION, **values}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """The profile that `to_json` wrote. Raises PlanError for anything else."""
        try:
            values: dict[str, Any] = json.loads(text)
            if values.pop("vescale hardware", None) != VERSION:
                raise ValueError(f"no profile of version {VERSION}")
            unknown = set(values) - {one.name for one in fields(cls)}
            if unknown:
                raise ValueError(f"a profile has no {min(unknown)!r}")
            kinds = {"inside": Link, "across": Link, "numbers": Numbers, "product": Product}
            given = [name for name in kinds if name in values and (name != "product" or values[name] is not None)]
            values |= {name: kinds[name](**values[name]) for name in given}
            values["operators"] = {name: _curve(points) for name, points in values.get("operators", {}).items()}
            values["collectives"] = {
                kind: {int(ranks): _curve(points) for ranks, points in curves.items()}
                for kind, curves in values.get("collectives", {}).items()
            }
            values["waits"] = _curve(values["waits"]) if values.get("waits") else None
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            remedies = [("vescale calibrate --out FILE", "writes one")]
            raise PlanError("hardware", f"this is not a hardware profile: {error}", (), remedies) from error


@cache
def _computing(hardware: Hardware, itemsize: int) -> Hardware:
    slower = hardware.flops / hardware.wide if hardware.wide and itemsize > hardware.itemsize else 1.0
    product = hardware.product
    if product is not None:
        each = itemsize / hardware.itemsize
        terms = (product.left * each, product.right * each, product.result * each)
        product = Product(product.launch, product.flop * slower, *terms)
    peak = hardware.peak and hardware.peak / slower
    return replace(hardware, itemsize=itemsize, flops=hardware.flops / slower, product=product, peak=peak)


def _curve(points: list) -> Curve:
    return Curve(tuple((float(size), float(seconds)) for size, seconds in points))
