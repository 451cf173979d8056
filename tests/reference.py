"""Recurrences written by hand, in float64, random problems, and comparisons of targets with them."""
from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from gdn_codegen.runtime import cache
from gdn_codegen.runtime.load import import_path
from gdn_codegen.schedule import SCHEDULES

DELTA, PLAIN = True, False
#: Schedules that differ on cores: what walks hold is never transposed there.
ON_CORES = [n for n in SCHEDULES if n != "prepared_vk"]
TOLERANCE = {"float16": 5e-3, "bfloat16": 5e-3, "float32": 1e-5}


def recurrence(q, k, v, g, beta, scale, S, delta=DELTA):
    """One head: q, k [T, K], v [T, V], g, beta [T], S [K, V], all float64; o [T, V] and the final state."""
    o, S = torch.empty(len(q), v.shape[1], dtype=torch.float64), S.clone()
    for t in range(len(q)):
        S = torch.exp(g[t]) * S
        u = beta[t] * (v[t] - k[t] @ S) if delta else v[t]
        S = S + torch.outer(k[t], u)
        o[t] = scale * (q[t] @ S)
    return o, S


def problem(lengths, H, HV, K, V, dtype=torch.float16, gate=-0.5, beta=None, initial=True, seed=0, same_keys=False):
    """Packed tensors [T, heads, ...]. gate: the mean of g, or "mixed"; beta: a constant, or uniform in (0, 1)."""
    gen = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    r = lambda *s: torch.randn(*s, generator=gen)
    u = torch.rand(T, HV, generator=gen)
    k = F.normalize(r(T, H, K), dim=-1)
    if same_keys and T:
        k = k[:1].expand(T, H, K).clone()
    g = 2 * gate * u if gate != "mixed" else torch.tensor([0.0, -0.05, -3.0, -50.0])[torch.randint(4, (T, HV), generator=gen)]
    b = torch.rand(T, HV, generator=gen) if beta is None else torch.full((T, HV), float(beta))
    return dict(lengths=list(lengths), q=F.normalize(r(T, H, K), dim=-1).to(dtype), k=k.to(dtype), v=r(T, HV, V).to(dtype),
                g=g, beta=b, S=r(len(lengths), HV, K, V) if initial else None, scale=K ** -0.5)


def expected(x, delta=DELTA):
    """o [T, HV, V] and final states [N, HV, K, V] of a problem, by the recurrence."""
    H, HV, K, V = x["q"].shape[1], x["v"].shape[1], x["q"].shape[2], x["v"].shape[2]
    o, states, at = torch.empty(x["v"].shape, dtype=torch.float64), [], 0
    for n, length in enumerate(x["lengths"]):
        s = slice(at, at + length)
        at += length
        for h in range(HV):
            i = h // (HV // H)
            S = x["S"][n, h].double() if x["S"] is not None else torch.zeros(K, V, dtype=torch.float64)
            o[s, h], S = recurrence(x["q"][s, i].double(), x["k"][s, i].double(), x["v"][s, h].double(),
                                    x["g"][s, h].double(), x["beta"][s, h].double(), x["scale"], S, delta)
            states.append(S)
    return o, torch.stack(states).reshape(len(x["lengths"]), HV, K, V)


