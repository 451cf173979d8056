"""Time of a traced PTO block by PTO-ISA's cost model: the cycles of each instruction, and a replay of issue, pipes and flags.

It ranks variants. It is not time on hardware: docs/performance/ascend.md lists what the model leaves out.
"""
from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from pathlib import Path

from ..devices.ascend_a2 import ASCEND_A2
from ..devices.cycle_model import CycleModel
from ..pto_sim import Step

#: Cycles that the scalar unit takes to issue an instruction to any pipe.
ISSUE = 2
CORES = ("cube", "vector 0", "vector 1")
PIPES = {"cube": ("S", "MTE2", "MTE1", "M", "FIX"), "vector": ("S", "MTE2", "V", "MTE3")}
WIDTH = {"fp32": 4, "float": 4, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "int8": 1, "uint8": 1}
SHORT = {"float": "fp32", "half": "fp16", "bfloat16_t": "fp16"}  # a bfloat16 costs what a half costs
#: Vector instructions: cycles of each repeat of 256 bytes, and of the instruction besides. From the table's rows of 64 x 128.
VECTOR = {"TADDS": (1, 0), "TMULS": (1, 0), "TMINS": (1, 0), "TMAXS": (1, 0), "TSUBS": (1, 0), "TCVT": (1, 2),
          "TCOLEXPAND": (2, 2), "TEXPANDS": (2, 2), "TMOV": (2, 2), "TFILLPAD": (2, 2), "TFILLPAD_INPLACE": (2, 2)}
#: Copies: bytes per cycle, and cycles of the instruction besides. From the table's largest rows. FIX counts 2 bytes for each
#: element, whatever dtype it writes.
MOVES = {"MTE2_AIC": (32768 / 418, 0), "MTE2_AIV": (32768 / 560, 0), "MTE3": (16384 / 149, 0),
         "FIXP TSTORE": (32768 / 807, 0), "FIXP TMOV": (32768 / 441, 0), "MTE1 left": (256, 1), "MTE1 right": (128, 1)}
PARTIAL = 18  # a last repeat that is not whole sets the lane mask: TADD 1 x 16 against 1 x 64
SCALAR_ROW = 24  # TROWEXPAND's scalar read and flags for a row: (1796 - 4) / 64, less two repeats of 2; GetValue too
COLUMN = 26  # spreading 64 column values to blocks, the most TROWEXPANDMUL takes beyond its repeats


def table_path() -> Path:
    """The table of cycles that was measured on an Ascend A2."""
    return Path(__file__).parents[1] / "devices" / "ascend_a2_cycles.csv"


@lru_cache(maxsize=1)
def table() -> dict[tuple[str, str, int, int, str], tuple[int, ...]]:
    """(instruction, pipe, rows, cols, dtype) -> the cycles of its rows, least first."""
    with table_path().open(encoding="ascii", newline="") as f:
        rows = list(csv.DictReader(line for line in f if not line.startswith("#")))
    out: dict[tuple[str, str, int, int, str], tuple[int, ...]] = {}
    for r in rows:
        key = (r["instruction"], r["pipe"], int(r["rows"]), int(r["cols"]), r["dtype"])
        out[key] = tuple(sorted((*out.get(key, ()), int(r["cycles"]))))
    return out


def first_use(instruction: str) -> int:
    """What a core's first use of a vector instruction costs more; known where the table has a row twice."""
    return max((max(c) - min(c) for key, c in table().items() if key[0] == instruction and key[1] == "VEC"), default=0)


def moved(pipe: str, rows: int, cols: int, dtype: str) -> int:
    """Bytes that a copy between cores and global memory counts. FIX: 2 for each element, whatever it writes. Others: a row is a
    burst of whole 32-byte blocks, so a column moves a block a value."""
    if pipe == "FIXP":
        return rows * cols * 2
    width = WIDTH.get(dtype, 2)
    return rows * ceil(cols * width / 32) * 32 if cols * width < 32 else rows * cols * width


