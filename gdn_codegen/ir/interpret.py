"""The interpreter: runs a program of any stage in torch, tile by tile. It defines what programs compute."""
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from .core import Kernel, Loop, Op, Program, Stmt
from .ops import OPS, OWN_PART, keep
from .padding import chunk_tokens
from .types import ZEROED, Tensor

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass
class Problem:
    """The sizes of a problem. lengths: the number of tokens of each sequence. heads: the heads of q and k. value_heads: the
    heads of v, a multiple of `heads`. span: the chunks of a part; 0 if a part is the whole sequence. every: the chunks between
    two checkpoints. pool: the number of slots of tensors in which a number gives each sequence's slot. rest: tokens past the
    end of the last sequence. width: the integers of a sequence where it has one for each chunk, and the tiles of its row."""

    lengths: list[int]
    heads: int
    value_heads: int
    span: int = 0
    every: int = 1
    pool: int = 0
    rest: int = 0
    width: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens of a packed tensor, including those past the last sequence."""
        return sum(self.lengths) + self.rest

    @property
    def starts(self) -> list[int]:
        """The index of each sequence's first token, and the end of the last sequence."""
        out = [0]
        for n in self.lengths:
            out.append(out[-1] + n)
        return out

    def slots(self, chunk: int) -> int:
        """The number of chunk slots. Sequence n begins at slot starts[n] // chunk + n, so that sequences never overlap."""
        return self.tokens // chunk + len(self.lengths)

    def part(self, chunk: int) -> int:
        """The number of tokens of a part."""
        return chunk * (self.span or self.slots(chunk) + 1)

    def parts(self, seq: int, chunk: int) -> int:
        """The number of parts of a sequence, at least 1."""
        return max(1, -(-self.lengths[seq] // self.part(chunk)))


#: The kinds of ops whose meaning is here, since it depends on more than operands: on the instance, or on the op's own type.
OWN_MEANING = frozenset({
    "load", "store", "resume", "warm_up_length", "return_unless_negative", "claim_part", "clear_counter", "claim_item",
    "set_if_negative", "return_if_zero", "return_if_set", "choose_parts", "return_unless_split",
    "next_item", "const", "scalar", "cast", "full", "eye", "expand", "row_max", "of_token", "valid", "latest"})

#: Those of them that take rows by the place of the chunk.
ROWS = frozenset({"of_token", "latest", "valid", "delay"})


class _Leave(Exception):
    """Ends the current instance."""


@dataclass
class _At:
    seq: int
    head: int
    chunk: int
    block: int = 0
    iteration: int = 0  # of the innermost loop
    part: int = 0
    begin: int = 0  # how many chunks a walk passes before the first of a part and its warm-up
    half: int = 0
    column: int = 0  # the first column of an iteration, in a loop over columns
    before: bool = False  # whether the chunk comes before the part, in a loop over "before"

    def to(self, **changes: int | bool) -> _At:
        """The position with these changes, in a fifth of the time of `replace`. Each iteration of each loop asks for one."""
        new = object.__new__(_At)
        new.__dict__.update(self.__dict__, **changes)
        return new

    def columns(self, o: Op, sizes: dict[str, int]) -> tuple[int, int]:
        """The first column that a load or store of a piece moves, and how many."""
        first, size = o.attr("piece")
        return self.column + first, sizes[size] if isinstance(size, str) else size


class Interpreter:
    """Runs a program. exact: all values are float64 and casts have no effect. Otherwise each value has the dtype of its tile."""

    def __init__(self, p: Program, problem: Problem, scalars: dict[str, float], exact: bool = True) -> None:
        self.p, self.problem, self.scalars, self.exact = p, problem, scalars, exact
        self.tensors, self.starts = {t.name: t for t in p.tensors}, problem.starts
        self.each = chunk_tokens(p)
        self.memory: dict[str, torch.Tensor] = {}
        self.channel: dict[tuple[str, int], torch.Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        """The torch dtype for a tile's dtype: the same, or float64 in an exact run."""
        return torch.float64 if self.exact else TORCH[name]

    def shape(self, t: Tensor) -> tuple[int, ...]:
        """The whole tensor's shape: token [T, heads, ...], slot [slots, HV, ...], sequence [N, HV, ...], head [HV]."""
        pr = self.problem
        if t.index in ("number", "numbers"):
            return (len(pr.lengths), *([pr.width] if t.index == "numbers" else []))
        if t.index in ("counter", "places"):
            return ()
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
        if t.index == "checkpoint" and t.at:
            return (pr.pool, *(() if self.tensors[t.at].index == "numbers" else (pr.width,)), heads, *tile)
        if t.index == "checkpoint":
            return (pr.tokens // (pr.every * self.p.sizes["C"]), heads, *tile)
        return (heads, *tile) if t.index == "head" else tile

    def run(self, inputs: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Run the program, and return its outputs by name.

        Outputs and workspaces start as NaN, or with the content that `inputs` gives. A missing optional input is zero. ValueError
        for another missing input or a wrong shape.
        """
        for t in self.p.tensors:
            shape = self.shape(t)
            if t.over:
                continue
            x = inputs.get(t.name)
            if t.index in ("number", "numbers"):
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
                dtype = torch.float64 if t.index in ("counter", "places") else self.dtype(t.dtype)
                self.memory[t.name] = torch.full(shape, 0.0 if t.fill == ZEROED else float("nan"), dtype=dtype)
                if x is not None:
                    self.memory[t.name].copy_(x)
        self.memory |= {t.name: self.memory[t.over] for t in self.p.tensors if t.over}
        covered = [t for n, _ in self.sequences() for t in range(*self.starts[n:n + 2])]
        rest = torch.ones(self.problem.tokens, dtype=torch.bool).index_fill(0, torch.tensor(covered, dtype=torch.int64), False)
        for k, part in self.launches():
            self.kernel(k, part)
            for t in self.p.clears(k):
                if inputs.get(t.name) is None:
                    self.memory[t.name][rest] = 0
        return {t.name: self.memory[t.name] for t in self.p.role("output")}

    def launches(self) -> Iterator[tuple[Kernel, int]]:
        """The kernels in the order in which they run, each with the part that it is launched for; -1 for all."""
        most = max((self.problem.parts(n, self.p.sizes["C"]) for n, _ in self.sequences()), default=1)
        return ((k, part) for part in (range(most) if self.p.kernels[0].by_part else (-1,)) for k in self.p.kernels)

    def kernel(self, k: Kernel, part: int = -1) -> None:
        """Run all instances of a kernel, one after another: loops over sequences, value heads, blocks, and chunks or parts. part:
        the part that a kernel with `by_part` is launched for."""
        full, sizes = self.p.sizes, {**self.p.sizes, **k.sizes}
        body: tuple[Stmt, ...] = k.body
        outer: dict[str, torch.Tensor] = {}
        for i, s in enumerate(k.body):
            if isinstance(s, Loop) and s.index == "item":  # statements before the loop run once
                self.body(k, k.body[:i], outer, _At(0, 0, -1), sizes)
                body = s.body
        for o in k.ops:
            if o.kind == "clear_counter":  # once, even if there are no instances
                self.memory[o.attr("tensor")].zero_()
            elif o.kind == "choose_parts":  # the problem has the host's parts
                self.memory[o.attr("tensor")].fill_(self.problem.part(full["C"]) // full["C"])
        blocks = full[k.blocked_dim] // sizes[k.blocked_dim] if k.blocked_dim else 1
        chunk, iteration = full["C"], count()
        halves = 1 + any(isinstance(s, Op) and s.kind == "claim_part" for s in k.body)
        for n, length in self.sequences():
            for h in range(0, self.problem.value_heads, k.batch.in_body):
                for b in range(blocks):
                    if k.grid == "sequences":
                        self.instance(k, body, dict(outer), _At(n, h, -1, b, next(iteration)), sizes)
                        continue
                    if k.grid == "parts":
                        parts = range(self.problem.parts(n, chunk))
                        for i in self.instances(parts) if part < 0 else parts[part:part + 1]:
                            for half in range(halves):
                                self.part(k, body, dict(outer), _At(n, h, -1, b, part=i, half=half), sizes)
                        continue
                    each = self.problem.part(chunk) // chunk
                    for c in range(-(-length // chunk))[slice(None) if part < 0 else slice(part * each, (part + 1) * each)]:
                        self.instance(k, body, dict(outer), _At(n, h, c, b, next(iteration)), sizes)

    def instance(self, k: Kernel, body: tuple[Stmt, ...], env: dict[str, torch.Tensor], at: _At, sizes: dict[str, int]) -> None:
        """Run the body of one instance of a kernel over sequences or chunks, until an op ends it."""
        with contextlib.suppress(_Leave):
            self.body(k, body, env, at, sizes)

    def sequences(self) -> list[tuple[int, int]]:
        """The sequences that are not skipped, with their lengths."""
        at = self.p.skips
        return [(n, x) for n, x in enumerate(self.problem.lengths) if not at or self.number(at, n) >= 0]

    def number(self, name: str, seq: int) -> int:
        """A sequence's own number in a tensor of integers. Of one number for each chunk, that is the one which `at` counts."""
        t, x = self.tensors[name], self.memory[name][seq]
        return int(x if t.index == "number" else x[int(self.memory[t.at][seq]) - 1 if t.at else 0])

    def kept(self, t: Tensor, at: _At) -> tuple[int, ...]:
        """The first indices of a checkpoint that lies where numbers say. () if they say nowhere."""
        if self.tensors[t.at].index == "numbers":
            slot = int(self.memory[t.at][at.seq, at.chunk])
            return (slot,) if slot >= 0 else ()
        row = int(self.memory[t.at][at.seq])
        return (row, at.chunk) if row >= 0 else ()

    def instances(self, parts: range) -> Iterable[int]:
        """The parts of a sequence, in the order in which they run. Any order must give the same results."""
        return parts

    def part(self, k: Kernel, body: tuple[Stmt, ...], env: dict[str, torch.Tensor], at: _At, sizes: dict[str, int]) -> None:
        """Run one part. A loop with a warm-up length begins this number of chunks before the part."""
        with contextlib.suppress(_Leave):
            at.begin = self.own(at, sizes)
            for i, s in enumerate(body):
                warm_up = next((x.warm_up for x in body[i:] if isinstance(x, Loop)), "")
                if warm_up in env:
                    at.begin = self.own(at, sizes) - max(0, int(env[warm_up]))
                self.body(k, (s,), env, at, sizes)

    def own(self, at: _At, sizes: dict[str, int]) -> int:
        """How many chunks a walk of the whole sequence passes before the part."""
        return at.part * self.problem.part(sizes["C"]) // sizes["C"]

    def iterations(self, k: Kernel, lp: Loop, at: _At, sizes: dict[str, int]) -> list[_At]:
        """The position (_At) of each iteration of a loop."""
        if lp.index == "last":
            return [at.to(chunk=i, iteration=0) for i in range(self.chunks(at))[-1:]]
        if lp.index == "part":
            return [at.to(part=i) for i in range(at.part)]
        if lp.index == "columns":
            return [at.to(column=i) for i in range(0, sizes["K"], lp.step)]
        if lp.index == "before":
            return [at.to(chunk=self.along(k.step, at, i), iteration=i, before=True)
                    for i in range(max(at.begin, 0), self.own(at, sizes))]
        stop = self.chunks(at)
        if k.grid == "parts":
            stop = min(stop, self.own(at.to(part=at.part + 1), sizes))
        begin = at.begin if lp.warm_up else self.own(at, sizes)
        return [at.to(chunk=self.along(k.step, at, i), iteration=i) for i in range(begin, stop)]

    def chunks(self, at: _At) -> int:
        """The number of chunks of the sequence."""
        return -(-self.problem.lengths[at.seq] // self.each)

    def along(self, step: int, at: _At, n: int) -> int:
        """The chunk that a walk comes to after n others, and how many come before chunk n. A walk back begins at the last."""
        return n if step > 0 else self.chunks(at) - 1 - n

    def body(self, k: Kernel, body: tuple[Stmt, ...], env: dict[str, torch.Tensor], at: _At, sizes: dict[str, int]) -> None:
        """Run statements in order. A loop passes its carried values from iteration to iteration."""
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
        """Run one op. Its value goes to `env`, or its effect to memory.

        An op with the attribute `ahead` works on a later chunk. Past the last chunk its value is NaN. So is the value of an op
        with `own_part` in a warm-up. A wrong read then shows in the results.
        """
        kind, attrs, past = o.kind, dict(o.attrs), False
        if ahead := attrs.get("ahead", 0):
            at, past = self.later(k, at, ahead, sizes)
        if past or (attrs.get(OWN_PART) and self.along(k.step, at, at.chunk) < self.own(at, sizes)):
            if o.out:  # no op may read it
                assert o.type is not None
                env[o.out] = torch.full(o.type.shape(sizes), float("nan"), dtype=self.dtype(o.type.dtype))
            return
        if kind in ROWS:
            env[o.out] = self.of_rows(o, [env[a] for a in o.args], at, sizes)
        elif kind not in OWN_MEANING:
            if (known := OPS[kind]).effect != "sync":
                assert known.evaluate is not None, kind
                env[o.out] = known.evaluate(attrs, *[env[a] for a in o.args])
        elif kind == "load" and o.args and env[o.args[0]] >= 0:
            assert o.type is not None
            env[o.out] = env[o.args[1]] if o.args[1:] else torch.zeros(o.type.shape(sizes), dtype=self.dtype(o.type.dtype))
        elif kind == "load":
            env[o.out] = self.load(k, o, self.headed(at, o), sizes)
        elif kind == "warm_up_length":
            env[o.out] = torch.tensor(float(self.warm_up_length(attrs, at, sizes)), dtype=self.dtype("float32"))
        elif kind == "return_unless_negative":
            if env[o.args[0]] >= 0:
                raise _Leave
        elif kind == "set_if_negative":
            if env[o.args[0]] < 0:
                self.memory[attrs["tensor"]].fill_(1)
        elif kind in ("return_if_zero", "return_if_set"):
            if (self.memory[attrs["tensor"]] == 0) == (kind == "return_if_zero"):
                raise _Leave
        elif kind == "return_unless_split":
            if all(self.problem.parts(n, sizes["C"]) == 1 for n in range(len(self.problem.lengths))):
                raise _Leave
        elif kind == "claim_part":
            if (2 * env[o.args[0]] > self.problem.part(sizes["C"]) // sizes["C"]) != (at.half == 0):
                raise _Leave
        elif kind in ("claim_item", "next_item"):
            self.item(o, env, at)
        elif kind == "resume":
            env[o.out] = self.resume(k, o, env, at, sizes)
        elif kind == "store":
            self.store(k, o, env[o.args[0]], self.headed(at, o), sizes)
        elif kind == "const":
            env[o.out] = torch.tensor(attrs["value"], dtype=self.dtype("float32"))
        elif kind == "scalar" and "tensor" in attrs:
            env[o.out] = self.memory[attrs["tensor"]][self.headed(at, o).head]
        elif kind == "scalar":
            env[o.out] = torch.tensor(self.scalars[attrs["param"]], dtype=self.dtype("float32"))
        elif kind == "cast":
            x, dtype = env[o.args[0]], self.dtype(attrs["to"])
            env[o.out] = x if x.dtype is dtype else x.to(dtype)
        elif kind in ("full", "eye", "expand", "row_max"):
            env[o.out] = self.of_type(o, env, sizes)

    def later(self, k: Kernel, at: _At, ahead: int, sizes: dict[str, int]) -> tuple[_At, bool]:
        """The position so many iterations later, and whether it is past the last one. Outside of the loop, `at` is before the
        first iteration."""
        now = self.along(k.step, at, at.chunk) if at.chunk >= 0 else at.begin - 1
        there = at.to(chunk=self.along(k.step, at, now + ahead), iteration=at.iteration + ahead)
        return there, not 0 <= there.chunk < self.chunks(at)

    def item(self, o: Op, env: dict[str, torch.Tensor], at: _At) -> None:
        """Claim an item, or go on with it. One block runs all items, so that each claims the next one; ValueError if it does not.
        `kernel` clears counters."""
        if o.kind == "claim_item":
            env[o.out] = self.memory[o.attr("tensor")].add_(1).clone()
        elif o.kind == "next_item" and env[o.args[0]] != at.iteration + 1:
            raise ValueError(f"next_item: got {env[o.args[0]]}; accepted: {at.iteration + 1}, the item after this one")

    def of_rows(self, o: Op, args: list[torch.Tensor], at: _At, sizes: dict[str, int]) -> torch.Tensor:
        """The value of an op on rows that depends on the chunk's place in the sequence, or on how many tokens it has."""
        x, *first = args
        if o.kind == "of_token":
            return x[at.chunk % len(x)]
        if o.kind == "latest":
            return x[self.rows(at, sizes) - 1]
        if o.attr("given"):  # valid: an absent tensor is zero to begin with. delay: `first` are rows of a sequence's first chunk
            return torch.cat([torch.stack(first), x[len(first):]])[:len(x)] if first and at.chunk == 0 else x
        if o.kind == "delay":
            moved = OPS[o.kind].evaluate
            assert moved is not None
            return moved(dict(o.attrs), *args)
        x = x.clone()
        x[self.rows(at, sizes):] = 0
        return x

    def of_type(self, o: Op, env: dict[str, torch.Tensor], sizes: dict[str, int]) -> torch.Tensor:
        """The value of an op that depends on its type or on extents: a constant tile, the identity, a broadcast operand, or
        maxima of rows."""
        assert o.type is not None
        if o.kind == "row_max":
            x = env[o.args[0]]
            return x[..., :self.p.memory.get(o.attr("within", ""), x.shape[-1])].amax(-1)
        shape, dtype = o.type.shape(sizes), self.dtype(o.type.dtype)
        if o.kind == "expand":
            return env[o.args[0]].expand(shape)
        if o.kind == "full":
            return torch.full(shape, o.attr("value"), dtype=dtype)
        square = torch.diag(torch.arange(shape[1]) < self.p.memory.get(o.attr("within", ""), shape[1])).to(dtype)
        return square.repeat(shape[0] // shape[1], 1)

    def warm_up_length(self, attrs: dict[str, Any], at: _At, sizes: dict[str, int]) -> int:
        """The warm-up length of a part in chunks: the least number of chunks whose entries of the tensor sum to -`bound` or less.

        -1 if it is more than `longest`. Without that, if some sequence may need summaries, -1 if it is more than `most` times the
        chunks of a part, or more than these and `limit`. If the sum stays above: all chunks back to the sequence's first; but if
        some sequence may need summaries, -1 if `most` such chunks would not reach the bound.
        """
        part = at.part + attrs.get("parts_ahead", 0)
        if part == 0 or part >= self.problem.parts(at.seq, sizes["C"]):
            return 0
        if "tensor" not in attrs:
            return -1
        first, total = self.own(at.to(part=part), sizes), 0.0
        alone = "longest" in attrs
        most = attrs["longest"] if alone else min(attrs["most"] * self.problem.span, self.problem.span + attrs["limit"])
        slot = self.starts[at.seq] // sizes["C"] + at.seq
        summed = not alone and -(-max(self.problem.lengths) // sizes["C"]) - self.problem.span > most
        for n in range(1, first + 1):
            total += float(self.memory[attrs["tensor"]][slot + self.along(attrs.get("step", 1), at, first - n), at.head])
            if n > most and (alone or summed):
                return -1
            if total <= -attrs["bound"]:
                return n
        return -1 if summed and total * most > -attrs["bound"] * first else first

    def headed(self, at: _At, o: Op) -> _At:
        """The position of the head that `o` belongs to. A head past the last is the last one."""
        beside = o.attr("head", 0)  # most ops are of the instance's own head
        return at.to(head=min(at.head + beside, self.problem.value_heads - 1)) if beside else at

    def rows(self, at: _At, sizes: dict[str, int]) -> int:
        """The number of tokens in this chunk."""
        return min(self.each, self.problem.lengths[at.seq] - at.chunk * self.each)

    def place(self, k: Kernel, t: Tensor, at: _At, sizes: dict[str, int], heads: int) -> tuple[slice | int, ...]:
        """The index of this instance's tile in the whole tensor. For index "token" it has only the rows with tokens.

        heads: the index covers the tiles of this number of heads, or of fewer at the last head.
        """
        pr = self.problem
        head: slice | int = at.head if t.heads == "HV" else at.head // (pr.value_heads // pr.heads)
        if heads:
            head = slice(at.head, at.head + heads)
        cut = () if k.blocked_dim not in t.dims else tuple([
            slice(at.block * sizes[d], (at.block + 1) * sizes[d]) if d == k.blocked_dim else slice(None) for d in t.dims])
        if t.index == "token":
            first = self.starts[at.seq] + at.chunk * self.each
            return (slice(first, first + self.rows(at, sizes)), head, *cut[1:])
        if t.index == "head":
            return (head, *cut)
        if t.index == "slot":
            return (self.starts[at.seq] // sizes["C"] + at.seq + at.chunk, head, *cut)
        if t.index == "part":
            return (self.starts[at.seq] // pr.part(sizes["C"]) + at.seq + at.part, head, *cut)
        if t.index == "sequence":
            return (self.number(t.at, at.seq) if t.at else at.seq, head, *cut)
        if t.index == "checkpoint" and t.at:
            return (*self.kept(t, at), head, *cut)
        if t.index == "checkpoint":
            return (self.starts[at.seq] // (pr.every * sizes["C"]) + (at.chunk + 1) // pr.every - 1, head, *cut)
        return cut

    def load(self, k: Kernel, o: Op, at: _At, sizes: dict[str, int]) -> torch.Tensor:
        """A copy of this instance's tile. It is zero in padding, in rows past the sequence's end (there NaN if the load is
        `unfilled`), and for a part that does not exist. The initial state is zero unless the walk begins at chunk 0."""
        attrs = dict(o.attrs)
        t, heads = self.tensors[attrs["tensor"]], attrs.get("heads", 0)
        if t.index == "block":
            there = self.channel[t.name, at.iteration % t.slots]
            return (there[-1] if attrs.get("last") else there).clone()
        if n := attrs.get("tokens"):  # those of the group in which the chunk's token is
            tile = torch.zeros(t.moved(one_token=True, tokens=n).shape(sizes), dtype=self.memory[t.name].dtype)
            first, one = at.chunk // n * n, o.with_attrs(tokens=None)
            for i, chunk in enumerate(range(first, min(first + n, self.problem.lengths[at.seq]))):
                tile[i] = self.load(k, one, at.to(chunk=chunk), sizes)
            return tile
        if later := attrs.get("parts_ahead"):
            at = at.to(part=at.part + later)
        if (t.index == "part" and at.part >= self.problem.parts(at.seq, sizes["C"])) or (t.index == "sequence" and at.begin):
            moved = t.moved(heads, attrs.get("transposed", False), piece=attrs.get("piece"))
            return torch.zeros(moved.shape(sizes), dtype=self.memory[t.name].dtype)
        x = self.memory[t.name][self.place(k, t, at, sizes, heads)]
        shape = t.moved(heads).shape(sizes)
        if by := attrs.get("delay", 0):
            first, begin = self.starts[at.seq], at.chunk * self.each - by
            rows = self.memory[t.name][first + max(0, begin):first + begin + self.rows(at, sizes), at.head // (
                1 if t.heads == "HV" else self.problem.value_heads // self.problem.heads)]
            x = torch.cat([rows.new_zeros(max(0, min(-begin, self.rows(at, sizes))), *rows.shape[1:]), rows])
        if x.shape == shape:  # most tiles, which have no padding
            tile = x.clone(memory_format=torch.contiguous_format)
        else:
            tile = torch.zeros(shape, dtype=x.dtype)
            tile[tuple([slice(n) for n in x.shape])] = x
        if attrs.get("piece"):
            tile = tile.narrow(-1, *at.columns(o, sizes))
        if size := attrs.get("middle"):
            tile = tile[torch.arange(len(tile)) // (2 * size) * (2 * size) + size - 1]
        if attrs.get("unfilled"):
            tile[self.rows(at, sizes):] = float("nan")
        if attrs.get("last") or attrs.get("one_token"):
            return tile[-1 if attrs.get("last") else 0]
        return tile.T if attrs.get("transposed") else tile

    def resume(self, k: Kernel, o: Op, env: dict[str, torch.Tensor], at: _At, sizes: dict[str, int]) -> torch.Tensor:
        """The state after a chunk's parent. The first chunk has none, and starts from the carried state."""
        before, initial = (env[a] for a in o.args)
        t, parent = self.tensors[o.attr("tensor")], int(self.memory[o.attr("parents")][at.seq, at.chunk])
        if at.chunk == 0 or parent == at.chunk - 1:
            return before
        if parent < 0:
            return initial.to(before.dtype)
        if not self.kept(t, at.to(chunk=parent)):
            return before
        return self.load(k, o, at.to(chunk=parent), sizes).to(before.dtype)

    def store(self, k: Kernel, o: Op, x: torch.Tensor, at: _At, sizes: dict[str, int]) -> None:
        """Write this instance's tile, without padding and without rows past the sequence's end.

        Iterations of the warm-up write nothing to global memory. Only the last part writes the final state.
        """
        attrs = dict(o.attrs)
        t, row, col = self.tensors[attrs["tensor"]], attrs.get("row"), attrs.get("col", 0)
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
                                  at.chunk >= 0 and self.along(k.step, at, at.chunk) < self.own(at, sizes) and not at.before):
            return
        if t.index == "checkpoint" and (not self.kept(t, at) if t.at else (at.chunk + 1) % self.problem.every or
                                        self.rows(at, sizes) < sizes["C"]):
            return
        if later := attrs.get("parts_ahead"):
            at = at.to(part=at.part + later)
            if at.part >= self.problem.parts(at.seq, sizes["C"]):
                return
        to = self.memory[t.name][self.place(k, t, at, sizes, attrs.get("heads", 0))]
        x = x.T if attrs.get("transposed") else x[None] if attrs.get("one_token") else x
        if attrs.get("piece"):
            first, size = at.columns(o, sizes)
            to = to[..., first:first + size]  # memory has fewer columns than the tile, if that has padding
        to.copy_(x if x.shape == to.shape else x[tuple([slice(n) for n in to.shape])])


def const_tile(t: Tensor, sizes: dict[str, int]) -> torch.Tensor:
    """The content of a tensor of index "const". Its `fill` is "KIND[:SIZE] KEPT OTHER": entries that `ir.ops.keep` keeps for
    KIND and SIZE are KEPT, the others are OTHER. Or it is "KIND:SIZE of I/N": what the op KIND makes of N tiles, of which number
    I is the identity and the others are zero."""
    kind, kept, other = t.fill.split()
    name, _, size = kind.partition(":")
    rows, columns = t.tile.shape(sizes)
    if kept == "of":
        which, count = map(int, other.split("/"))
        evaluate = OPS[name].evaluate
        assert evaluate is not None
        return evaluate({"size": int(size)}, *(torch.eye(rows) * (i == which) for i in range(count)))
    square = keep(name, columns, int(size or 0))  # with more rows: squares one below the other
    return torch.where(square.repeat(-(-rows // columns), 1)[:rows], float(kept), float(other))


def interpret(p: Program, problem: Problem, inputs: dict[str, torch.Tensor | None], scalars: dict[str, float],
              exact: bool = True) -> dict[str, torch.Tensor]:
    """Run `p` on `inputs`. See Interpreter and its method `run`."""
    return Interpreter(p, problem, scalars, exact).run(inputs)
