"""Values of a page: its function runs once, and their operators record ops."""
from __future__ import annotations

import sys
from collections.abc import Iterable
from numbers import Real
from types import FrameType
from typing import Any

from .body import Body
from .core import Line, Op
from .ops import TypeRuleError
from .types import Tile


class Trace:
    """The ops that a page has recorded so far. filename: of the page, whose lines ops have."""

    def __init__(self, filename: str) -> None:
        self.body = Body()
        self.filename = filename

    def line(self) -> Line:
        """The line of the page that runs now."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.filename:
            frame = frame.f_back
        return Line(frame.f_lineno if frame is not None else 0)


class Value:
    """A tile in an algorithm's page. It supports + - * / @, -x, abs(x), x.T as an operand of @, x[:, None] and x[None, :]."""

    def __init__(self, trace: Trace, name: str, transposed: bool = False) -> None:
        self._trace, self._name, self._transposed = trace, name, transposed

    @property
    def type(self) -> Tile:
        """The dims and dtype of the tile."""
        return self._trace.body.types[self._name]

    @property
    def T(self) -> Value:
        """The transpose. It may only be an operand of @."""
        return Value(self._trace, self._name, not self._transposed)

    def __getitem__(self, key: Any) -> Value:
        known = not any(isinstance(x, Value) for x in (key if isinstance(key, tuple) else (key,)))
        if known and key == (slice(None), None):
            return apply("col", self)
        if known and key == (None, slice(None)):
            return apply("row", self)
        raise TypeRuleError(f"got {self._name}[{key!r}]; accepted: x[:, None] (a column), x[None, :] (a row), and "
                            "last(x) for the entry or row of the last token")

    def __repr__(self) -> str:
        return self._name

    def __matmul__(self, other: Value) -> Value:
        t = self._trace
        if not isinstance(other, Value):
            raise TypeRuleError(f"@ takes two tiles; got {other!r}")
        return Value(t, t.body.op("matmul", self._name, other._name, line=t.line(), ta=self._transposed,
                                  tb=other._transposed))

    def __add__(self, o: Any) -> Value: return apply("add", self, o)
    def __radd__(self, o: Any) -> Value: return apply("add", o, self)
    def __sub__(self, o: Any) -> Value: return apply("sub", self, o)
    def __rsub__(self, o: Any) -> Value: return apply("sub", o, self)
    def __mul__(self, o: Any) -> Value: return apply("mul", self, o)
    def __rmul__(self, o: Any) -> Value: return apply("mul", o, self)
    def __truediv__(self, o: Any) -> Value: return apply("div", self, o)
    def __rtruediv__(self, o: Any) -> Value: return apply("div", o, self)
    def __neg__(self) -> Value: return apply("neg", self)
    def __abs__(self) -> Value: return apply("maximum", self, -self)

    __hash__ = object.__hash__
    def __eq__(self, o: object) -> Any: raise self._unknown(f"== {_shown(o)}")
    def __ne__(self, o: object) -> Any: raise self._unknown(f"!= {_shown(o)}")
    def __lt__(self, o: object) -> Any: raise self._unknown(f"< {_shown(o)}")
    def __le__(self, o: object) -> Any: raise self._unknown(f"<= {_shown(o)}")
    def __gt__(self, o: object) -> Any: raise self._unknown(f"> {_shown(o)}")
    def __ge__(self, o: object) -> Any: raise self._unknown(f">= {_shown(o)}")
    def __bool__(self) -> bool: raise self._unknown("as a truth value")

    def _unknown(self, what: str) -> TypeRuleError:
        return TypeRuleError(f"got {self._name} {what}: a page runs once, to record ops, when no value is known, so it cannot "
                             "compare or branch on data or on a caller's number; accepted: arithmetic, maximum(x, y), masks, "
                             "or a page for each case")


def _shown(x: object) -> str:
    return x._name if isinstance(x, Value) else repr(x)


def apply(kind: str, *args: Any, **attrs: Any) -> Value:
    """Record an op on values and numbers, and return its value. TypeRuleError for operands of another kind."""
    trace = next((a._trace for a in args if isinstance(a, Value)), None)
    if trace is None:
        raise TypeRuleError(f"{kind}: none of its operands is a tile")
    line, names = trace.line(), []
    for a in args:
        if isinstance(a, Real):  # numpy's numbers, too
            names.append(trace.body.op("const", line=line, value=float(a)))
            continue
        if not isinstance(a, Value):
            raise TypeRuleError(f"{kind}: operand {a!r} is neither a tile nor a number")
        if a._transposed:
            raise TypeRuleError(f"{kind}: x.T may only be an operand of @")
        names.append(a._name)
    return Value(trace, trace.body.op(kind, *names, line=line, **attrs))


def behind(values: Iterable[Value]) -> dict[str, Op]:
    """The ops on which values of one page depend, with their own, by the names of their values."""
    ops, todo, found = dict[str, Op](), [], dict[str, Op]()
    for v in values:
        ops = ops or {o.out: o for o in v._trace.body.stmts if isinstance(o, Op)}
        todo.append(v._name)
    while todo:
        o = ops.get(todo.pop())
        if o is not None and o.out not in found:
            found[o.out] = o
            todo += o.args
    return found
