"""`gdn_codegen tune --decode`: times decoding steps of all targets, for the table from which decoding chooses.

The time of a step is what it adds to a queue of calls (`bench_gpu.wall_time`). A step takes microseconds, so its launches count.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..host.check import Check
from ..ir.interpret import TORCH
from ..runtime.build import Build
from ..runtime.call import tables
from ..runtime.call.request import DECODE_CHUNK
from ..runtime.load import function
from ..schedule.contract import Contract
from . import bench_gpu
from .candidates import steps
from .problems import NOISE
from .shapes import Shape
from .tune import compiled_ahead, here, listed, tuned
from .tune_jobs import Job, shared_kib, step_choice
from .tune_meter import Gpu
from .verify import TOLERANCE, rms_error

#: What servers pass: raw gates and norms in the kernel, a pool of states in place.
CONTRACTS = tuple(Contract.parse(f"beta=sigmoid/bfloat16,g=raw/bfloat16,k=l2norm,q=l2norm,state=vk{dtype}/pool/in_place")
                  for dtype in ("/bfloat16", ""))
SHAPES = tuple(Shape(f"{n} x {t}, {h}/{hv}", (t,) * n, h, hv)
               for h, hv in ((16, 32), (4, 8)) for n in (1, 8, 64, 256) for t in (1, 4))
#: The shape at which a candidate is compared with float64 before it is timed. Its head counts are those of one of SHAPES, so that
#: kernels that have them compiled in serve both.
CHECKED = Shape("3 x 5, 4/8", (5,) * 3, 4, 8)
#: The same heads for similar keys, with as many tokens as a step may have, since errors of the inverse grow with them.
ALIKE = Shape("2 x 16, 4/8", (DECODE_CHUNK,) * 2, 4, 8)


def jobs(about: Build, contracts: Sequence[Contract], shapes: Sequence[Shape], units: int, kib: int = 0) -> list[Job]:
    """All that there is to time: at each shape the model's choice, then one candidate after the other at all shapes. kib: as in
    Facts."""
    found = []
    for contract in contracts:
        inputs = replace(about, contract=contract)
        first = [Job(inputs, s.H, s.HV, s.lens, tables.DECODE) for s in shapes]
        found += [replace(j, build=step_choice(inputs, j.extent, units, kib)) for j in first]
        found += [replace(j, build=b.for_shared(kib)) for b in steps(inputs) for j in first]
    return list({j.key: j for j in found}.values())


def check_shapes(shapes: Sequence[Shape]) -> None:
    """ValueError for a shape whose sequences differ in length, or have more than 16 tokens."""
    for s in shapes:
        if len(set(s.lens)) > 1 or max(s.lens) > DECODE_CHUNK:
            raise ValueError(f"shapes: got {s.name} of {sorted(set(s.lens))} tokens; accepted with --decode: as many in each "
                             f"sequence, {DECODE_CHUNK} at most")


@dataclass(frozen=True)
class Step:
    """Inputs of a step, in rows of their own, as a contract has them. pool: states; slots: theirs, None for row after row."""

    given: dict[str, torch.Tensor]
    pool: torch.Tensor
    slots: torch.Tensor | None
    scale: float


def step(b: Build, s: Shape, device: str = "cuda", seed: int = 0) -> Step:
    """Seeded tensors of a build's contract. Slots are shuffled, and one slot of the pool is unused."""
    gen = torch.Generator(device=device).manual_seed(seed)
    N, T, K, V, c = len(s.lens), s.lens[0], b.head_dim_k, b.head_dim_v, b.contract

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=gen)
    q, k = (normal(N, T, s.H, K) for _ in range(2))
    if c.input_form("k") != "l2norm":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    v, g, beta = normal(N, T, s.HV, V), normal(N, T, s.HV), normal(N, T, s.HV)
    given = {"q": q, "k": k, "v": v, "g": g if c.input_form("g") == "raw" else -F.softplus(g),
             "beta": beta if c.input_form("beta") == "sigmoid" else beta.sigmoid()}
    if c.input_form("g") == "raw":
        given |= {"A_log": normal(s.HV) / 2, "dt_bias": normal(s.HV) / 2}
    given = {n: x.to(TORCH[b.dtype if n in "qkv" else c.dtype(n)]) for n, x in given.items()}
    pool = normal(N + c.pool, s.HV, *((V, K) if c.state_layout == "vk" else (K, V))).to(TORCH[c.state_dtype])
    slots = torch.randperm(N + 1, generator=gen, device=device)[:N].to(torch.int32) if c.pool else None
    return Step(given, pool, slots, K ** -0.5)


def alike(b: Build, x: Step) -> Step:
    """The same step with similar keys: each is the first of its sequence plus noise. There is no decay, and beta is 1, the
    largest value of a sigmoid."""
    c, k = b.contract, x.given["k"]
    noise = torch.tensor(NOISE, device=k.device).repeat(k.shape[2])[:k.shape[2], None]
    noisy = F.normalize(k[:, :1].float(), dim=-1) + noise * F.normalize(k.float(), dim=-1)
    k = F.normalize(noisy, dim=-1).to(k.dtype)
    g = torch.full_like(x.given["g"], -100.0 if c.input_form("g") == "raw" else 0.0)  # of which softplus is 0
    beta = torch.full_like(x.given["beta"], 20.0 if c.input_form("beta") == "sigmoid" else 1.0)
    return replace(x, given=x.given | {"k": k, "g": g, "beta": beta})


