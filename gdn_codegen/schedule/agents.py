"""Assignments of warp groups, as data: which warp group runs which ops of a walk. Passes know no agent by name.

Each op has one task, which `passes/agents/tasks.py` computes from the graph. An `Assignment` gives each task to an agent. If
an agent reads a value that another agent computes, the value crosses through shared memory. The passes derive these crossings.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.types import WARPS_OF_GROUP

#: The tasks of a walk's ops, in the order in which an iteration runs them, and what these ops compute.
WALK_TASKS = {
    "load": "what is loaded in the walk",
    "load_numbers": "loads of a number for each token, which threads copy by themselves",
    "gates": "vectors of tokens that depend on loaded vectors only",
    "rest": "what depends on no carried value and on no inverse",
    "inverse": "inverses",
    "solved": "what is computed from an inverse, and depends on no carried value",
    "state": "carried values, and what leads from them to the next ones",
    "output": "what depends on carried values and leads to no next one",
    "tokens": "tiles that the state's warp groups cannot hold, because they have a row for each token, and sums of such tiles",
    "vectors": "vectors that depend on sums of tiles",
    "store": "stores of tokens and of inverses",
}
#: Tasks of agents whose warps run iterations in turn.
IN_TURNS = ("rest", "gates", "inverse", "solved")
#: A task that an assignment gives to no agent, and the task whose agent then has it. Stores are then those of the agents that
#: computed the values.
PART_OF = {"load_numbers": "load", "gates": "rest", "tokens": "output", "vectors": "output"}


@dataclass(frozen=True)
class AgentPlan:
    """The work and the resources of one agent.

    name: an identifier. tasks: the tasks of WALK_TASKS that it computes.
    warps: the number of warps of 32 threads: a multiple of 4, where each four warps hold 64 rows of a tile, or 1 to 3 for an
      agent that only loads, stores and inverts. 0 means four warps for each 64 rows of the carried value.
    registers: the registers of a thread: a multiple of 8 from 24 to 240.
    slots: the slots of each ring in shared memory that the agent's threads fill. A ring of loads has the schedule's `stages`.
    in_turns: whether each of its warps runs whole iterations by itself, in turn with the others: of n warps, warp w has
      iterations w, w + n and so on. So n iterations are under way at a time. This is for tasks that depend on no carried value.
    """

    name: str
    tasks: tuple[str, ...]
    warps: int
    registers: int
    slots: int = 1
    in_turns: bool = False


@dataclass(frozen=True)
class Assignment:
    """The agents of a thread block, in the order of their threads.

    outputs_early: whether the agent of the state begins the products of outputs before those of the next carried value, and frees
    slots of rings as soon as it can (passes/agents/outputs_early.py). An iteration then takes less time, and blocks have more
    loads under way. Walks with products of several agents, and others that the pass names, keep the order without it.

    An agent of fewer than four warps comes after the others, because such agents share warp groups. A kernel that has a task
    which no agent has cannot use this assignment. Raises ValueError if names, tasks, warps, registers or slots are not as
    `AgentPlan` says.
    """

    name: str
    agents: tuple[AgentPlan, ...]
    outputs_early: bool = False

    def __post_init__(self) -> None:
        """ValueError that names the agent and the field which is wrong."""
        if not (isinstance(self.name, str) and self.name.isascii() and self.name.isidentifier()):
            raise ValueError(f"assignment: got the name {self.name!r}; accepted: an identifier")
        where, names = f"assignment {self.name}", [a.name for a in self.agents]
        for a in self.agents:
            if not (a.name.isascii() and a.name.isidentifier()) or names.count(a.name) > 1:
                raise ValueError(f"{where}: got the agent {a.name!r}; accepted: an identifier, once")
            if type(a.warps) is not int or not (a.warps in (1, 2, 3) or (a.warps >= 0 and a.warps % WARPS_OF_GROUP == 0)):
                raise ValueError(f"{where}, agent {a.name}: warps={a.warps!r}; accepted: 0 (four for each 64 rows of the carried "
                                 "value), 1, 2, 3, or a multiple of 4")
            if type(a.registers) is not int or a.registers not in range(24, 241, 8):
                raise ValueError(f"{where}, agent {a.name}: registers={a.registers!r}; accepted: multiples of 8 from 24 to 240")
            if type(a.slots) is not int or a.slots < 1:
                raise ValueError(f"{where}, agent {a.name}: slots={a.slots!r}; accepted: whole numbers from 1")
            if "vectors" in a.tasks and a.warps != 1:
                raise ValueError(f"{where}, agent {a.name}: warps={a.warps} for the task vectors; accepted: 1")
            others = set(a.tasks) - set(IN_TURNS)
            if type(a.in_turns) is not bool or (a.in_turns and (a.warps < 4 or a.slots < a.warps or others)):
                raise ValueError(f"{where}, agent {a.name}: in_turns={a.in_turns!r}, warps={a.warps} and slots={a.slots} for "
                                 f"the tasks {', '.join(a.tasks)}; accepted: False, or True with 4, 8, ... warps, as many slots "
                                 f"or more, and the tasks {', '.join(IN_TURNS)}")
            few = sorted(set(a.tasks) - {"load", "load_numbers", "store", "inverse", "gates", "vectors"})
            if a.warps in (1, 2, 3) and few:
                raise ValueError(f"{where}, agent {a.name}: warps={a.warps} for the tasks {', '.join(few)}; accepted for them: "
                                 "0, 4, 8, ...; agents with fewer warps have the tasks load, load_numbers, store, "
                                 "inverse, gates and vectors")
        given = [r for a in self.agents for r in a.tasks]
        wrong = [r for r in given if r not in WALK_TASKS or given.count(r) > 1]
        if wrong or not {"state", "output"} <= set(given):
            raise ValueError(f"{where}: got the tasks {', '.join(given)}; accepted: each of {', '.join(WALK_TASKS)} "
                             "once at most, and state and output")
        small = [a for a in self.agents if a.warps in (1, 2, 3)]
        if list(self.agents[len(self.agents) - len(small):]) != small or len({a.registers for a in small}) > 1:
            got = ", ".join(f"{a.name} (warps={a.warps}, registers={a.registers})" for a in self.agents)
            raise ValueError(f"{where}: got {got}; accepted: agents of fewer than four warps last, with the same registers")

    @property
    def refined(self) -> bool:
        """Whether tiles of tokens have an agent of their own."""
        return any("tokens" in a.tasks for a in self.agents)

    @property
    def agent_of(self) -> dict[str, str]:
        """The agent of each task."""
        given = {r: a.name for a in self.agents for r in a.tasks}
        return given | {r: given[x] for r, x in PART_OF.items() if r not in given and x in given}


#: For a walk without inverses.
WALK = Assignment("walk", (
    AgentPlan("state", ("state", "output"), 0, 192),
    AgentPlan("aux", ("rest",), 4, 104, slots=2),
    AgentPlan("loader", ("load",), 1, 24),
    AgentPlan("store", ("store",), 1, 24)))
#: For a walk whose operands an earlier kernel computed. What is left of the rest are numbers, which do not occupy a warp group.
OPERAND_WALK = Assignment("operand_walk", (
    AgentPlan("state", ("state", "output", "rest"), 0, 240),
    AgentPlan("loader", ("load",), 1, 24),
    AgentPlan("store", ("store",), 1, 24)))
#: OPERAND_WALK with early outputs. It pays where blocks are so few that they do not wait for memory.
EARLY_OUTPUTS = Assignment("early_outputs", OPERAND_WALK.agents, outputs_early=True)
#: For a walk with inverses. Inverses run some iterations ahead of the state, so their operands have three slots.
SOLVING_WALK = Assignment("solving_walk", (
    AgentPlan("state", ("state", "output", "solved"), 0, 192),
    AgentPlan("aux", ("rest",), 4, 80, slots=3),
    AgentPlan("loader", ("load",), 1, 48),
    AgentPlan("store", ("store",), 1, 48),
    AgentPlan("solve", ("inverse",), 2, 48)))
#: For a walk back with all outputs of a gradient.
FUSED_GRADIENT = Assignment("fused_gradient", (
    AgentPlan("state", ("state", "output"), 0, 144),
    AgentPlan("tokens", ("rest", "tokens"), 4, 184),
    AgentPlan("loader", ("load",), 1, 40),
    AgentPlan("gates", ("gates",), 1, 40),
    AgentPlan("vectors", ("vectors",), 1, 40)))

#: For a whole walk in short chunks. An iteration is then little work for the operands, which warps compute in turn.
FOUR_IN_TURN = Assignment("four_in_turn", (
    AgentPlan("state", ("state", "output"), 0, 168),
    AgentPlan("operands", ("rest", "inverse", "solved"), 4, 152, slots=8, in_turns=True),
    AgentPlan("loader", ("load",), 1, 24),
    AgentPlan("numbers", ("load_numbers",), 1, 24),
    AgentPlan("store", ("store",), 1, 24)))

#: The assignments that `Schedule.agents` may name.
ASSIGNMENTS: dict[str, Assignment] = {a.name: a for a in (WALK, OPERAND_WALK, EARLY_OUTPUTS, SOLVING_WALK, FUSED_GRADIENT,
                                                              FOUR_IN_TURN)}
#: A schedule that names no assignment takes the first of these that has an agent for each task of a kernel.
DEFAULTS = (WALK, SOLVING_WALK)


def register(assignment: Assignment) -> Assignment:
    """Let schedules name `assignment`. Returns it. Raises ValueError if another assignment has its name."""
    if ASSIGNMENTS.setdefault(assignment.name, assignment) != assignment:
        raise ValueError(f"assignment: got the name {assignment.name!r}, which is registered already; accepted: a new name")
    return assignment
