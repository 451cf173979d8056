"""`takes`: what stage a pass needs, and what stage it gives."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec

from ..ir.core import Program
from ..ir.stages import STAGES

P = ParamSpec("P")


class StageError(ValueError):
    """A pass was given a program of a stage that it does not take."""


@dataclass(frozen=True)
class Stages:
    """The stages of a program that a pass takes, and that of the program which it gives, "" for the one it took."""

    needs: tuple[str, ...]
    gives: str


#: Every pass, by name.
PASSES: dict[str, Stages] = {}


def takes(*needs: str, gives: str = "") -> Callable[[Callable[Concatenate[Program, P], Program]],
                                                    Callable[Concatenate[Program, P], Program]]:
    """Declare a pass, whose first argument is a program of a stage `needs`. What it returns gets stage `gives`.

    The pass raises StageError, which says what has to run first, for a program of another stage.
    """
    assert {*needs, gives or needs[0]} <= STAGES.keys()

    def declared(run: Callable[Concatenate[Program, P], Program]) -> Callable[Concatenate[Program, P], Program]:
        """The pass, which refuses a program of another stage by a StageError and sets the stage that it gives."""
        PASSES[run.__name__] = Stages(needs, gives)

        @wraps(run)
        def checked(p: Program, /, *args: P.args, **kwargs: P.kwargs) -> Program:
            if p.stage not in needs:
                raise StageError(f"pass {run.__name__}: got {p.name}, a program of stage {p.stage!r}; accepted: "
                                 f"{' or '.join(map(repr, needs))}. {_advice(p.stage, needs)}")
            done = run(p, *args, **kwargs)
            return replace(done, stage=gives) if gives and done.stage != gives else done
        return checked
    return declared


def _advice(stage: str, needs: tuple[str, ...]) -> str:
    """Which pass must run first, or which has ended the stage that is needed."""
    from . import pipelines  # noqa: F401  (every pass declares itself as it is imported)
    order = list(STAGES)
    if stage not in order or order.index(stage) < order.index(needs[0]):
        return f"Run {' or '.join(sorted(n for n, x in PASSES.items() if x.gives == needs[0]))} first."
    ended = [n for n, x in PASSES.items() if x.gives and needs[-1] in x.needs]
    return f"It comes too late: {' or '.join(sorted(ended))} has ended that stage."
