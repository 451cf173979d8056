"""`takes`: declares which stages a pass accepts and which stage its result has."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec

from ..ir.core import Program
from ..ir.stages import STAGES

P = ParamSpec("P")


class StageError(ValueError):
    """A pass was given a program of a stage that it does not accept."""


@dataclass(frozen=True)
class Stages:
    """needs: the stages that a pass accepts. gives: the stage of its result, "" if the stage does not change."""

    needs: tuple[str, ...]
    gives: str


#: Every pass, by name.
PASSES: dict[str, Stages] = {}


def takes(*needs: str, gives: str = "") -> Callable[[Callable[Concatenate[Program, P], Program]],
                                                    Callable[Concatenate[Program, P], Program]]:
    """Declare a pass. needs: the stages that it accepts. gives: the stage of its result, "" if the stage does not change.

    For a program of another stage, the pass raises StageError. The message names the pass that must run first.
    """
    assert {*needs, gives or needs[0]} <= STAGES.keys()

    def declared(run: Callable[Concatenate[Program, P], Program]) -> Callable[Concatenate[Program, P], Program]:
        """The pass with a check of the stage before it runs."""
        PASSES[run.__name__] = Stages(needs, gives)

        @wraps(run)
        def checked(p: Program, /, *args: P.args, **kwargs: P.kwargs) -> Program:
            require(run.__name__, p, *needs)
            done = run(p, *args, **kwargs)
            return replace(done, stage=gives) if gives and done.stage != gives else done
        return checked
    return declared


def require(name: str, p: Program, *needs: str) -> None:
    """Raise StageError unless `p` has one of the stages `needs`. name: of the pass."""
    if p.stage not in needs:
        raise StageError(f"pass {name}: got {p.name}, a program of stage {p.stage!r}; accepted: {' or '.join(map(repr, needs))}. "
                         f"{_advice(p.stage, needs)}")


def _advice(stage: str, needs: tuple[str, ...]) -> str:
    """Which pass must run first, or which pass has ended the needed stage."""
    order = list(STAGES)
    if stage not in order or order.index(stage) < order.index(needs[0]):
        return f"Run {' or '.join(sorted(n for n, x in PASSES.items() if x.gives == needs[0]))} first."
    ended = [n for n, x in PASSES.items() if x.gives and needs[-1] in x.needs]
    return f"It comes too late: {' or '.join(sorted(ended))} has ended that stage."
