"""block_agents: the agents of a thread block: which assignment a walk uses, and the threads and registers of each agent.
`warp_groups` uses it.

The agent of the state has one warp group for each `Groups.rows` rows of the carried values.
"""
from __future__ import annotations

from collections.abc import Collection

from ...devices import Groups
from ...ir.core import Agent
from ...ir.types import GROUP, WARP, WARPS_OF_GROUP
from ...schedule.agents import ASSIGNMENTS, DEFAULTS, Assignment
from ...schedule.schedule import Schedule, ScheduleError
from .tasks import Tasks


def assignment(tasks: Tasks, s: Schedule, where: str) -> Assignment:
    """The assignment that the schedule names, or the first default one that has all tasks of a kernel. where: the kernel, for
    errors. ScheduleError if there is none."""
    needed = dict.fromkeys(tasks.of.values())
    options = (ASSIGNMENTS[s.agents],) if s.agents else DEFAULTS
    for x in options:
        lacks = [r for r in needed if r not in x.agent_of and r != "store"]
        if not lacks:
            return x
    values = ", ".join(f"{o.out or o.kind} ({r})" for o, r in tasks.of.items() if r in lacks)
    raise ScheduleError(f"{where}: agents={options[-1].name} has no agent for {values}; accepted: an assignment with these tasks")


def block_agents(plan: Assignment, tasks: Tasks, d: Groups, used: Collection[str], where: str) -> tuple[Agent, ...]:
    """The agents of `plan` that are used, with their threads and registers. where: the kernel, for errors.

    ScheduleError if the block has too few threads or registers, or if the carried values have a number of rows that warp groups
    cannot hold.
    """
    rows = _rows(plan, tasks, d, where)
    out: list[Agent] = []
    for a in (a for a in plan.agents if a.name in used):
        threads = WARP * (a.warps or WARPS_OF_GROUP * (rows // d.rows))
        out.append(Agent(a.name, sum(x.threads for x in out), threads, a.registers, a.slots,
                         a.warps if a.in_turns else 1))
    threads = sum(a.threads for a in out)
    registers = sum(GROUP * max((a.registers for a in out if a.first < n + GROUP and n < a.first + a.threads), default=0)
                    for n in range(0, threads, GROUP))  # all warps of a warp group have the same number of registers
    if threads > d.threads or registers > d.register_file:
        each = ", ".join(f"{a.name} {a.threads} threads of {a.registers} registers" for a in out)
        raise ScheduleError(f"{where}: agents={plan.name} takes {threads} threads and {registers} registers ({each}); a block "
                            f"has {d.threads} and {d.register_file}; with v_block={d.rows} the state needs one warp group")
    return tuple(out)


def _rows(plan: Assignment, tasks: Tasks, d: Groups, where: str) -> int:
    """The rows of the carried values. ScheduleError if warp groups cannot hold as many."""
    carried = tasks.loop.carried
    heights = sorted({(c.type.shape(tasks.sizes) or (1,))[0] for c in carried})
    rows = heights[0]
    if len(heights) == 1 and rows % d.rows == 0 and rows <= d.rows * d.most:
        return rows
    accepted = [d.rows * n for n in range(1, d.most + 1)]
    smaller = [n for n in accepted if len(heights) == 1 and rows > n and rows % n == 0]
    hint = f"; v_block={smaller[-1]} gives an instance as many" if smaller and {c.type.dims[0] for c in carried} == {"V"} else ""
    names = ", ".join(c.name for c in carried)
    raise ScheduleError(f"{where}: carried values ({names}) have {', '.join(map(str, heights))} rows; {plan.agent_of['state']} "
                        f"takes {', '.join(map(str, accepted))}{hint}")
