"""A build: options -> name and text of a generated module."""
from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import algorithms, derived_pages
from ..devices import Device
from ..emit.base import Heads, KernelText, heads_tag
from ..ir.core import Program
from ..ir.page import Algorithm
from ..schedule import SCHEDULES, Schedule, changes, named, spelled
from ..schedule.contract import PLAIN, Contract
from ..targets import DEFAULT_SCHEDULE, Target, find, lower
from .cache import digest
from .tables import arguments, documentation, forms_text, literal, signature, tables

if TYPE_CHECKING:
    import jinja2

CHUNKS = (1, 16, 32, 64, 128)
#: Names of layouts, also those of other libraries -> our names.
LAYOUTS = {"bthd": "bthd", "bsnd": "bthd", "bhtd": "bhtd", "bnsd": "bhtd"}
DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (16, *range(32, 257, 4))
#: The characters of a module's name. File systems take 255, and caches add digests, endings and words before them.
LONGEST_NAME = 160


@dataclass(frozen=True)
class Build:
    """What to generate.

    algorithm: a name, FILE.py:FUNCTION, or a page itself; NAME.gradient and the like (`derived_pages`). chunk: tokens of a chunk.
    head_dim_k, head_dim_v: K and V. schedule: a name or a Schedule. heads: H and HV compiled in (pto), None for kernels that take
    them at run time. arch: the one architecture to build for ("sm_90a" of tilelang), "" for text that runs on any. contract: what
    callers pass. earlier: for a schedule with `if_declined`, the build with partition="short" that runs before this one in each
    call. None for builds that run alone, and for that one.
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
    earlier: Build | None = None

    def __post_init__(self) -> None:
        """Replaces the layout by our name of it. ValueError for an option that no target, or not this one, accepts."""
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
            raise ValueError(f"arch: got {self.arch!r}; accepted: {', '.join(target.archs) or 'none'} for {self.target}"
                             + (f", as it is not known {target.refused[self.arch]}" if self.arch in target.refused else ""))
        self._check_heads()
        if not isinstance(self.contract, Contract):
            raise ValueError(f"contract: got {self.contract!r}; accepted: a Contract, as Contract.parse('q=l2norm,k=l2norm') of "
                             "gdn_codegen.schedule.contract")
        if isinstance(self.schedule, str):
            named(self.schedule)
        elif not isinstance(self.schedule, Schedule):
            raise ValueError(f"schedule: got {self.schedule!r}; accepted: a name, or a Schedule")
        self._check_pair()

    def _check_pair(self) -> None:
        """ValueError unless `earlier` is None, or the first of a pair of which this build is the second."""
        x = self.earlier
        if x is None:
            return
        same = ("target", "layout", "algorithm", "dtype", "head_dim_k", "head_dim_v", "heads", "arch")
        fits = isinstance(x, Build) and x.plan.partition == "short" and self.plan.if_declined and (
            all(getattr(x, n) == getattr(self, n) for n in same) and x.contract.unpromised() == self.contract.unpromised())
        if not fits:
            raise ValueError(f"earlier: got {x!r}; accepted: None, or before a schedule with if_declined=True a build with "
                             f"partition='short' and the same {', '.join(same)} and contract")

    def _check_heads(self) -> None:
        """ValueError unless `heads` is None, or H and HV."""
        if self.heads is None:
            return
        two = isinstance(self.heads, (tuple, list)) and len(self.heads) == 2 and all(type(n) is int for n in self.heads)
        if not two:
            raise ValueError(f"heads: got {self.heads!r}; accepted: (H, HV), or None for kernels that take them at run time")
        heads, value_heads = self.heads
        if min(self.heads) < 1 or value_heads % heads:
            raise ValueError(f"heads: got H = {heads}, HV = {value_heads}; accepted: HV a multiple of H, both at least 1")

    def for_shared(self, kib: int) -> Build:
        """The build for blocks that may take `kib` KiB of shared memory, as Schedule.shared_kib says it. The same build if its
        device does not count shared memory."""
        counted = "shared" in self.device.spaces
        return replace(self, schedule=replace(self.plan, shared_kib=kib)) if counted and self.plan.shared_kib != kib else self

    @property
    def plan(self) -> Schedule:
        """The schedule itself, where `schedule` may be a name."""
        return named(self.schedule, self.arch) if isinstance(self.schedule, str) else self.schedule

    @property
    def of(self) -> Target:
        """What the package knows of the target."""
        return find(self.target)

    @property
    def device(self) -> Device:
        """What the device has for which the passes lower."""
        return self.of.lowered_for(self.arch).device

    @property
    def sizes(self) -> dict[str, int]:
        """The extents of the page's dims: C tokens, K and V."""
        return {"C": self.chunk, "K": self.head_dim_k, "V": self.head_dim_v}

    @property
    def page(self) -> Algorithm:
        """The algorithm itself, where `algorithm` may be a name or a file."""
        return derived_pages.find(self.algorithm, self.contract.inputs)

    @property
    def passed(self) -> Contract:
        """The contract for passes. The input forms of a derived page are a part of the page."""
        return replace(self.contract, inputs=()) if isinstance(self.page, derived_pages.Derived) else self.contract

    @property
    def name(self) -> str:
        """The module's name: ALGORITHM_cCHUNK_LAYOUT, then what differs from the defaults. A digest ends long names."""
        page = self.page.name
        parts = [algorithms.SHORT.get(page, page), f"c{self.chunk}", self.layout]
        if (self.head_dim_k, self.head_dim_v) != (128, 128):
            parts.append(f"k{self.head_dim_k}v{self.head_dim_v}")
        if self.dtype != "float16":
            parts.append({"bfloat16": "bf16", "float32": "f32"}[self.dtype])
        own = {n: v for n, v in changes(self.plan, self.arch).items() if n not in ("launch", "partition", "part_chunks")}
        if own or self.plan.name != find(self.target).lowered_for(self.arch).schedule:
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
        whole = "_".join(parts)
        return whole if len(whole) <= LONGEST_NAME else f"{whole[:LONGEST_NAME - 17]}_{digest(whole)}"

    @property
    def function(self) -> str:
        """The name of the generated module's function."""
        return f"chunk_{self.page.name}"


