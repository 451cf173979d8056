"""The canonical form: what it leaves alone, every rule by itself, and values that it may not look into."""
from dataclasses import replace
from math import inf

import pytest
import torch
from reference import rms_error
from test_members_in_groups import delta_net, dplr, ssd
from test_own_pages import column_elsewhere, inverse_read_twice, look, negative, outer_products, read_often, twice_decayed
from test_spelled_decays import SAME
from test_spellings import PAGES

from gdn_codegen.algorithms import find, names
from gdn_codegen.ir.builder import (
    algorithm,
    apply,
    carried,
    cumsum,
    exp,
    last,
    log,
    lower,
    maximum,
    row_sum,
    sigmoid,
    strictly_lower,
)
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.verify import verify
from gdn_codegen.passes.algebra import canonical as module
from gdn_codegen.passes.algebra.canonical import canonical
from gdn_codegen.passes.algebra.rules import JOINING, RULES
from gdn_codegen.schedule import Schedule, named

ONE = named("fused")


@algorithm(q="C K", k="C K", v="C V", g="C", b="C", S=carried("K V"))
def signs_and_sums(q, k, v, g, b, S, *, scale=0.5):
    """What no page above has: signs, sums and quotients in every place."""
    G = cumsum(g)
    x, y = g[:, None], b[:, None]
    z = (-g)[:, None] * v - (v - (b - g)[:, None] * v) - (-v - y * v) - (x - last(-G)) * v
    z = z + (v + (v * v + z)) + (z - (v * 2.0 + v) - q @ S) + (-v) / (2 + v * v) + v * -1.0
    z = z + (1 - x) * v + (x + 1) * v + (x - 1.0) * v + (x + y) * v + sigmoid(x) * v + log(2 + x * x) * v
    w = exp(x) * (exp(y) * v) + exp(x) * exp(y) * v + exp(g) [:, None] * (exp(v) / exp(v + 1))
    w = w + exp(v) * exp(2 * v) + (z * exp(v)) * exp(-v) + maximum(z, v) + exp(-(v - w))
    P = (-q) @ k.T + q @ (-k).T + lower(-(q @ k.T)) + -lower(q @ k.T) + (q * x) @ (k * y).T
    row = P * (g * b)[None, :] + P * (scale * g)[None, :] + P * (-g)[None, :] + P * exp(g[None, :]) * exp(b[None, :])
    row = row + P * sigmoid(g[None, :]) + P * log(2 + (g * g)[None, :]) + P * (g[None, :] + b[None, :]) + P * (1 - g[None, :])
    row = row + P * (g[None, :] - b[None, :]) + P * (g[None, :] - 1) + P * (g[None, :] + 1) + P * exp(g)[None, :] * (
        P * exp(b)[None, :])
    M = lower(exp(P)) + strictly_lower(exp(P)) + lower(P) * P + strictly_lower(P) * P + lower(exp(-(P - row)))
    M = M + exp(lower(-(P - row), fill=float("-inf"))) + -(P * (P - row))
    o = scale * (M @ w) - (row @ z + row @ w) + (M * x) @ (v * scale) + ((P @ k) @ S) * last(sigmoid(G)) * last(log(2 - G))
    o = o + M @ z - M @ v + M.T @ v + M.T @ w - M.T @ z + P.T @ (-v) + (-P).T @ z + (M * g[None, :]) @ z + (P * b[:, None]).T @ z
    turned = (-k).T @ (-q) + k.T @ q + k.T @ (q * scale) - (k.T @ (k * x)) + (k * x).T @ k
    o = o + (q @ (turned.T)) @ S + q @ (-turned).T @ S + (-q) @ turned.T @ S + (q @ turned.T + q @ (2 * turned).T) @ S
    o = o + (q @ turned.T - q @ (turned * turned).T) @ S
    o = o + P @ (-w) + (scale * g)[:, None] * v + (x - y) * w + log((2 + g * g)[:, None]) * v
    row = P * log((2 + g * g)[None, :]) + P * (exp(g)[None, :] * exp(b)[None, :])
    o = o + (x / (2 + y * y)) * v + (x / 2.0) * v + (1.0 / (2 + x * x)) * v + (y * 0.5) * (v + w) + (3 - x * x) * w
    o = o + (exp(x * x) + log(2 + x * x) * sigmoid(x * x) - (x * x - y * y) * (x * x + y * y) * (x * x - 1)) * v
    o = o + ((exp(g) * exp(b)) + (g * exp(b)) * exp(g) + exp(b) / exp(g))[:, None] * v
    r, t = g[None, :], b[None, :]
    row = row + P * (r / (2 + t * t)) + P * (r / 2.0) + P * (1.0 / (2 + r * r)) + exp(P * (0.5 * t)) + (3 - r * r) * M
    o = o + row_sum(0.5 * x)[:, None] * v + apply("column_sum", r * t)[:, None] * v
    row = row + (exp(r * r) + log(2 + r * r) * sigmoid(r * r) - (r * r - t * t) * (r * r + t * t) * (r * r - 1)) * M
    wide = (-q).T @ row.T + q.T @ (-row).T + (q.T @ P.T + q.T @ M.T) + (k.T @ P.T - k.T @ M.T)
    S = 0.5 * S + k.T @ (w * 0.01) + wide @ v + (k.T @ v - k.T @ (v * v))
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def powers(q, k, v, g, S):
    """A factor that one term has more often than the other."""
    x = g[:, None]
    o = q @ S + x * x * v + x * v - (0.5 * x * v - x * v * 0.5 * x * 0.5)
    S = S + k.T @ (x * v - x * x * x * v)
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="C", b="C", S=carried("K V"))
def two_decays(q, k, v, g, b, S):
    """Decays by two gates, above the diagonal as large as these are small below it, masked together and one by one."""
    G, B = cumsum(g), cumsum(b)
    D, E = G[:, None] - G[None, :], B[:, None] - B[None, :]
    N = q @ k.T
    P = lower(N * exp(D) * exp(E)) + lower(N * exp(lower(D, fill=-inf)) * exp(E)) + strictly_lower(N * exp(D) * exp(E))
    P = P + lower(exp(lower(D, fill=-inf)) * (N + exp(E))) + lower(exp(lower(D, fill=-inf)) * strictly_lower(N, fill=-inf))
    o = exp(G + B)[:, None] * (q @ S) + maximum(P, -v @ v.T) @ v
    S = exp(last(G) + last(B)) * S + (exp(last(G) - G + last(B) - B)[:, None] * k).T @ v
    return o, S


