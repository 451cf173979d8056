"""A build: options -> name and text of a generated module."""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jinja2

from .. import algorithms
from ..devices import Device
from ..devices.part_cost import of_chunks
from ..emit.base import Heads, KernelText, heads_tag, stride_unit
from ..emit.page import page_text
from ..ir.builder import Algorithm
from ..ir.core import Kernel, Program, walk
from ..ir.decays import log_decays
from ..ir.types import Tensor
from ..passes.pipelines import lower
from ..schedule import SCHEDULES, Schedule, changes, named, spelled
from ..schedule.contract import PLAIN, Contract
from ..targets import Target, find

CHUNKS = (16, 32, 64, 128)
#: Names of layouts, others' too -> ours.
LAYOUTS = {"bthd": "bthd", "bsnd": "bthd", "bhtd": "bhtd", "bnsd": "bhtd"}
DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (16, *range(32, 257, 4))
DEFAULT_SCHEDULE = "fused"
#: Of builds for one architecture.
DEFAULTS = {"sm_90a": "walk"}
#: What a module says of an input that comes in another form than the page's.
FORM_DOC = {"linear": "{0} comes as the factor of which the kernels take the log.",
            "raw": "{0} comes raw: the kernels take -exp(A_log) softplus({0} + dt_bias).",
            "sigmoid": "{0} comes as it is before a sigmoid.", "twice_sigmoid": "{0} comes as it is before twice a sigmoid.",
            "l2norm": "{0} comes as it is: the kernels divide its rows by their norms.",
            "unit": "{0} has rows of norm 1: how far a walk begins early is worked out from gates and beta alone."}


@dataclass(frozen=True)
class Build:
    """What to generate.

    algorithm: a name, FILE.py:FUNCTION, or a page itself. chunk: tokens of a chunk. head_dim_k, head_dim_v: K and V.
    schedule: a name or a Schedule. heads: H and HV compiled in (pto), None for kernels that take them at run time.
    arch: the one architecture to build for ("sm_90a" of tilelang), "" for text that runs on any. contract: what callers pass.
    """

    target: str
    chunk: int = 64
    layout: str = "bthd"
    algorithm: str | Algorithm = "gated_delta_rule"
    schedule: str | Schedule = DEFAULT_SCHEDULE
    dtype: str = "float16"
    head_dim_k: int = 128
    head_dim_v: int = 128
    heads: Heads = None
    arch: str = ""
    contract: Contract = PLAIN

    def __post_init__(self) -> None:
        target = find(self.target)
        for field, value, accepted in (("chunk", self.chunk, CHUNKS), ("layout", self.layout, LAYOUTS),
                                       ("dtype", self.dtype, DTYPES)):
            if not isinstance(value, int if field == "chunk" else str) or value not in accepted:
                raise ValueError(f"{field}: got {value!r}; accepted: {', '.join(map(str, accepted))}")
        object.__setattr__(self, "layout", LAYOUTS[self.layout])
        for field, value in (("head_dim_k", self.head_dim_k), ("head_dim_v", self.head_dim_v)):
            if not isinstance(value, int) or value not in HEAD_DIMS:
                raise ValueError(f"{field}: got {value!r}; accepted: 16, and multiples of 4 from 32 to 256")
        if self.arch and self.arch not in target.archs:
            raise ValueError(f"arch: got {self.arch!r}; accepted: {', '.join(target.archs) or 'none'} for {self.target}")
        if self.heads and (min(self.heads) < 1 or self.heads[1] % self.heads[0]):
            raise ValueError(f"heads: got {self.heads[0]}/{self.heads[1]}; accepted: H/HV, HV a multiple of H, both at least 1")
        if isinstance(self.schedule, str):
            named(self.schedule)

    @property
    def plan(self) -> Schedule:
        return named(self.schedule) if isinstance(self.schedule, str) else self.schedule

    @property
    def of(self) -> Target:
        """What the package knows of the target."""
        return find(self.target)

    @property
    def device(self) -> Device:
        return self.of.lowered_for(self.arch).device

    @property
    def sizes(self) -> dict[str, int]:
        return {"C": self.chunk, "K": self.head_dim_k, "V": self.head_dim_v}

    @property
    def page(self) -> Algorithm:
        return algorithms.find(self.algorithm)

    @property
    def name(self) -> str:
        """The module's name: ALGORITHM_cCHUNK_LAYOUT, then what differs from the defaults."""
        page = self.page.name
        parts = [algorithms.SHORT.get(page, page), f"c{self.chunk}", self.layout]
        if (self.head_dim_k, self.head_dim_v) != (128, 128):
            parts.append(f"k{self.head_dim_k}v{self.head_dim_v}")
        if self.dtype != "float16":
            parts.append({"bfloat16": "bf16", "float32": "f32"}[self.dtype])
        own = {n: v for n, v in changes(self.plan).items() if n not in ("launch", "partition", "part_chunks")}
        if own or self.plan.name != DEFAULTS.get(self.arch, DEFAULT_SCHEDULE):
            numbers = {n: n.replace("_", "") for n, v in own.items() if isinstance(v, int)}
            parts.append(self.plan.name)
            parts += [numbers.get(n, "") + re.sub(r"\W", "_", spelled(v).replace(",", "")) for n, v in own.items()]
        if self.plan.partition:
            parts.append(f"{self.plan.partition}{self.plan.part_chunks or ''}")
        if self.plan.launch != "kernels":
            parts.append(self.plan.launch)
        if self.heads:
            parts.append(heads_tag(self.heads))
        if self.contract != PLAIN:
            parts.append(self.contract.tag)
        if self.arch:
            parts.append(self.arch.replace("_", ""))
        return "_".join(parts)

    @property
    def function(self) -> str:
        return f"chunk_{self.page.name}"


