"""One rule, and a list of rules to which modules add theirs."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....ir.core import Op
from ...match import Found, build, matches

if TYPE_CHECKING:
    from ..terms import Terms

Apply = Callable[["Terms", Op], "str | None"]
Condition = Callable[["Terms", Found], bool]


@dataclass(frozen=True)
class Rule:
    """name: what the rule does. kinds: the ops that it may replace. apply: gives the value that replaces an op, or None."""

    name: str
    kinds: tuple[str, ...]
    apply: Apply


class Rules(list[Rule]):
    """Rules in the order in which they are tried."""

    def rule(self, name: str, old: str, new: str, kind: str, when: Condition = lambda t, x: True, ordered: bool = False) -> None:
        """Add a rule: an op `kind` that matches the pattern `old` becomes `new` if `when` holds. ordered: operands keep their
        order."""
        def apply(t: Terms, o: Op) -> str | None:
            found = next((x for x in matches(old, o, t.defs, ordered) if when(t, x)), None)
            return None if found is None else build(new, found, lambda kind, args, attrs: t.make(kind, args, attrs, o.line))
        self.append(Rule(name, (kind,), apply))

    def written(self, name: str, *kinds: str) -> Callable[[Apply], Apply]:
        """Add a rule whose replacement is a function. name: what it does. kinds: the ops that it may replace."""
        def add(apply: Apply) -> Apply:
            self.append(Rule(name, kinds, apply))
            return apply
        return add
