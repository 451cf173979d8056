"""`Body` collects the ops of a kernel: passes and traces of pages build with it."""
from __future__ import annotations

from typing import Any

from .core import NO_LINE, Line, Op, Stmt
from .names import name_of
from .ops import OPS, TypeRuleError, infer
from .types import Tensor, Tile


class Body:
    """Collects ops. A pure op that is appended a second time gives the value of the first (common subexpressions)."""

    def __init__(self, tensors: dict[str, Tensor] | None = None, types: dict[str, Tile] | None = None) -> None:
        self.stmts: list[Stmt] = []
        self.types: dict[str, Tile] = dict(types or {})
        self.tensors = dict(tensors or {})
        self._seen: dict[Any, str] = {}
        self.taken: set[str] = set(self.types)

    def fresh(self, hint: str) -> str:
        """An unused name: `hint`, or else `hint_2`, `hint_3`..."""
        return free(hint, self.taken)

    def op(self, kind: str, *args: str, name: str = "", line: Line = NO_LINE, agent: str = "", buffer: str = "",
           **attrs: Any) -> str:
        """Append an op, unless an equal pure op exists, and return the name of its value. TypeRuleError for wrong operands."""
        kept = _attrs(attrs)
        if not name and (equal := self._seen.get((kind, args, kept, agent))):
            return equal
        out_type = self._type(kind, args, kept)
        effect = kind in OPS and OPS[kind].effect in ("write", "sync")
        out = "" if effect else (name or self.fresh(name_of(kind, args, attrs)))
        return self._append(Op(kind, out, args, kept, None if effect else out_type, line, agent, buffer), out_type)

    def _type(self, kind: str, args: tuple[str, ...], attrs: tuple[tuple[str, Any], ...]) -> Tile:
        """The type of the value of an op. TypeRuleError for wrong operands."""
        if kind == "load":
            of = dict(attrs)
            return self.tensors[of["tensor"]].moved(of.get("heads", 0), bool(of.get("transposed")), bool(of.get("last")),
                                                    bool(of.get("one_token")), of.get("tokens", 0), of.get("piece"))
        missing = [a for a in args if a not in self.types]
        if missing:
            raise TypeRuleError(f"{kind}: operand {missing[0]!r} is not defined before it is read")
        return infer(kind, tuple([self.types[a] for a in args]), attrs)

    def _append(self, o: Op, type: Tile) -> str:
        """Append an op, and return the name of its value. type: of its value."""
        self.taken.add(o.out)
        self.stmts.append(o)
        if o.out:
            self.types[o.out] = type
            if o.kind in OPS and OPS[o.kind].effect == "pure":
                self._seen[o.kind, o.args, o.attrs, o.agent] = o.out
        return o.out

    def equal(self, kind: str, *args: str, agent: str = "", **attrs: Any) -> str:
        """The value of an equal pure op of this body, "" if there is none."""
        return self._seen.get((kind, args, _attrs(attrs), agent), "")

    def copy(self, o: Op, names: dict[str, str] | None = None) -> str:
        """Append `o` with its operands renamed. The name of its value stays."""
        o = o.renamed(names or {})
        type = self._type(o.kind, o.args, o.attrs)
        return self._append(o if type == o.type or not o.out else o.changed(type=type), type)

    def finish(self) -> tuple[Stmt, ...]:
        """The statements so far."""
        return tuple(self.stmts)


def _attrs(attrs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as an op holds them: sorted, without those that are None or False."""
    return tuple(sorted((k, v) for k, v in attrs.items() if v is not None and v is not False))


def free(name: str, taken: set[str]) -> str:
    """The name, or else name_2, name_3..., whichever is not taken yet. It then is."""
    stem, n = name, 1
    while name in taken:
        n += 1
        name = f"{stem}_{n}"
    taken.add(name)
    return name
