"""Names of emitted values say what a value is; and the comparison of texts up to names."""
import re

import pytest
from renaming import difference

from gdn_codegen.ir.core import walk
from gdn_codegen.ir.names import LONGEST, name_of, stem
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied

BUILDS = [Build("triton", schedule="fused"), Build("triton", schedule=varied("walk", partition="decay")),
          Build("tilelang", schedule="staged"), Build("tilelang", arch="sm_90a", schedule="walk"),
          Build("tilelang", arch="sm_90a", schedule=varied("fused_walk", partition="decay")),
          Build("pto", schedule="fused", head_dim_k=32, head_dim_v=32, chunk=32)]


@pytest.mark.parametrize("kind, args, attrs, name", [
    ("matmul", ("k", "k"), {"tb": True}, "k_kT"), ("matmul", ("k", "S_f16"), {}, "k_S"),
    ("matmul", ("k_in", "U"), {"ta": True}, "kT_U"),
    ("exp", ("last_G",), {}, "exp_last_G"), ("sub", ("last_G", "G"), {}, "last_G_minus_G"),
    ("exp", ("last_G_minus_G",), {}, "exp_last_G_minus_G"), ("mul", ("beta_col", "v"), {}, "beta_v"),
    ("neg", ("A",), {}, "minus_A"),
    ("cast", ("U",), {"to": "bfloat16"}, "U_bf16"), ("cast", ("v_f16",), {"to": "float32"}, "v_f32"),
    ("col", ("G",), {}, "G_col"),
    ("pairs", ("minus_A",), {"size": 4}, "minus_A_8"), ("mul", ("exp_last_G_minus_G", "beta"), {}, "beta_scaled"),
    ("add", ("exp_G_q_S", "q_kT_D_U_product"), {}, "exp_G_q_S_sum"), ("load", (), {"tensor": "k"}, "k"),
    ("eye", (), {}, "identity")])
def test_a_value_is_named_by_what_it_is(kind, args, attrs, name):
    assert name_of(kind, args, attrs) == name


def test_a_long_name_gives_way_to_what_the_value_is_for():
    args = ("exp_last_G_minus_G", "U")
    assert name_of("mul", args, {}, "S", True) == "S_operand" and name_of("mul", args, {}, "S") == "S_term"
    assert name_of("mul", args, {}) == "U_scaled"
    assert stem("G_minus_H_f16_col") == "G_minus_H"


@pytest.mark.parametrize("b", BUILDS, ids=lambda b: b.name)
def test_names_are_short_ascii_and_say_something(b):
    for k in lowered(b).kernels:
        for o in walk(k.body):
            assert o.out.isascii() and len(o.out) <= LONGEST + 14, o.out
            assert not re.search(r"_[hpsmx](_\d+)?$|^(mul|add|sub|div)_|_op$", o.out), o.out


TEXT = "def f(x):\n    # G = cumsum(g)\n    G_2 = x // 2  # half\n    return g(\n        G_2,\n        x,\n    )\n"


@pytest.mark.parametrize("other, same", [
    (TEXT.replace("G_2", "half"), True), (TEXT.replace("# G = cumsum(g)", "# another"), True),
    (TEXT.replace("g(\n        G_2,\n        x,\n    )", "g(G_2, x)"), True), (TEXT.replace("// 2", "// 3"), False),
    (TEXT.replace("G_2,", "x,"), False), (TEXT.replace("        x,\n", "        G_2,\n"), False),
    (TEXT + "def h():\n    pass\n", False),
    (TEXT.replace("G_2 = x // 2", "x = x // 2").replace("G_2,", "x,"), False)])
def test_texts_are_compared_up_to_names_and_comments(other, same):
    assert (difference(TEXT, other) == "") == same


def test_comments_of_cpp_and_floor_division_are_told_apart():
    assert difference("a = b;  // a -> b\nc(a);", "a = b;\nc(a);") == ""
    assert difference("a = b // 2\n", "a = b // c\n") and difference("a = b // 2", "a = b")
