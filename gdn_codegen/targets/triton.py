"""The target Triton, for NVIDIA and AMD GPUs. CPU tensors run in its interpreter."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices import HOPPER, TRITON
from ..emit import triton
from ..emit.base import KernelText, quoted
from ..emit.triton import functions
from ..ir.core import Kernel, Program, Stmt, loops, walk
from ..ir.types import BYTES, Tile
from ..passes.pipelines import INSTANCES
from ..schedule import OF_CORES, varied
from ..schedule.schedule import BEFORE_BACK
from . import Ahead, Line, Lowering, Target, Toolchain, machine, register
from .candidates import Asked, Candidate, Space
from .gradient_plans import (
    BY_CHANNELS,
    IN_PARTS,
    OF_SOLUTIONS_APART,
    ONE,
    STATE_WALKS,
    STORING_BY_PIECES,
    THREE,
    GradientPlan,
    late_sums,
)
from .machine import Finding

if TYPE_CHECKING:
    from ..runtime.build import Build

INSTALL = "pip install 'gdn_codegen[triton]'"
#: Fields of `walk` by chunk, on a GPU, with K and V of at most WIDEST. The first serves calls that give no chunk.
WALKS: dict[int, dict[str, Any]] = {32: {"stages": 3}, 64: {}, 16: {"stages": 3}}
WIDEST = 128
#: The chunk with which `staged` serves pages with a decay for each channel, on a GPU, with K and V of at most WIDEST.
STAGED = 64
#: The chunk and the fields of `operand_walk` that serve such pages on Hopper. One kernel has the products of pairs of tokens and
#: the inverse, in a loop over pieces of K: with all of K, or chunks of 64 tokens, it spills. On an H100 with K = V = 128 it takes
#: 0.1 to 0.3 of the time that `staged` took (docs/performance/members.md). Its walk has no room in the 64
#: KiB of shared memory of gfx942.
BY_CHANNEL: tuple[int, dict[str, Any]] = (32, {
    "kernels": (("@gate_sum", "@keyed"), ("@inverse", "@pair", "@operand"), ("@output", "@state")), "k_piece": 16, "stages": 3,
    "warps": 4})
#: Chunks for which these walks over whole sequences read q and k by descriptors, by architecture. Parts do so for any chunk.
DESCRIBED: dict[str, tuple[int, ...]] = {"sm_90a": (32,)}


def _described(arch: str, chunk: int, parts: bool) -> dict[str, Any]:
    """Fields of walks that depend on the architecture."""
    return {"descriptors": True} if arch in DESCRIBED and (parts or chunk in DESCRIBED[arch]) else {}


def _model(x: Asked) -> Iterator[Candidate]:
    """On a GPU walks, or for decays of channels kernels over chunks."""
    if x.channels and x.few is not None and max(x.head_dims) <= WIDEST:
        chunk, fields = BY_CHANNEL
        fields = fields | ({} if x.inverts else x.residuals)
        if x.arch in DESCRIBED and x.chunk in (None, chunk):
            if x.few:
                parts = varied("operand_walk", partition="decay", **fields)
                yield Candidate(parts, "walks fill at most half of the GPU", chunk)
            yield Candidate(varied("operand_walk", **fields), "a decay for each channel", chunk)
        if x.chunk in (None, STAGED):
            yield Candidate("staged", "a decay for each channel", STAGED)
    n = x.chunk or next(iter(WALKS))
    if x.few is None or max(x.head_dims) > WIDEST or n not in WALKS:
        return
    if x.few and not x.channels:  # the cost of parts was fitted to gates that are numbers
        plan = varied("walk", partition="decay", longest_first=True, **WALKS[n], **_described(x.arch, n, True))
        yield Candidate(plan, "walks fill at most half of the GPU", n)
    yield Candidate(varied("walk", **WALKS[n], **_described(x.arch, n, False)), "made for GPUs", n)


def _too_large(p: Program) -> str:
    """Why a kernel with K or V above WIDEST does not fit into shared memory; "" if it fits.

    The estimate adds the tiles that a walk loads and the state as an operand. Tiles count twice if 16-bit loads run ahead.
    float32 needs a tenth more. For K = V = 256 the estimate is within 5 % of what Triton's compiler reports. Of a kernel over
    chunks it is the loaded tiles that are live at once. For gradients in chunks of 64 on sm_90 the compiler reports 0.94 to 1.13
    times as much with plain gates, and 0.2 to 1 times as much in smaller chunks.
    """
    if max(p.sizes["K"], p.sizes["V"]) <= WIDEST:
        return ""
    for k in p.kernels:
        sizes = {**p.sizes, **k.sizes}

        def size(types: Iterable[Tile], sizes: dict[str, int] = sizes) -> int:
            return sum(prod(t.shape(sizes)) * BYTES[t.dtype] for t in types)
        needs = [_live_loads(k, sizes)] if k.grid == "chunks" else []
        for lp in loops(k.body):
            tiles = _tiles(lp.body)
            operands = [o.type for o in walk(lp.body) if o.kind == "cast" and o.args[0] in {c.name for c in lp.carried}]
            wide = any(t.dtype == "float32" for t in tiles) and not operands
            need = size(tiles) * (1 if wide else 2) + size([t for t in operands if t] or [c.type for c in lp.carried])
            needs.append(need + need // 10 * wide)
        if (need := max(needs, default=0)) > HOPPER.spaces["shared"]:
            return f"kernel {k.name} takes about {need} bytes of shared memory, and an H100 has {HOPPER.spaces['shared']}"
    return ""


def _live_loads(k: Kernel, sizes: dict[str, int]) -> int:
    """The bytes of loaded tiles that are live at once, at most."""
    size = {o.out: prod(t.shape(sizes)) * BYTES[t.dtype] for o in k.ops
            if o.kind == "load" and (t := o.type) is not None and t.rank == 2}
    last = {a: n for n, o in enumerate(k.ops) for a in o.args if a in size}
    live = most = 0
    for n, o in enumerate(k.ops):
        live += size.get(o.out, 0)
        most = max(most, live)
        live -= sum(size[a] for a in set(o.args) & size.keys() if last[a] == n)
    return most


def _tiles(body: tuple[Stmt, ...]) -> list[Tile]:
    """The types of the tiles that statements load."""
    return [o.type for o in walk(body) if o.kind == "load" and o.type is not None and o.type.rank == 2]


def _implied(schedule: str, arch: str, chunk: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a candidate for `tune` that follow from its others."""
    return _described(arch, chunk, "partition" in fields) if schedule == "walk" else {}