def passed(lengths, H, HV, K, V, forms, dtypes=(), dtype=torch.float16, seed=0):
    """A problem as callers may pass it, and what the recurrence reads of it, in float64. forms, dtypes: by input's name. Raw
    gates reach +-30, a raw key is zero, and rows to be normalised are 10 long."""
    gen = torch.Generator().manual_seed(seed + 77)
    T, dtypes = sum(lengths), dict(dtypes)
    r = lambda *s: torch.randn(*s, generator=gen)
    x = problem(lengths, H, HV, K, V, dtype, seed=seed)
    more = {}
    for n in ("q", "k"):
        if forms.get(n) == "l2norm":
            x[n] = (10 * torch.rand(T, H, 1, generator=gen) * r(T, H, K) / K ** 0.5).to(dtype)
            x[n][T // 2:T // 2 + 1] = 0
    if forms.get("g") == "linear":
        x["g"] = torch.exp(x["g"])
    if forms.get("g") == "raw":
        x["g"] = 3 * r(T, HV) - 2
        x["g"][::7], x["g"][3::7] = -30, 30
        more = {"A_log": r(HV), "dt_bias": r(HV)}
    if forms.get("beta"):
        x["beta"] = 2 * r(T, HV)
    for n in dtypes:
        (more if n in more else x)[n] = (more if n in more else x)[n].to(dtypes[n])
    x["more"], page = more, {n: y.double() if isinstance(y, torch.Tensor) else y for n, y in x.items()}
    for n in ("q", "k"):
        if forms.get(n) == "l2norm":
            page[n] = page[n] / torch.sqrt((page[n] ** 2).sum(-1, keepdim=True) + 1e-6)
    g, beta = page["g"], page["beta"]
    if forms.get("g") == "raw":
        page["g"] = -torch.exp(more["A_log"].double()) * torch.logaddexp(g + more["dt_bias"].double(), torch.zeros(()).double())
    elif forms.get("g") == "linear":
        page["g"] = torch.log(g)
    page["beta"] = {"sigmoid": 1, "twice_sigmoid": 2}[forms["beta"]] / (1 + torch.exp(-beta)) if "beta" in forms else beta
    return x, page


def rms_error(got, want):
    """RMSE over RMS; NaN in `got` gives NaN, which no comparison passes. An all-zero reference counts absolutely."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.numel():
        return 0.0
    rms = want.double().pow(2).mean().sqrt().item()
    return (got.double() - want.double()).pow(2).mean().sqrt().item() / (rms or 1.0)


def call(fn, x, layout="bthd", batched=False, cu_dtype=torch.int32, delta=DELTA, state=True, rest=0):
    """Run a generated op on a problem: packed with cu_seqlens, or as equal rows; outputs packed again. rest: rows of NaN past the
    last sequence's end, of which o has zeros."""
    n = len(x["lengths"]) if batched else 1
    rest = 0 if batched else rest
    def shaped(t):
        t = torch.cat([t, t.new_full((rest, *t.shape[1:]), float("nan"))])
        t = t.reshape(n, t.shape[0] // n, *t.shape[1:])
        return t if layout == "bthd" else t.transpose(1, 2).contiguous()
    ends = [0]
    for length in x["lengths"]:
        ends.append(ends[-1] + length)
    args = [shaped(x[i]) for i in (("q", "k", "v", "g", "beta") if delta else ("q", "k", "v", "g"))]
    o, final = fn(*args, scale=x["scale"], initial_state=x["S"], output_final_state=state, **x.get("more", {}),
                  cu_seqlens=None if batched else torch.tensor(ends, dtype=cu_dtype))
    o = (o if layout == "bthd" else o.transpose(1, 2)).reshape(len(x["v"]) + rest, *x["v"].shape[1:])
    assert (o[len(x["v"]):] == 0).all(), "rows of no sequence are not zero"
    return o[:len(x["v"])], final


def check(fn, x, tolerance=5e-3, page=None, **options):
    """Assert that a generated op agrees with the recurrence. page: what that reads, where it is not x."""
    want_o, want_S = expected(page or x, options.get("delta", DELTA))
    o, S = call(fn, x, **{"rest": 5, **options})
    errors = rms_error(o, want_o), rms_error(S, want_S)
    # a dtype keeps few digits, or none, near its smallest numbers (float16: 2^-24), however they are computed
    bound, bound_S = (max(tolerance, 2 * rms_error(w.to(y.dtype), w)) for w, y in ((want_o, o), (want_S, S)))
    assert errors[0] <= bound and errors[1] <= bound_S, f"o {errors[0]:.2e} > {bound:.2e}; state {errors[1]:.2e} > {bound_S:.2e}"
    return errors


def in_parts(fn, chunks):
    """`fn`, with parts of `chunks` chunks; 0 lets the module choose. It changes nothing in a module without parts."""
    host = fn.__globals__["HOST"]
    host.part_chunks = chunks
    host.plans.clear()
    return fn


def module(text):
    """A generated module of this text, imported."""
    out = import_path(cache.write(cache.folder() / "texts" / f"module_{cache.digest(text)}.py", text))
    assert out.HOST.poison
    return out


def in_form(s, form):
    """A schedule in another form."""
    return replace(s, form=form)


def variant(schedule, **changes):
    """A named schedule changed."""
    return replace(SCHEDULES[schedule], name="_".join([schedule, *map(str, changes.values())]).replace("-", ""), **changes)


def positional(op, inputs, **named):
    """The arguments of a torch.library op by position, as its checks want them: `inputs` first, then those with a name, and None
    for each that has none. KeyError for a name that the op does not have."""
    names = [a.name for a in op._opoverload._schema.arguments[len(inputs):]]
    if unknown := named.keys() - set(names):
        raise KeyError(*unknown)
    return (*inputs, *(named.get(n) for n in names))