def cycles(instruction: str, pipe: str, rows: int, cols: int, dtype: str, *, depth: int = 0, right: bool = False,
           spread: bool = False, source: int = 0) -> int:
    """Cycles of one instruction in steady state. Pipes go by the table's names.

    depth: k of a product, whose dtype is that of its operands. right: a move to L0B, which has half of L0A's rate.
    spread: a row broadcast of a column that has 32 bytes for each row. source: bytes of a cast's source element.
    If the table lacks the shape, the figure is scaled by repeats of 256 bytes (V), bytes (moves), or fractals (M).
    """
    if pipe == "CUBE":  # 16 x 32 bytes x 16 a cycle, twice that for float
        width = WIDTH.get(dtype, 2)
        return 6 + ceil(rows / 16) * ceil((depth or cols) * width / 32) * ceil(cols / 16) * (2 if width == 4 else 1)
    if pipe == "MTE1":
        rate, whole = MOVES["MTE1 right" if right else "MTE1 left"]
        return ceil(rows * cols * WIDTH.get(dtype, 2) / rate) + whole
    known = table().get((instruction, pipe, rows, cols, SHORT.get(dtype, dtype)))
    if known and not (pipe == "VEC" and (spread or source)):
        return known[0]
    width = WIDTH.get(dtype, 2)
    if pipe == "S":
        return SCALAR_ROW
    if pipe != "VEC":
        return ceil(moved(pipe, rows, cols, dtype) / MOVES[f"FIXP {instruction}" if pipe == "FIXP" else pipe][0])
    repeats, part = divmod(rows * cols * max(width, source), 256)
    n = repeats + bool(part)
    if instruction == "TROWEXPAND":
        return ceil(rows / 8) + PARTIAL if spread else rows * (SCALAR_ROW + 2 * ceil(cols * width / 256)) + 4
    if instruction == "TROWSUM":  # repeats of a row added up, then 7 cycles per row to sum one
        return rows * (2 * (ceil(cols * width / 256) - 1) + 7)
    if instruction == "TTRANS":  # moved into scratch, and out
        return 4 * n
    each, whole = VECTOR.get(instruction, (2, 0))
    if instruction.startswith("TROWEXPAND") and not spread:
        whole += ceil(COLUMN * rows / 64)
    if part and instruction not in ("TEXPANDS", "TMOV", "TCVT"):
        whole += PARTIAL
    return each * n + whole


def step_pipe(s: Step) -> str:
    """The table's name of a step's pipe."""
    if s.pipe == "MTE2":
        return "MTE2_AIC" if s.core == "cube" else "MTE2_AIV"
    return {"V": "VEC", "M": "CUBE", "FIX": "FIXP"}.get(s.pipe, s.pipe)


@lru_cache(maxsize=4096)
def _cost(name: str, pipe: str, rows: int, cols: int, dtype: str, a: int) -> int:
    if pipe == "CUBE":
        return cycles(name, pipe, rows, cols, dtype, depth=a)
    if name == "TCVT":
        return cycles(name, pipe, rows, cols, dtype, source=a)
    return cycles(name, pipe, rows, cols, dtype, right=pipe == "MTE1" and a == 1, spread=pipe == "VEC" and a == 1)


def cycle_model(name: str) -> CycleModel:
    """The device's time model of that name: "flat", by the table alone, or "fitted", where transfers through global memory have a
    latency and a bandwidth that were fitted to an NPU. ValueError for another name."""
    if name not in ASCEND_A2.cycle_models:
        raise ValueError(f"model: got {name!r}; accepted: {', '.join(ASCEND_A2.cycle_models)}")
    return ASCEND_A2.cycle_models[name]


def cost(s: Step, model: str = "flat") -> int:
    """Cycles of a traced instruction in steady state. ValueError for an unknown model."""
    by, pipe = cycle_model(model), step_pipe(s)
    if s.name in ("TLOAD", "TSTORE") and (transfer := by.transfers.get((s.core.split()[0], s.pipe))):
        return transfer.cycles(moved(pipe, s.rows, s.cols, s.dtype))
    each, whole = by.least.get((s.name, s.dtype, s.cols), (0, 0))
    return max(_cost(s.name, pipe, s.rows, s.cols, s.dtype, s.extra[0]), round(each * s.rows * s.cols + whole))


@dataclass(frozen=True)
class Interval:
    """A time in which a pipe works."""

    core: str
    pipe: str
    name: str
    start: int
    end: int
    line: int


@dataclass
class Replay:
    """cycles: from the first issue to the last end. busy: cycles that (core, pipe) works. waiting: cycles that it is held
    by a flag while it could work; S: by flags, barriers and other cores. path: of the chain of causes that ends last, the
    cycles in each (core, pipe); "issue" stands for in-order issue. They sum to `cycles`."""

    cycles: int = 0
    busy: dict[tuple[str, str], int] = field(default_factory=dict)
    waiting: dict[tuple[str, str], int] = field(default_factory=dict)
    path: dict[tuple[str, str], int] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)


Point = tuple[int, int]  # a time, and the node of what ended then


