"""Zeros on padding: each rule of the op table says what the interpreter shows, and decomposed ops agree with what they become."""
from itertools import combinations, product

import pytest
import torch

from gdn_codegen.devices import Device
from gdn_codegen.ir.body import Body
from gdn_codegen.ir.core import Kernel, Op, Program, walk
from gdn_codegen.ir.interpret import Interpreter, Problem, _At
from gdn_codegen.ir.ops import OPS, infer
from gdn_codegen.ir.types import Tensor, Tile
from gdn_codegen.passes.algebra.decompose import decompose
from gdn_codegen.schedule import named

SIZE = 8
#: How much of C, and of K and V, is no padding: all or part.
ENDS = ({"C": 5, "K": 8, "V": 8}, {"C": 8, "K": 5, "V": 5}, {"C": 5, "K": 6, "V": 6})
SIZES = {"C": SIZE, "K": SIZE, "V": SIZE}
CK, CC, C, KV = ("C", "K"), ("C", "C"), ("C",), ("K", "V")
COL, ROW, NUMBER = ("C", 1), (1, "K"), ()
PAIRS = ((CK, CK), (CK, COL), (COL, CK), (COL, ROW), (CK, NUMBER), (NUMBER, CK), (C, C))
MASKS = [((CC,), {}), ((CC,), {"fill": -1.0})]
#: Of each op that gives a value: dims of its operands, attributes.
CASES = {
    "const": [((), {"value": 2.0})], "scalar": [((), {"param": "scale"})],
    "full": [((), {"dims": CK, "value": 0.0}), ((), {"dims": CK, "value": 1.0})],
    **{n: [(pair, {}) for pair in PAIRS] for n in ("add", "sub", "mul", "div", "maximum", "minimum")},
    **{n: [((x,), {}) for x in (CK, C)]
       for n in ("neg", "exp", "log", "rsqrt", "sigmoid", "softplus", "rounded", "boundary", "row_norm", "last")},
    "row_norm": [((CK,), {})], "cast": [((CK,), {"to": "float16"})], "move": [((CK,), {"space": "shared"})],
    "col": [((C,), {})], "row": [((C,), {})],
    "expand": [((x,), {"dims": CK}) for x in (COL, ROW, CK, NUMBER)],
    "matmul": [((CK, KV), {}), ((("K", "C"), KV), {"ta": True}), ((CK, ("V", "K")), {"tb": True}), ((CK, KV, ("C", "V")), {}),
               ((("C", 4), ("C", 4)), {"stacked": True})],
    "cumsum": [*(((x,), a) for x in (C, CK) for a in ({}, {"least": -0.5})), *(((x,), {"exclusive": True}) for x in (C, CK)),
               ((CK,), {"by_head": True})],
    "to_middle": [((CK,), {"size": 4}), ((CK, CK), {"size": 4})],
    "delay": [((CK, ("K",)), {}), ((CK, ("K",), ("K",)), {})], "advance": [((CK,), {"by": 2})], "latest": [((CK,), {})],
    "halves": [((CK, CK), {"size": 2}), ((CC, CC), {"size": 2})],
    "from_middle": [((CK,), {"size": 4}), ((CK, CK), {"size": 4})],
    "decayed_product": [((CK,) * n, {}) for n in (3, 4)],
    "decayed_matmul": [((CC, *(CK,) * n), {"transposed": t} if t else {}) for n in (2, 3) for t in (False, True)],
    "decayed_blocks": [((CC, CK, *(CK,) * n), {"size": 4, "limit": 0.0, **({"transposed": t} if t else {})})
                       for t in (False, True) for n in (1, 2)],
    "decayed_pairs": [((CK,) * n, {"limit": 0.0}) for n in (3, 4)],
    "segment": [((C,), {"start": 4, "size": 4})], "join": [(((4,), (4,)), {"dim": "C"})],
    "block": [((CC,), {"row": 4, "col": 4, "size": 4})], "from_quarters": [(((4, 4),) * 4, {"dims": CC})],
    "blocks": [((CC,), {"at": ((4, 0), (0, 4)), "size": 4})], "diagonal_stack": [((CC,), {"size": 4})],
    "insert": [((CC, (8, 4)), {"at": ((4, 0), (0, 4))})],
    "add_rows": [((CK,), {"to": 1, "of": 0, "width": 3, "count": 2, "step": 4})],
    "row_sum": [((CK,), {}), ((C,), {})], "column_sum": [((CK,), {})],
    "row_max": [((CK,), {}), ((CK,), {"within": "K"}), ((C,), {})],
    "of_token": [(((4, "K"),), {}), (((4,),), {})], "diagonal": [((CC,), {})], "transpose": [((CK,), {})],
    "lower": MASKS, "strictly_lower": MASKS,
    **{n: [(x, {**a, "size": 2}) for x, a in MASKS] for n in ("pairs", "diagonal_blocks")},
    "pairs": [(x, {**a, "size": 2, **both}) for x, a in MASKS for both in ({}, {"both": True})] + [((("C", 4),), {"size": 2})],
    "eye": [((), {"dims": CC}), ((), {"dims": ("C", 4)}), ((), {"dims": ("K", "K"), "within": "K"})],
    "unit_lower_inverse": [((CC,), {})],
    "diag_inverse": [(x, {"size": 8, **a}) for x in ((CC,), (CC, C)) for a in ({}, {"strict": True})],
    "valid": [((CK,), {}), ((C,), {}), ((CK,), {"given": "initial_state"})],
    "warm_up_length": [((), {})], "claim_item": [((), {})], "resume": [((KV, KV), {})],
    "if_negative": [((NUMBER, x), {}) for x in (CK, C)],
}
ALL_CASES = [(kind, dims, attrs) for kind, cases in CASES.items() for dims, attrs in cases]


