"""Tables of builds that were measured to be the fastest, and how a call finds its row.

A table is {"device", "kind", "target", "versions", "rows"} in JSON. `gdn_codegen tune` writes it. The package's tables are in
devices/choices, a user's in the cache folder, by device and versions. A row has the inputs and the shape of a measurement, the
build, its time, and the time of the model's choice. It serves its device, and devices of the same kind: the same architecture
and number of multiprocessors. The table of decoding has the target "decode", and each of its builds names its own target.
"""
from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, inf, isqrt
from pathlib import Path
from typing import Any

from ...ir.types import BYTES
from ...schedule import changes, varied
from ...schedule.contract import Contract
from ...targets.candidates import Lengths
from .. import cache
from ..build import Build

PACKAGED = Path(__file__).parents[2] / "devices" / "choices"
PACKAGE, USER = "the package's", "the user's"
#: The table of decoding steps.
DECODE = "decode"
#: The name of the tables of gradients, whose rows have the builds of the states before chunks and of the gradient itself.
BACKWARD = "backward"
#: Tables that targets share. Their rows say which target they are of.
SHARED = DECODE, BACKWARD
UNIT = Contract((("k", "unit"),))


#: The fixed cost of a walk, in tokens.
START_TOKENS = 77
#: What part of the time of all walks side by side the longest one takes at least, if it matters when it starts. Fitted to those
#: 68 of 200 random packs that have more walks than an H100 has multiprocessors.
LEVEL = 0.7


