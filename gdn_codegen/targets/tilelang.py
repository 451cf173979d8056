"""The target TileLang, for NVIDIA GPUs. CPU tensors run through its C backend."""
from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices import HOPPER
from ..devices.sm_90a import SM_90A
from ..emit import tilelang
from ..emit.base import KernelText, quoted
from ..emit.tilelang import functions
from ..ir.stored import Solved
from ..passes.cut.partition import longest_warm_up
from ..passes.cut.summaries import SUMMARIES
from ..passes.pipelines import GROUPS, ONE_AGENT
from ..schedule import OF_CORES, Schedule, named, varied
from . import Ahead, Line, Lowering, Target, Toolchain, machine, register
from .candidates import Asked, Candidate, Space, Splits, several
from .gradient_plans import (
    BY_CHANNELS,
    IN_PARTS,
    OF_SOLUTIONS,
    ONE,
    ONE_WALK,
    STATE_WALKS,
    STORING_WALKS,
    THREE,
    GradientPlan,
    late_sums,
)
from .machine import Finding

if TYPE_CHECKING:
    from ..runtime.build import Build

INSTALL = "pip install 'gdn_codegen[tilelang]'"
#: The architecture with kernels of warp groups.
ARCH = "sm_90a"
#: From this class of value heads times tokens (the last two of Extent.shape_class) on, `fused_walk` also serves parts. A kernel
#: for inverses then costs more than warm-ups that compute inverses again. Where the host knows that one sequence has more than
#: twice the mean, that is so from LARGE_UNEVEN on, since a long sequence has many parts, each with a warm-up: on an H200 packs of
#: class 18 took 0.89 to 1.13 times as long with `fused_walk` as with `walk`, and of class 19 0.84 to 1.01 times.
LARGE, LARGE_UNEVEN = 18, 19
#: Up to this class of value heads times tokens, halves of V with operands of an earlier kernel serve parts. They
#: have twice the blocks, whose chunks take half the time. Gated DeltaNet on an H200, us with `walk` and with these parts: over
#: 1024 tokens with 4 heads 15 and 13 where heads forget fast, 31 and 22 where they do not; with 32 heads 24 and 25, 38 and 30;
#: over 4096 tokens with 8 heads 31 and 24, 99 and 64; over 2048 tokens with 32 heads, of the next class, 39 and 45, 62 and 55.
#: Whole walks over 512 tokens with 16 heads took 26 us with `fused_walk` and 17 in halves.
SMALL = 15
#: From which class of walks on, and for which classes of mean tokens, blocks take several walks. With fewer walks few blocks have
#: a second one. Of longer sequences the first loads and the final state take a small part of the time. A mean of one token, class
#: 0, is that of a call which says no size. EVEN: classes of mean tokens for lengths that are "level", whatever the walks' class.
#: TIMED: the K and V that were timed so (docs/performance/packs.md); others have whole walks.
MANY, SHORT, EVEN, TIMED = 8, range(1, 9), range(1, 11), ((128, 128), (64, 64))
#: Fields of `operand_walk`, the best first, for so few walks that halves of V occupy more multiprocessors, and for more. Few: at
#: most FEW_OF_EIGHT walks for each eight multiprocessors (49 of an H200), or if no GPU is known, a class below FEW_WALKS. With
#: still fewer walks, halves of parts occupy more. On an H200 walks over 8192 tokens took, in halves and whole, with early
#: outputs: of Kimi Delta Attention with 40 heads 479 and 541 us, 48 heads 596 and 594, 64 heads 759 and 703; of Gated DeltaNet-2
#: 492 and 568, 603 and 633, 772 and 754.
FEW_OF_EIGHT, FEW_WALKS = 3, 6
#: For how many walks of each eight multiprocessors outputs of pages with an inverse come early. In between, halves of V wait for
#: memory. On an H200 Gated DeltaNet-2 took 334 us late and 297 early with 16 heads, 646 and 682 with 48; Kimi Delta Attention
#: 286 and 265 with 16 heads, 342 and 318 with 24, 691 and 675 with 64 (whole), 991 and 1003 with 96.
EARLY_OF_EIGHT = (1, 2, 4)
EARLY: dict[str, Any] = {"agents": "early_outputs"}
#: For how many walks of each eight multiprocessors, and from which class of mean tokens on, the kernel over chunks runs beside
#: the walk of the part before; and from which class of walks on that comes before parts side by side. On an H200 Kimi Delta
#: Attention took, whole and so: 16 heads over 8192 tokens 275 us and 226, over 2048 tokens 80 and 72; 24 heads over 8192 tokens
#: 330 and 299, over 2048 tokens 97 and 97; four rows of 2048 tokens with 8 heads 112 and 114. RWKV-7 with 16 heads took 592 and
#: 525. With 12 heads over 4096 tokens parts took 140 us where no head forgets fast, 96 where all do, and this 113; with 8 heads
#: 118, 68 and 108.
PIPELINED_MEAN, PIPELINED_WALKS = {1: 11, 2: 13}, 4
HALVES: tuple[dict[str, Any], ...] = ({"v_block": 64}, {"v_block": 64, "stages": 1})
WHOLE: tuple[dict[str, Any], ...] = ({}, {"v_block": 64}, {"stages": 1})