OTHERS = [signs_and_sums, powers, two_decays, ssd, delta_net, dplr, column_elsewhere, inverse_read_twice, look, negative,
          outer_products, read_often, twice_decayed, *PAGES, *(page for page, _ in SAME)]


def results(p, gates=1.0):
    """What a traced program computes of two short sequences, in float64. gates: what they are multiplied by."""
    sizes, lengths, gen, x = {"C": 8, "K": 4, "V": 4}, [19, 5], torch.Generator().manual_seed(0), {}
    for t in p.role("input"):
        if t.index == "token":
            dims = [sizes[d] for d in t.dims[1:]]
            x[t.name] = torch.randn(sum(lengths), 1, *dims, generator=gen, dtype=torch.float64) / 4
            x[t.name] = x[t.name] if dims else -x[t.name].abs() * gates
    return interpret(replace(p, dims=tuple(sizes.items())), Problem(lengths, 1, 1),
                     {t.name: x.get(t.name) for t in p.role("input")}, dict.fromkeys(p.scalars, 0.5))


def keeps_the_meaning(p, done):
    verify(done)
    want, got = results(p), results(done)
    assert want.keys() == got.keys()
    for n in want:
        assert rms_error(got[n], want[n]) < 1e-9, n


@pytest.mark.parametrize("name", names())
def test_the_packages_pages_are_canonical(name):
    """Some as they are written."""
    p = find(name).trace()
    done = canonical(p, ONE)
    if not any(t.index == "head" for t in p.tensors):
        keeps_the_meaning(p, done)
    assert canonical(done, ONE) == done
    assert name not in ("gated_delta_rule", "delta_rule", "simple_gla", "lightning_attention") or done == p


