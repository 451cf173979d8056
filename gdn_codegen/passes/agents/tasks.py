"""tasks: finds the task of each op of a walk from the graph. schedule/agents.py lists the tasks.

- "state" or "output" is the task of an op that reads a carried value, or a value that depends on one. It is "state" if the op
  leads to a next carried value, or reads the present one directly. Casts and stores of such values have the task "state" too,
  because tiles cross between agents in 16 bit.
- A tile with as many rows as the carried value, and more than one warp group holds, is computed with the state, as its readers.
- A product onto which another product accumulates has that product's task, if this is "state" or "output".
- Stores of outputs, and of values whose task is neither "state" nor "output", have the task "store".
- A float32 tile that does not depend on the state is computed by the state's agents if they read it. So are its other readers.
"""
from __future__ import annotations

from ...ir.core import Kernel, Loop, Op, Program, loops, walk
from ...ir.ops import OPS
from ..storage.stored_values import is_view
from ..storage.summed import is_sum

INVERSE = "diag_inverse"
STATES = ("state", "output")


def leads(ops: list[Op], kind: str) -> set[str]:
    """The values on which an op of that kind depends."""
    out: set[str] = set()
    for o in reversed(ops):
        if o.kind == kind or o.out in out:
            out |= set(o.args)
    return out


def is_transposed(o: Op | None) -> bool:
    """Whether `o` loads a tile that its readers use transposed."""
    return o is not None and o.kind == "load" and bool(o.attr("transposed"))


def _is_wide(o: Op) -> bool:
    """Whether `o` computes a float32 tile. Such a tile does not cross between agents."""
    return o.type is not None and o.type.rank == 2 and 1 not in o.type.dims and o.type.dtype == "float32"


class Tasks:
    """The tasks of a kernel that walks the chunks. rows: the rows of a tile that one warp group holds.

    of: the task of each op. Views (columns, rows, masks, casts of transposed loads) have no task, because each reader makes its
    own. first: the values that lead to the next carried value, or read the present one.
    """

    def __init__(self, p: Program, k: Kernel, rows: int) -> None:
        self.p, self.sizes, self.rows = p, {**p.sizes, **k.sizes}, rows
        self.loop: Loop = next(loops(k.body))
        self.inside = list(walk(self.loop.body))
        self.defs = {o.out: o for o in self.inside if o.out}
        self.first = self._first()
        self.of = self._tasks()

    def view(self, o: Op) -> bool:
        """Whether each reader of `o` makes its own copy."""
        return is_view(o) or (o.kind == "cast" and is_transposed(self.defs.get(o.args[0])))

    def tall(self, o: Op) -> bool:
        """Whether `o` computes a tile with as many rows as a carried value, and more than one warp group holds."""
        if not o.out or o.kind == "load" or self.view(o) or o.type is None or o.type.rank != 2:
            return False
        carried = {c.type.dims[0] for c in self.loop.carried if c.type.rank == 2}
        return o.type.dims[0] in carried and o.type.shape(self.sizes)[0] > self.rows

    def _first(self) -> set[str]:
        """The values that lead to a next carried value, or read the present one."""
        first = {c.next for c in self.loop.carried}
        first |= {o.out for o in self.inside if o.out and set(o.args) & {c.name for c in self.loop.carried}}
        for o in reversed(self.inside):
            if o.out in first:
                first |= set(o.args)
        return first

    def _tasks(self) -> dict[Op, str]:
        """The task of each op in the loop, from its dependences on carried values and on inverses."""
        depends = {c.name for c in self.loop.carried}
        solved: set[str] = set()
        sums: dict[str, Op] = {}  # accumulator -> the product onto it
        for o in self.inside:
            if depends & set(o.args) or self.tall(o):
                depends.add(o.out)
            elif o.kind == INVERSE or solved & set(o.args):
                solved.add(o.out)
            if o.kind == "matmul" and len(o.args) == 3:
                sums[o.args[2]] = o
        out: dict[Op, str] = {}
        inverses = {o.out for o in self.inside if o.kind == INVERSE}
        for o in reversed(self.inside):
            if self.view(o):
                continue
            onto = out.get(sums[o.out], "") if o.kind == "matmul" and o.out in sums else ""
            if o.kind == "load":
                t = self.p.tensor(o.attr("tensor"))
                out[o] = "load_numbers" if t.index == "token" and len(t.dims) == 1 else "load"
            elif o.kind == "store" and (self.p.tensor(o.attr("tensor")).index == "token" or o.args[0] in inverses):
                out[o] = "store"
            elif set(o.args) & depends or self.tall(o):
                leads_on = o.out in self.first or (o.kind in ("cast", "store") and set(o.args) <= self.first)
                out[o] = "state" if leads_on else "output"
            elif onto in STATES:
                out[o] = onto
            else:
                out[o] = self._without_state(o, o.out in solved, out)
        return self._refined(self._followed(out))

    def _refined(self, tasks: dict[Op, str]) -> dict[Op, str]:
        """The tasks, where the state's agents hold more rows than tiles of tokens have, and where gates are apart."""
        several = any(c.type.rank == 2 and c.type.shape(self.sizes)[0] > self.rows for c in self.loop.carried)
        out, summed = dict(tasks), set[str]()  # summed: what depends on a sum of a tile
        for o in (o for o in self.inside if o.out and o.kind != "load"):
            made = self.defs.get(o.args[0]) if o.args else None
            of_tile = is_sum(o) and made is not None and made.type is not None and made.type.rank == 2
            if of_tile or summed & set(o.args):
                summed.add(o.out)
            if o not in tasks or o.type is None:
                continue
            if o.type.rank == 2 or of_tile:
                if several and not self.tall(made if of_tile and made is not None else o) and (of_tile or tasks[o] in STATES):
                    out[o] = "tokens"
                elif several and of_tile:
                    out[o] = tasks[made] if made in tasks else tasks[o]
            elif several and (o.out in summed or tasks[o] in STATES):
                out[o] = "vectors"
            elif tasks[o] == "rest":
                out[o] = "gates"
        made_apart = {o.out for o, task in out.items() if o.out and task not in STATES}
        return out | {o: "store" for o in self.inside if o.kind == "store" and o.args[0] in made_apart}

    def _followed(self, tasks: dict[Op, str]) -> dict[Op, str]:
        """The tasks after readers of a float32 tile of the state's agents have moved to these agents too."""
        there: set[str] = set()
        out = dict(tasks)
        for o in self.inside:
            if o in tasks and tasks[o] in ("rest", "solved") and there & set(o.args):
                out[o] = "state" if o.out in self.first else "output"
            if o in tasks and out[o] in STATES and _is_wide(o):
                there.add(o.out)
        return out

    def _without_state(self, o: Op, solved: bool, known: dict[Op, str]) -> str:
        """The task of an op that does not depend on a carried value. known: the tasks of later ops."""
        if o.kind == INVERSE:
            return "inverse"
        if _is_wide(o) and (OPS[o.kind].elementwise or o.kind == "matmul"):
            readers = {known[r] for r in self.inside if o.out in r.args and r in known} & {*STATES}
            if readers:
                return "state" if "state" in readers else "output"
        return "solved" if solved else "rest"
