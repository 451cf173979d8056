"""Counts the bytes and operations of a kernel from its IR, and compares its time with the peak rates of the machine."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.core import Kernel, Loop, Op, Program, Stmt, types
from ..ir.types import BYTES, Tensor


@dataclass(frozen=True)
class Cost:
    """Of one kernel. bytes: each tensor that it reads or writes, once; asked: what its instances ask for in all, of which
    caches serve a part; flops: of its products, padding included."""

    bytes: int = 0
    asked: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Ceilings:
    """bytes and float16 flops a second that a large copy and a large product reach."""

    bytes: float
    flops: float

    def floor(self, c: Cost) -> float:
        """Seconds that the kernel takes at least."""
        return max(c.bytes / self.bytes, c.flops / self.flops)


def costs(p: Program, lengths: Sequence[int], heads: int, value_heads: int, absent: Sequence[str] = (),
          every: int = 1) -> dict[str, Cost]:
    """Kernel -> cost of a lowered program. absent: optional tensors that are not given; every: chunks from checkpoint to
    checkpoint. Walks over parts count as if none had a warm-up; what runs for some parts only, or before them, as nothing."""
    def cost(k: Kernel) -> Cost:
        if k.slices > 1 or any(o.kind == "return_unless_negative" for o in k.ops):
            return Cost(0, 0, 0)
        return _Walk(p, k, lengths, heads, value_heads, absent, every).cost()

    return {k.name: cost(k) for k in p.kernels}


class _Walk:
    def __init__(self, p: Program, k: Kernel, lengths: Sequence[int], heads: int, value_heads: int,
                 absent: Sequence[str], every: int) -> None:
        self.p, self.k, self.lengths, self.heads, self.value_heads, self.absent = p, k, lengths, heads, value_heads, absent
        self.chunks = sum(-(-n // p.sizes["C"]) for n in lengths)
        self.checkpoints = sum(n // (p.sizes["C"] * every) for n in lengths)
        self.types, self.sizes = types(k.body), {**p.sizes, **k.sizes}
        self.blocks = p.sizes[k.blocked_dim] // k.sizes[k.blocked_dim] if k.blocked_dim else 1
        self.moved: dict[tuple[str, str], int] = {}
        self.asked = self.flops = 0

    def cost(self) -> Cost:
        instances = self.value_heads // self.k.batch.in_body * self.blocks
        self.body(self.k.body, instances * (self.chunks if self.k.grid == "chunks" else len(self.lengths)))
        return Cost(sum(self.moved.values()), self.asked, self.flops)

    def body(self, body: tuple[Stmt, ...], times: int) -> None:
        """Add what statements cost that run so many times."""
        for s in body:
            if isinstance(s, Loop) and s.index == "before":
                continue
            if isinstance(s, Loop) and s.index == "columns":
                self.body(s.body, times * (self.sizes["K"] // s.step))
            elif isinstance(s, Loop):
                self.body(s.body, self.chunks * self.value_heads * self.blocks)
            elif s.kind in ("load", "store"):
                self.transfer(s)
            elif s.kind == "matmul":
                self.flops += times * self.product(s)

    def product(self, o: Op) -> int:
        assert o.type is not None
        left = self.types[o.args[0]].shape(self.sizes)
        return 2 * math.prod(o.type.shape(self.sizes)) * left[0 if o.attr("ta") else 1]

    def transfer(self, o: Op) -> None:
        t = self.p.tensor(o.attr("tensor"))
        if t.name in self.absent:
            return
        heads = self.heads if t.heads == "H" else self.value_heads
        there = self.p.sizes if t.in_tiles else self.p.memory
        self.moved[o.kind, t.name] = self.elements(t, there) * heads * BYTES[t.dtype]
        self.asked += self.elements(t, self.sizes) * self.value_heads // self.k.batch.in_body * self.blocks * BYTES[t.dtype]

    def elements(self, t: Tensor, sizes: dict[str, int]) -> int:
        """Elements of all tiles of a head. Rows past a sequence's end do not count in a caller's tensor."""
        tile = t.tile.shape(sizes)
        if t.index == "token":
            return sum(self.lengths) * math.prod(tile[1:])
        return math.prod(tile) * {"slot": self.chunks, "sequence": len(self.lengths), "checkpoint": self.checkpoints,
                                  "part": 0}[t.index]
