"""The comparison of kernels of two commits: what it must find, and that a renaming is none of it."""
import pytest
from kernels_of_builds import builds, compared, kernels

from gdn_codegen.runtime.build import Build

BEFORE = {"pto fused": [["chunks", 2, "void f() {\n  TADD(a, b);\n}", "None", "128"]], "triton walk": "ScheduleError: too large"}


def test_builds_have_keys_of_their_own_but_for_rows_of_tables():
    keys = [key for key, _ in builds() if " table " not in key]
    assert len(keys) == len(set(keys)) > 200


def test_kernels_are_those_of_the_build():
    (kernel,) = kernels(Build("triton", 16, head_dim_k=32, head_dim_v=32))
    assert kernel[0] == "sequences" and "tl.dot" in kernel[2]
    assert kernels(Build("tilelang", 128, arch="sm_90a", schedule="fused", dtype="float32")).startswith("ScheduleError: ")


def test_names_and_refusals_that_stay_do_not_differ():
    assert not compared(BEFORE, BEFORE | {"pto fused": [["chunks", 2, "void f() {  // c\n  TADD(x, y);\n}", "None", "128"]],
                                          "triton walk": "ScheduleError: larger still"})


@pytest.mark.parametrize("after", [
    {"pto fused": [["chunks", 2, "void f() {\n  TSUB(a, b);\n}", "None", "128"]]},
    {"pto fused": [["chunks", 2, "void f() {\n  TADD(a, a);\n}", "None", "128"]]},
    {"pto fused": [["chunks", 2, "void f() {\n  TADD(a, b);\n}", "None", "256"]]}, {"pto fused": []},
    {"pto fused": "ScheduleError: too large"}, {"triton walk": []}, {"pto other": []}])
def test_all_else_does(after):
    assert compared(BEFORE, BEFORE | after)
