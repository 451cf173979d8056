"""Random calls of the package's ops, all that the contract allows, and what a recurrence in float64 says of them."""
from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from reference import TOLERANCE, expected, rms_error

from gdn_codegen.schedule import Schedule

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 129)
#: What a buffer holds where no call may write.
MARK = 7.0
#: Of products whose float32 operands pass as tf32.
TF32 = 3e-3


@dataclass
class Drawn:
    """One call. `said` is what it passes beside tensors; all else says how the tensors are made."""

    seed: int
    target: str
    lengths: list[int]
    batched: bool
    H: int
    HV: int
    K: int
    V: int
    dtype: str
    chunk: int | None
    layout: str
    gate: str
    gate_mean: float
    gate_dtype: str
    beta: str
    beta_dtype: str
    l2norm: bool
    initial: bool
    state_dtype: str
    v_first: bool
    pool: str  # "", "in place", "dense" (a new tensor), "buffer" (another pool)
    in_place: bool
    skipped: list[int] = field(default_factory=list)
    extra_rows: int = 0  # rows past the last sequence's end
    views: bool = False  # q, k and v are slices of one projection
    out: bool = False
    checkpoints: int = 0
    decode: bool = False
    schedule: str | Schedule | None = None
    alike: float | None = None  # all keys are one, but for so much noise
    beta_value: float | None = None  # of beta "given", for all tokens
    tf32: bool = False  # whether products of float32 pass as tf32
    allowed: float = 0.0  # an error that is no fault


def drawn(seed: int, target: str = "triton", small: bool = False) -> Drawn:
    """A call at random. small: sizes that a slow target can bear."""
    r = random.Random(seed)
    decode = r.random() < 0.15
    most = 16 if decode else 70 if small else 130
    length = lambda: r.choice([n for n in LENGTHS if n <= most]) if r.random() < 0.7 else r.randint(0, most)
    batched = r.random() < 0.35
    lengths = [length()] * r.randint(1, 3) if batched else [length() for _ in range(r.randint(1, 4))]
    H = r.randint(1, 2)
    HV = H * r.choice([1, 1, 2, 3])
    size = lambda: r.choice([32, 32, 64, 64, 36, 60, 48] if small else [32, 64, 64, 128, 36, 60, 100, 48, 192])
    gate, dtype = r.choice(["log", "log", "linear", "raw", "raw"]), r.choice(list(DTYPES))
    pool = r.choice(["", "", "in place", "dense", "buffer"])
    initial = bool(pool) or r.random() < 0.6
    views = r.random() < 0.3
    checkpoints = r.choice([0, 0, 0, 1, 2, 3]) if not decode else 0
    return Drawn(
        seed, target, lengths, batched, H, HV, size(), size(), dtype,
        16 if decode else r.choice([16, 32, 64] + [128] * (not small)), r.choice(["bthd", "bhtd", "bsnd", "bnsd"]), gate,
        r.choice([0.0, -1e-3, -0.1, -1.0] + [-20.0] * (gate == "log")), r.choice(["float32", "float32", "float16", "bfloat16"]),
        r.choice(["given", "given", "sigmoid", "twice_sigmoid"]), r.choice(["float32", "float16", "bfloat16"]), r.random() < 0.4,
        initial, r.choice(["float32", "float32", "bfloat16", "float16"]), r.random() < 0.4, pool,
        not pool and initial and r.random() < 0.3,
        [n for n in range(len(lengths)) if pool and r.random() < 0.25],
        0 if batched else r.choice([0, 0, 3]), views, r.random() < 0.3, checkpoints, decode,
        None if decode or r.random() < 0.5 else r.choice(["fused", "replay", "staged", "prepared"]))