def expected(b: Build, x: Step, heads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """o [N, T, heads, V] and states [N, heads, K, V] of some value heads: the recurrence in float64."""
    c, y = b.contract, {n: t.double() for n, t in x.given.items()}
    mine, shared = list(heads), y["v"].shape[2] // y["q"].shape[2]
    q, k = (y[n][:, :, [h // shared for h in mine]] for n in ("q", "k"))
    if c.input_form("k") == "l2norm":
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    v, g, beta = (y[n][:, :, mine] for n in ("v", "g", "beta"))
    if c.input_form("g") == "raw":
        g = -torch.exp(y["A_log"][mine]) * F.softplus(g + y["dt_bias"][mine])
    beta = beta.sigmoid() if c.input_form("beta") == "sigmoid" else beta
    S = (x.pool if x.slots is None else x.pool[x.slots.long()])[:, mine].double()
    S = S.transpose(-1, -2) if c.state_layout == "vk" else S
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        S = g[:, t].exp()[..., None, None] * S
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhk,nhkv->nhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        o[:, t] = x.scale * torch.einsum("nhk,nhkv->nhv", q[:, t], S)
    return o, S


def call(b: Build, x: Step, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the build's function on a step. Returns o and the final state."""
    slots: dict[str, Any] = {} if x.slots is None else {"state_indices": x.slots}
    o, final = function(b)(**x.given, scale=x.scale, initial_state=pool, output_final_state=True, **slots)
    return o, final


def off(b: Build, x: Step, accepted: float) -> str:
    """Why the build's results differ from float64 by more than `accepted`, RMSE over RMS; "" where they do not."""
    heads = (0, x.given["v"].shape[2] - 1)
    o, final = call(b, x, x.pool.clone())
    if x.slots is not None and b.contract.in_place:
        final = final[x.slots.long()]
    final = final[:, list(heads)]
    want_o, want = expected(b, x, heads)
    got = rms_error(o[:, :, list(heads)], want_o), rms_error(final.mT if b.contract.state_layout == "vk" else final, want)
    return "" if all(e <= accepted for e in got) else f"off by {got[0]:.1e} (o) and {got[1]:.1e} (state)"


@dataclass
class Steps(Gpu):
    """A meter for decoding steps: what a step adds to a queue of calls."""

    device: str = "cuda"

    def wrong(self, b: Build) -> str:
        """Why the build's results are wrong at CHECKED, or on similar keys; "" if they are right."""
        def work() -> str:
            against = off(b, step(b, CHECKED, self.device), TOLERANCE[b.dtype])
            near = "" if against else off(b, alike(b, step(b, ALIKE, self.device)), Check.ACCEPTED[b.dtype])
            return against or near and f"{near} on similar keys"
        return self._said(work)

    def workspace(self, b: Build, s: Shape) -> int:
        """0 bytes: a step is one kernel."""
        return 0  # one kernel

    def time(self, b: Build, s: Shape) -> dict[str, Any]:
        """ms of a step in a queue, or why the build is dropped."""
        x, found = step(b, s, self.device), {}

        def work() -> str:
            against = off(b, x, TOLERANCE[b.dtype])
            found["ms"] = round(bench_gpu.wall_time(lambda: call(b, x, x.pool), self.runs), 5)
            return against
        against = self._said(work)
        self.alive()
        return {"dropped": against} if against else found

    def _said(self, work: Callable[[], str]) -> str:
        try:
            with torch.no_grad():
                return work()
        except Exception as e:  # whatever a toolchain raises is a finding
            self.alive()
            return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def command(a: argparse.Namespace, shapes: Sequence[Shape]) -> int:
    """`gdn_codegen tune --decode`. a: the parsed options."""
    check_shapes(shapes)
    about = Build("triton", DECODE_CHUNK, layout=a.layout, dtype=a.dtype, head_dim_k=a.head_dim_k, head_dim_v=a.head_dim_v)
    names, arch, units = ((), a.compile, 0) if a.compile is not None else here()
    todo = jobs(about, CONTRACTS, shapes, units, shared_kib(names or (arch,)))
    if a.compile is not None:
        heads = sorted({(CHECKED.H, CHECKED.HV), *((s.H, s.HV) for s in shapes)})
        for line in compiled_ahead(list(dict.fromkeys(j.build for j in todo)), arch, heads):
            print(line, flush=True)
        return 0
    out = None if a.out is None else Path(a.out)
    if a.list:
        print("\n".join(listed(tables.DECODE, todo, names, out)))
        return 0
    return tuned(tables.DECODE, todo, names, arch, units, Steps(a.runs), out, budget=a.budget)
