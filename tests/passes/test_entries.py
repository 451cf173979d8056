"""Ops that read an entry of a vector: passes and checkers ask the op table what they are, and know none by its name."""
from dataclasses import replace
from math import inf

import pytest

from gdn_codegen.ir.builder import algorithm, apply, carried, cumsum, exp, lower
from gdn_codegen.ir.decays import log_decays
from gdn_codegen.ir.ops import OPS
from gdn_codegen.ir.printer import program_text
from gdn_codegen.schedule import named
from gdn_codegen.targets import lower as lowered

SMALL, WIDE = {"C": 32, "K": 32, "V": 32}, {"C": 64, "K": 128, "V": 128}


def page(kind="last", factor=lambda end, k: exp(end), add=lambda v: v):
    """Linear attention with a decay. kind: the op that reads the last entry of G. factor: of the state. add: what v becomes."""
    @algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
    def entries(q, k, v, g, S):
        G = cumsum(g)
        D = exp(lower(G[:, None] - G[None, :], fill=-inf))
        end = apply(kind, G)
        x = add(v)
        o = exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ x
        S = factor(end, k) * S + k.T @ (exp(end - G)[:, None] * x)
        return o, S
    return entries.trace()


@pytest.mark.parametrize("target, arch, schedule, sizes", [
    ("pto", "", "fused", SMALL), ("pto", "", "staged", SMALL), ("tilelang", "", "staged", SMALL),
    ("tilelang", "sm_90a", "walk", WIDE), ("triton", "", "staged", SMALL)])
def test_such_an_op_of_another_name_gets_the_same_kernels(monkeypatch, target, arch, schedule, sizes):
    monkeypatch.setitem(OPS, "final", replace(OPS["last"], name="final"))
    one, other = (program_text(lowered(page(x), target, named(schedule), sizes, "float16", arch)) for x in ("last", "final"))
    assert "final(" in other and other.replace("final(", "last(") == one
    assert log_decays(page("final")) == {"g"}
