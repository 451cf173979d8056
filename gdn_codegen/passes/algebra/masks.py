"""masks: replaces two nested masks by one.

strictly_lower(x * exp(lower(y, fill=-inf))) becomes x * exp(strictly_lower(y, fill=-inf)). Both are equal, because exp(-inf) is
0. One selection for each entry remains. It is inside the exponential; compilers turn a selection around an exponential into a
branch. The pass applies where neither the exponential nor its mask has another reader. All targets run it.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program, uses
from ..common import rebuild_kernels
from ..match import matched
from ..stage import takes


@takes("cut", "assigned")
def masks(p: Program) -> Program:
    """`p` with such pairs of masks replaced."""
    return rebuild_kernels(p, _Masks)


class _Masks:
    """The rule for one kernel. It drops the outer mask and makes the inner mask strict."""
    def __init__(self, k: Kernel) -> None:
        self.defs, self.count = {o.out: o for o in k.ops if o.out}, uses(k.body)
        found = {o.out: self.mask(o.args[0]) for o in self.defs.values() if o.kind == "strictly_lower" and not o.attr("fill")}
        self.outer = {name: inner for name, inner in found.items() if inner}
        self.inner = set(self.outer.values())
        self.named = {self.defs[name].args[0]: name for name in self.outer}  # value -> the masked value that it becomes

    def mask(self, name: str) -> str:
        """The mask inside the exponential that is a factor of `name`. "" if there is none."""
        o = self.defs.get(name)
        if o is None or self.count[name] != 1:
            return ""
        if o.kind == "mul":
            return next(filter(None, map(self.mask, o.args)), "")
        return o.args[0] if matched("exp(lower(x, fill=-inf))", o, self.defs) and self.count[o.args[0]] == 1 else ""

    def __call__(self, o: Op, b: Body) -> str | None:
        if o.out in self.outer:
            return o.args[0]
        if o.out in self.named:
            return b.op(o.kind, *o.args, name=self.named[o.out], line=o.line, agent=o.agent, **dict(o.attrs))
        if o.out in self.inner:
            return b.op("strictly_lower", *o.args, name=o.out, line=o.line, agent=o.agent, **dict(o.attrs))
        return None