def _model(x: Asked) -> Iterator[Candidate]:
    """Kernels with warp groups, on their architecture. First pairs of builds, where gates have a bound and walks are few."""
    if x.arch != ARCH:
        return
    size = sum(x.shape_class[1:])
    pays = (x.longest_share > 0 and x.of_eight <= 4 and x.shape_class[2] >= PAIRED_MEAN and size >= PAIRED_ALL[x.computed]
            or _uneven(x) and x.longest_share > UNEVEN_WHOLE and size >= PAIRED_UNEVEN[x.computed])
    if pays and x.chunk is None and x.bounded and x.block_rows >= SHORT_CHUNKS and x.head_dims == (128, 128):
        first = varied("walk_in_turn", ARCH, partition="short", **x.residuals), SHORT_CHUNKS
        parts = _dominated(x) or x.shape_class[1] < SECOND_WHOLE[0] or x.shape_class[2] > SECOND_WHOLE[1]
        for c in _alone(replace(x, few=x.few and parts)):
            plan = c.schedule
            assert isinstance(plan, Schedule)
            why = "the first of these two if all heads forget fast, else the second"
            yield replace(c, schedule=replace(plan, if_declined=True), reason=why, earlier=first)
    yield from _alone(x)


def _uneven(x: Asked) -> bool:
    """Whether a page with a gate for each channel has a sequence of more than twice the mean."""
    return x.channels and x.uneven


def _dominated(x: Asked) -> bool:
    """Whether the longest sequence of a pack takes so long that its parts, side by side, take less, for such a page."""
    return x.channels and not x.rows and x.longest_share > PARTS_FROM[x.uneven]


def _in_turn(x: Asked) -> tuple[dict[str, Any], ...]:
    """The fields of `walk_in_turn` if it serves a call well, the best first."""
    if not x.longest_share:
        return ({},) if x.of_eight >= UNKNOWN else ()
    if _uneven(x) and x.inverts:
        halves = UNEVEN_WHOLE if x.computed else UNEVEN_HALVES
        return ({},) if x.longest_share <= UNEVEN_WHOLE else (HALVES[0],) if x.longest_share <= halves else ()
    if x.of_eight > 4:
        return ({},) if x.longest_share <= IN_TURN[x.inverts] else ()
    # each half of V can have a multiprocessor
    pays = x.longest_share <= IN_HALVES and x.shape_class[2] >= IN_HALVES_MEAN
    return (HALVES[0],) if pays and x.inverts and not x.computed else ()


