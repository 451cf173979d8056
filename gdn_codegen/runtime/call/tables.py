"""Tables of builds that were measured to be the fastest, and how a call finds its row.

A table is {"device", "kind", "target", "versions", "rows"} in JSON, written by `gdn_codegen tune`: the package's own lie in
devices/choices, a user's under the cache folder by device and versions. A row says for which inputs and which shape it was
measured, the build, and its time beside that of the model's choice. It serves its device, and others of its kind: of the same
architecture, with as many multiprocessors. The table of decoding has "decode" for its target: each of its builds says its own.
"""
from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, inf
from pathlib import Path
from typing import Any

from ...ir.types import BYTES
from ...schedule import changes, varied
from ...schedule.contract import Contract
from .. import cache
from ..build import Build

PACKAGED = Path(__file__).parents[2] / "devices" / "choices"
PACKAGE, USER = "the package's", "the user's"
#: The table of decoding steps.
DECODE = "decode"
UNIT = Contract((("k", "unit"),))


@dataclass(frozen=True)
class Extent:
    """A call's size: query and key heads, value heads, sequences, tokens of all."""

    H: int
    HV: int
    sequences: int
    tokens: int

    @property
    def walks(self) -> int:
        """Instances that walk over chunks: one for each sequence and value head."""
        return self.sequences * self.HV

    @property
    def shared(self) -> int:
        """Value heads of a key head that a kernel may take together: 4, 2 or 1."""
        return gcd(self.HV // max(self.H, 1), 4)

    @property
    def shape_class(self) -> tuple[int, int, int]:
        """The nearest powers of two of: value heads a query head, walks over chunks, tokens of a sequence."""
        return power(self.HV // max(self.H, 1)), power(self.walks), power(self.tokens // max(self.sequences, 1))


def power(n: int) -> int:
    """The exponent of the power of two that is nearest to n >= 1 by ratio; 0 for 0."""
    return (n * n).bit_length() // 2


@dataclass(frozen=True)
class Row:
    """A choice that was measured: for which device and inputs (`about`: a build of these, with any schedule) and at what
    size; ms of a call, and of the model's choice there. source: whose table. kind: of the device. table: a target's, or that of
    decoding. float16 and bfloat16 take the same time."""

    device: str
    about: Build
    extent: Extent
    ms: float
    model_ms: float | None = None
    source: str = ""
    kind: str = ""
    table: str = ""

    def known(self, devices: Sequence[str]) -> int:
        """The first of a device's names that is the row's; their number where none is."""
        return next((i for i, d in enumerate(devices) if d in (self.device, self.kind)), len(devices))

    def serves(self, b: Build, contract: Contract) -> bool:
        """Whether the row was measured for inputs as `b` has them: target, layout, algorithm, bytes of the dtype, K and V; and
        for this contract."""
        a = self.about
        return (a.target, a.layout, a.algorithm, BYTES[a.dtype], a.head_dim_k, a.head_dim_v, a.contract) == (
            b.target, b.layout, b.algorithm, BYTES[b.dtype], b.head_dim_k, b.head_dim_v, contract)

    def far(self, shape_class: tuple[int, ...]) -> int:
        """Steps from one shape class to another."""
        return sum(abs(x - y) for x, y in zip(self.extent.shape_class, shape_class, strict=True))

    def __str__(self) -> str:
        x = self.extent
        return (f"{self.source} table of {self.device}: {self.ms:g} ms at {x.sequences} "
                f"{'sequence' if x.sequences == 1 else 'sequences'}, {x.tokens} tokens, heads {x.H}/{x.HV}")


#: Fields of a build that a row has, in this order.
ABOUT = ("algorithm", "dtype", "layout", "head_dim_k", "head_dim_v")


def as_json(r: Row) -> dict[str, Any]:
    """A row of a table's JSON."""
    b, x = r.about, r.extent
    return {**{n: getattr(b, n) for n in ABOUT}, "accept": str(b.contract), "H": x.H, "HV": x.HV, "sequences": x.sequences,
            "tokens": x.tokens, "build": choice_json(b, r.table), "ms": r.ms, "model_ms": r.model_ms}


def choice_json(b: Build, table: str = "") -> dict[str, Any]:
    """What a table keeps of a build that it chose; its schedule is a named one, some fields changed."""
    target = {"target": b.target} if table == DECODE else {}
    return {**target, "schedule": b.plan.name, "set": changes(b.plan), "chunk": b.chunk, "arch": b.arch}


def chosen(about: dict[str, Any], choice: dict[str, Any], table: str) -> Build:
    """The build of `choice_json` for inputs of a kind."""
    target = choice["target"] if table == DECODE else table
    fields = dict(choice["set"])
    if "kernels" in fields:  # JSON has lists
        fields["kernels"] = tuple(map(tuple, fields["kernels"]))
    schedule = varied(choice["schedule"], **fields) if fields else choice["schedule"]
    return Build(target, schedule=schedule, chunk=choice["chunk"], arch=choice["arch"], **about)


def from_json(table: dict[str, Any], source: str) -> tuple[Row, ...]:
    """The rows of a table. source: whose it is, PACKAGE or USER.

    ValueError, KeyError or TypeError where a row lacks a field or a number is not above 0.
    """
    rows, kind, name = [], table.get("kind", ""), table["target"]
    for r in table["rows"]:
        about = {n: r[n] for n in ABOUT} | {"contract": Contract.parse(r["accept"])}
        extent = Extent(*(_number(r, n, int) for n in ("H", "HV", "sequences", "tokens")))
        rows.append(Row(table["device"], chosen(about, r["build"], name), extent, _number(r, "ms", float, int),
                        None if r["model_ms"] is None else _number(r, "model_ms", float, int), source, kind, name))
    return tuple(rows)


def _number(row: dict[str, Any], name: str, *kinds: type) -> Any:
    if type(row[name]) not in kinds or not 0 < row[name] < inf:
        raise ValueError(f"{name}: got {row[name]!r}; accepted: a number above 0")
    return row[name]


# --- where tables lie ------------------------------------------------------------------------------------------------
def versions(target: str) -> dict[str, str]:
    """What a measurement depends on, beside the device."""
    from ... import __version__
    from ...targets import find
    from ...targets.machine import version
    used = {n: n for n in ("torch", "triton", "tilelang")} if target == DECODE else \
        {"torch": "torch", target: find(target).toolchain.package}
    return {"gdn_codegen": __version__, **{n: version(package) if package else "" for n, package in used.items()}}


def own_path(device: str, target: str) -> Path:
    """Where `tune` keeps a user's table of a device, for the versions installed."""
    name = "_".join(f"{n}-{v}" for n, v in versions(target).items())
    return cache.folder() / "choices" / re.sub(r"\W+", "_", device).strip("_") / f"{target}_{name}.json"


def read(path: Path, source: str) -> tuple[Row, ...]:
    """The rows of a table; none, and a warning, where it cannot be read: a call must not fail for it."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), source)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        warnings.warn(f"gdn_codegen: {path} is no table of choices and is left out: {type(e).__name__}: {e}", stacklevel=2)
        return ()


@lru_cache(maxsize=1)
def packaged() -> tuple[Row, ...]:
    """The rows of the tables that come with the package."""
    return tuple(r for path in sorted(PACKAGED.glob("*.json")) for r in read(path, PACKAGE))


@lru_cache(maxsize=64)
def rows(devices: Sequence[str], target: str) -> tuple[Row, ...]:
    """Rows of a target's tables, or those of decoding, for a device that goes by these names: the user's, then the package's."""
    own = [p for p in (own_path(d, target) for d in devices) if p.is_file()]
    found = (*(r for p in own for r in read(p, USER)), *packaged())
    return tuple(r for r in found if r.table == target and r.known(devices) < len(devices))


def nearest(devices: Sequence[str], b: Build, shape_class: tuple[int, ...], chunk: int | None) -> list[Row]:
    """Rows that may choose for calls of `b`'s inputs and a shape class, the best first: rows for the same contract before
    those for keys of norm 1, where they are, before rows for plain inputs; of these the user's before the package's; of these
    the device's own before those of its kind; of these the same class before those one step away; of these the one that gained
    most over the model."""
    found = []
    unit = [UNIT] if b.contract.input_form("k") in ("unit", "l2norm") else []
    for i, contract in enumerate(dict.fromkeys((b.contract, *unit, Contract()))):
        for r in rows(devices, b.target):
            if r.serves(b, contract) and r.far(shape_class) <= 1 and chunk in (None, r.about.chunk):
                found.append((i, r.source != USER, r.known(devices), r.far(shape_class), r.ms / (r.model_ms or r.ms), r))
    return [r for *_, r in sorted(found, key=lambda x: x[:-1])]


def steps(devices: Sequence[str], b: Build, shape_class: tuple[int, ...], targets: Sequence[str]) -> list[Row]:
    """Rows that may choose for decoding steps of `b`'s inputs, the best first: of states that lie alike, since these are what a
    step reads and writes, whatever its gates and query heads. Ordered as `nearest` orders; what gained most over the model is the
    fastest, of whichever target: the model's choice is one for all."""
    def lie(c: Contract) -> tuple[str, int]:
        return c.state_layout, BYTES[c.state_dtype]

    def far(x: Extent) -> int:
        return sum(abs(a - b) for a, b in zip(x.shape_class[1:], shape_class[1:], strict=True))
    found = []
    for r in rows(devices, DECODE):
        alike = r.serves(replace(b, target=r.about.target), r.about.contract) and lie(r.about.contract) == lie(b.contract)
        if alike and r.about.target in targets and far(r.extent) <= 1:
            found.append((r.about.contract != b.contract, r.source != USER, r.known(devices), far(r.extent),
                          r.ms / (r.model_ms or r.ms), r))
    return [r for *_, r in sorted(found, key=lambda x: x[:-1])]
