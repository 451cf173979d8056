"""live_ranges: changes a kernel so that `pack` needs less space: it adds copies of carried values, and loads values later."""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.body import Body
from ...ir.core import Kernel, Loop, Op, Stmt
from ...ir.ops import OPS


def late_loads(k: Kernel) -> Kernel:
    """The kernel with each load, and the `valid` after it, directly before its first reader."""
    return replace(k, body=_late(k.body))


def _late(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The body with late loads."""
    held: list[Op] = []
    out: list[Stmt] = []

    def release(names: set[str]) -> None:
        """Append the held loads of these names, after the loads that they depend on."""
        for o in [o for o in held if o.out in names]:
            if o in held:
                release(set(o.args))
                held.remove(o)
                out.append(o)

    for s in body:
        if isinstance(s, Loop):
            release({o.out for o in held})
            out.append(replace(s, body=_late(s.body)))
        elif s.kind == "load" or (s.kind == "valid" and any(o.out in s.args for o in held)):
            held.append(s)
        else:
            release(set(s.args))
            out.append(s)
    release({o.out for o in held})
    return tuple(out)


def with_copies(k: Kernel, device: Cores) -> Kernel:
    """The kernel with copies of carried values where the next value cannot use the carried value's buffer.

    That is so if the carried value has readers after the next value is computed, if the loop does not compute the next value,
    or if an op computes it that cannot overwrite. Then the loop ends with a copy of the next value.
    """
    def each(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The body with copies in its loops."""
        out: list[Stmt] = []
        for s in body:
            if not isinstance(s, Loop):
                out.append(s)
                continue
            inner = list(each(s.body))
            carried = []
            for c in s.carried:
                ops = [o for o in inner if isinstance(o, Op)]
                if c.slots > 1:  # the next value has its own slot
                    carried.append(c)
                    continue
                made = next((n for n, o in enumerate(ops) if o.out == c.next), -1)
                late = any(c.name in _through_views(ops, o) for o in ops[made + 1:])
                if late or made < 0 or ops[made].kind not in OPS or (not OPS[ops[made].kind].elementwise \
                        and ops[made].kind != "load"):
                    b, first = Body(types={c.next: c.type}), device.agents[0]
                    b.op("move", c.next, name=f"{c.next}_kept", space=device.home[first], agent=first)
                    inner += b.finish()
                    c = replace(c, next=f"{c.next}_kept")
                carried.append(c)
            out.append(replace(s, carried=tuple(carried), body=tuple(inner)))
        return tuple(out)
    return replace(k, body=each(k.body))


def _through_views(ops: list[Op], o: Op) -> set[str]:
    """The operands of `o`. A column or row is replaced by its vector."""
    defs = {x.out: x for x in ops if x.kind in ("col", "row")}
    return {defs[a].args[0] if a in defs else a for a in o.args}