def gates(c: Drawn, gen: torch.Generator, T: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What is passed for g, the log decay that it means in float64, and further tensors."""
    dtype, u = DTYPES[c.gate_dtype], torch.rand(T, c.HV, generator=gen)
    g = (2 * c.gate_mean * u).to(dtype)
    if c.gate == "log":
        return g, g.double(), {}
    if c.gate == "linear":
        a = torch.exp(g.float()).to(dtype)
        return a, torch.log(a.double()), {}
    raw = (torch.randn(T, c.HV, generator=gen) * 3 - 2).to(dtype)
    more = {"A_log": torch.rand(c.HV, generator=gen) * 3 - 2, "dt_bias": torch.randn(c.HV, generator=gen)}
    more = {n: x.to(DTYPES[("float32", "bfloat16", "float16")[c.seed // 2 % 3]]) for n, x in more.items()}
    if c.seed % 3 == 0:
        del more["dt_bias"]
    log_decay = -torch.exp(more["A_log"].double()) * F.softplus(raw.double() + more.get("dt_bias", torch.zeros(1)).double())
    return raw, log_decay, more


def betas(c: Drawn, gen: torch.Generator, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is passed for beta, and beta in float64."""
    dtype = DTYPES[c.beta_dtype]
    if c.beta == "given":
        b = torch.rand(T, c.HV, generator=gen)
        b = (b if c.beta_value is None else torch.full_like(b, c.beta_value)).to(dtype)
        return b, b.double()
    b = (2 * torch.randn(T, c.HV, generator=gen)).to(dtype)
    return b, torch.sigmoid(b.double()) * (2 if c.beta == "twice_sigmoid" else 1)


def rows(c: Drawn, x: torch.Tensor) -> torch.Tensor:
    """[T, heads, ...] as the call takes it."""
    n = len(c.lengths) if c.batched else 1
    x = x.reshape(n, x.shape[0] // n, *x.shape[1:]) if len(x) else x.new_empty(n, 0, *x.shape[1:])
    return x.transpose(1, 2).contiguous() if c.layout in ("bhtd", "bnsd") else x


def flat(c: Drawn, x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rows`."""
    x = x.transpose(1, 2) if c.layout in ("bhtd", "bnsd") else x
    return x.flatten(0, 1)


def made(c: Drawn, expected: Any = expected) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call's arguments, and what is expected: o, states, checkpoints, all in float64. expected: who computes it."""
    gen = torch.Generator().manual_seed(c.seed)
    random_ = lambda *s: torch.randn(*s, generator=gen)
    T, N, dtype = sum(c.lengths) + c.extra_rows, len(c.lengths), DTYPES[c.dtype]
    q, k = (F.normalize(random_(T, c.H, c.K), dim=-1) for _ in range(2))
    if c.alike is not None and T:
        k = F.normalize(k[:1] + c.alike * k, dim=-1)
    if c.l2norm:  # long and short rows
        q, k = (x * torch.exp(random_(T, c.H, 1)) for x in (q, k))
    q, k, v = q.to(dtype), k.to(dtype), random_(T, c.HV, c.V).to(dtype)
    g, log_decay, more = gates(c, gen, T)
    beta, factor = betas(c, gen, T)
    S = random_(N, c.HV, c.K, c.V).to(DTYPES[c.state_dtype] if c.initial else torch.float32) if c.initial else None
    known = None if S is None else S.double()  # which a call in place writes over
    unit = (lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)) if c.l2norm else (lambda x: x)
    means = dict(lengths=c.lengths, q=unit(q.double()), k=unit(k.double()), v=v.double(), g=log_decay, beta=factor, S=known,
                 scale=c.K ** -0.5)
    o, final = expected(means)
    about: dict[str, Any] = {"o": o[:sum(c.lengths)], "final": final, "means": means}

    if c.views:
        width = (2 * c.H * c.K, c.HV * c.V)
        whole = torch.full((T, sum(width)), float("nan"), dtype=dtype)
        whole[:, :width[0]] = torch.cat([q, k], 1).flatten(1)
        whole[:, width[0]:] = v.flatten(1)
        n = N if c.batched else 1
        whole = whole.unflatten(0, (n, T // n))
        q, k, v = (whole[..., a:b].unflatten(-1, (h, d)) for a, b, h, d in (
            (0, c.H * c.K, c.H, c.K), (c.H * c.K, width[0], c.H, c.K), (width[0], sum(width), c.HV, c.V)))
        if c.layout in ("bhtd", "bnsd"):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    else:
        q, k, v = (rows(c, x) for x in (q, k, v))
    said: dict[str, Any] = dict(q=q, k=k, v=v, g=rows(c, g), beta=rows(c, beta), layout=c.layout, target=c.target, gate=c.gate,
                                beta_form=c.beta, use_qk_l2norm_in_kernel=c.l2norm, state_v_first=c.v_first,
                                output_final_state=True, **more)
    if not c.batched:
        ends = torch.tensor([0, *torch.tensor(c.lengths).cumsum(0).tolist()], dtype=(torch.int32, torch.int64)[c.seed % 2])
        said["cu_seqlens"] = ends
    if not c.decode:
        said.update(chunk_size=c.chunk, schedule=c.schedule, unit_keys=not c.l2norm and c.seed % 2 > 0)
        if c.checkpoints:
            said["checkpoint_chunks"] = c.checkpoints
    if c.out:
        said["out"] = torch.full_like(said["v"], MARK, memory_format=torch.contiguous_format)
    said.update(states(c, gen, S, about))
    return said, about


def states(c: Drawn, gen: torch.Generator, S: torch.Tensor | None, about: dict[str, Any]) -> dict[str, Any]:
    """The arguments that hold states."""
    dtype, turned = DTYPES[c.state_dtype], (lambda x: x.transpose(-1, -2).contiguous()) if c.v_first else (lambda x: x)
    if S is None:
        return {"state_dtype": dtype}
    if not c.pool:
        return {"initial_state": turned(S), **({"inplace_final_state": True} if c.in_place else {"state_dtype": dtype})}
    N, slots = len(c.lengths), len(c.lengths) + 2
    order = torch.randperm(slots, generator=gen)[:N]
    shape = turned(S).shape[1:]
    padded = torch.full((slots, shape.numel() + 32 * (c.seed % 2)), MARK, dtype=dtype)
    pool = padded[:, :shape.numel()].unflatten(1, shape)
    pool[order] = turned(S)
    indices = order.clone()
    indices[c.skipped] = -1
    about.update(order=order, padded=padded)
    more: dict[str, Any] = {"initial_state": pool, "state_indices": indices.to((torch.int64, torch.int32)[c.seed % 2])}
    if c.pool == "dense":
        more.update(inplace_final_state=False, state_dtype=dtype)
    elif c.pool == "buffer":
        more["final_state"] = torch.full_like(pool, MARK)
    return more


def tolerance(c: Drawn, o: torch.Tensor, want: torch.Tensor) -> float:
    # what the dtype keeps at all; and where a token may turn the state about (beta up to 2), errors of all tokens stay
    tf32 = c.tf32 and c.dtype == "float32"
    turns = c.beta == "twice_sigmoid" or (c.beta_value or 0) > 1
    stays = (2 if turns else 1) * (10 if c.dtype == "float32" and not tf32 else 1)
    return max(c.allowed, (TF32 if tf32 else TOLERANCE[c.dtype]) * stays, 2 * rms_error(want.to(o.dtype), want))


def checked(c: Drawn, fn: Any, expected: Any = expected) -> dict[str, float]:
    """Make the call twice and hold it against what is expected: errors of o and states, or AssertionError that says what is
    wrong."""
    said, about = made(c, expected)
    kept = {n: x.clone() for n, x in said.items() if isinstance(x, torch.Tensor)}
    results = fn(**said)
    o, final = flat(c, results[0]), results[1]
    skipped = set(c.skipped)
    starts = torch.tensor([0, *c.lengths]).cumsum(0).tolist()
    mine = [t for n in range(len(c.lengths)) if n not in skipped for t in range(starts[n], starts[n + 1])]
    want = about["o"]
    errors = {"o": rms_error(o[mine], want[mine])}
    assert errors["o"] <= (e := tolerance(c, o, want[mine])), ("o", errors["o"], e)
    rest = [t for t in range(len(o)) if t not in set(mine)]
    assert bool((o[rest] == (MARK if c.out else 0)).all()), "rows that no sequence has are not as they were, or zero"
    if c.out:
        assert results[0].data_ptr() == said["out"].data_ptr(), "o is not the buffer"
    turned = (lambda x: x.transpose(-1, -2)) if c.v_first else (lambda x: x)
    live = [n for n in range(len(c.lengths)) if n not in skipped]
    if c.pool:
        pool = said["initial_state"] if c.pool == "in place" else said.get("final_state", final)
        where = about["order"] if c.pool in ("in place", "buffer") else torch.arange(len(c.lengths))
        got = turned(pool[where[live]])
        if c.pool != "dense":
            others = [s for s in range(len(pool)) if s not in set(where[live].tolist())]
            before = kept["initial_state"] if c.pool == "in place" else torch.full_like(pool, MARK)
            assert torch.equal(pool[others], before[others]), "slots that no sequence has were written"
        assert bool((about["padded"][:, pool[0].numel():] == MARK).all()), "between slots something was written"
    else:
        got = turned(final[live])
    want_S = about["final"][live]
    errors["state"] = rms_error(got, want_S)
    assert errors["state"] <= (e := tolerance(c, got, want_S)), ("state", errors["state"], e)
    if c.checkpoints and not c.decode:
        check_checkpoints(c, turned(results[2]), about, live, starts, expected)
    changed = {"out", "final_state"} | ({"initial_state"} if c.in_place or c.pool == "in place" else set())
    for n, x in kept.items():
        assert n in changed or torch.equal(x.nan_to_num(9), said[n].nan_to_num(9)), f"{n} was modified"
    again, _ = made(c, lambda means: (about["o"], about["final"]))
    more = fn(**again)
    assert torch.equal(flat(c, more[0])[mine], o[mine]), "not the same bits twice"
    where = about["order"][live] if c.pool in ("in place", "buffer") else live  # slots of a pool are its caller's
    assert torch.equal(more[1][where], final[where]), "states differ"
    return errors


def check_checkpoints(c: Drawn, got: torch.Tensor, about: dict[str, Any], live: list[int], starts: list[int],
                      expected: Any) -> None:
    """Row start // (n C) + i of a sequence is its state after (i + 1) n chunks."""
    step = c.checkpoints * (c.chunk or 64)
    for n in live:
        for i in range(c.lengths[n] // step):
            S = about["means"]["S"]
            x = dict(about["means"], lengths=[(i + 1) * step], S=None if S is None else S[n:n + 1])
            for name in ("q", "k", "v", "g", "beta"):
                x[name] = x[name][starts[n]:starts[n] + (i + 1) * step]
            want = expected(x)[1][0]
            row = got[starts[n] // step + i]
            assert rms_error(row, want) <= tolerance(c, row, want), ("checkpoint", n, i, rms_error(row, want))


def _memory(x: torch.Tensor) -> torch.Tensor:
    """The bytes of all the memory that x lies in."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def elsewhere(fn: Any, device: str) -> Any:
    """The op on copies of its tensors on another device, twice, since a first call settles how the next are done; what the second
    wrote and gives comes back. Whole memories are copied, so that views stay views and what lies between slots is seen."""
    def run(**said: Any) -> tuple[Any, ...]:
        memories = {x.untyped_storage().data_ptr(): _memory(x) for x in said.values() if isinstance(x, torch.Tensor)}
        for _ in range(2):
            copies = {at: x.to(device, copy=True) for at, x in memories.items()}
            there = {n: x if not isinstance(x, torch.Tensor) else copies[x.untyped_storage().data_ptr()].view(x.dtype).as_strided(
                x.shape, x.stride(), x.storage_offset()) for n, x in said.items()}
            results = fn(**there)
        for at, x in memories.items():
            x.copy_(copies[at])
        back = {id(there[n]): x for n, x in said.items() if isinstance(x, torch.Tensor)}
        return tuple(r if r is None else back[id(r)] if id(r) in back else r.cpu() for r in results)
    return run
