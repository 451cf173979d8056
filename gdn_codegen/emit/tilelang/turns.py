"""Loops of agents whose warps run iterations in turn, and their loops over pieces of columns."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ...ir.core import Agent, Buffer
from ...ir.ops import BY_COLUMNS
from ...ir.types import WARP, Dim
from ..base import Op, Stmt
from .kernel import KernelWriter


def runs(body: Iterable[Stmt]) -> Iterator[tuple[int, list[Stmt]]]:
    """The statements, divided into those that compute so many columns at a time, and others (0)."""
    for columns, run in groupby(body, lambda s: s.attr(BY_COLUMNS) or 0 if isinstance(s, Op) else 0):
        some = list(run)
        yield columns if any(isinstance(s, Op) and s.buffer for s in some) else 0, some  # expressions print nothing


class TurnsWriter(KernelWriter):
    """Writes such loops. agent: the current one. piece: the dim of which ops compute so many columns at a time now."""
    agent: Agent

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.piece = "", 0

    @property
    def thread(self) -> str:
        """The index of a thread among those that run an iteration with it."""
        if self.agent.turns > 1:
            return "lane"
        return f"tx - {self.agent.first}" if self.agent.first else "tx"

    def turn(self, a: Agent) -> None:
        """Print the lines that say which turn a thread of `a` has."""
        if a.turns == 1:
            return
        self.w(f"turn = (tx - {a.first}) // {WARP}", f"lane = (tx - {a.first}) % {WARP}")
        ops = [o for o in self.k.ops if o.agent == a.name]
        for o in ops:
            if o.kind == "move" and self.buffers[o.buffer].space == "fragment" and all(
                    r.kind == "matmul" for r in ops if o.out in r.args):
                self.about(o)  # TileLang allocates no fragment that calls of helpers alone name
                index = self.loop(self.buffers[o.buffer].dims)
                self.line(f"{self.stored(self.buffers[o.buffer].dims, o.buffer).at(*index)} = 0")
                self.end(self.buffers[o.buffer].dims)

    def in_piece(self, x: Buffer, index: tuple[str, ...]) -> tuple[str, ...]:
        """The index of an element of `x`, which has all columns, from its index in the current piece."""
        of, columns = self.piece
        return (*index[:-1], f"piece * {columns} + {index[-1]}") if index and x.dims[-1:] == (of,) else index

    def in_pieces(self, columns: int, run: Sequence[Stmt]) -> None:
        """Print statements, in a loop over pieces of so many columns of their tiles if that is not 0."""
        if columns:
            made = [(s, s.type.dims) for s in run if isinstance(s, Op) and s.type is not None]
            for o, dims in ((x, dims) for x, dims in made if x.kind == "matmul"):  # sums over all pieces
                self.about(o)
                index = self.loop(dims)
                self.line(f"{self.stored(dims, o.buffer).at(*index)} = 0")
                self.end(dims)
            of = next(str(dims[1]) for x, dims in made if x.kind != "matmul")
            self.w(f"for piece in T.serial({self.dim(of)} // {columns}):")
            self.piece = of, columns
        self.w.indent += bool(columns)
        super().body(tuple(run))
        self.w.indent -= bool(columns)
        self.piece = "", 0

    def loop(self, dims: tuple[Dim, ...]) -> tuple[str, ...]:
        """Open a parallel loop over a tile, or over a piece of its columns."""
        of, columns = self.piece
        return super().loop(tuple(columns if d == of else d for d in dims))

    def head_of_loop(self, name: str, start: str, stop: str, before: str) -> None:
        """Print the first line of a loop. Of several warps that run iterations in turn, each begins with its first one. before:
        how many iterations these warps ran before this loop."""
        turns, over = self.agent.turns, stop if start == "0" else f"{start}, {stop}"
        if turns == 1:
            self.w(f"for {name} in T.serial({over}):")
            return
        first = "turn" if before == "0" else f"(turn - ({before})) % {turns}" + (f" + {start}" if start != "0" else "")
        self.w(f"for step in T.serial(T.ceildiv({stop} - ({first}), {turns})):", f"    {name} = {first} + step * {turns}")
