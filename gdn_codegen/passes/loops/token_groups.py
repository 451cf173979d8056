"""token_groups: computes what depends on tokens alone for several tokens at once, where a chunk has one token. For TileLang.

A walk over single tokens computes norms, gates and scales of each token in all threads, although a few threads would do.
This pass finds the ops of its loop that depend on loads of tokens alone, and not on a carried value. It lets them compute TOKENS
tokens at once: a vector [K] becomes a tile [TOKENS, K], a number a vector [TOKENS]. Values that the other ops read lie in shared
memory, and are carried. The first group is computed after the loads of the initial state, while these are under way; in schedules
with `token_groups="late"` right before the loop, after ops that wait for them. The end of an iteration computes the group of the
next token, which does nothing unless that token begins a group.

Example:
    before:  S_0 = load of the state; for each token: k = load of the token; rk = rsqrt(row_sum(k * k)); ... rk ... S
    after:   S_0 = load of the state; k_first, rk_first: of the first 4 tokens
             for each token, k_group and rk_group from these: rk = of_token(rk_group); ... rk ... S; k_next, rk_next
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ir.body import Body
from ...ir.core import Carry, Kernel, Loop, Op, Program, types
from ...ir.ops import AHEAD, OPS
from ...ir.types import WARP
from ...schedule.schedule import Schedule
from ..common import dead_code
from ..stage import takes

#: Threads of a warp that share a token. Each moves 16 bytes of a row of 64 entries in 16 bit.
LANES = 8
#: The tokens of a group: as many as a warp has threads for.
TOKENS = WARP // LANES
#: Ops whose result for a token follows from their operands for that token, besides elementwise ones.
ALONE = ("row_sum",)
#: Elementwise ops that change the rank.
VIEWS = ("row", "col", "expand")


@takes("assigned")
def token_groups(p: Program, s: Schedule) -> Program:
    """`p` with ops on groups of tokens, where a chunk has one token."""
    return p.map_kernels(lambda k: _kernel(p, k, s.token_groups == "late"))


def _kernel(p: Program, k: Kernel, late: bool) -> Kernel:
    """The kernel with its groups, the first one right before the loop if `late`. `k` itself if its chunks have several tokens."""
    at = next((i for i, s in enumerate(k.body) if isinstance(s, Loop) and s.index == "chunk"), None)
    loop = k.body[at] if at is not None else None
    if at is None or not isinstance(loop, Loop) or not any(o.attr("one_token") for o in loop.ops):
        return k
    numbers, alone = _alone(loop)
    if not alone:
        return k
    rest = [s for s in loop.body if not isinstance(s, Op) or s.out not in alone]
    read = {a for s in rest if isinstance(s, Op) and s.out not in numbers for a in s.args} | {c.next for c in loop.carried}
    b = Body({t.name: t for t in p.tensors}, types(k.body))
    kept = [o for o in loop.body if isinstance(o, Op) and o.out in alone and o.out in read]
    group = [o for o in loop.body if isinstance(o, Op) and (o.out in alone or o.out in numbers)]
    group = [s for s in dead_code(tuple(group), {o.out for o in kept}) if isinstance(s, Op)]
    group.sort(key=lambda o: o.kind != "load")  # all loads are under way at once
    first = _copies(b, group, alone, kept, "first")
    before, b.stmts = dead_code(tuple(b.stmts), set(first.values())), []
    after = _copies(b, group, alone, kept, "next")
    last, b.stmts = dead_code(tuple(b.stmts), set(after.values())), []
    carried = []
    for o in kept:
        name, unread = b.fresh(f"{o.out}_group"), b.fresh(f"{o.out}_unread")
        carried.append(Carry(name, first[o.out], after[o.out], unread, b.types[first[o.out]]))
        b.types[name] = carried[-1].type
        b.op("of_token", name, name=o.out, line=o.line, agent=o.agent)
    body = dead_code((*b.stmts, *rest, *last), {c.next for c in (*loop.carried, *carried)})
    walk = replace(loop, carried=(*loop.carried, *carried), body=body)
    loads = at if late else max((i + 1 for i, s in enumerate(k.body[:at]) if isinstance(s, Op) and s.kind == "load"), default=0)
    return replace(k, body=(*k.body[:loads], *before, *k.body[loads:at], walk, *k.body[at + 1:]))


def _alone(loop: Loop) -> tuple[set[str], set[str]]:
    """The values of the loop that are the same for every token, and those that depend on the token alone."""
    numbers: set[str] = set()
    alone: set[str] = set()
    written = {o.attr("tensor") for o in loop.ops if o.kind in ("store", "resume")}
    for o in (s for s in loop.body if isinstance(s, Op) and s.out):
        assert o.type is not None
        if o.kind == "load" and o.attr("one_token") and not o.args and o.attr("tensor") not in written:
            alone.add(o.out)
        elif OPS[o.kind].number:
            numbers.add(o.out)
        elif (OPS[o.kind].elementwise and o.kind not in VIEWS or o.kind in ALONE) and o.args and {*o.args} <= numbers | alone:
            (numbers if {*o.args} <= numbers else alone).add(o.out)
    read = {a for s in loop.body if isinstance(s, Op) and s.out in alone for a in s.args}
    casts = {s.out for s in loop.body if isinstance(s, Op) and s.kind == "cast"}
    return numbers, alone - (casts - read)  # a cast that only the other ops read stays: its operand takes less shared memory


def _copies(b: Body, group: list[Op], alone: set[str], kept: list[Op], suffix: str) -> dict[str, str]:
    """The ops of a group for TOKENS tokens, with moves of the kept values to shared memory. Returns for each kept value its name
    there."""
    names: dict[str, str] = {}
    ahead: dict[str, Any] = {AHEAD: 1}
    for o in group:
        assert o.type is not None
        args = [names.get(a, a) for a in o.args]
        if o.out in alone and o.type.rank:  # numbers of tokens meet vectors of tokens as a column
            args = [b.op("col", x, agent=o.agent, **ahead) if a in alone and b.types[x].rank == 1 else x
                    for a, x in zip(o.args, args, strict=True)]
        attrs = {**dict(o.attrs), **ahead, **({"tokens": TOKENS} if o.kind == "load" else {})}
        names[o.out] = b.op(o.kind, *args, name=b.fresh(f"{o.out}_{suffix}"), line=o.line, agent=o.agent, **attrs)
    read = {a for o in group for a in o.args}  # what no op of the group reads is loaded to shared memory
    for o in kept:
        if o.kind != "load" or o.out in read:
            name = b.fresh(f"{o.out}_{suffix}_shared")
            names[o.out] = b.op("move", names[o.out], name=name, agent=o.agent, space="shared", **ahead)
    return {o.out: names[o.out] for o in kept}
