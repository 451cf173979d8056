"""shared_buffers: which values of a kernel share a buffer. `place` uses it.

Values may share one if the old value has no later reader. `owner` gives each value with a buffer the value whose buffer it uses.
These functions change it. `buffer_names` names the buffers afterwards.
"""
from __future__ import annotations

from itertools import pairwise

from ...ir.core import Kernel, Loop, Op, loops, walk
from ...ir.ops import AHEAD
from .stored_values import DECAYED, StoredValues, over

#: Ops that may run at the same time as a neighbour of the same kind, and write to shared memory, not to registers.
SIDE_BY_SIDE = ("cumsum", "diag_inverse")


def share_carried(v: StoredValues, k: Kernel, owner: dict[str, str]) -> None:
    """Let the next value of a carried value overwrite it if nothing reads the carried value after that. So does the state from
    which a chunk resumes, and the carried value overwrites its initial value."""
    for lp in loops(k.body):
        ops = list(walk(lp.body))
        for c in lp.carried:
            owner[c.name] = owner[c.result] = c.name
            if c.init in owner and not any(v.reads(o, c.init) for o in ops):
                owner[c.init] = c.name
            resumed = [o.out for o in ops if o.kind == "resume" and o.args[0] == c.name]
            if resumed and _no_later_reader(v, lp, c.name, resumed[0]):
                owner[resumed[0]] = c.name
            if v.type[c.next] == v.type[c.name] and all(_no_later_reader(v, lp, x, c.next) for x in (c.name, *resumed)):
                owner[c.next] = c.name


def share_groups(v: StoredValues, k: Kernel, owner: dict[str, str]) -> None:
    """Let the groups of tokens that a loop computes use the buffers of the first group, which the same ops computed before it."""
    first = [o for o in k.body if isinstance(o, Op) and o.attr(AHEAD)]
    for lp in loops(k.body):
        after = [o for o in lp.body if isinstance(o, Op) and o.attr(AHEAD)]
        for o, again in zip(first, after, strict=True) if first else ():
            if o.out in owner and again.out not in v.carried:
                owner[again.out] = owner[o.out]


def _no_later_reader(v: StoredValues, lp: Loop, name: str, new: str) -> bool:
    """Whether the loop computes `new`, and reads `name` only before."""
    ops = list(walk(lp.body))
    made = next((n for n, o in enumerate(ops) if o.out == new), len(ops))
    return made < len(ops) and not any(v.reads(o, name) for o in ops[made + 1:])


def share_accumulators(v: StoredValues, owner: dict[str, str]) -> None:
    """Let a product overwrite its accumulator if the accumulator has no later reader."""
    order, operands = {o: n for n, o in enumerate(v.ops)}, v.operands
    for o in v.ops:
        if o.kind != "matmul" or len(o.args) < 3 or o.out not in owner:
            continue
        acc = o.args[2]
        if acc not in owner or acc in v.carried or o.out in v.carried or acc in operands:
            continue
        if all(order[r] <= order[o] for r, _ in v.all_readers(acc)):
            _give(owner, owner[acc], o.out)


def sums_over(v: StoredValues, o: Op, owner: dict[str, str]) -> bool:
    """Whether `o` gives the running sums of the columns of a tile that nothing reads later, so that they may overwrite it."""
    if o.kind != "cumsum" or v.type[o.out].rank != 2 or o.args[0] not in owner or o.args[0] in v.carried:
        return False
    return v.type[o.args[0]] == v.type[o.out] and v.space(o.args[0]) == v.space(o.out) \
        and all(v.place[r] <= v.place[o] for r, _ in v.all_readers(o.args[0]))


def share_storage(v: StoredValues, k: Kernel, owner: dict[str, str]) -> None:
    """Let values of limited spaces share a buffer of their shape and dtype if they are never live at the same time.

    The inverse of a whole tile fixes the layout of its buffer: rows of 128 bytes. A product that reads along columns may make
    TileLang's compiler choose another layout. So such a value does not share a buffer with an inverse. Nor does a second operand
    read so share one with a tile that device code addresses (`DECAYED`). An identity matrix, which transposes a tile at the start
    of a kernel, shares none: a load would wait for that product, and later loads with it.
    """
    inverses = {owner[o.out] for o in v.ops if over(o, v.device)}
    across = {owner[x] for x in owner if not _along_rows(v, x)}
    blocks = {owner[a] for o in v.ops if o.kind in DECAYED for a in o.args[:2]}
    seconds = {owner[x] for x in owner if not _along_rows(v, x, first=False)}
    apart = ((inverses, across), (blocks, seconds))
    free: dict[tuple[str, tuple[int, ...], str], list[tuple[int, str]]] = {}  # buffers of a kind, and when each is free
    for name, (first, last) in sorted(_alive(v, k, owner).items(), key=lambda x: x[1]):
        t, space = v.type[name], v.space(name)
        if not v.device.spaces.get(space) or _is_identity(v, name):
            continue
        same = free.setdefault((space, t.shape(v.sizes), t.dtype), [])
        for n, (end, other) in enumerate(same):
            if end < first and not any(x & {name, other} and y & {name, other} for x, y in apart):
                same[n] = last, other
                for found in (x for pair in apart for x in pair if name in x):
                    found.add(other)
                _give(owner, name, other)
                break
        else:
            same.append((last, name))


def _alive(v: StoredValues, k: Kernel, owner: dict[str, str]) -> dict[str, tuple[int, int]]:
    """For each buffer without a carried value: its first definition and its last reader, in the loop or the kernel without
    one. Ops that run side by side have one number."""
    region = next(loops(k.body), k).body
    order = {o: n for n, o in enumerate(region) if isinstance(o, Op)}
    for after, o in pairwise(reversed(region)):
        if isinstance(o, Op) and isinstance(after, Op) and o.kind == after.kind and o.kind in SIDE_BY_SIDE:
            order[o] = order[after]
    out: dict[str, tuple[int, int]] = {}
    for o in region:
        if isinstance(o, Op) and o.out in owner and o.out not in v.carried:
            ends = [order.get(r, len(region)) for r, _ in v.all_readers(o.out)]
            first, last = out.get(owner[o.out], (order[o], 0))
            out[owner[o.out]] = first, max([last, order[o], *ends])
    return out


def _is_identity(v: StoredValues, name: str) -> bool:
    """Whether `name` is an identity matrix, of any dtype."""
    o = v.defs.get(name)
    while o and o.kind in ("cast", "move"):
        o = v.defs.get(o.args[0])
    return o is not None and o.kind == "eye"


def _along_rows(v: StoredValues, name: str, first: bool = True) -> bool:
    """Whether products read `name` along its rows: as a first operand that is not transposed, or as a second one that is. first:
    whether first operands count."""
    reads = [(r, n) for r, n in v.all_readers(name) if r.kind == "matmul" and (n == 1 or (n == 0 and first))]
    return not any(r.attr("ta") if n == 0 else not r.attr("tb") for r, n in reads)


def _give(owner: dict[str, str], old: str, new: str) -> None:
    """Let the values of `old`'s buffer use that of `new`."""
    for x in [x for x, name in owner.items() if name == old]:
        owner[x] = new
