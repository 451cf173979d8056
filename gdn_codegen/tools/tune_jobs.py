"""What `gdn_codegen tune` has to time: jobs, each a build at a shape."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..ir.differentiate import derivative
from ..runtime.build import Build
from ..runtime.call import choose, choose_decode, gradient_builds, tables
from ..runtime.call.device import SHARED_KIB, Facts
from ..runtime.call.request import DECODE_CHUNK, DEFAULT_CHUNK
from ..runtime.call.size import size_of
from ..runtime.call.tables import Extent
from .candidates import candidates
from .shapes import Shape


def shared_kib(names: Sequence[str]) -> int:
    """KiB of shared memory that blocks may take on a GPU with these names, as in Facts."""
    return SHARED_KIB.get(names[-1], 0)


def model_choice(about: Build, x: Extent, arch: str, units: int, kib: int = 0) -> Build:
    """The build that a call gets if no table has a row for it. kib: as in Facts."""
    size = size_of(x, about.target, Facts("cuda", (), arch, units))
    found = (b.for_shared(kib) for b, _ in choose.modelled(about, arch, size.few, x.shape_class, None, **size.asked))
    return next(filter(choose.fits, found), about)


def step_choice(about: Build, x: Extent, units: int, kib: int = 0) -> Build:
    """The build that a decoding step gets if no table has a row for it and both targets run. kib: as in Facts."""
    plain = replace(about, chunk=DECODE_CHUNK, arch="")
    found = choose_decode.modelled(plain, x, units, choose_decode.PREFERRED["cuda"])
    return next(filter(choose.fits, (b.for_shared(kib) for b, _ in found)), plain)


@lru_cache(maxsize=256)
def gradient_choice(b: Build, arch: str, shape_class: tuple[int, ...], units: int, kib: int = 0) -> Build:
    """The build of the states before chunks, or of the gradient, that a gradient takes if no table has a row for it. b: such a
    build for the same inputs. shape_class: of the call. units: multiprocessors of the device. kib: as in Facts."""
    page, _, kind = str(b.algorithm).rpartition(".")
    plain = replace(b, algorithm=page, contract=replace(b.contract, dtypes=rounded_rows(b)))
    few = gradient_builds.few_walks(b.target, shape_class, units)
    every = (x.for_shared(kib) for x in gradient_builds.candidates(plain, "cuda", arch, DEFAULT_CHUNK, few=few))
    found = next((x for x in every if all(map(choose.fits, x.all))), None)
    return b if found is None else found.gradient if kind == "gradient" or found.states is None else found.states


def rounded_rows(b: Build) -> tuple[tuple[str, str], ...]:
    """The dtypes that a contract of a gradient has for gradients of rows, without those of states before chunks."""
    return tuple(x for x in b.contract.dtypes if x[0].startswith(derivative("")))


@dataclass(frozen=True)
class Job:
    """A build to be timed at a shape, for a table."""

    build: Build
    H: int
    HV: int
    lens: tuple[int, ...]
    table: str = ""  # one that targets share, or its target's

    @property
    def shape(self) -> Shape:
        """The shape, named by its lengths and head counts."""
        each = f"{len(self.lens)} x {self.lens[0]}" if len(set(self.lens)) == 1 else " + ".join(map(str, self.lens))
        return Shape(f"{each}, {self.H}/{self.HV}", self.lens, self.H, self.HV)

    @property
    def extent(self) -> Extent:
        """The size of a call at this shape."""
        return Extent(self.H, self.HV, len(self.lens), sum(self.lens), len(self.lens) > 1)

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs as the log has them."""
        about = {n: getattr(self.build, n) for n in tables.ABOUT}
        return {**about, "accept": str(self.build.contract), "H": self.H, "HV": self.HV, "lens": list(self.lens)}

    @property
    def about(self) -> str:
        """Inputs that times may be compared on."""
        return json.dumps(self.inputs, sort_keys=True)

    @property
    def key(self) -> str:
        """What the log calls it."""
        return json.dumps({**self.inputs, "build": tables.choice_json(self.build, self.table)}, sort_keys=True)


def extent(s: Shape) -> Extent:
    """The size of a call with this shape. Several sequences are packed."""
    return Extent(s.H, s.HV, len(s.lens), sum(s.lens), len(s.lens) > 1)


def jobs(about: Build, shapes: Sequence[Shape], arch: str, units: int, kib: int = 0) -> list[Job]:
    """All that there is to time: at each shape the model's choice, then one candidate after the other at all shapes, but for
    parts as long as a sequence. kib: as in Facts."""
    every = [b.for_shared(kib) for b in candidates(about, arch)]
    first = {s: model_choice(about, extent(s), arch, units, kib) for s in shapes}
    found = [Job(b, s.H, s.HV, s.lens) for s, b in first.items()] + [
        Job(b, s.H, s.HV, s.lens) for b in every for s in shapes if sensible(b, s, units)]
    return list({j.key: j for j in found}.values())


def sensible(b: Build, s: Shape, units: int) -> bool:
    """True if a candidate is worth timing: parts of a given length are shorter than a sequence, the number of walks is between
    half and six times the multiprocessors, and a kernel batches no heads or as many as possible. Parts that follow one another
    are for single sequences: each of a pack has launches for all tokens."""
    if b.plan.value_heads not in (0, extent(s).shared) or (b.plan.partition == "pipelined" and len(s.lens) > 1):
        return False
    size = b.plan.part_chunks * b.chunk
    walks = s.HV * sum(-(-n // size) for n in s.lens) if size else units
    return size < max(s.lens) and units <= 2 * walks <= 12 * units


def in_short_parts(b: Build) -> Build:
    """The same kernels with parts of one chunk, so that even a short sequence has parts that need summaries."""
    return replace(b, schedule=replace(b.plan, part_chunks=1)) if b.plan.partition else b
