"""linear_part: the part of a walk's body that is linear in the state. `summaries` uses it for the factor M of S' = M S + N."""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Op
from ...ir.ops import TypeRuleError
from ...schedule.schedule import ScheduleError
from ..common import dead_code
from .parts import Parts


def linear_part(parts: Parts, b: Body) -> str:
    """Append what the state's next value needs of the walk's body, without terms that do not depend on the state. Returns its
    name. The state of `b` is a matrix, or a vector if all that happens to the state is that its rows are scaled."""
    linear = {parts.c.name: parts.c.name}  # a value that depends on the state -> its linear part
    columns: dict[str, str] = {}  # a view as a column -> its vector
    within = b.types[parts.c.name].dims[1:]
    for o in dead_code(tuple(o for o in parts.loop.body if isinstance(o, Op) and o.kind != "store"), {parts.c.next}):
        assert isinstance(o, Op)
        depends = [a in linear for a in o.args]
        if not any(depends):
            b.copy(o)
            columns |= {o.out: o.args[0]} if o.kind == "col" and not within else {}
            continue
        args = [linear.get(a, columns.get(a, a)) for a in o.args]
        if o.kind in ("add", "sub") and not all(depends):
            x = args[depends.index(True)]
            linear[o.out] = b.op("neg", x, name=o.out, line=o.line) if o.kind == "sub" and depends[1] else x
        # "rounded" counts as linear: the interpreter has it as the identity. It stands in x - rounded(x), which is taken of the
        # linear part itself. So products of that read it in two parts, too.
        elif o.kind in ("add", "sub", "neg", "rounded") or (o.kind == "mul" and not all(depends)) or (
                o.kind == "matmul" and depends == [False, True] and not o.attr("tb")):
            try:
                linear[o.out] = b.op(o.kind, *args, name=o.out, line=o.line, **dict(o.attrs))
            except TypeRuleError as e:
                raise _not_affine(parts, o) from e
        else:
            raise _not_affine(parts, o)
        if b.types[linear[o.out]].dims[1:] != within:
            raise _not_affine(parts, o)
    if parts.c.next not in linear:
        raise ScheduleError(f"{parts.where} needs a next state that depends on the state, and that of "
                            f"{parts.c.name} in {parts.p.name} does not")
    if linear[parts.c.next] == parts.c.name:  # an empty loop body has no text
        return b.op("mul", b.op("const", value=1.0), parts.c.name)
    return linear[parts.c.next]


def _not_affine(parts: Parts, o: Op) -> ScheduleError:
    return ScheduleError(f"{parts.where} needs a next state of which each column is affine in the same column of the "
                         f"state; {o.out} ({o.kind}, {o.line}) of {parts.p.name} is not")
