"""Helpers that several passes use: dead code elimination, rebuilding a body op by op, and questions about walks."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.body import Body
from ..ir.core import Kernel, Loop, Op, Program, Stmt, loops, walk
from ..ir.ops import OPS
from ..ir.types import Tensor


def dead_code(body: tuple[Stmt, ...], alive: set[str]) -> tuple[Stmt, ...]:
    """The body without pure ops and loads whose value is unused.

    alive: values that something outside the body reads.
    """
    alive = set(alive)
    out: list[Stmt] = []
    for s in reversed(body):
        if isinstance(s, Loop):
            inner = dead_code(s.body, alive | {c.next for c in s.carried})
            s = replace(s, body=inner)
            alive |= {c.init for c in s.carried} | {s.warm_up} | _reads(inner)
        elif s.out and s.out not in alive and OPS[s.kind].effect in ("pure", "read"):
            continue
        else:
            alive |= set(s.args)
        out.append(s)
    return tuple(reversed(out))


def _reads(body: tuple[Stmt, ...]) -> set[str]:
    """The values that ops and loops of the body read."""
    out: set[str] = set()
    for s in body:
        if isinstance(s, Loop):
            out |= {x for c in s.carried for x in (c.init, c.next)} | {s.warm_up} | _reads(s.body)
        else:
            out |= set(s.args)
    return out


def walk_body(p: Program) -> Body:
    """An empty body for the single walk of `p`. The names that the walk uses are taken in it. It knows the initial values."""
    loop, before = p.walk, {o.out: o.type for o in p.kernels[0].body if isinstance(o, Op) and o.type is not None}
    b = Body({t.name: t for t in p.tensors}, {**before, **{c.name: c.type for c in loop.carried}})
    b.taken |= {o.out for o in walk(loop.body)} | {c.result for c in loop.carried}
    return b


def with_walk_body(p: Program, body: tuple[Stmt, ...]) -> Program:
    """`p`, a program of one walk, with `body` as the walk's body. Dead code is dropped."""
    loop = p.walk
    return p.with_walk(replace(loop, body=dead_code(body, {c.next for c in loop.carried} | {p.forgets})))


Rule = Callable[[Op, Body], "str | None"]


def rebuild(body: tuple[Stmt, ...], b: Body, rule: Rule, names: dict[str, str] | None = None) -> tuple[Stmt, ...]:
    """The body after each op has gone through `rule`.

    The rule appends ops to `b` and returns the name of the new value. It returns None to keep the op. Later ops read the new
    value.
    """
    names = {} if names is None else names
    for s in body:
        if isinstance(s, Loop):
            inner = Body(b.tensors, {**b.types, **{c.name: c.type for c in s.carried}})
            inner.taken = b.taken
            done = rebuild(s.body, inner, rule, names)
            carried = tuple(replace(c, init=names.get(c.init, c.init), next=names.get(c.next, c.next)) for c in s.carried)
            b.stmts.append(replace(s, carried=carried, body=done, warm_up=names.get(s.warm_up, s.warm_up)))
            b.types.update({c.result: c.type for c in s.carried})
            continue
        o = s.renamed(names)
        new = rule(o, b)
        if new is None:
            b.copy(o)
        elif o.out and new != o.out:
            names[o.out] = new
    return b.finish()


def rebuild_kernels(p: Program, rule: Callable[[Kernel], Rule]) -> Program:
    """The program after each op has gone through the rule of its kernel. rule: gives the rule of a kernel. Dead code is
    dropped."""
    return p.map_kernels(lambda k: rebuild_kernel(p, k, rule(k)))


def rebuild_kernel(p: Program, k: Kernel, rule: Rule) -> Kernel:
    """The kernel after each op has gone through `rule`. Dead code is dropped."""
    b = Body({t.name: t for t in p.tensors})
    b.taken = {o.out for o in k.ops} | {x for lp in loops(k.body) for c in lp.carried for x in (c.name, c.result)}
    return replace(k, body=dead_code(rebuild(k.body, b, rule), set()))


def with_tensors(p: Program, *more: Tensor) -> Program:
    """`p` with those of `more` whose names it does not have yet."""
    have = {t.name for t in p.tensors}
    return replace(p, tensors=(*p.tensors, *{t.name: t for t in more if t.name not in have}.values()))


def walks(k: Kernel) -> bool:
    """Whether `k` carries values over the chunks of a sequence or part.

    False for the loop that computes bounds before a part, and for the fold over parts.
    """
    return any(s.index == "chunk" and s.carried for s in k.body if isinstance(s, Loop))