SPACES = (
    Space(("walk",), {"partition": (None, "decay"), "part_chunks": (0, 10, 16, 32, 64, 68, 128),
                      "longest_first": (False, True), "v_block": (0, 128)}, (32,), base={"stages": 3}, implied=_implied),
    Space(("walk",), {}, (32,), base={"stages": 4, "partition": "decay", "part_chunks": 10, "longest_first": True},
          implied=_implied),
    Space(("walk", "prepared"), {"partition": (None, "decay"), "part_chunks": (0, 8, 16, 32, 64),
                                 "longest_first": (False, True)}, (64,), implied=_implied))


def _findings() -> list[Finding]:
    version, gpu = machine.version("triton"), machine.gpu()
    return [Finding("triton", "package", bool(version), version or INSTALL),
            Finding("triton", "CPU tensors", bool(version), "Triton's interpreter" if version else "needs the package"),
            Finding("triton", "GPU tensors", bool(version and gpu), gpu or machine.NO_GPU)]


def _check(b: Build, path: Path, archs: Sequence[str]) -> Sequence[Line]:
    from ..tools import check_triton
    return check_triton.check(b, path, archs or check_triton.USUAL)


def _ahead(path: Path, arch: str, heads: Sequence[tuple[int, int]]) -> Iterator[str]:
    from ..tools import compile_ahead
    return compile_ahead.triton(path, arch, heads)


def _facts(b: Build, kernels: Sequence[KernelText]) -> dict[str, Any]:
    """The device functions of a module, and tables of its kernels."""
    def those(key: str) -> list[str]:
        return [k.name for k in kernels if k.extra[key]]
    return {"device_functions": functions.module_texts({x for k in kernels for x in k.extra["calls"]}),
            "blocks": quoted({k.name: k.extra["block"] for k in kernels if k.extra["block"]}),
            "warps": quoted({k.name: k.extra["warps"] for k in kernels}), "stages": b.plan.stages,
            "unspecialised": quoted(tuple(sorted({n for k in kernels for n in k.extra["loose"]}))),
            "in_shares": quoted(those("in_pairs")), "descriptors": bool(those("described"))}


#: Kernels of a gradient, smaller than three: what is early has a kernel of its own, and so have outputs of one number a token.
#: Their sums are stored by the kernel before: ptxas delays sums until they are read. K, V from 132 to 252 may fit three kernels
#: alone.
FIVE = ((*BEFORE_BACK, "@converted"), ("@early",), ("@state", "@solution"), ("@sum", "@tile"), ("@core",), ("@output",))
_THREE = replace(THREE, gradient=("gradient", {"v_block": 64}))
GRADIENTS = {
    "cpu": (ONE, THREE),
    "cuda": (*(replace(THREE, gradient=("gradient", {"v_block": 64, "kernels": FIVE, **x})) for x in (IN_PARTS, {})), _THREE,
             *(GradientPlan((BY_CHANNELS, {"v_block": 64, "kernels": OF_SOLUTIONS_APART, **x}), STORING_BY_PIECES, True, most=32,
                            solved="operands") for x in (IN_PARTS, {})),
             GradientPlan((BY_CHANNELS, {"v_block": 64}), STATE_WALKS, True, most=32), ONE,
             replace(THREE, gradient=("gradient", {"v_block": 64, **late_sums(FIVE)}), rank=1))}

TARGET = register(Target(
    "triton", Lowering(INSTANCES, TRITON, unused=(*OF_CORES, "value_heads", "agents", "persistent", "by_length",
                                          "token_groups", "shared_kib")), triton.emit,
    "triton/module.py.j2", ("cpu", "cuda"), facts=_facts, preference=1, model=_model,
    too_large=_too_large, sized_for=("sm_90a",), spaces=SPACES, per_call=True, interprets=("cpu",),
    gradients=GRADIENTS,
    toolchain=Toolchain(
        package="triton", install=INSTALL, modules=("triton",), findings=_findings, check=_check,
        check_archs=("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950"),
        ahead=Ahead(r"sm_\d+a?|gfx\w+", "as sm_90a or gfx942", True, _ahead))))