@lru_cache(maxsize=256)
def lowered(b: Build) -> Program:
    """The program that `b`'s emitter prints."""
    return lower(b.page.trace(), b.target, b.plan, b.sizes, b.dtype, b.arch, b.contract)


@cache
def _environment(folder: Path | None = None) -> jinja2.Environment:
    """The package's templates, and those of a folder."""
    packaged = Path(__file__).parents[1] / "templates"
    own = packaged if packaged.is_dir() else Path(__file__).parents[2] / "templates"
    made = jinja2.Environment(loader=jinja2.FileSystemLoader([own, *filter(None, [folder])]), undefined=jinja2.StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    made.globals["copied"] = copied
    return made


def _template(target: Target) -> jinja2.Template:
    if isinstance(target.template, str):
        return _environment().get_template(target.template)
    return _environment(target.template.parent).get_template(target.template.name)


def render(b: Build) -> str:
    """The generated module's text: ASCII, the same bytes for the same build."""
    p = lowered(b)
    kernels = b.of.emit(p, b.layout, b.heads)
    page = b.page
    text = _template(b.of).render(
        **_facts(b, p, page), tables=_tables(p, page, b, kernels), kernels=kernels)
    if not text.isascii():
        other = next(x for x in text if not x.isascii())
        raise ValueError(f"algorithm: got {other!a} in a line of {page.name} that its modules quote; accepted: ASCII")
    return text


def _command(b: Build) -> str:
    """What makes the module again, files in the folder at hand: a command, or Python where the schedule is one's own."""
    if isinstance(b.algorithm, Algorithm):
        return f"render({_spelled_out(b)}) of gdn_codegen.runtime.build, {b.page.name} a page"
    file, colon, function = b.algorithm.rpartition(":")
    algorithm = re.sub(r"[^\w.+-]", "_", Path(file).name, flags=re.ASCII) + colon + function if colon else b.algorithm
    if b.plan.name not in SCHEDULES:
        return f"render({_spelled_out(replace(b, algorithm=algorithm))}) of gdn_codegen.runtime.build"
    return (f"gdn_codegen build --target {b.target} --chunk {b.chunk} --layout {b.layout} --algorithm {algorithm}"
            f" --schedule {b.plan.name} --dtype {b.dtype} --head-dim-k {b.head_dim_k} --head-dim-v {b.head_dim_v}"
            + (f" --launch {b.plan.launch}" if b.plan.launch != "kernels" else "")
            + (f" --partition {b.plan.partition}" if b.plan.partition else "")
            + "".join(f" --set {n}={spelled(v)}" for n, v in changes(b.plan).items() if n not in ("launch", "partition"))
            + (f" --heads {b.heads[0]}/{b.heads[1]}" if b.heads else "")
            + (f" --accept {b.contract}" if b.contract != PLAIN else "")
            + (f" --arch {b.arch}" if b.arch else ""))


def _spelled_out(x: Any) -> str:
    """Python for a Build, or part of one: fields that are not as by default."""
    if isinstance(x, Algorithm):
        return x.name
    if not is_dataclass(x):
        return repr(x)
    given = [(f.name, getattr(x, f.name)) for f in fields(x) if getattr(x, f.name) != f.default]
    return f"{type(x).__name__}({', '.join(f'{n}={_spelled_out(v)}' for n, v in given)})"


def _facts(b: Build, p: Program, page: Algorithm) -> dict[str, Any]:
    inputs, initial = (_named(p, "input", index) for index in ("token", "sequence"))
    final, checkpoints = (_named(p, "output", index) for index in ("sequence", "checkpoint"))
    head_inputs, outputs = _named(p, "input", "head"), _named(p, "output", "token")
    shape = {"bthd": "[B, T, {h}{d}]", "bhtd": "[B, {h}, T{d}]"}[b.layout]
    def dims(t: Tensor) -> str:
        return "".join(f", {b.sizes[str(d)]}" for d in t.dims[1:])
    shapes = ", ".join(f"{t.name} {shape.format(h=t.heads, d=dims(t))} {t.dtype}" for t in inputs)
    forms = [FORM_DOC[form].format(n) for n, form in b.contract.inputs]
    forms += [f"{t.name}: [HV] {t.dtype}, one number a value head{'; zero where None' if t.fill else ''}." for t in head_inputs]
    # it stands in strings of the module's between three quotes
    summary = re.sub(r"(['\"])\1+", r"\1", page.doc.splitlines()[0].replace("\\", "/")) if page.doc else page.name
    reaches = [o for k in p.kernels for o in walk(k.body) if o.kind == "reach"]
    most = max((o.attr("most", 0) for o in reaches), default=0)
    return {"command": _command(b), "algorithm": page.name, "schedule": b.plan.name, "function": b.function,
            "chunk": b.chunk, "layout": b.layout, "dtype": b.dtype,
            "sizes": {**b.sizes, **{f"P{d}": p.sizes[d] for d, _ in p.extents}}, "padded": bool(p.extents),
            "strided": b.contract.strided, "view": b.of.views,
            "units": {t.name: stride_unit(p, t) for t in p.tensors if t.strided},
            "outs": ["out"] if len(outputs) == 1 else [f"out_{t.name}" for t in outputs], "name": b.name, "heads": b.heads,
            "arch": b.arch, "cleared": any(t.cleared for t in outputs),
            "summary": summary, "shapes": shapes,
            "state_doc": _state_doc(b, [*initial, *final], checkpoints),
            "inputs": [t.name for t in inputs], "head_inputs": [t.name for t in head_inputs], "form_doc": forms,
            "given": [t.name for t in (*inputs, *head_inputs)], "initial": [t.name for t in initial],
            "final": [t.name for t in final],
            "checkpoints": [t.name for t in checkpoints], "buffers": [t.name for t in (*final, *checkpoints)],
            "scalars": list(p.scalars), "unset": None in page.scalar_defaults(b.sizes).values(),
            "pool": b.contract.pool, "in_place": b.contract.in_place, "state_dtype": b.contract.state_dtype,
            "ends_apart": bool(_named(p, "workspace", "sequence")),
            "partition": b.plan.partition or "", "part_chunks": b.plan.part_chunks,
            "warps": b.plan.warps, "stages": b.plan.stages,
            "value_heads": max(k.lanes for k in p.kernels) if b.of.lanes_of_key_head else 1,
            "reaches": any(o.attr("tensor") for o in reaches),
            "most": most, **_check_facts(b, p, page, most)}


@cache
def copied(file: str) -> str:
    """The part of a file of this package that generated modules have word for word, as of "host/check.py"."""
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")  # to import it would import torch
    return text.partition("# --- copied from here on ---\n")[2].strip()


def _check_facts(b: Build, p: Program, page: Algorithm, most: int) -> dict[str, Any]:
    """What a module's check is told beside the tables. Its longest sequence has more chunks than any ring has slots, and so many
    parts of one that some are summed up."""
    traced = page.trace()
    slots = max((x.slots for k in p.kernels for x in k.buffers), default=1)
    return {"page_text": page_text(traced), "forms": dict(b.contract.inputs),
            "tf32": b.of.tf32 and b.dtype == "float32", "decays": sorted(log_decays(traced)),
            "state": b.contract.state,
            "lanes": max(k.lanes for k in p.kernels) if b.of.lanes_of_key_head else 1,
            "check_chunks": max(slots, b.plan.stages, most + 1 if b.plan.partition else 1, 2) + 1}


def _named(p: Program, role: str, index: str) -> list[Tensor]:
    """The program's tensors of a kind that the host passes: what lies over another is that one."""
    return [t for t in p.role(role) if t.index == index and not t.over]


def _state_doc(b: Build, states: list[Tensor], checkpoints: list[Tensor]) -> list[str]:
    """What a generated function says of its states."""
    c, out = b.contract, []
    for t in [*states, *checkpoints]:
        dims = ", ".join(str(b.sizes[str(d)]) for d in t.dims)
        lead = "slots" if c.pool and t.index == "sequence" else "N" if t.index == "sequence" else "rows"
        text = f"{t.name}: [{lead}, HV, {dims}] {t.dtype}"
        if t.role == "input":
            text += "; the final state takes its place." if c.in_place else "." if c.pool else \
                ", or what widens to it; zero where absent." if t.dtype == "float32" else "; zero where absent."
        elif t.index == "sequence":
            text += ", another pool; without it the final state is [N, ...], undefined where a sequence is left out." if c.pool \
                else ", to be written to."
        else:
            text += (f", to be written to: the state after (i + 1) * checkpoint_chunks chunks of sequence n in row\n"
                     f"        cu_seqlens[n] // (checkpoint_chunks * {b.chunk}) + i; other rows are left as they are.")
        out.append(text)
    if c.pool:
        out.append("state_indices: int32 or int64 [N], a sequence's slot; -1 leaves it out: nothing of it is read, and nothing\n"
                   "        written. Slots may lie apart; each is dense, and aligned to 16 bytes.")
    return out


def _table(rows: list[tuple[Any, ...]]) -> str:
    if not rows:
        return "()"
    return "(\n" + "".join(f"    {row!r},\n" for row in rows).replace("'", '"') + ")"


def _names(kernels: Iterable[Kernel]) -> str:
    """As a tuple's text, "" for none."""
    names = tuple(k.name for k in kernels)
    return repr(names).replace("'", '"') if names else ""


def _tables(p: Program, page: Algorithm, b: Build, kernels: list[KernelText]) -> dict[str, str]:
    def shape(t: Tensor, skip: int = 0) -> tuple[int, ...]:
        return p.shape(t)[skip:]
    return {
        "inputs": _table([(t.name, t.heads, shape(t, 1), t.dtype) for t in _named(p, "input", "token")]),
        "head_inputs": _table([(t.name, float(t.fill) if t.fill else None, t.dtype) for t in _named(p, "input", "head")]),
        "outputs": _table([(t.name, shape(t, 1), t.dtype) for t in p.role("output") if t.index == "token"]),
        "workspaces": _table([(t.name, shape(t), t.dtype) for t in p.role("workspace") if t.index == "slot"]),
        "initial": _table([(t.name, shape(t)) for t in _named(p, "input", "sequence")]),
        "final": _table([(t.name, shape(t)) for t in _named(p, "output", "sequence")]),
        "checkpoints": _table([(t.name, shape(t)) for t in _named(p, "output", "checkpoint")]),
        "end_workspaces": _table([(t.name, shape(t), t.dtype) for t in _named(p, "workspace", "sequence")]),
        "indices": _table([(t.name,) for t in _named(p, "input", "number")]),
        "part_workspaces": _table([(t.name, shape(t), t.dtype) for t in p.role("workspace") if t.index == "part"]),
        "summaries": _names(k for k in p.kernels if any(o.kind == "leave" for o in walk(k.body))) or "()",
        "bounds": _names(k for k in p.kernels if k.slices > 1),
        "part_cost": repr(b.device.part_cost and of_chunks(b.device.part_cost, b.chunk)),
        "unspecialised": repr(tuple(sorted({n for k in kernels for n in k.extra.get("sizes", ())}))).replace("'", '"'),
        "scalars": repr(page.scalar_defaults(b.sizes)).replace("'", '"'),
        "kernels": _table([(k.name, k.grid, k.blocks, tuple(t.name for t in k.tensors), k.scalars) for k in kernels]),
    }


