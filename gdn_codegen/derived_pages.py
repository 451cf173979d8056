"""Pages that are derived from another page: with its states before each chunk, or the page of its gradients.

`find` takes the name of a page, or such a name that ends in a dot and one of KINDS.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property

from . import algorithms
from .ir.core import Program
from .ir.differentiate import differentiate, saving
from .ir.page import Algorithm
from .ir.stored import by_token
from .ir.types import Dim

#: The kinds of pages that are derived from another one.
KINDS: dict[str, Callable[[Program], Program]] = {
    "saving": saving, "states": lambda p: saving(p, outputs=False), "gradient": differentiate,
    "solved_states": lambda p: saving(p, outputs=False, solved="solutions"),
    "solved_gradient": lambda p: differentiate(p, "solutions"),
    "inverse_states": lambda p: saving(p, outputs=False, solved="inverses"),
    "inverse_gradient": lambda p: differentiate(p, "inverses"),
    "stored_states": lambda p: saving(p, outputs=False, solved="operands"),
    "stored_gradient": lambda p: differentiate(p, "operands"),
    "bounded_states": lambda p: saving(by_token(p), outputs=False, solved="bounds"),
    "bounded_gradient": lambda p: differentiate(by_token(p), "bounds")}
#: Kinds in which an op `boundary` comes after each input form.
WITH_BOUNDARIES = {k for k in KINDS if k.endswith("gradient") or k.startswith(("stored", "bounded"))}


class Derived(Algorithm):
    """A page that is derived from another one.

    of: that page. kind: a key of KINDS. forms: the input forms of a contract, as pairs (name, form), which become a part of the
    page before it is derived. So gradients are those of what callers pass.
    """

    def __init__(self, of: Algorithm, kind: str, forms: tuple[tuple[str, str], ...] = ()) -> None:
        """Derives nothing yet."""
        self.of, self.kind, self.forms = of, kind, forms
        self.fn, self.name, self.scalars = of.fn, f"{of.name}_{kind}", of.scalars
        first = of.doc.splitlines()[0] if of.doc else of.name
        self.doc = {"saving": f"{first} It also returns the states before each chunk.",
                    "states": f"The states before each chunk, and the final ones. {first}",
                    "solved_states": f"The states before each chunk, what solves its system, and the final states. {first}",
                    "inverse_states": f"The states before each chunk, its inverse and solution, and the final states. {first}",
                    "stored_states": "The states before each chunk, operands of products of each chunk, and the final states. "
                                     f"{first}",
                    "gradient": f"The gradient of a loss by the inputs. {first}",
                    "solved_gradient": f"The gradient of a loss by the inputs. It reads what solves each system. {first}",
                    "inverse_gradient": f"The gradient of a loss by the inputs. It reads inverses and solutions. {first}",
                    "stored_gradient": f"The gradient of a loss by the inputs. It reads operands of products. {first}",
                    "bounded_states": "The states before each chunk, operands of products of each chunk, bounds of what tokens "
                                      f"forget, and the final states. {first}",
                    "bounded_gradient": "The gradient of a loss by the inputs. It reads operands of products, and bounds of what "
                                        f"tokens forget. {first}"}[kind]
        self._where = f"{of._where}, {kind}"

    @cached_property
    def _traced(self) -> Program:
        """The program that `trace` gives."""
        from .passes.abi.caller_inputs import caller_inputs
        from .schedule.contract import Contract
        p = self.of.trace()
        if self.forms:
            p = caller_inputs(p, Contract(inputs=self.forms), scaled=self.kind not in WITH_BOUNDARIES)
        return KINDS[self.kind](p)

    @cached_property
    def inputs(self) -> dict[str, tuple[str, tuple[Dim, ...]]]:  # type: ignore[override]
        """The heads and dims of each input."""
        return {t.name: (t.heads, t.dims) for t in self.trace().role("input") if t.index in ("token", "head")}

    @cached_property
    def states(self) -> dict[str, tuple[Dim, ...]]:  # type: ignore[override]
        """The dims of each state."""
        return {c.name: c.type.dims for c in self.trace().walk.carried}

    @cached_property
    def defaults(self) -> dict[str, float]:  # type: ignore[override]
        """The defaults of numbers of value heads."""
        return {t.name: float(t.fill) for t in self.trace().role("input") if t.index == "head" and t.fill}

    @cached_property
    def forgets(self) -> str:  # type: ignore[override]
        """The value that bounds what tokens forget."""
        return self.trace().forgets


@cache
def derived(page: Algorithm, kind: str, forms: tuple[tuple[str, str], ...]) -> Derived:
    """The page of a kind that is derived from `page`. Arguments as for Derived."""
    return Derived(page, kind, forms)


def beside(spec: str | Algorithm, kind: str) -> str | Algorithm:
    """What names another page derived from the same one as `spec` (`find`), or that one itself if kind is ""."""
    if isinstance(spec, Algorithm):
        of = spec.of if isinstance(spec, Derived) else spec
        return derived(of, kind, ()) if kind else of
    base = without_kind(spec)
    return f"{base}.{kind}" if kind else base


def without_kind(spec: str) -> str:
    """The name of a page of which `spec` names one that is derived, or `spec`."""
    base, _, kind = spec.rpartition(".")
    return base if kind in KINDS else spec


def find(spec: str | Algorithm, forms: tuple[tuple[str, str], ...] = ()) -> Algorithm:
    """The page called `spec`, or that page itself, as `algorithms.find`. forms: of a contract, for a derived page."""
    if isinstance(spec, Derived):
        return derived(spec.of, spec.kind, forms)
    if not isinstance(spec, str) or (base := without_kind(spec)) == spec:
        return algorithms.find(spec)
    return derived(algorithms.find(base), spec.rpartition(".")[2], forms)
