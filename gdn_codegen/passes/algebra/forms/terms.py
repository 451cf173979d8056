"""What forms ask about a walk's ops."""
from __future__ import annotations

from ....ir.builder import Body
from ....ir.core import Loop, Op


def ops(loop: Loop) -> list[Op]:
    """The ops of a loop's body, inner loops left out."""
    return [o for o in loop.body if isinstance(o, Op)]


def waiting(loop: Loop) -> set[str]:
    """The carried values, and what depends on one."""
    out = {c.name for c in loop.carried}
    for o in ops(loop):
        if out & set(o.args):
            out.add(o.out)
    return out


def is_plain(o: Op) -> bool:
    """A product of two tiles as they lie."""
    return o.kind == "matmul" and len(o.args) == 2 and not o.attr("ta") and not o.attr("tb")


def factors(name: str, defs: dict[str, Op]) -> list[str]:
    """The factors of a value, which is one itself if it is no product."""
    o = defs.get(name)
    return [name] if o is None or o.kind != "mul" else [f for a in o.args for f in factors(a, defs)]


def product(b: Body, values: list[str], line: int) -> str:
    """Append the product of `values`."""
    x, *rest = values
    for f in rest:
        x = b.op("mul", x, f, line=line)
    return x
