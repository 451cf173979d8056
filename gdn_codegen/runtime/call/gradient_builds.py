"""Chooses the builds of a gradient: one for the states before chunks, and one that walks back."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ...host.tensors import _fail
from ...schedule import varied
from ...targets import names
from ..admit import Refused, admit
from ..build import Build
from ..load import module
from ..targets import choose, runs, serving
from .choose import refuse, refused, unfit
from .compiling import DoesNotCompile, compiling
from .device import facts
from .request import DEFAULT_CHUNK, DTYPES, Call

#: Schedules of gradients with changed fields, by target and architecture; "" is for any. The first that fits is taken. A target
#: that is not here has no gradients.
SCHEDULES: dict[tuple[str, str], tuple[tuple[str, dict[str, Any]], ...]] = {
    ("triton", ""): (("fused", {}),), ("tilelang", ""): (("fused", {}),), ("pto", ""): (("prepared", {}), ("fused", {}))}
#: Tokens of a chunk, tried from the largest that the call allows.
CHUNKS = (128, 64, 32, 16)


@dataclass(frozen=True)
class Builds:
    """The builds of a gradient: the states before chunks, and the gradient itself."""

    states: Build
    gradient: Build


def candidates(b: Build, arch: str, most: int) -> Iterator[Build]:
    """Builds of a gradient, the best first. b: with target, page, dtype, K, V and contract. arch: of the device. most: tokens of
    the largest chunk."""
    for chunk in (n for n in CHUNKS if n <= most):
        for key in dict.fromkeys(((b.target, arch), (b.target, ""))):
            for name, fields in SCHEDULES.get(key, ()):
                yield replace(b, chunk=chunk, schedule=varied(name, **fields) if fields else name)


#: Targets that have gradients.
TARGETS = tuple(dict.fromkeys(n for n, _ in SCHEDULES))


def check_target(asked: str) -> None:
    """ValueError for a target without gradients."""
    if asked in names() and asked not in TARGETS:
        _fail("target", repr(asked), f"auto, {', '.join(TARGETS)}, which have gradients")


def targets_for(device: str, asked: str) -> list[str]:
    """The targets whose builds may serve the gradient of a call, the preferred one first: the caller's, or all that run here."""
    check_target(asked)
    found = [n for n in serving(device) if n in TARGETS and runs(n, device)]
    return found if asked == "auto" and found else [choose(device, asked)]


def builds_for(call: Call) -> Builds:
    """The builds of the gradient of a call. ValueError where none fits.

    States lie as the pages have them, in float32: the gradient makes of them what the caller has.
    """
    x = call.request
    contract = replace(call.contract.unpromised(), dtypes=(), state_layout="kv", state_dtype="float32")
    b = Build("triton", layout=x.layout, algorithm=x.page, dtype=DTYPES[call.dtype], head_dim_k=call.head_dims[0],
              head_dim_v=call.head_dims[1], contract=contract)
    most = DEFAULT_CHUNK if x.chunk is None else max(x.chunk, CHUNKS[-1])
    return _fitting(b, x.target, facts(call.device).arch, most, call.device)


@lru_cache(maxsize=256)
def _fitting(b: Build, asked: str, arch: str, most: int, device: Any) -> Builds:
    """The first builds that fit. b, arch, most: as for `candidates`, of any target. asked: the call's target."""
    why = []
    for target in targets_for(device.type, asked):
        for x in candidates(replace(b, target=target), arch, most):
            found = Builds(*(replace(x, algorithm=f"{b.algorithm}.{kind}") for kind in ("states", "gradient")))
            against = [unfit(y) or refused(y, device) for y in (found.states, found.gradient)]
            if not any(against):
                return found
            why.append(next(filter(None, against)))
    _fail("target", repr(asked), f"a target that has a gradient of {b.algorithm} with K = {b.head_dim_k}, V = {b.head_dim_v} in "
                                 f"{b.dtype} ({why[-1]})")


def modules_for(call: Call) -> tuple[Any, Any]:
    """The modules of the gradient of a call, after admission: states before chunks, and the gradient. A build that is refused on
    the device, or that does not compile, is passed over; its warning says so. ValueError where none is left."""
    while True:
        builds, made = builds_for(call), []
        for b in (builds.states, builds.gradient):
            m = module(b)
            try:
                with compiling(m, call.device.type):
                    admit(b, m, call, lambda: None)
            except (Refused, DoesNotCompile) as e:
                if not refuse(b, call.device, str(e)):
                    raise
                warnings.warn(f"{e}. Gradients take another build", RuntimeWarning, stacklevel=2)
                _fitting.cache_clear()
                break
            made.append(m)
        else:
            return made[0], made[1]
