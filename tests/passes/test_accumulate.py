"""accumulate: a sum with a product is one product; signs and numbers before it move to a vector that scales its operand."""
import pytest
import torch

from gdn_codegen.ir.builder import algorithm, carried, last
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.schedule import Schedule
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 16, "V": 16}


@algorithm(k="C K", v="C V", g="C", S=carried("K V"))
def by_a_vector(k, v, g, S, *, scale):
    o = k @ S
    S = last(g) * S - scale * (k.T @ (g[:, None] * (v - o)))
    return o, S


@algorithm(k="C K", v="C V", g="C", S=carried("K V"))
def as_loaded(k, v, g, S, *, scale):
    o = k @ S
    S = last(g) * S - scale * (k.T @ v)
    return o, S


def lowered(page, upto="accumulate"):
    plan = Schedule("own", ((page.trace().role("output")[0].name, "S"),))
    return lower(page.trace(), "triton", plan, SIZES, "float16", upto=upto)


def results(p):
    gen = torch.Generator().manual_seed(0)
    shapes = {"k": (40, 1, 16), "v": (40, 2, 16), "g": (40, 2), "initial_state": (1, 2, 16, 16)}
    x = {n: torch.randn(shape, generator=gen).double() / 4 for n, shape in shapes.items()}
    return Interpreter(p, Problem([40], 1, 2), {"scale": 0.3}).run(x)


@pytest.mark.parametrize("page, sums, subtracts", [(by_a_vector, 1, 0), (as_loaded, 0, 1)])
def test_signs_and_numbers_move_into_an_operand(page, sums, subtracts):
    """One product adds onto the decayed state. An operand that is loaded stays: a tile would have to be scaled for it."""
    before, after = lowered(page, "fold_into_inverse"), lowered(page)
    ops = [o for k in after.kernels for o in walk(k.body)]
    assert sum(o.kind == "matmul" and len(o.args) == 3 for o in ops) == sums
    assert sum(o.kind == "sub" and o.type.dims == ("K", "V") for o in ops) == subtracts
    for one, other in zip(results(before).values(), results(after).values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_the_walk_of_a_gradient_holds_no_product_besides_the_derivative():
    """Both products of d_S add onto it. Each would take as many registers as d_S."""
    from gdn_codegen.derived_pages import find
    from gdn_codegen.schedule import named
    p = lower(find("gated_delta_rule.gradient").trace(), "triton", named("gradient"), SIZES, "float16", upto="accumulate")
    (k,) = (k for k in p.kernels if k.grid == "sequences")
    tiles = [o for o in k.ops if o.kind == "matmul" and o.type.dims == ("K", "V")]
    assert len(tiles) == 2 and all(len(o.args) == 3 for o in tiles)