@lru_cache(maxsize=256)
def lowered(b: Build) -> Program:
    """The program that `b`'s emitter prints."""
    with _no_collection():
        return lower(b.page.trace(), b.target, b.plan, b.sizes, b.dtype, b.arch, b.passed)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector from searching the nodes of programs for cycles meanwhile. There are many nodes and few cycles,
    so the searches took a tenth of the time of lowering."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@cache
def _environment(folder: Path | None = None) -> jinja2.Environment:
    """The package's templates, and those of a folder."""
    import jinja2
    packaged = Path(__file__).parents[1] / "templates"
    own = packaged if packaged.is_dir() else Path(__file__).parents[2] / "templates"
    made = jinja2.Environment(loader=jinja2.FileSystemLoader([own, *filter(None, [folder])]), undefined=jinja2.StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    made.globals["copied"] = copied
    made.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return made


def _template(target: Target) -> jinja2.Template:
    if isinstance(target.template, str):
        return _environment().get_template(target.template)
    return _environment(target.template.parent).get_template(target.template.name)


def render(b: Build) -> str:
    """The generated module's text: ASCII, the same bytes for the same build."""
    p = lowered(b)
    kernels = b.of.emit(p, b.layout, b.heads)
    text = _template(b.of).render(**_facts(b, p, kernels))
    if not text.isascii():
        other = next(x for x in text if not x.isascii())
        raise ValueError(f"algorithm: got {other!a} in a line of {b.page.name} that its modules quote; accepted: ASCII")
    return text


def _command(b: Build) -> str:
    """How to make the module again from the current folder: a command, or Python if the schedule is not a named one."""
    if isinstance(b.algorithm, Algorithm):
        return f"render({_spelled_out(b)}) of gdn_codegen.runtime.build, {b.page.name} a page"
    file, colon, function = b.algorithm.rpartition(":")
    algorithm = re.sub(r"[^\w.+-]", "_", Path(file).name, flags=re.ASCII) + colon + function if colon else b.algorithm
    if b.plan.name not in SCHEDULES or b.plan.if_declined or b.plan.partition == "short":  # no command makes half of a pair
        return f"render({_spelled_out(replace(b, algorithm=algorithm))}) of gdn_codegen.runtime.build"
    return (f"gdn_codegen build --target {b.target} --chunk {b.chunk} --layout {b.layout} --algorithm {algorithm}"
            f" --schedule {b.plan.name} --dtype {b.dtype} --head-dim-k {b.head_dim_k} --head-dim-v {b.head_dim_v}"
            + (f" --launch {b.plan.launch}" if b.plan.launch != "kernels" else "")
            + (f" --partition {b.plan.partition}" if b.plan.partition else "")
            + "".join(f" --set {n}={spelled(v)}" for n, v in changes(b.plan, b.arch).items() if n not in ("launch", "partition"))
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


def _facts(b: Build, p: Program, kernels: list[KernelText]) -> dict[str, Any]:
    """The texts for the slots of a template."""
    from ..emit.page import page_text
    t, read = tables(b, p, kernels), b.page.of if isinstance(b.page, derived_pages.Derived) else b.page
    forms = forms_text(b.contract, read.trace(), read is not b.page)
    page = page_text(replace(b.page.trace(), dims=tuple(b.sizes.items())))
    # the module has it in triple-quoted strings
    doc = b.page.doc
    summary = re.sub(r"(['\"])\1+", r"\1", doc.splitlines()[0].replace("\\", "/")) if doc else b.page.name
    return {"command": _command(b), "schedule": b.plan.name, "function": b.function, "chunk": b.chunk, "layout": b.layout,
            "dtype": b.dtype, "arch": b.arch, "sizes": {**b.sizes, **{f"P{d}": p.sizes[d] for d, _ in p.extents}},
            "summary": summary, "documentation": documentation(b, p, t), "signature": signature(t, b.page.inputs),
            "arguments": arguments(t), "tables": literal(t),
            "reference_text": "\n\n\n".join(filter(None, (page, forms))),
            "check_arguments": [b.function, *(("_reads", "_draws") if forms else ())], "kernels": kernels,
            **b.of.facts(b, kernels)}


@cache
def copied(file: str) -> str:
    """The part of a file of this package that generated modules have word for word, as of "host/check.py"."""
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")  # to import it would import torch
    return text.partition("# --- copied from here on ---\n")[2].strip()