class _Causes:
    """What ended when and after what, to find the critical path."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, tuple[str, str], int]] = [(-1, ("", ""), 0)]

    def after(self, p: Point, label: tuple[str, str], length: int) -> Point:
        self.nodes.append((p[1], label, length))
        return p[0] + length, len(self.nodes) - 1

    def path(self, end: Point) -> dict[tuple[str, str], int]:
        out: dict[tuple[str, str], int] = {}
        at = end[1]
        while at > 0:
            at, label, length = self.nodes[at]
            out[label] = out.get(label, 0) + length
        return dict(sorted(out.items(), key=lambda x: (-x[1], x[0])))


class _Core:
    """One core: its steps, when its scalar unit and its pipes are free, its flags."""

    def __init__(self, name: str, steps: Sequence[Step], block: _Block) -> None:
        self.name, self.steps, self.block = name, steps, block
        self.at = 0
        self.issue: Point = (0, 0)
        self.free: dict[str, Point] = {}
        self.flags: dict[tuple[int, int, int], Point] = {}
        self.counter: dict[int, deque[Point]] = {}
        self.used: set[str] = set()

    def held(self, pipe: str, since: Point, until: Point) -> Point:
        """The later of two points in time. The time between them counts as waiting."""
        if until[0] > since[0]:
            w = self.block.out.waiting
            w[self.name, pipe] = w.get((self.name, pipe), 0) + until[0] - since[0]
        return max(since, until)

    def ready(self, pipe: str) -> Point:
        return self.issue if pipe == "S" else max(self.issue, self.free.get(pipe, (0, 0)))

    def run(self) -> bool:
        """Go on until the end or a signal that is not there yet; whether it moved."""
        start = self.at
        while self.at < len(self.steps):
            s = self.steps[self.at]
            if s.name == "wait_flag_dev" and not self.counter.get(s.extra[2]):
                break
            self.at += 1
            self.issue = self.block.causes.after(self.issue, (self.name, "issue"), ISSUE)
            self.step(s)
        return self.at > start

    def step(self, s: Step) -> None:
        """Replay one instruction: a flag, a barrier, a signal to other cores, or work of a pipe."""
        if s.name == "set_flag":
            self.flags[s.extra] = self.ready(s.pipe)
        elif s.name == "wait_flag":
            p = self.held(s.pipe, self.ready(s.pipe), self.flags.pop(s.extra))
            if s.pipe == "S": self.issue = p
            else: self.free[s.pipe] = p
        elif s.name == "pipe_barrier":
            if s.extra[0] < 0:
                self.issue = self.held("S", self.issue, max(self.free.values(), default=(0, 0)))
        elif s.name == "wait_flag_dev":
            self.issue = self.held("S", self.issue, self.counter[s.extra[2]].popleft())
        elif s.name == "ffts_cross_core_sync":
            self.block.signal(self.name, s.extra[1], s.extra[2], self.ready(s.pipe))
        else:
            self.work(s)

    def work(self, s: Step) -> None:
        """Replay an instruction that keeps a pipe busy, and record when."""
        length = cost(s, self.block.model)
        if s.name not in self.used and s.pipe == "V":
            self.used.add(s.name)
            length += first_use(s.name)
        begin = self.ready(s.pipe)
        end = self.block.causes.after(begin, (self.name, s.pipe), length)
        self.free[s.pipe] = end
        if s.pipe == "S" or (s.name == "TROWEXPAND" and not s.extra[0]):  # the scalar unit reads the rows
            self.issue = end
        out = self.block.out
        out.busy[self.name, s.pipe] = out.busy.get((self.name, s.pipe), 0) + length
        out.intervals.append(Interval(self.name, s.pipe, s.name, begin[0], end[0], s.line))
        self.block.end = max(self.block.end, end)


class _Block:
    def __init__(self, steps: Sequence[Step], model: str) -> None:
        self.model = model
        self.out, self.causes, self.end = Replay(), _Causes(), (0, 0)
        self.cores = {n: _Core(n, [s for s in steps if s.core == n], self) for n in CORES}
        self.half: dict[tuple[str, int, int], deque[Point]] = {}

    def signal(self, sender: str, mode: int, flag: int, p: Point) -> None:
        """Mode 2: a signal of the cube core reaches both vector cores; one of a vector core reaches the cube core once both have
        signalled. Mode 1: the vector cores wait for each other. Mode 0, all cores of a kind: this block's own only."""
        if mode == 2 and sender == "cube":
            self.deliver(CORES[1:], flag, p)
        elif mode == 2 or sender != "cube":
            self.half.setdefault((sender, mode, flag), deque()).append(p)
            both = [self.half.setdefault((n, mode, flag), deque()) for n in CORES[1:]]
            while all(both):
                self.deliver(CORES[:1] if mode == 2 else CORES[1:], flag, max(q.popleft() for q in both))
        else:
            self.deliver((sender,), flag, p)

    def deliver(self, to: Iterable[str], flag: int, p: Point) -> None:
        for n in to:
            self.cores[n].counter.setdefault(flag, deque()).append(p)

    def run(self) -> Replay:
        while any(c.run() for c in self.cores.values()): pass
        for c in self.cores.values():
            if c.at < len(c.steps):
                raise ValueError(f"trace: {c.name} waits for flag {c.steps[c.at].extra[2]}, which none signals")
            self.end = max(self.end, c.issue)
        self.out.cycles, self.out.path = self.end[0], self.causes.path(self.end)
        self.out.intervals.sort(key=lambda i: (i.start, i.core, i.pipe))
        return self.out


def replay(steps: Sequence[Step], model: str = "flat") -> Replay:
    """Time of one block's trace by a model of the device. ValueError for an unknown one, and for a trace of several blocks.

    A core's scalar unit issues in order. A pipe works first in, first out. A wait blocks its pipe; a wait of S, or for another
    core, blocks all later issue. Flags and barriers take no time except to issue.
    """
    cycle_model(model)  # an empty trace asks for no cost
    if len({s.block for s in steps}) > 1:
        raise ValueError("trace: steps of several blocks; accepted: those of one")
    return _Block(steps, model).run()
