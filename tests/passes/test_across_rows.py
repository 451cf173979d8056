"""across_rows: products with constant tiles for ops across the rows of a tile, on vector cores that hold some rows each."""
from dataclasses import replace

import pytest
import torch
from reference import rms_error

from gdn_codegen.host.pto import _mask
from gdn_codegen.ir.builder import algorithm, apply, carried, cumsum, exp, last
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Problem, const_tile, interpret
from gdn_codegen.ir.types import Tensor
from gdn_codegen.passes import pipelines
from gdn_codegen.schedule.schedule import Schedule, varied
from gdn_codegen.targets import lower as lower_program

SIZES, LENGTHS = {"C": 16, "K": 32, "V": 32}, [1, 0, 20, 40]


@algorithm(q="C K", k="C K", v="C V", g="C K", S=carried("K V"))
def sums(q, k, v, g, S):
    """Sums with a factor of their last row, and the last row of a value that is no sum."""
    G = cumsum(g)
    o = (exp(G) * q) @ S + cumsum(k * q) @ S
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * last(k * q)[None, :]).T @ v
    return o, S


@algorithm(q="C K", v="C V", S=carried("K V"))
def of_memory(q, v, S):
    """The last rows of a tile from memory and of the state. A page may take the second only as an op."""
    o = apply("last", S)[None, :] * (q @ S)
    S = S + (last(q)[None, :] * q).T @ v
    return o, S


def after(page, schedule, name):
    """The program after the pass, and the last one."""
    seen = []
    see = lambda done, before, p, c: seen.append(p) if done == name else None
    pipelines.observers.append(see)
    try:
        return lower_program(page.trace(), "pto", schedule, SIZES, "float32"), seen[0]
    finally:
        pipelines.observers.remove(see)


def given(page):
    gen = torch.Generator().manual_seed(0)
    p = page.trace()
    draw = lambda n: torch.randn(sum(LENGTHS), 2, SIZES[n], generator=gen, dtype=torch.float64) / 4
    x = {t.name: draw(t.dims[-1]) for t in p.role("input") if t.index == "token"}
    return {**x, **({"g": -x["g"].abs()} if "g" in x else {}), "initial_state": torch.ones(len(LENGTHS), 2, 32, 32).double()}


@pytest.mark.parametrize("page, schedule", [(sums, varied("fused")), (sums, varied("fused", channel_slots=2)),
                                            (sums, Schedule("two", (("G",), ("o", "S")))), (of_memory, varied("fused"))],
                         ids=["fused", "slots", "two", "memory"])
def test_it_means_the_page(page, schedule):
    x, problem = given(page), Problem(LENGTHS, 2, 2)
    want = interpret(replace(page.trace(), dims=tuple(SIZES.items())), problem, x, {})
    done, products = after(page, schedule, "across_rows")
    assert not [o for k in products.kernels for o in walk(k.body) if o.kind in ("cumsum", "to_middle")]
    got = interpret(done, problem, x, {})
    assert all(rms_error(got[n], want[n]) < 1e-12 for n in want)


def test_only_the_last_row_crosses_to_the_vector_cores():
    done, _ = after(sums, varied("fused"), "across_rows")
    rows = [o for k in done.kernels for o in walk(k.body) if o.kind == "load" and o.attr("last")]
    assert {(o.agent, o.type.dims) for o in rows} == {("vector", ("K",))}
    assert not [o for k in done.kernels for o in walk(k.body) if o.kind == "last"]


@pytest.mark.parametrize("fill", ["lower 1 0", "strictly_lower 1 0", "eye 1 0", "pairs:4 1 0", "lower 0 -inf",
                                  *(f"to_middle:{size} of {n}" for size in (1, 2, 8) for n in ("0/1", "0/2", "1/2"))])
def test_launcher_and_interpreter_fill_a_constant_tile_alike(fill):
    t = Tensor("t", "workspace", "const", "HV", ("C", "C"), fill=fill)
    assert torch.equal(_mask(fill, (16, 16), "float32"), const_tile(t, SIZES).float())
