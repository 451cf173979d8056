"""residuals: lets products read an operand in two parts, its rounded value and the rest. All targets run it.

An operand of a product is rounded to 16 bits. What that leaves is rounded once more, and is the operand of a second product. The
sum of both is as exact as an operand with twice the digits. `Schedule.residuals` names the values.

Example, for the value X:
    before:  U = X + M @ X
    after:   X_rest = X - rounded(X);  U = X + M @ X_rest + M @ X

The small product comes first in a sum, so that `accumulate` makes a chain of both.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Op, Program, Stmt, uses
from ...schedule.schedule import Schedule, ScheduleError
from ..common import walk_body, with_walk_body
from ..cut.roles import roles
from ..stage import takes


@takes("traced")
def residuals(p: Program, s: Schedule, dtype: str) -> Program:
    """`p` with such products. `p` itself if `s` names no value of the page, or operands have all digits. dtype: of operands.
    ScheduleError for a name that the page does not have."""
    if not s.residuals or dtype == "float32":
        return p
    ops = [o for o in p.walk.body if isinstance(o, Op)]
    of, known = roles(p), {o.out for o in ops} | {c.name for c in p.walk.carried}
    chosen = {n for word in s.residuals.split(",") for n in (of[word[1:]] if word.startswith("@") else (word,))}
    if chosen - known:
        raise ScheduleError(f"schedule {s.name}: residuals has {', '.join(sorted(chosen - known))}; accepted are roles, and "
                            f"values of {p.name}")
    read = {a for o in ops if o.kind == "matmul" for a in o.args}
    if unread := sorted(set(s.residuals.split(",")) & known - read):
        raise ScheduleError(f"schedule {s.name}: residuals has {', '.join(unread)}, which no product of {p.name} reads; accepted "
                            "are values that one reads")
    return with_walk_body(p, _Parts(ops, walk_body(p), chosen, {c.next for c in p.walk.carried}).body())


class _Parts:
    """The ops of a walk, in which products read the values `chosen` in two parts. carried: values that the next chunk gets."""

    def __init__(self, ops: list[Op], b: Body, chosen: set[str], carried: set[str]) -> None:
        self.ops, self.b, self.chosen = ops, b, chosen
        count = uses(tuple(ops))
        self.made = {o.out: o for o in ops if o.kind == "matmul" and chosen & set(o.args)}
        #: Products that one sum reads, and nothing else. It adds their small products as well.
        self.summed = {a for o in ops if o.kind in ("add", "sub") for a in o.args
                       if a in self.made and count[a] == 1 and a not in carried}

    def body(self) -> tuple[Stmt, ...]:
        """All ops, in order."""
        b = self.b
        for o in self.ops:
            if o.out in self.made and o.out not in self.summed:
                whole = b.op(o.kind, *o.args, line=o.line, **dict(o.attrs))
                self.add(o, [(x, False) for x in (*self.small(o), whole)])
            elif o.kind in ("add", "sub") and self.summed & set(o.args):
                terms: list[tuple[bool, int, str]] = []  # whether it has a minus sign, its place, the value
                for n, a in enumerate(o.args):
                    minus, product = o.kind == "sub" and n == 1, self.made[a] if a in self.summed else None
                    terms += [(minus, 1, x) for x in self.small(product)] if product else []
                    terms.append((minus, 2 if product else 0, a))
                self.add(o, [(x, minus) for minus, _, x in sorted(terms, key=lambda x: x[:2])])
            else:
                b.copy(o)
        return b.finish()

    def small(self, o: Op) -> list[str]:
        """The products of `o` with what rounding leaves of each of its operands."""
        b, out = self.b, []
        for n, a in enumerate(o.args):
            if a in self.chosen:
                rest = b.equal("sub", a, b.op("rounded", a, line=o.line)) or b.op(
                    "sub", a, b.op("rounded", a, line=o.line), line=o.line, name=b.fresh(f"{a}_rest"))
                out.append(b.op("matmul", *o.args[:n], rest, *o.args[n + 1:], line=o.line, **dict(o.attrs)))
        return out

    def add(self, o: Op, terms: list[tuple[str, bool]]) -> None:
        """Compute `o` as the sum of terms, the last ones with a minus sign if they say so."""
        total = terms[0][0]
        for n, (x, minus) in enumerate(terms[1:], 2):
            total = self.b.op("sub" if minus else "add", total, x, line=o.line, name=o.out if n == len(terms) else "")