def _alone(x: Asked) -> Iterator[Candidate]:
    """Builds that run alone."""
    heads = several(x.shared)
    long_chunks = x.chunk in (None, 64)  # in shorter ones `operand_walk` is for schedules that ask: it lost at some shapes
    uneven = _uneven(x) and x.longest_share > UNEVEN_WHOLE
    halves = uneven or (x.of_eight <= FEW_OF_EIGHT if x.of_eight else x.shape_class[1] < FEW_WALKS)
    early = EARLY if uneven or x.inverts and (x.of_eight in EARLY_OF_EIGHT if x.of_eight else halves) else {}
    if long_chunks and x.inverts and x.bounded and not x.channels and x.head_dims == (128, 128):
        if x.few and sum(x.shape_class[1:]) <= SMALL:
            yield Candidate(varied("operand_walk", ARCH, partition="decay", **EARLY, **HALVES[0], **x.residuals),
                            "parts take less time than whole walks, and are few", arch=ARCH)
        elif x.few is False and halves and early:
            yield Candidate(varied("operand_walk", ARCH, **early, **HALVES[0], **x.residuals), "few short walks", arch=ARCH)
    if x.few and not x.channels:
        if sum(x.shape_class[1:]) >= (LARGE_UNEVEN if x.uneven else LARGE):
            yield Candidate(varied("fused_walk", ARCH, partition="decay", **x.residuals),
                            "parts take less time than whole walks, and are many", arch=ARCH)
        yield Candidate(varied("walk", ARCH, partition="decay", **x.residuals),
                        "parts take less time than whole walks", arch=ARCH)
    elif x.few is False and x.lengths != "dominated" and x.head_dims in TIMED and (
            x.shape_class[2] in EVEN if x.lengths == "level" else x.shape_class[1] >= MANY and x.shape_class[2] in SHORT):
        yield Candidate(varied("fused_walk", ARCH, persistent=True, **x.residuals), "many short sequences", arch=ARCH)
    beside = long_chunks and x.channels and bool(early) and x.rows and x.shape_class[2] >= PIPELINED_MEAN.get(x.of_eight, inf)
    pipelined = Candidate(varied("operand_walk", ARCH, partition="pipelined", **early, **HALVES[0], **x.residuals),
                          "the kernel over chunks runs beside walks, which are few", arch=ARCH)
    before_parts = not x.few or x.shape_class[1] >= PIPELINED_WALKS
    if beside and before_parts:
        yield pipelined
    in_parts = SPLITS.of_channels(x.shape_class) or _dominated(x) if x.channels else x.shape_class[1] < FEW_WALKS
    if long_chunks and x.few and in_parts:
        fields = {} if _dominated(x) and sum(x.shape_class[1:]) >= LARGE_PARTS else HALVES[0]
        plan = varied("operand_walk", ARCH, partition="decay", **fields, **x.residuals)
        yield Candidate(plan, "parts take less time than whole walks", arch=ARCH)
    if beside and not before_parts:
        yield pipelined
    if x.chunk in (None, SHORT_CHUNKS) and x.bounded and x.block_rows >= SHORT_CHUNKS and x.head_dims == (128, 128):
        for fields in _in_turn(x):
            yield Candidate(varied("walk_in_turn", ARCH, **fields, **x.residuals), "gates have a bound, and walks are many",
                            SHORT_CHUNKS, ARCH)
    for plan in (varied("fused_walk", ARCH, **x.residuals), varied("walk", ARCH, value_heads=heads, **x.residuals)):
        yield Candidate(plan, f"made for {ARCH}", arch=ARCH)
    for fields in () if not long_chunks else HALVES if halves else (*WHOLE, *HALVES[1:]):
        yield Candidate(varied("operand_walk", ARCH, **early, **fields, **x.residuals), f"made for {ARCH}", arch=ARCH)


