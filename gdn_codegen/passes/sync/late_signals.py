"""late_signals: lets an agent signal that it has written a ring while its next product runs. A part of `mbarriers`.

A signal at the end of an iteration, and the fence before it, delay the agent's next iteration. If nothing but stores waits for
the signal, it can come in the next iteration, behind an asynchronous product. That of the last iteration comes after the loop.

Example:
    before:  loop: y = a product is begun; drain; o = ...; fence; signal o_ready
    after:   loop: y = a product is begun; (fence; signal o_ready, of the iteration before); drain; o = ...
             fence; signal o_ready
"""
from __future__ import annotations

from ...ir.core import Op
from ...ir.ops import LATE


def late_place(ops: list[Op], last: Op, users: list[Op], slots: int) -> tuple[Op, dict[str, bool]]:
    """The op after which the agent of `last` signals that it has written a ring, and the attributes of that signal: `last` and
    none, or the first of the agent's asynchronous products, with those that begin at once, and `late`.

    ops: of the loop. last: the write. users: the readers. slots: of the ring.
    """
    mine = [o for o in ops if o.agent == last.agent and (o.buffer or not o.out)]
    start = next((o for o in mine if o.attr("asynchronous")), None)
    if start is None or slots > 1 or any(r.kind != "store" for r in users) or mine[-1] is not last:
        return last, {}
    at = mine.index(start)
    while mine[at + 1].attr("asynchronous"):
        at += 1
    return mine[at], {LATE: True}
