"""Questions that forms ask about the ops of a walk."""
from __future__ import annotations

from ....ir.body import Body
from ....ir.core import Line, Loop, Op


def ops(loop: Loop) -> list[Op]:
    """The ops of a loop's body, without those of inner loops."""
    return [o for o in loop.body if isinstance(o, Op)]


def waiting(loop: Loop) -> set[str]:
    """The carried values and all values that depend on one."""
    out = {c.name for c in loop.carried}
    for o in ops(loop):
        if out & set(o.args):
            out.add(o.out)
    return out


def is_plain(o: Op) -> bool:
    """Whether `o` is a product of two tiles, neither of them transposed, without an accumulator."""
    return o.kind == "matmul" and len(o.args) == 2 and not o.attr("ta") and not o.attr("tb")


def factors(name: str, defs: dict[str, Op]) -> list[str]:
    """The factors of an elementwise product. For another value, the value itself."""
    o = defs.get(name)
    return [name] if o is None or o.kind != "mul" else [f for a in o.args for f in factors(a, defs)]


def product(b: Body, values: list[str], line: Line) -> str:
    """Append the elementwise product of `values`."""
    x, *rest = values
    for f in rest:
        x = b.op("mul", x, f, line=line)
    return x