#: Where gates are -5 or more, a decayed product of 16 tokens is one product. Warps that take such chunks in turn then compute
#: all operands in the block of the walk, so that none goes through global memory. A call takes as long as its longest walk,
#: 0.087 us for a token, and in halves of V 0.070 us, whatever the number of walks, while `operand_walk` takes 0.17 us for a
#: token that each multiprocessor has (Kimi Delta Attention, an H200). So the longest walk may have so many eighths of those
#: tokens: IN_TURN, by whether the page has an inverse, and IN_HALVES, if kernels compute no gates or norms, from a class of mean
#: tokens on. On an H200 64 walks over 8192 tokens took 575 us in halves and 693 with `operand_walk`, 72 walks 714 (whole) and
#: 909; with a layer's inputs 780 and 776, 876 and 999; 64 heads over 34 sequences of 11 tokens 176 and 260. Of gated linear
#: attention 64 took 732 us and 479, in two runs. UNKNOWN: where only kernels know lengths, from so many walks for each eight
#: multiprocessors on.
SHORT_CHUNKS, IN_TURN, IN_HALVES, IN_HALVES_MEAN, UNKNOWN = 16, {True: 16, False: 10}, 19, 9, 7
#: Eighths of packs of which the host knows that one sequence has more than twice the mean: up to UNEVEN_WHOLE whole walks in
#: turn, up to UNEVEN_HALVES in halves, if kernels compute no gates or norms; above that `operand_walk` in halves. Packs with
#: more than PARTS_FROM, by whether they are uneven so, have parts, of whole V from a size of LARGE_PARTS on (classes of walks
#: and mean tokens). PAIRED_UNEVEN: from which size on uneven packs with more than UNEVEN_WHOLE have pairs of builds, by whether
#: kernels compute gates or norms. On an H200 Kimi Delta Attention with 16 heads over 13 sequences, one with 17487 of 26482
#: tokens, took 1502 us in turn, 928 with `operand_walk`, 706 in halves, 630 in parts, and in a pair 412 where all heads forget
#: fast; 24 heads over 28 sequences, the longest with 4306 of 6536 tokens, 384, 307, 270 and 290 (parts) us.
UNEVEN_WHOLE, UNEVEN_HALVES, LARGE_PARTS, PAIRED_UNEVEN = 15, 20, 17, {False: 18, True: inf}
PARTS_FROM = {True: 48, False: 63}
#: From which classes of mean tokens, and of walks times these, on a build with short warm-ups runs before the one that runs
#: alone, where the GPU has two multiprocessors for each walk; the second class by whether kernels compute gates or norms, as
#: those of a layer, of which some head forgets slowly. On an H200 Kimi Delta Attention took, in a pair where all heads forget
#: fast, and where one does not, and alone: 16 heads over 8192 tokens 126 us, 232 and 223; 24 heads 189, 314 and 291. In a pair
#: and in parts: 8 heads over 4096 tokens 53, 119 and 61, 112; 12 heads 64, 127 and 87, 131; over 2048 tokens 16 heads 51, 82 and
#: 61, 81; 12 heads 44, 77 and 50, 70.
PAIRED_MEAN, PAIRED_ALL = 11, {False: 15, True: 17}
#: From which class of walks, and up to which class of mean tokens, the second build has no parts side by side. 16 walks over
#: 12000 tokens that forget slowly took 439 us in a pair with whole walks, and 385 in parts alone; 8 over 16384 tokens take 373 in
#: a pair, and 324 in parts alone.
SECOND_WHOLE = (3, 13)
assert SM_90A.part_cost is not None
#: No shorter call was timed. With a gate for each channel, the bound of what channels forget takes up to a tenth of the kernel
#: over chunks. On an H200 16 walks of Kimi Delta Attention over 2048 tokens took 95 us in parts and 96 whole, 4 over 8192 tokens
#: 172 and 215; where gates are -5 or more and forget fast, 68 and 89, 75 and 211. 4 over 1024 tokens took 41 and 39, 24 over 8192
#: tokens 589 and 433. unsplit_us: fitted to 30 packs of equal lengths on an H200 (docs/performance/packs.md).
SPLITS = Splits(SM_90A.part_cost, least_tokens=256, walks=1, summaries=len(SUMMARIES), most=longest_warm_up(SM_90A),
                chosen=True, unsplit_us=(12.0, 7.0), channels=(4, 11))
#: The values of a schedule's `value_heads` to try. 0 means the device's number, which is 1.
HEADS = {"walk": (0, 4, 2), "fused_walk": (0,)}
SPACES = (
    *(Space((name,), {"partition": (None, "decay"), "part_chunks": (0, 8, 10, 16, 24, 32, 34, 40, 64, 128, 256),
                      "longest_first": (False, True), "value_heads": heads}, (64,), ARCH)
      for name, heads in HEADS.items()),
    Space(("fused_walk",), {}, (64,), ARCH, {"persistent": True}),
    Space(("operand_walk",), {"v_block": (0, 64), "stages": (2, 1)}, (64,), ARCH),
    Space(("operand_walk",), {"v_block": (0, 64), "partition": (None, "decay", "pipelined")}, (64,), ARCH, EARLY),
    Space(("operand_walk",), {"v_block": (0, 64)}, (SHORT_CHUNKS,), ARCH, {"stages": 4}),
    Space(("walk_in_turn",), {"v_block": (0, 64), "partition": (None, "decay")}, (SHORT_CHUNKS,), ARCH),
    Space(("fused", "replay", "prepared", "staged"), {"partition": (None, "decay"), "part_chunks": (0, 16, 64),
                                                      "v_block": (0, 64, 32)}))


def _lacks(device: str) -> str:
    if device == "cuda" and shutil.which("nvcc") is None:
        return f"nvcc is missing: install {machine.TOOLS['nvcc']}, or compile ahead (gdn_codegen build --compile)"
    return machine.lacks_compiler() if device == "cpu" else ""


def _findings() -> list[Finding]:
    version, gpu, nvcc = machine.version("tilelang"), machine.gpu(), machine.first_line("nvcc", "--version")
    compiles = bool(version) and machine.compiler()
    return [Finding("tilelang", "package", bool(version), version or INSTALL),
            Finding("tilelang", "CPU tensors", compiles,
                    "TileLang's C backend" if compiles else f"needs the package and {machine.TOOLS['c++']}"),
            Finding("tilelang", "nvcc", bool(nvcc), nvcc or f"needs {machine.TOOLS['nvcc']}"),
            Finding("tilelang", "GPU tensors", bool(version and gpu and nvcc), gpu or machine.NO_GPU)]


def _check(b: Build, path: Path, archs: Sequence[str]) -> Sequence[Line]:
    from ..tools import check_tilelang
    return check_tilelang.check(b, path)


