"""The meaning of a program at any stage: runs it in torch, tile by tile."""
from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from .core import Kernel, Loop, Op, Program, Stmt
from .ops import OPS, keep
from .types import Tensor

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass
class Problem:
    """Sequences to run on. lengths: tokens of each; heads: of q and k; value_heads: of v, a multiple of heads; span: chunks
    of a part, 0 for all of a sequence; every: chunks from checkpoint to checkpoint; pool: slots of what lies at numbers;
    rest: tokens past the last sequence's end."""

    lengths: list[int]
    heads: int
    value_heads: int
    span: int = 0
    every: int = 1
    pool: int = 0
    rest: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a packed tensor, those past the last sequence included."""
        return sum(self.lengths) + self.rest

    @property
    def starts(self) -> list[int]:
        """The first token of each sequence, and the end of the last."""
        out = [0]
        for n in self.lengths:
            out.append(out[-1] + n)
        return out

    def slots(self, chunk: int) -> int:
        """Chunk slots: sequence n's chunks begin at starts[n] // chunk + n, which never overlap."""
        return self.tokens // chunk + len(self.lengths)

    def part(self, chunk: int) -> int:
        """Tokens of a part."""
        return chunk * (self.span or self.slots(chunk) + 1)

    def parts(self, seq: int, chunk: int) -> int:
        """Parts of a sequence: one at least."""
        return max(1, -(-self.lengths[seq] // self.part(chunk)))


class _Leave(Exception):
    """The instance ends."""


@dataclass
class _At:
    seq: int
    head: int
    chunk: int
    block: int = 0
    iteration: int = 0  # of the innermost loop
    part: int = 0
    begin: int = 0  # the chunk at which a part's walk begins
    half: int = 0
    before: bool = False  # the part


class Interpreter:
    """exact: all in float64 and casts do nothing; otherwise each op in the dtype of its tile."""

    def __init__(self, p: Program, problem: Problem, scalars: dict[str, float], exact: bool = True) -> None:
        self.p, self.problem, self.scalars, self.exact = p, problem, scalars, exact
        self.memory: dict[str, torch.Tensor] = {}
        self.channel: dict[tuple[str, int], torch.Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tile is held: its own, or float64 where the run is exact."""
        return torch.float64 if self.exact else TORCH[name]

    def shape(self, t: Tensor) -> tuple[int, ...]:
        """The whole tensor's shape: token [T, heads, ...], slot [slots, HV, ...], sequence [N, HV, ...], head [HV]."""
        pr = self.problem
        if t.index == "number":
            return (len(pr.lengths),)
        tile = self.p.shape(t)
        heads = pr.heads if t.heads == "H" else pr.value_heads
        if t.index == "token":
            return (pr.tokens, heads, *tile[1:])
        if t.index == "slot":
            return (pr.slots(self.p.sizes["C"]), heads, *tile)
        if t.index == "part":
            return (pr.slots(pr.part(self.p.sizes["C"])), heads, *tile)
        if t.index == "sequence":
            return (pr.pool if t.at else len(pr.lengths), heads, *tile)
        if t.index == "checkpoint":
            return (pr.tokens // (pr.every * self.p.sizes["C"]), heads, *tile)
        return (heads,) if t.index == "head" else tile

    def run(self, inputs: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Outputs by name. Outputs and workspaces start as NaN, or as what is given; a missing optional input is zero."""
        for t in self.p.tensors:
            shape = self.shape(t)
            if t.over:
                continue
            x = inputs.get(t.name)
            if t.index == "number":
                assert x is not None and tuple(x.shape) == shape
                self.memory[t.name] = x
            elif t.role == "input":
                if x is None:
                    if not t.optional:
                        raise ValueError(f"{t.name}: missing, and it is not optional")
                    x = torch.zeros(shape)
                if tuple(x.shape) != shape:
                    raise ValueError(f"{t.name}: got shape {tuple(x.shape)}, accepted is {shape}")
                self.memory[t.name] = x.to(self.dtype(t.dtype), copy=True)
            elif t.index == "const":
                self.memory[t.name] = const_tile(t, self.p.sizes).to(self.dtype(t.dtype))
            elif t.index != "block":
                self.memory[t.name] = torch.full(shape, float("nan"), dtype=self.dtype(t.dtype))
                if x is not None:
                    self.memory[t.name].copy_(x)
        self.memory |= {t.name: self.memory[t.over] for t in self.p.tensors if t.over}
        covered = [t for n, _ in self.sequences() for t in range(*self.problem.starts[n:n + 2])]
        rest = torch.ones(self.problem.tokens, dtype=torch.bool).index_fill(0, torch.tensor(covered, dtype=torch.int64), False)
        for k in self.p.kernels:
            self.kernel(k)
            for t in self.p.clears(k):
                if inputs.get(t.name) is None:
                    self.memory[t.name][rest] = 0
        return {t.name: self.memory[t.name] for t in self.p.role("output")}

    def kernel(self, k: Kernel) -> None:
        """Run all instances of a kernel, one after another: sequences, value heads, blocks, and chunks or parts."""
        full, sizes = self.p.sizes, {**self.p.sizes, **k.sizes}
        body: tuple[Stmt, ...] = k.body
        outer: dict[str, torch.Tensor] = {}
        for i, s in enumerate(k.body):
            if isinstance(s, Loop) and s.index == "item":  # what stands before it runs once
                self.body(k, k.body[:i], outer, _At(0, 0, -1), sizes)
                body = s.body
        blocks = full[k.split] // sizes[k.split] if k.split else 1
        chunk, iteration = full["C"], count()
        halves = 1 + any(isinstance(s, Op) and s.kind == "claim_part" for s in k.body)
        for n, length in self.sequences():
            for h in range(0, self.problem.value_heads, k.lanes):
                for b in range(blocks):
                    if k.grid == "sequences":
                        self.body(k, body, dict(outer), _At(n, h, -1, b, next(iteration)), sizes)
                        continue
                    if k.grid == "parts":
                        for i in self.instances(range(self.problem.parts(n, chunk))):
                            for half in range(halves):
                                self.part(k, body, dict(outer), _At(n, h, -1, b, part=i, half=half), sizes)
                        continue
                    for c in range(-(-length // chunk)):
                        self.body(k, body, dict(outer), _At(n, h, c, b, next(iteration)), sizes)

    def sequences(self) -> list[tuple[int, int]]:
        """The sequences that are not left out, and their lengths."""
        numbers = self.memory.get(self.p.skips)
        return [(n, x) for n, x in enumerate(self.problem.lengths) if numbers is None or numbers[n] >= 0]

    def instances(self, parts: range) -> Iterable[int]:
        """Parts of a sequence, in the order in which they run; any would do."""
        return parts

    def part(self, k: Kernel, body: tuple[Stmt, ...], env: dict[str, torch.Tensor], at: _At, sizes: dict[str, int]) -> None:
        """Run one part: loops with a warm-up length begin so many chunks before the part."""
        with contextlib.suppress(_Leave):
            at.begin = self.own(at, sizes)
            for i, s in enumerate(body):
                warm_up = next((x.warm_up for x in body[i:] if isinstance(x, Loop)), "")
                if warm_up in env:
                    at.begin = self.own(at, sizes) - max(0, int(env[warm_up]))
                self.body(k, (s,), env, at, sizes)

    def own(self, at: _At, sizes: dict[str, int]) -> int:
        """The first chunk of a part."""
        return at.part * self.problem.part(sizes["C"]) // sizes["C"]

    def iterations(self, k: Kernel, lp: Loop, at: _At, sizes: dict[str, int]) -> list[_At]:
        """Where the iterations of a loop stand."""
        if lp.index == "part":
            return [replace(at, part=i) for i in range(at.part)]
        if lp.index == "before":
            return [replace(at, chunk=i, iteration=i, before=True) for i in range(max(at.begin, 0), self.own(at, sizes))]
        stop = -(-self.problem.lengths[at.seq] // sizes["C"])
        if k.grid == "parts":
            stop = min(stop, self.own(replace(at, part=at.part + 1), sizes))
        return [replace(at, chunk=i, iteration=i) for i in range(at.begin, stop)]

    def body(self, k: Kernel, body: tuple[Stmt, ...], env: dict[str, torch.Tensor], at: _At, sizes: dict[str, int]) -> None:
        """Run statements in order; a loop runs its iterations with the values that it carries."""
        for s in body:
            if isinstance(s, Loop):
                now = {c.name: env[c.init] for c in s.carried}
                for iteration in self.iterations(k, s, at, sizes):
                    inner = {**env, **now}
                    self.body(k, s.body, inner, iteration, sizes)
                    now = {c.name: inner[c.next] for c in s.carried}
                env.update({c.result: now[c.name] for c in s.carried})
            else:
                self.op(k, s, env, at, sizes)

    def op(self, k: Kernel, o: Op, env: dict[str, torch.Tensor], at: _At, sizes: dict[str, int]) -> None:
        """Run one op: its value goes to `env`, or its effect to memory.

        An op that is ahead works on a later chunk. Past the last chunk, and in warm-ups for what only the part itself does, its
        value is NaN, so that a read of it shows.
        """
        attrs = dict(o.attrs)
        if attrs.get("ahead"):
            before = at.begin - 1 if at.chunk < 0 else at.chunk  # outside of the loop: before its first iteration
            at = replace(at, chunk=before + attrs["ahead"], iteration=at.iteration + attrs["ahead"])
        past = attrs.get("ahead") and at.chunk * sizes["C"] >= self.problem.lengths[at.seq]
        if past or (attrs.get("own") and at.chunk < self.own(at, sizes)):  # it does nothing, and nobody may read its value
            if o.out:
                assert o.type is not None
                env[o.out] = torch.full(o.type.shape(sizes), float("nan"), dtype=self.dtype(o.type.dtype))
            return
        if o.kind == "load" and o.args and env[o.args[0]] >= 0:
            assert o.type is not None
            env[o.out] = env[o.args[1]] if o.args[1:] else torch.zeros(o.type.shape(sizes), dtype=self.dtype(o.type.dtype))
        elif o.kind == "load":
            env[o.out] = self.load(k, o, self.lane(at, o), sizes)
        elif o.kind == "warm_up_length":
            env[o.out] = torch.tensor(float(self.warm_up_length(attrs, at, sizes)), dtype=self.dtype("float32"))
        elif o.kind == "return_unless_negative":
            if env[o.args[0]] >= 0:
                raise _Leave
        elif o.kind == "claim_part":
            if (2 * env[o.args[0]] > self.problem.part(sizes["C"]) // sizes["C"]) != (at.half == 0):
                raise _Leave
        elif o.kind == "store":
            self.store(k, o, env[o.args[0]], self.lane(at, o), sizes)
        elif OPS[o.kind].effect == "sync":
            return
        elif o.kind == "const":
            env[o.out] = torch.tensor(attrs["value"], dtype=self.dtype("float32"))
        elif o.kind == "scalar" and "tensor" in attrs:
            env[o.out] = self.memory[attrs["tensor"]][self.lane(at, o).head]
        elif o.kind == "scalar":
            env[o.out] = torch.tensor(self.scalars[attrs["param"]], dtype=self.dtype("float32"))
        elif o.kind == "cast":
            env[o.out] = env[o.args[0]].to(self.dtype(attrs["to"]))
        elif o.kind in ("full", "eye", "expand"):
            assert o.type is not None
            shape = o.type.shape(sizes)
            if o.kind == "eye":
                ones = torch.arange(shape[0]) < self.p.memory.get(attrs.get("within", ""), shape[0])
                env[o.out] = torch.diag(ones).to(self.dtype(o.type.dtype))
            elif o.kind == "full":
                env[o.out] = torch.full(shape, attrs["value"], dtype=self.dtype(o.type.dtype))
            else:
                env[o.out] = env[o.args[0]].expand(shape)
        elif o.kind == "valid" and attrs.get("given"):
            env[o.out] = env[o.args[0]]  # an absent tensor is zero to begin with
        elif o.kind == "valid":
            x = env[o.args[0]].clone()
            x[self.rows(at, sizes):] = 0
            env[o.out] = x
        else:
            meaning = OPS[o.kind].evaluate
            assert meaning is not None, o.kind
            env[o.out] = meaning(attrs, *(env[a] for a in o.args))

    def warm_up_length(self, attrs: dict[str, Any], at: _At, sizes: dict[str, int]) -> int:
        """Chunks of warm-up of a part: the fewest whose bounds sum to -`bound` or less, all where a sequence begins before, -1
        where there would be more than `most` parts' worth.
        """
        part = at.part + attrs.get("parts_ahead", 0)
        if part == 0 or part >= self.problem.parts(at.seq, sizes["C"]):
            return 0
        if "tensor" not in attrs:
            return -1
        first, total = self.own(replace(at, part=part), sizes), 0.0
        slot = self.problem.starts[at.seq] // sizes["C"] + at.seq
        for n in range(1, first + 1):
            total += float(self.memory[attrs["tensor"]][slot + first - n, at.head])
            if n > attrs["most"] * self.problem.span:
                return -1
            if total <= -attrs["bound"]:
                return n
        return first

    def lane(self, at: _At, o: Op) -> _At:
        """Where the instance stands that `o` belongs to: a lane past the last head repeats that one."""
        return replace(at, head=min(at.head + o.attr("lane", 0), self.problem.value_heads - 1))

    def rows(self, at: _At, sizes: dict[str, int]) -> int:
        """Rows of this chunk that have a token."""
        return min(sizes["C"], self.problem.lengths[at.seq] - at.chunk * sizes["C"])

    def place(self, k: Kernel, t: Tensor, at: _At, sizes: dict[str, int], heads: int) -> tuple[slice | int, ...]:
        """The index of this instance's tile in the whole tensor (rows of a token tensor: the valid ones); with `heads`,
        that of as many heads' tiles, of which there may be fewer."""
        pr = self.problem
        head: slice | int = at.head if t.heads == "HV" else at.head // (pr.value_heads // pr.heads)
        if heads:
            head = slice(at.head, at.head + heads)
        cut = tuple(slice(at.block * sizes[d], (at.block + 1) * sizes[d]) if d == k.split else slice(None)
                    for d in t.dims)
        if t.index == "token":
            first = pr.starts[at.seq] + at.chunk * sizes["C"]
            return (slice(first, first + self.rows(at, sizes)), head, *cut[1:])
        if t.index == "slot":
            return (pr.starts[at.seq] // sizes["C"] + at.seq + at.chunk, head, *cut)
        if t.index == "part":
            return (pr.starts[at.seq] // pr.part(sizes["C"]) + at.seq + at.part, head, *cut)
        if t.index == "sequence":
            return (int(self.memory[t.at][at.seq]) if t.at else at.seq, head, *cut)
        if t.index == "checkpoint":
            return (pr.starts[at.seq] // (pr.every * sizes["C"]) + (at.chunk + 1) // pr.every - 1, head, *cut)
        return cut

    def load(self, k: Kernel, o: Op, at: _At, sizes: dict[str, int]) -> torch.Tensor:
        """A copy of this instance's tile; zeros past the tensor's end, in padding, and for a part or state that there is not."""
        t, heads = self.p.tensor(o.attr("tensor")), o.attr("heads", 0)
        if t.index == "block":
            return self.channel[t.name, at.iteration % t.slots].clone()
        at = replace(at, part=at.part + o.attr("parts_ahead", 0))
        if (t.index == "part" and at.part >= self.problem.parts(at.seq, sizes["C"])) or (t.index == "sequence" and at.begin):
            return torch.zeros(t.moved(heads, o.attr("transposed", False)).shape(sizes), dtype=self.memory[t.name].dtype)
        x = self.memory[t.name][self.place(k, t, at, sizes, heads)]
        tile = torch.zeros(t.moved(heads).shape(sizes), dtype=x.dtype)
        tile[tuple(slice(n) for n in x.shape)] = x
        return tile[-1] if o.attr("last") else tile.T if o.attr("transposed") else tile

    def store(self, k: Kernel, o: Op, x: torch.Tensor, at: _At, sizes: dict[str, int]) -> None:
        """Write this instance's tile: what the tensor has of it. Warm-ups store nothing to memory, and states are those of the
        last part.
        """
        t, row, col = self.p.tensor(o.attr("tensor")), o.attr("row"), o.attr("col")
        if t.index == "block":
            slot = t.name, at.iteration % t.slots
            if row is None:
                self.channel[slot] = x.clone()
                return
            whole = self.channel.get(slot, torch.full(t.tile.shape(sizes), float("nan"), dtype=x.dtype)).clone()
            whole[row:row + len(x), col:col + x.shape[1]] = x
            self.channel[slot] = whole
            return
        if k.grid == "parts" and (at.part + 1 < self.problem.parts(at.seq, sizes["C"]) if t.index == "sequence" else
                                  0 <= at.chunk < self.own(at, sizes) and not at.before):
            return
        if t.index == "checkpoint" and ((at.chunk + 1) % self.problem.every or self.rows(at, sizes) < sizes["C"]):
            return
        at = replace(at, part=at.part + o.attr("parts_ahead", 0))
        if o.attr("parts_ahead") and at.part >= self.problem.parts(at.seq, sizes["C"]):
            return
        to = self.memory[t.name][self.place(k, t, at, sizes, o.attr("heads", 0))]
        x = x.T if o.attr("transposed") else x
        to[...] = x[tuple(slice(n) for n in to.shape)]


def const_tile(t: Tensor, sizes: dict[str, int]) -> torch.Tensor:
    """A mask made on the host. fill: "KIND[:SIZE] KEPT OTHER", KIND of `keep`: KEPT where it keeps, OTHER elsewhere."""
    kind, kept, other = t.fill.split()
    name, _, size = kind.partition(":")
    n = t.tile.shape(sizes)[0]
    return torch.where(keep(name, n, int(size or 0)), float(kept), float(other))


def interpret(p: Program, problem: Problem, inputs: dict[str, torch.Tensor | None], scalars: dict[str, float],
              exact: bool = True) -> dict[str, torch.Tensor]:
    """Run `p`: see Interpreter."""
    return Interpreter(p, problem, scalars, exact).run(inputs)