def padded(t):
    """The axes of a tile that have padding."""
    return [n for n, d in enumerate(t.dims) if isinstance(d, str)]


def subsets(axes):
    return [frozenset(x) for n in range(len(axes) + 1) for x in combinations(axes, n)]


def tile(t, zero, ends, gen):
    """Numbers of both signs, zero past the end of these axes."""
    x = torch.randn(t.shape(SIZES), generator=gen, dtype=torch.float64)
    signs = torch.tensor([-1.0 if sum(i) % 2 else 1.0 for i in product(*map(range, x.shape))]).reshape(x.shape)
    x = x.abs() * signs
    for axis in zero:
        past(x, t, axis, ends).zero_()
    return x


def past(x, t, axis, ends):
    """What of a tile is past the end of an axis."""
    end = ends[t.dims[axis]]
    return x.narrow(axis, end, SIZE - end)


def test_each_op_with_a_value_has_a_case():
    own = {n for n, d in OPS.items() if d.effect in ("pure", "read") and n != "load"}  # of a load the program says
    assert own == set(CASES)


@pytest.mark.parametrize("kind, dims, attrs", [c for c in ALL_CASES if c[0] not in ("warm_up_length", "claim_item", "resume")],
                         ids=str)
def test_a_rule_says_what_the_interpreter_shows(kind, dims, attrs):
    types, gen = tuple(map(Tile, dims)), torch.Generator().manual_seed(0)
    result, names = infer(kind, types, tuple(attrs.items())), [f"x{i}" for i in range(len(dims))]
    o = Op(kind, "y", tuple(names), tuple(sorted(attrs.items())), result)
    for zero in product(*(subsets(padded(t)) for t in types)):
        shown = set(padded(result))
        for ends, sign in product(ENDS, (1, -1)):  # the minimum of a number below zero and zeros is the number
            p = Program("p", "typed", (), (), ("scale",), tuple(SIZES.items()), extents=(("K", ends["K"]),))
            env = {n: sign * tile(t, z, ends, gen) for n, t, z in zip(names, types, zero, strict=True)}
            if kind == "decayed_blocks":  # of other entries it makes NaN
                env[names[0]] = env[names[0]].tril(-1)
            Interpreter(p, Problem([ends["C"]], 1, 1), {"scale": 2.0}).op(None, o, env, _At(0, 0, 0), SIZES)
            shown -= {n for n in shown if past(env["y"], result, n, ends).ne(0).any()}
        said = OPS[kind].zero(attrs, types, zero) & set(padded(result))
        assert said == shown, f"operands are zero on {[sorted(z) for z in zero]}"


def zeros(ops, zero):
    """The zero axes of each value of these ops; of what is loaded, `zero`."""
    axes, types = {}, {}
    for o in ops:
        if o.out:
            axes[o.out] = zero if o.kind == "load" else OPS[o.kind].zero(
                dict(o.attrs), tuple(types[a] for a in o.args), tuple(axes[a] for a in o.args))
            types[o.out] = o.type
    return axes


@pytest.mark.parametrize("solves", [0, 4])
@pytest.mark.parametrize("kind", [n for n, d in OPS.items() if d.decompose] + ["unit_lower_inverse"])
def test_a_decomposed_op_is_zero_where_what_it_becomes_is(kind, solves):
    for dims, attrs in CASES[kind]:
        tensors = tuple(Tensor(n, role, "slot", "HV", dims[0]) for n, role in (("x", "input"), ("y", "output")))
        b = Body({t.name: t for t in tensors})
        out = b.op(kind, b.op("load", tensor="x", name="x"), name="y", **attrs)
        b.op("store", out, tensor="y")
        p = Program("p", "typed", tensors, (Kernel("k", "chunks", b.finish()),), (), tuple(SIZES.items()))
        made = decompose(p, named("fused"), "float32", Device("d", "t", solves=solves))
        ops = list(walk(made.kernels[0].body))
        assert kind not in {o.kind for o in ops}
        for zero in subsets(padded(Tile(dims[0]))):
            assert zeros(ops, zero)["y"] == zeros(walk(p.kernels[0].body), zero)["y"]
