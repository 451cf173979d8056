"""Names of emitted values say what a value is."""
import re

import pytest

from gdn_codegen.ir.core import walk
from gdn_codegen.ir.names import LONGEST, name_of, stem
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied

BUILDS = [Build("triton", schedule="fused"), Build("triton", schedule=varied("walk", partition="decay")),
          Build("tilelang", schedule="staged"), Build("tilelang", arch="sm_90a", schedule="walk"),
          Build("tilelang", arch="sm_90a", schedule=varied("fused_walk", "sm_90a", partition="decay")),
          Build("pto", schedule="fused", head_dim_k=32, head_dim_v=32, chunk=32)]


@pytest.mark.parametrize("kind, args, attrs, name", [
    ("matmul", ("k", "k"), {"tb": True}, "k_kT"), ("matmul", ("k", "S_f16"), {}, "k_S"),
    ("matmul", ("k_in", "U"), {"ta": True}, "kT_U"),
    ("exp", ("last_G",), {}, "chunk_decay"), ("sub", ("last_G", "G"), {}, "last_G_minus_G"),
    ("exp", ("last_G_minus_G",), {}, "decay_to_end"), ("mul", ("beta_col", "v"), {}, "beta_v"),
    ("neg", ("A",), {}, "minus_A"),
    ("cast", ("U",), {"to": "bfloat16"}, "U_bf16"), ("cast", ("v_f16",), {"to": "float32"}, "v_f32"),
    ("col", ("G",), {}, "G_col"),
    ("pairs", ("minus_A",), {"size": 4}, "minus_A_8"), ("exp", ("last_G_minus_H",), {}, "exp_last_G_minus_H"),
    ("mul", ("decay_to_end", "beta"), {}, "beta_decay_to_end"), ("mul", ("exp_G_minus_H_sum", "beta"), {}, "beta_scaled"),
    ("const", (), {"value": -105.0}, "const_minus_105"), ("const", (), {"value": 1e-6}, "const_1e_06"),
    ("maximum", ("const_1", "g"), {}, "const_1_max_g"), ("maximum", ("g", "const_minus_105"), {}, "g_max_minus_105"),
    ("mul", ("const_0_5", "g"), {}, "g_times_0_5"), ("add", ("g_plus_h_exp", "const_0_279652"), {}, "g_plus_h_exp_sum"),
    ("add", ("exp_G_q_S", "q_kT_D_U_product"), {}, "exp_G_q_S_sum"), ("load", (), {"tensor": "k"}, "k"),
    ("eye", (), {}, "identity")])
def test_a_value_is_named_by_what_it_is(kind, args, attrs, name):
    assert name_of(kind, args, attrs) == name


def test_a_long_name_gives_way_to_what_the_value_is_for():
    args = ("exp_H_minus_G_sum", "U")
    assert name_of("mul", args, {}, "S", True) == "operand_of_S" and name_of("mul", args, {}, "S") == "S_term"
    assert name_of("mul", args, {}) == "U_scaled"
    assert name_of("mul", ("beta_decay_to_end_col", "U_unscaled"), {}, "S", True) == "U_unscaled_to_end"
    assert stem("G_minus_H_f16_col") == "G_minus_H"


@pytest.mark.parametrize("b", BUILDS, ids=lambda b: b.name)
def test_names_are_short_ascii_and_say_something(b):
    for k in lowered(b).kernels:
        for o in walk(k.body):
            assert o.out.isascii() and len(o.out) <= LONGEST + 14, o.out
            assert not re.search(r"_[hpsmx](_\d+)?$|^(mul|add|sub|div)_|_op$", o.out), o.out
