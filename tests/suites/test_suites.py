"""Other projects' tests against our op, where a checkout is given. Each adapter says what differs, and why; all else passes.

    SUITE_FLA=... SUITE_FLASHQLA=... SUITE_FLASHINFER=... SUITE_AITER=... python -m pytest tests/suites
"""
from pathlib import Path

import pytest
from run_suites import NAMES, VARIABLES, Run, checkout, lines
from suite import ADAPTERS, GRADIENT, adapter

#: Like FLA's, with one test that holds, one that does not, one of what is not here, and a gradient that nothing is said of.
LIKE_FLA = """
import pytest
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

device = "nowhere"

def assert_close(name, ref, tri, ratio):
    assert (ref - tri).norm() <= ratio * ref.norm(), name

def call(scale, **more):
    q, k, v = (torch.randn(1, 20, 1, 16, device=device).requires_grad_() for _ in range(3))
    g, beta = torch.zeros(1, 20, 1, device=device), torch.zeros(1, 20, 1, device=device)
    o, S = chunk_gated_delta_rule(q, k, v, g, beta, scale, torch.ones(1, 1, 16, 16, device=device), True, chunk_size=16, **more)
    o.sum().backward()
    return q, v, o, S

@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_holds(scale):
    q, v, o, S = call(scale)
    assert_close("o", scale * q.sum(-1, keepdim=True).expand_as(o), o, 1e-2)
    assert_close("dv", v, v.grad, 1e-2)

def test_fails():
    assert_close("o", torch.ones(1, 20, 1, 16, device=device), call(0.5)[2], 1e-2)

def test_gate():
    raise RuntimeError
"""


@pytest.fixture
def like_fla(tmp_path):
    for folder in ("fla/ops/gated_delta_rule", "tests/ops"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests/ops/test_gdn.py").write_text(LIKE_FLA)
    return tmp_path


@pytest.mark.slow
def test_a_suite_is_run_and_what_fails_is_named(like_fla):
    r = Run("fla", like_fla).wait()
    assert r["done"] and r["passed"] == len(r["names"]) == 2, r["log"]
    assert list(r["failed"]) == ["tests/ops/test_gdn.py::test_fails"] and "AssertionError: o" in r["failed"].popitem()[1]
    assert r["different"] == {"test_gate: FLA's own kernel of the gate alone": 1}


@pytest.mark.slow
def test_a_file_that_does_not_import_is_a_failure(like_fla):
    (like_fla / "tests/ops/test_gdn.py").write_text("import nothing_of_that_name")
    r = Run("fla", like_fla).wait()
    assert "nothing_of_that_name" in str(r["failed"]) and r["passed"] == 0
    with pytest.raises(ValueError, match=r"SUITE_AITER: got .*; accepted: a checkout with op_tests"):
        Run("aiter", like_fla)


def test_adapters_say_why():
    assert set(ADAPTERS) == set(VARIABLES) == set(NAMES)
    for name in NAMES:
        a = adapter(name)
        assert a.ENV == VARIABLES[name] and a.PATHS and all(a.DIFFERENT.values())
    assert GRADIENT.match("dq") and GRADIENT.match("dh0") and not GRADIENT.match("ht") and not GRADIENT.match("o@16")


@pytest.mark.parametrize("name", NAMES)
def test_suite(name):
    root = checkout(name)
    if root is None:
        pytest.skip(f"set {VARIABLES[name]} to a checkout that has {Path(adapter(name).PATHS[0])}")
    r = Run(name, root).wait()
    assert r["done"] and r["passed"] and not r["failed"], "\n".join(lines(r))