def _ahead(path: Path, arch: str, heads: Sequence[tuple[int, int]]) -> Iterator[str]:
    from ..tools import compile_ahead
    return compile_ahead.tilelang_on_cpu(path) if arch == "cpu" else compile_ahead.tilelang(path, arch)


def _fill(path: Path, arch: str, heads: Sequence[tuple[int, int]]) -> Iterator[str]:
    from ..tools import compile_ahead
    return compile_ahead.tilelang_cache(path, arch)


#: Fields that serve other targets, whatever the architecture.
OF_OTHERS = (*OF_CORES, "warps", "descriptors", "k_piece", "piece_warps")


def _facts(b: Build, kernels: Sequence[KernelText]) -> dict[str, Any]:
    """The device functions of a module, and the names of kernels with warp groups."""
    called = {x for k in kernels for x in k.extra["calls"]}
    return {"device_functions": functions.module_texts(called, ("cuda",) if b.arch else ("cuda", "cpu"), b.arch),
            "groups": quoted([k.name for k in kernels if k.extra["agents"]])}


#: Walks for the states before chunks on Hopper's warp groups.
_STATES = (("fused_walk", IN_PARTS), *STATE_WALKS)
#: The same, and last one in parts that serves pages with a gate for each channel.
_OF_CHANNELS = (*_STATES, ("operand_walk", {"v_block": 64, **IN_PARTS}))
#: What the walk back with all outputs may read beside states, the most first.
OF_ONE_WALK: tuple[Solved, ...] = ("inverses", "solutions", "")
#: What kernels over chunks read beside states, in parts and not: operands of products, and bounds of tokens where a page has
#: such (`by_token`).
OF_OPERANDS: tuple[tuple[Solved, dict[str, Any]], ...] = (("bounds", IN_PARTS), ("operands", IN_PARTS), ("operands", {}))
#: The last one of any GPU has chunks of 16: with 32, a kernel of RWKV-7 with K = V = 256 lacks 512 bytes.
GRADIENTS = {
    "cpu": (ONE, THREE),
    "cuda": (*(replace(THREE, gradient=("gradient", {"v_block": 64, **x})) for x in (IN_PARTS, {})), ONE,
             replace(THREE, gradient=("gradient", {"v_block": 64, **late_sums(named("gradient").kernels)}), rank=1),
             GradientPlan((BY_CHANNELS, {"v_block": 64}), STATE_WALKS, True, most=16, rank=1)),
    ARCH: (
        *(GradientPlan((ONE_WALK, IN_PARTS), _STATES, True, ARCH, solved=x) for x in OF_ONE_WALK),
        *(GradientPlan((name, {"v_block": 64, "stages": n, **x}), _STATES, True, ARCH)
          for name in ("gradient", "operand_gradient") for n in (3, 2, 1) for x in (IN_PARTS, {})),
        *(GradientPlan((BY_CHANNELS, {"v_block": 64, "stages": n, "kernels": OF_SOLUTIONS, **x}), STORING_WALKS, True, ARCH,
                       solved=stored) for n in (3, 2, 1) for stored, x in OF_OPERANDS),
        *(GradientPlan((BY_CHANNELS, {"v_block": 64, "stages": n, **x}), _OF_CHANNELS, True, ARCH)
          for n in (3, 2, 1) for x in (IN_PARTS, {})))}

TARGET = register(Target(
    "tilelang",
    Lowering(ONE_AGENT, HOPPER, unused=(*OF_OTHERS, "stages", "warm_up", "longest_first", "agents", "persistent", "by_length")),
    tilelang.emit, "tilelang/module.py.j2", ("cpu", "cuda"),
    facts=_facts, archs={ARCH: Lowering(GROUPS, SM_90A, unused=(*OF_OTHERS, "token_groups", "padded_pieces"), schedule="walk",
                                        columns=64)},
    preference=0, model=_model, sized_for=(ARCH,), spaces=SPACES, splits=SPLITS, stride_units=True, tf32=True,
    gradients=GRADIENTS,
    toolchain=Toolchain(
        package="tilelang", install=INSTALL, modules=("tilelang", "tvm", "tvm_ffi"), lacks=_lacks,
        compiler=lambda device: "gcc" if device == "cpu" else "nvcc", findings=_findings,
        check_needs=lambda: "" if shutil.which("nvcc") else machine.TOOLS["nvcc"], check=_check,
        ahead=Ahead(r"sm_\d+a?|cpu", "an architecture of NVIDIA, as sm_90a, or cpu", False, _ahead, _fill))))
