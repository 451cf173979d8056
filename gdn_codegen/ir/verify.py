"""Checks a program.

Its features must be legal at its stage, and it must have what the stage requires. Names must be defined once, before their use.
The types of ops, loads and stores must be right. Sums over padding must have an operand that is zero there.
"""
from __future__ import annotations

from itertools import chain, zip_longest

from .core import Kernel, Loop, Op, Program, Stmt, loops, repeats, types, without_tail
from .ops import BESIDE, OPS, TypeRuleError, infer
from .padding import sums_over_padding
from .places import can_be_delayed, has_columns, miscounted, misplaced, takes_columns, unplaced
from .required import missing
from .stages import illegal
from .types import LAYOUTS, Tile


class VerifyError(ValueError):
    """The program is not well-formed."""


def verify(p: Program, verified: Program | None = None) -> Program:
    """Returns `p` if it is well-formed. Otherwise raises a VerifyError, which names the kernel and the op.

    verified: an earlier program that was verified. A kernel that both have is not checked again if what the check depends on is
    the same: the tensors, the dims, and what earlier kernels store.
    """
    verify_stage(p)
    for what, names in (("tensors", [t.name for t in p.tensors]), ("kernels", [k.name for k in p.kernels])):
        if len(set(names)) != len(names):
            raise VerifyError(f"{p.name}: several {what} have the same name: {names}")
    for text in chain(*(misplaced(p, t) for t in p.tensors), miscounted(p), unplaced(p)):
        raise VerifyError(f"{p.name}: {text}")
    alike = verified is not None and (p.tensors, p.dims, p.extents) == (verified.tensors, verified.dims, verified.extents)
    twins = verified.kernels if verified is not None and alike else ()
    stored, by_twins = set[str](), set[str]()
    for k, twin in zip_longest(p.kernels, twins[:len(p.kernels)]):
        if (stored, k) != (by_twins, twin):
            _Kernel(p, k, stored | _stores(k, for_next_part=True)).run()
        stored, by_twins = stored | _stores(k), by_twins | (_stores(twin) if twin else set())
    if lost := [t.name for t in p.tensors if t.role == "output" and t.name not in stored]:
        raise VerifyError(f"{p.name}: output {', '.join(lost)} is written by no kernel")
    for name, o, d in sums_over_padding(p):
        why = (f"{o.kind} runs over the padding, and {o.args[0]} is not zero there; use valid({o.args[0]})" if d == "C"
               else f"{o.kind} sums over {d}, tiles of which are padded from {p.memory[d]} to {p.sizes[d]}, and no operand is "
                    "surely zero there")
        raise VerifyError(f"{p.name}, kernel {name}, {o.out} ({o.line}): {why}")
    return p


def _stores(k: Kernel, for_next_part: bool = False) -> set[str]:
    """The names of the tensors to which a kernel stores. for_next_part: only what it stores for its launch for the next part."""
    return {o.attr("tensor") for o in k.ops if o.kind == "store" and (not for_next_part or (k.by_part and o.attr("parts_ahead")))}


def verify_stage(p: Program) -> None:
    """VerifyError if a feature of `p` is not legal at its stage, or if it lacks what the stage requires. Nothing else that
    `verify` checks depends on the stage."""
    for text, k, o in chain(illegal(p), missing(p)):
        at = "".join([f", kernel {k.name}" if k else "", f", {o.out or o.kind} ({o.line})" if o else ""])
        raise VerifyError(f"{p.name}{at}: {text}")


def describes(p: Program, k: Kernel, o: Op) -> bool:
    """Whether a load of `k` can use a tensor descriptor of the sequence's rows. The load must be unconditional. The tile must
    have the tensor's full width, and the same layout as in memory."""
    t = p.tensor(o.attr("tensor"))
    plain = not (o.args or o.attr("ahead") or o.attr("transposed") or t.strided or any(p.padded(t)))
    return plain and t.index == "token" and len(t.dims) == 2 and k.blocked_dim not in t.dims and k.grid != "chunks"