@pytest.mark.parametrize("page", OTHERS, ids=lambda p: p.name)
def test_the_canonical_form_means_the_page_and_is_its_own(page):
    p = page.trace()
    done = canonical(p, ONE)
    keeps_the_meaning(p, done)
    assert page is signs_and_sums or canonical(done, ONE) == done


def test_what_is_masked_may_be_infinite():
    """exp of a difference of gates above the diagonal is, if they are large. A mask goes where nothing else may be."""
    p = two_decays.trace()
    want, got = results(p, 3000.0), results(canonical(p, ONE), 3000.0)
    assert all(x.isfinite().all() and rms_error(got[n], x) < 1e-9 for n, x in want.items())


def test_every_rule_fits_somewhere(monkeypatch):
    fired = set()

    def watched(rule):
        def apply(t, o):
            new = rule.apply(t, o)
            fired.update({rule.name} if new is not None else ())
            return new
        return replace(rule, apply=apply)
    monkeypatch.setattr(module, "RULES", [watched(r) for r in RULES])
    monkeypatch.setattr(module, "JOINING", [watched(r) for r in JOINING])
    for page in OTHERS:
        canonical(page.trace(), ONE)
    assert not {r.name for r in (*RULES, *JOINING)} - fired


@pytest.mark.slow
def test_every_rule_holds_by_itself(monkeypatch):
    """Each is applied alone to every page; what it makes of one is interpreted where it changed it."""
    monkeypatch.setattr(module, "RULES", [])
    monkeypatch.setattr(module, "JOINING", [])
    traced = [page.trace() for page in OTHERS]
    plain = [canonical(p, ONE) for p in traced]
    for rule in (*RULES, *JOINING):
        monkeypatch.setattr(module, "RULES", [rule])
        for p, without in zip(traced, plain, strict=True):
            done = canonical(p, ONE)
            if done != without:
                keeps_the_meaning(without, done)


def test_a_wrong_rule_is_found(monkeypatch):
    """A difference the other way round."""
    wrong = next(r for r in RULES if r.name == "a subtracted sign")
    bad = replace(wrong, apply=lambda t, o: t.make("add", o.args, line=o.line))
    monkeypatch.setattr(module, "RULES", [bad])
    with pytest.raises(AssertionError):
        keeps_the_meaning(negative.trace(), canonical(negative.trace(), ONE))


def test_values_that_groups_name_stay():
    """Rules do not look into them, so that a kernel may write them."""
    @algorithm(q="C K", k="C K", v="C V", b="C", S=carried("K V"))
    def page(q, k, v, b, S):
        X = (k * b[:, None]) * 2.0
        Y = X @ S - v
        o = lower(q @ X.T) @ Y
        S = S + X.T @ Y
        return o, S
    p = page.trace()
    made = lambda s: {o.out for o in walk(canonical(p, s).kernels[0].body)}
    own = Schedule("own", (("X",), ("o", "S")))
    assert "X" not in made(ONE) and "X" in made(own)
    keeps_the_meaning(p, canonical(p, own))


def test_what_callers_get_is_a_value_of_its_own():
    """An output that is a sign twice over, and two outputs that are the same."""
    @algorithm(q="C K", v="C V", S=carried("K V"))
    def page(q, v, S):
        negative = -v
        x = -negative
        y, z = q @ S + v, v + q @ S
        S = S + q.T @ v
        return x, y, z, S
    p = page.trace()
    done = canonical(p, ONE)
    stored = [o.args[0] for o in walk(done.kernels[0].body) if o.kind == "store"][:3]
    assert len(set(stored)) == 3 and "v" not in stored
    keeps_the_meaning(p, done)
