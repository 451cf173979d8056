"""whole_vectors: sums that cores with some rows each need as a whole; and walks from the last chunk to the first on them."""
from dataclasses import replace

import pytest
import torch
from reference import rms_error

from gdn_codegen.ir.builder import algorithm, apply, carried, cumsum, exp, last, lower, row_sum
from gdn_codegen.ir.core import map_loops
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes import pipelines
from gdn_codegen.schedule.schedule import varied
from gdn_codegen.targets import lower as lower_program

SIZES, LENGTHS = {"C": 16, "K": 32, "V": 48}, [1, 0, 20, 40]


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def sums_of_vectors(q, k, v, S):
    """Of a vector of row sums: the running sums, an entry, the sum, and the vector as a row. Sums of columns and of a vector that
    each core has as a whole."""
    n = row_sum(q * k) / 8
    N = cumsum(n)
    total = row_sum(n)
    columns = apply("column_sum", k * q)
    o = (N + last(n))[:, None] * (q @ S) + (lower(q @ k.T) * n[None, :]) @ v + total * v
    S = S / (1 + row_sum(columns * columns) + row_sum(row_sum(S * S))) + (columns[None, :] * k).T @ v
    return o, N, S


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def diagonals(q, k, v, S):
    """The diagonal of a tile whose columns past the end are not zero, and a vector of the rows of a state as a row."""
    P = exp(q @ k.T)
    o = apply("diagonal", P)[:, None] * v + (row_sum(S)[None, :] * q) @ S
    S = S + k.T @ v
    return o, S


def given():
    gen = torch.Generator().manual_seed(0)

    def draw(n):
        return torch.randn(sum(LENGTHS), 2, SIZES[n], generator=gen, dtype=torch.float64) / 4
    return {"q": draw("K"), "k": draw("K"), "v": draw("V"), "initial_state": torch.ones(len(LENGTHS), 2, 32, 48).double()}


def backwards(p):
    """The traced program with its walk from the last chunk to the first."""
    return p.map_kernels(lambda k: replace(k, body=map_loops(k.body, lambda lp: [replace(lp, step=-1)])))


@pytest.mark.parametrize("page", [sums_of_vectors, diagonals], ids=lambda x: x.name)
@pytest.mark.parametrize("prefetch, slots", [("no", 1), ("all", 2)])
@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
def test_each_pass_keeps_the_meaning(page, prefetch, slots, back):
    """Also with the walk reversed, prefetch and two slots. The first chunk of such a walk is the ragged one."""
    p = backwards(page.trace()) if back else page.trace()
    x, problem, seen = given(), Problem(LENGTHS, 2, 2), []
    pipelines.observers.append(see := lambda name, before, after, c: seen.append((name, after)) if before != after else None)
    try:
        lower_program(p, "pto", varied("fused", prefetch=prefetch, channel_slots=slots), SIZES, "float32")
    finally:
        pipelines.observers.remove(see)
    want = interpret(replace(p, dims=tuple(SIZES.items())), problem, x, {})
    assert {"whole_vectors", "pack"} <= {name for name, _ in seen}
    for name, q in seen:
        got = interpret(q, problem, x, {})
        for n, y in want.items():
            assert rms_error(got[n], y) < 1e-12, (name, n)