@dataclass(frozen=True)
class Extent:
    """A call's size: query and key heads, value heads, sequences, tokens of all. packed: whether sequences may differ in length.
    longest: tokens of the longest, about, 0 if the host does not know."""

    H: int
    HV: int
    sequences: int
    tokens: int
    packed: bool = False
    longest: int = 0

    @property
    def walks(self) -> int:
        """Instances that walk over chunks: one for each sequence and value head."""
        return self.sequences * self.HV

    @property
    def rows(self) -> bool:
        """Whether each sequence is a row of the call's tensors, so that none is longer than another."""
        return self.sequences == 1 or not self.packed

    @property
    def uneven(self) -> bool:
        """Whether the host knows that one sequence has much more than its share of the tokens."""
        return self.longest * self.sequences > 2 * self.tokens

    @property
    def unknown(self) -> bool:
        """Whether there are several sequences, and the host does not know how much they differ in length."""
        return self.packed and self.sequences > 1 and not self.longest

    def lengths(self, units: int) -> Lengths:
        """What the host knows of lengths, on `units` multiprocessors; "" for 0, no GPU. A walk takes about a chunk besides its
        tokens. The longest sequence of "dominated" ones has eight chunks or more. No order of walks saves time if sequences have
        about one length, or the longest has fewer than eight chunks, or takes less than LEVEL of the time of all walks side by
        side."""
        if not units:
            return ""
        share = self.longest * units / max(1, (self.tokens + START_TOKENS * self.sequences) * self.HV)
        if self.longest >= 512 and share >= 1:
            return "dominated"
        known, equal = self.longest or not self.packed, 8 * self.longest * self.sequences <= 9 * self.tokens
        return "level" if self.walks > units and known and (equal or self.longest < 512 or share < LEVEL) else ""

    def of_eight(self, units: int) -> int:
        """Walks for each eight of `units` multiprocessors, rounded up, at most 9. 0 without a GPU."""
        return min(9, -(-8 * self.walks // units)) if units else 0

    def longest_share(self, units: int) -> int:
        """Tokens of the longest walk, in eighths of those that each of `units` multiprocessors has in all, where all walks have
        START_TOKENS more; rounded up, at most 64. 0 if the host does not know, and without a GPU."""
        longest = self.longest or (0 if self.unknown else -(-self.tokens // self.sequences))
        return min(64, -(-8 * longest * units // max(1, (self.tokens + START_TOKENS * self.sequences) * self.HV)))

    @property
    def shared(self) -> int:
        """How many value heads of a key head a kernel may batch: 4, 2 or 1."""
        return gcd(self.HV // max(self.H, 1), 4)

    @property
    def shape_class(self) -> tuple[int, int, int]:
        """The exponents of the nearest powers of two of: value heads per query head, walks, mean tokens of a sequence."""
        return power(self.HV // max(self.H, 1)), power(self.walks), power(self.tokens // max(self.sequences, 1))


def power(n: int) -> int:
    """The exponent of the power of two that is nearest to n >= 1 by ratio; 0 for 0."""
    return (n * n).bit_length() // 2


def least(exponent: int) -> int:
    """The least n >= 1 of which this is the `power`."""
    return isqrt(2 ** (2 * exponent - 1) - 1) + 1 if exponent else 1


@dataclass(frozen=True)
class Row:
    """A measured choice.

    about: the build, with the inputs for which it was measured. extent: the size. ms, model_ms: times of a call with this build,
    and with the model's choice. source: PACKAGE or USER. kind: of the device. table: a target, or one of SHARED. float16 and
    bfloat16 take the same time."""

    device: str
    about: Build
    extent: Extent
    ms: float
    model_ms: float | None = None
    source: str = ""
    kind: str = ""
    table: str = ""

    def known(self, devices: Sequence[str]) -> int:
        """The index of the first of a device's names that is the row's; the number of names if none is."""
        return next((i for i, d in enumerate(devices) if d in (self.device, self.kind)), len(devices))

    def serves(self, b: Build, contract: Contract) -> bool:
        """True if the row was measured for this contract and the inputs of `b`: target, layout, algorithm, bytes of the dtype, K
        and V."""
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
    """The JSON of a chosen build. Its schedule is a named one with changed fields."""
    target = {"target": b.target} if table in SHARED else {}
    return {**target, "schedule": b.plan.name, "set": changes(b.plan, b.arch), "chunk": b.chunk, "arch": b.arch}


def chosen(about: dict[str, Any], choice: dict[str, Any], table: str) -> Build:
    """The build of `choice_json` for inputs of a kind."""
    target = choice["target"] if table in SHARED else table
    fields = dict(choice["set"])
    if "kernels" in fields:  # JSON has lists
        fields["kernels"] = tuple(map(tuple, fields["kernels"]))
    schedule = varied(choice["schedule"], choice["arch"], **fields) if fields else choice["schedule"]
    return Build(target, schedule=schedule, chunk=choice["chunk"], arch=choice["arch"], **about)


def from_json(table: dict[str, Any], source: str) -> tuple[Row, ...]:
    """The rows of a table. source: whose it is, PACKAGE or USER.

    Raises ValueError, KeyError or TypeError if a row lacks a field or a number is not above 0.
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


# --- files of tables -------------------------------------------------------------------------------------------------
def versions(target: str) -> dict[str, str]:
    """The versions on which a measurement depends."""
    from ... import __version__
    from ...targets import find
    from ...targets.machine import version
    used = {n: n for n in ("torch", "triton", "tilelang")} if target in SHARED else \
        {"torch": "torch", target: find(target).toolchain.package}
    return {"gdn_codegen": __version__, **{n: version(package) if package else "" for n, package in used.items()}}


def own_path(device: str, target: str) -> Path:
    """The path of a user's table for a device and the installed versions."""
    name = "_".join(f"{n}-{v}" for n, v in versions(target).items())
    return cache.folder() / "choices" / re.sub(r"\W+", "_", device).strip("_") / f"{target}_{name}.json"


def read(path: Path, source: str) -> tuple[Row, ...]:
    """The rows of a table. If it cannot be read, no rows and a warning, because a call must not fail for it."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), source)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        warnings.warn(f"gdn_codegen: {path} is no table of choices and is ignored: {type(e).__name__}: {e}", stacklevel=2)
        return ()


@lru_cache(maxsize=1)
def packaged() -> tuple[Row, ...]:
    """The rows of the tables that come with the package."""
    return tuple(r for path in sorted(PACKAGED.glob("*.json")) for r in read(path, PACKAGE))


@lru_cache(maxsize=64)
def rows(devices: Sequence[str], target: str) -> tuple[Row, ...]:
    """Rows for a device with these names, of a target's tables or of the tables of decoding: the user's, then the package's."""
    own = [p for p in (own_path(d, target) for d in devices) if p.is_file()]
    found = (*(r for p in own for r in read(p, USER)), *packaged())
    return tuple(r for r in found if r.table == target and r.known(devices) < len(devices))


def nearest(devices: Sequence[str], b: Build, shape_class: tuple[int, ...], chunk: int | None) -> list[Row]:
    """Rows that may choose for calls with the inputs of `b` and a shape class, the best first.

    The order is, by descending weight: rows for the same contract, for keys of norm 1 (if the call has such keys), for plain
    inputs; the user's, then the package's; the device's own, then those of its kind; the same class, then classes one step away;
    the largest gain over the model."""
    found = []
    unit = [UNIT] if b.contract.input_form("k") in ("unit", "l2norm") else []
    for i, contract in enumerate(dict.fromkeys((b.contract, *unit, Contract()))):
        for r in rows(devices, b.target):
            if r.serves(b, contract) and r.far(shape_class) <= 1 and chunk in (None, r.about.chunk):
                found.append((i, r.source != USER, r.known(devices), r.far(shape_class), r.ms / (r.model_ms or r.ms), r))
    return [r for *_, r in sorted(found, key=lambda x: x[:-1])]


def steps(devices: Sequence[str], b: Build, shape_class: tuple[int, ...], targets: Sequence[str]) -> list[Row]:
    """Rows that may choose for decoding steps with the inputs of `b`, the best first.

    Rows have the same layout and size of states, because a step mostly reads and writes states. The order is that of `nearest`.
    The largest gain over the model is the fastest of all targets, because they share one model's choice."""
    def state(c: Contract) -> tuple[str, int]:
        return c.state_layout, BYTES[c.state_dtype]

    def far(x: Extent) -> int:
        return sum(abs(a - b) for a, b in zip(x.shape_class[1:], shape_class[1:], strict=True))
    found = []
    for r in rows(devices, DECODE):
        fits = r.serves(replace(b, target=r.about.target), r.about.contract) and state(r.about.contract) == state(b.contract)
        if fits and r.about.target in targets and far(r.extent) <= 1:
            found.append((r.about.contract != b.contract, r.source != USER, r.known(devices), far(r.extent),
                          r.ms / (r.model_ms or r.ms), r))
    return [r for *_, r in sorted(found, key=lambda x: x[:-1])]
