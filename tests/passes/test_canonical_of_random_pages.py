"""The canonical form of random pages: it means the page, and is finite wherever the page is."""
import random
from math import inf

import pytest
from reference import rms_error
from test_canonical import ONE, results

from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, maximum, strictly_lower, unit_lower_inverse
from gdn_codegen.passes.algebra.canonical import canonical


class Values:
    """Random values of a chunk: vectors, tiles [C, C] and tiles [C, V], each of at most `d` levels of ops."""

    def __init__(self, seed, q, k, v, g, b, S, scale):
        G = cumsum(g)
        self.choice = random.Random(seed).choice
        self.numbers = [scale, 2.0, -1.0, 0.5, exp(last(G)), last(g)]
        self.vectors = [g, b, G, -b, 1 - g, exp(g), exp(G), exp(last(G) - G)]
        self.sums, self.squares, self.tiles = [G, cumsum(b)], [q @ k.T, k @ k.T], [v, q @ S, k @ S]

    def number(self):
        return self.choice(self.numbers)

    def vector(self, d):
        x = lambda: self.vector(d - 1)
        return self.choice([lambda: self.choice(self.vectors)] * (9 if d == 0 else 3) + [
            lambda: x() * x(), lambda: x() + x(), lambda: x() - x(), lambda: self.number() * x(), lambda: -x()][:5 * (d > 0)])()

    def decay(self):
        G = self.choice(self.sums)
        D = G[:, None] - G[None, :]
        return self.choice([lambda: exp(lower(D, fill=-inf)), lambda: exp(D), lambda: exp(-(G[None, :] - G[:, None]))])()

    def square(self, d):
        x = lambda: self.square(d - 1)
        return self.choice([lambda: self.choice(self.squares)] if d == 0 else [
            lambda: lower(x() * self.decay()), lambda: lower(x() * self.decay() * self.decay()), x,
            lambda: strictly_lower(x() * self.decay()), lambda: x() * self.vector(1)[:, None],
            lambda: x() * self.vector(1)[None, :], lambda: self.number() * x(), lambda: x() + x(),
            lambda: x() - x(), lambda: -x(), lambda: lower(x()) * x(), lambda: lower(x(), fill=1.0),
            lambda: unit_lower_inverse(strictly_lower(x() * 0.1))])()

    def tile(self, d):
        x = lambda: self.tile(d - 1)
        return self.choice([lambda: self.choice(self.tiles)] if d == 0 else [
            lambda: self.vector(1)[:, None] * x(), lambda: self.number() * x(), lambda: x() + x(), lambda: x() - x(),
            lambda: -x(), lambda: lower(self.square(d - 1)) @ x(), lambda: lower(self.square(1)).T @ x(),
            lambda: maximum(x(), x()), lambda: x() * x()])()


def random_page(seed):
    @algorithm(q="C K", k="C K", v="C V", g="C", b="C", S=carried("K V"))
    def page(q, k, v, g, b, S, *, scale=0.5):
        x = Values(seed, q, k, v, g, b, S, scale)
        o = x.tile(4) + x.tile(3) + scale * (g * b)[:, None] * (q @ S)  # which reads every input, as a page has to
        S = 0.5 * S + k.T @ (x.vector(1)[:, None] * v) + (x.vector(1)[:, None] * k).T @ (0.01 * v)
        return o, S
    return page


@pytest.mark.parametrize("gates", [1.0, 1000.0])
def test_the_canonical_form_of_a_random_page(gates):
    """Small gates tell a wrong rule, large ones an infinity that a mask no longer covers."""
    for seed in range(60):
        p = random_page(seed).trace()
        want, got = results(p, gates), results(canonical(p, ONE), gates)
        for n, x in want.items():
            there = x.isfinite()
            assert got[n][there].isfinite().all(), (seed, n)
            assert gates > 1 or rms_error(got[n][there], x[there]) < 1e-9, (seed, n)