class _Kernel:
    def __init__(self, p: Program, k: Kernel, stored: set[str]) -> None:
        self.p, self.k, self.stored = p, k, stored
        self.env: dict[str, Tile] = {}
        self.buffers = {b.name for b in k.buffers}
        self.tensors = {t.name: t for t in p.tensors}
        self.begun: Loop | None = None  # the loop over the warm-up that hands its carried values to the next loop

    def fail(self, o: Op | None, text: str) -> VerifyError:
        where = f"{self.p.name}, kernel {self.k.name}" + (f", {o.out or o.kind} ({o.line})" if o else "")
        return VerifyError(f"{where}: {text}")

    def run(self) -> None:
        """Check the kernel. The VerifyError names the op and what is accepted."""
        if self.k.grid not in ("chunks", "sequences", "parts"):
            raise self.fail(None, f"grid {self.k.grid!r} is not chunks, sequences or parts")
        if self.k.batch.way == "threads":
            tiles = [x for x, t in types(self.k.body).items() if t.rank > 1]
            if self.k.grid != "chunks" or self.k.blocked_dim or tiles or any(loops(self.k.body)):
                raise self.fail(None, f"has {self.k.batch}: accepted for a kernel over chunks without loops, blocks of a dim and "
                                      f"tiles; tiles are {', '.join(tiles) or 'none'}")
        self.launch()
        self.layouts()
        items = any(isinstance(s, Loop) and s.index == "item" for s in self.k.body)
        self.body(self.k.body, inside=self.k.grid == "chunks" and not items)

    def launch(self) -> None:
        """Check that threads are whole warps and enough for the agents. Registers, blocks and lanes need threads."""
        k, mine = self.k, sum(a.threads for a in self.k.agents)
        if k.threads % 32 or (k.threads and k.threads < mine):
            raise self.fail(None, f"has {k.threads} threads; accepted: a multiple of 32 that is at least {mine}, the sum "
                                  "over its agents")
        if (k.registers or k.blocks_per_sm or k.lanes or k.piece) and not k.threads or k.threads % (k.lanes or 1):
            raise self.fail(None, "has `registers`, `blocks_per_sm`, `lanes` or `piece`, but no `threads`, a multiple of lanes")

    def layouts(self) -> None:
        """Check that dims of buffers match their shapes, that layouts are known, and that padding has a use."""
        sizes = {**self.p.sizes, **self.k.sizes}
        for b in self.k.buffers:
            if b.dims and Tile(b.dims).shape(sizes) != b.shape:
                raise self.fail(None, f"buffer {b.name} has the shape {b.shape} and the dims {b.dims}")
            if b.layout and LAYOUTS.get(b.layout) != len(b.shape):
                raise self.fail(None, f"buffer {b.name}, {b.shape}, has the layout {b.layout!r}; accepted: "
                                      f"{', '.join(n for n, rank in LAYOUTS.items() if rank == len(b.shape)) or 'none'}")
            paddable = self.k.grid == "chunks" and len(b.shape) == 2 and not b.layout or self.k.agents and len(b.shape) == 1
            if b.pad and self.k.batch.way != "threads" and not paddable:
                raise self.fail(None, f"buffer {b.name} has padded rows (`pad`); accepted: only in a kernel that batches heads "
                                      "by threads, tiles without a layout of one over chunks, and vectors that agents exchange")

    def beside(self, body: tuple[Stmt, ...]) -> None:
        """Check that ops that are executed by one statement follow each other, and that there are as many as their attribute
        gives."""
        left, first = 0, None
        for s in body:
            n = s.attr(BESIDE, 1) if isinstance(s, Op) and s.attrs else 1
            if left and first is not None and (not isinstance(s, Op) or (s.kind, n) != (first.kind, first.attr(BESIDE))):
                raise self.fail(first, f"is one of {first.attr(BESIDE)} ops side by side, and {left} of them do not follow")
            left, first = (left - 1, first) if left else (n - 1, s if isinstance(s, Op) else None)
        if left:
            raise self.fail(first, f"is one of several ops side by side, and {left} of them do not follow")

    def define(self, o: Op | None, name: str, t: Tile) -> None:
        if name in self.env:
            raise self.fail(o, f"{name} is defined twice")
        self.env[name] = t

    def body(self, body: tuple[Stmt, ...], inside: bool) -> None:
        self.beside(body)
        for s in body:
            if isinstance(s, Loop):
                self.loop(s, inside)
            else:
                self.op(s, inside)

    def loop(self, lp: Loop, inside: bool) -> None:
        """Check a loop: that it is legal in this place, its warm-up length, and the types of its carried values.

        inside: whether the loop is already in a loop over chunks, or the kernel is one over chunks.
        """
        if lp.index == "item":  # the instances that one core group or block runs, one after the other
            if lp.carried:
                raise self.fail(None, "a loop over items carries values; accepted: none, because items are instances of their "
                                      "own")
            self.body(lp.body, self.k.grid == "chunks")
            return
        if not takes_columns(self.p, self.k, lp) if lp.index == "columns" else (
                inside or self.k.grid == "chunks" or (lp.index == "part" and self.k.grid != "parts")):
            over = {"part": "parts", "columns": "chunks, by pieces of K"}.get(lp.index, "sequences or parts")
            raise self.fail(None, f"has a loop over {lp.index.removesuffix('s')}s; accepted: one, in a kernel over {over}")
        if lp.warm_up and (self.k.grid != "parts" or lp.index == "part" or self.env.get(lp.warm_up) != Tile(())):
            raise self.fail(None, f"has the warm-up length {lp.warm_up}; accepted: a number, in a grid over parts")
        if lp.index == "before" and (not lp.warm_up or (lp.carried and self.k.slices > 1)):
            raise self.fail(None, "a loop over the chunks before a part needs a warm-up length, and carries nothing between "
                                  "slices")
        if self.begun is not None:
            self.continues(self.begun, lp)
        self.begun = lp if lp.index == "before" and lp.carried else None
        for c in lp.carried:
            if self.env.get(c.init) != c.type:
                raise self.fail(None, f"carried {c.name} starts as {c.init}, which is {self.env.get(c.init)}, not {c.type}")
            self.define(None, c.name, c.type)
        self.body(lp.body, inside or lp.index in ("chunk", "before", "last"))
        for c in lp.carried:
            if self.env.get(c.next) != c.type:
                raise self.fail(None, f"carried {c.name} becomes {c.next}: {self.env.get(c.next)}, not {c.type}")
            self.define(None, c.result, c.type)

    def continues(self, before: Loop, lp: Loop) -> None:
        """Check that `lp` continues the walk that `before` begins with a warm-up: it has the same ops in the same order, and
        others that store or that the carried values do not depend on. The names of `before` end, as `lp` defines them again."""
        rest = [without_tail(o) for o in lp.body]
        for o in before.body:
            if without_tail(o) not in rest or (isinstance(o, Op) and o.kind == "store"):
                raise self.fail(o if isinstance(o, Op) else None, "is in the loop over a warm-up: accepted are ops of the loop "
                                                                  "after it, in its order, that store nothing")
            del rest[:rest.index(without_tail(o)) + 1]
        if (lp.index, lp.warm_up) != ("chunk", "") or [(c.name, c.result, c.next, c.type) for c in before.carried] != [
                (c.name, c.init, c.next, c.type) for c in lp.carried]:
            raise self.fail(None, f"a loop over a warm-up hands {', '.join(c.result for c in before.carried)} to the next loop, "
                                  "which carries the same values over the chunks of the part")
        if others := [a for a in self.k.one_loop if not repeats(before, lp, a)]:
            raise self.fail(None, f"{', '.join(others)} run one loop over a warm-up and the part; accepted: agents with the same "
                                  "ops in both")
        for name in (*(c.name for c in before.carried), *(o.out for o in before.body if isinstance(o, Op) and o.out)):
            del self.env[name]

    def op(self, o: Op, inside: bool) -> None:
        """Check one op: its operands are defined, its type follows from theirs, its tensors exist, and it is legal in this
        place."""
        if o.kind not in OPS:
            raise self.fail(o, f"op {o.kind!r} is not in the table")
        env = self.env
        for a in o.args:
            if a not in env:
                raise self.fail(o, f"{a} is read before it is defined")
        args = tuple([env[a] for a in o.args])
        if o.buffer and o.buffer not in self.buffers:
            raise self.fail(o, f"buffer {o.buffer!r} is not one of the kernel's")
        if o.kind in ("load", "store"):
            self.move(o, args, inside)
            return
        if o.kind == "resume":
            self.resume(o, args, inside)
        if o.kind == "scalar" and o.attr("tensor") is not None:
            of = self.tensors.get(o.attr("tensor"))
            if of is None or (of.index, of.dims, of.dtype) != ("head", (), o.attr("dtype", "float32")):
                raise self.fail(o, f"reads {o.attr('tensor')}, which is {of and (of.index, of.dtype)}; accepted: one number a "
                                   "value head")
        kept = o.attr("kept") if o.attrs else None
        if kept is not None and (kept not in self.stored or (self.tensors[kept].index, self.tensors[kept].dims) != ("part", ())):
            raise self.fail(o, f"has kept={kept!r}; accepted: a tensor of one number per part, which an earlier kernel wrote")
        try:
            want = infer(o.kind, args, o.attrs)
        except TypeRuleError as e:
            raise self.fail(o, str(e)) from e
        if o.out and o.type != want:
            raise self.fail(o, f"has type {o.type}, its operands give {want}")
        self.define(o, o.out, want) if o.out else None

    def move(self, o: Op, args: tuple[Tile, ...], inside: bool) -> None:
        """Check a load or a store: that it is legal in this place, and what its tensor holds. args: the types of its operands."""
        at, name = dict(o.attrs), o.attr("tensor")
        if name not in self.tensors:
            raise self.fail(o, f"tensor {name!r} does not exist")
        t, heads = self.tensors[name], at.get("heads", 0)
        if t.index == "head" and not (t.dims and o.kind == "load"):
            raise self.fail(o, f"tensor {name} has one number for each value head, which only scalar reads")
        if heads and (heads != self.k.batch.heads or t.heads != "HV" or len(t.dims) != 1):
            raise self.fail(o, f"takes {heads} heads at once; accepted: as many as the kernel batches, of one value a "
                               f"token and value head; {self.k.name} has {self.k.batch.heads}, and {name} holds {t.tile} a head "
                               f"of {t.heads}")
        if t.index in ("token", "slot") and not inside and not (at.get("ahead") and self.k.grid != "chunks"):
            raise self.fail(o, f"tensor {name} has one tile for each chunk, and this op is outside of the loop over chunks")
        last = o.kind == "load" and at.get("last", False)
        if last and len(t.dims) != 1 and t.index != "block":
            raise self.fail(o, f"takes the last entry of a vector, or the last row in a channel; {name} holds {t.tile}")
        if at.get("one_token") and (t.index != "token" or self.p.sizes["C"] != 1):
            raise self.fail(o, f"moves one token of {name}; accepted: a tensor of tokens, in chunks of one token")
        if at.get("piece") and not has_columns(self.p, t, o):
            raise self.fail(o, f"moves the columns {at['piece']} of {name}; accepted: (first, size) within the rows of its tiles")
        if at.get("delay") and not can_be_delayed(t, o):
            raise self.fail(o, f"loads rows of earlier tokens of {name}; accepted: of a tile of tokens, as it lies")
        row = at.get("one_token", False), at.get("tokens", 0), at.get("piece")
        moved = t.moved(heads, at.get("transposed", False), last, *row)
        if t.index in ("number", "numbers") or (t.index == "checkpoint" and not (
                o.kind == "store" and inside and self.k.grid != "chunks")):
            raise self.fail(o, f"tensor {name} has the index {t.index!r}; accepted: stores of checkpoints in the body of a walk")
        if t.index == "part" and self.k.grid != "parts":
            raise self.fail(o, f"tensor {name} has one tile for each part, and the grid is over {self.k.grid}")
        if at.get("parts_ahead") and t.index != "part":
            raise self.fail(o, f"has parts_ahead, and {name} has one tile for each {t.index}; accepted: one for each part")
        if o.kind == "load" and (args[:1] not in ((), (Tile(()),)) or args[1:] not in ((), (moved,))):
            raise self.fail(o, f"has the operands {', '.join(map(str, args))}; accepted: none, or a number and the {moved} "
                               "that is taken where the number is not negative")
        self.store(o, args[0], moved) if o.kind == "store" else self.load(o, moved)

    def resume(self, o: Op, args: tuple[Tile, ...], inside: bool) -> None:
        """Check an op that reads a tile that this kernel stores after an earlier chunk."""
        t, parents = (self.tensors.get(o.attr(x)) for x in ("tensor", "parents"))
        kept = any(s.kind == "store" and s.attr("tensor") == o.attr("tensor") for s in self.k.ops)
        if not (inside and kept and t and t.index == "checkpoint" and t.at and parents and parents.index == "numbers"):
            raise self.fail(o, "accepted: in a walk that stores the tensor after each chunk, with the numbers of parents")
        if args[0].dims != (moved := t.moved(transposed=o.attr("transposed", False))).dims:
            raise self.fail(o, f"takes {args[0]}, and {t.name} holds {moved}")

    def store(self, o: Op, stored: Tile, moved: Tile) -> None:
        """Check the type and the tensor of a store. moved: the type of what it moves."""
        name, transposed = o.attr("tensor"), " transposed" if o.attr("transposed") else ""
        if stored != moved and o.attr("row") is None:
            raise self.fail(o, f"stores {stored} to {name}, which takes {moved}{transposed}")
        if self.tensors[name].role == "input":
            raise self.fail(o, f"stores to the input {name}")
        self.stored.add(name)

    def load(self, o: Op, moved: Tile) -> None:
        """Check the type and the tensor of a load, and define its value. moved: the type of what it moves."""
        name, transposed = o.attr("tensor"), " transposed" if o.attr("transposed") else ""
        t = self.tensors[name]
        if t.role == "output" and t.index != "slot":
            raise self.fail(o, f"loads the output {name}; accepted: inputs, workspaces, and outputs with a tile for each chunk")
        if t.role != "input" and t.index != "const" and name not in self.stored:
            raise self.fail(o, f"loads {name} before any kernel wrote it")
        if o.attr("described") and not describes(self.p, self.k, o):
            raise self.fail(o, f"is marked `described`, and no descriptor of {name} can load it; accepted: whole rows of "
                               "tokens in a walk, without transposition")
        if o.type != moved:
            raise self.fail(o, f"has type {o.type}, but {name} holds {moved}{transposed}")
        self.define(o, o.out, o.type)
