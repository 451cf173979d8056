"""Heads batched by threads: which kernels, and that nothing else changes."""
from dataclasses import replace

import pytest

from gdn_codegen.algorithms import find
from gdn_codegen.devices import HOPPER
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last
from gdn_codegen.ir.core import Batch
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.schedule import Schedule, named
from gdn_codegen.schedule.contract import PLAIN, Contract
from gdn_codegen.targets import lower

SIZES = {"C": 64, "K": 64, "V": 64}


def lowered(schedule="staged", target="tilelang", arch="", accept="", **changes):
    contract = Contract.parse(accept) if accept else PLAIN
    plan = replace(named(schedule, arch), **changes)
    return lower(find("gated_delta_rule").trace(), target, plan, SIZES, "float16", arch, contract)


def together(p):
    return {k.name: k.batch.heads for k in p.kernels if k.batch.way == "threads"}


@pytest.mark.slow
@pytest.mark.parametrize("options, names", [
    ({}, ["G"]), ({"schedule": "fused_walk"}, ["G_beta"]), ({"schedule": "fused_walk", "arch": "sm_90a"}, ["G_beta"]),
    ({"schedule": "fused_walk", "arch": "sm_90a", "accept": "beta=sigmoid/bfloat16,dt_bias=bfloat16,g=raw/float16,strided"},
     ["G_beta"]),
    ({"schedule": "fused_walk", "arch": "sm_90a", "partition": "decay", "accept": "k=unit"}, ["G_beta_F_chunk"]),
    ({"schedule": "fused_walk", "arch": "sm_90a", "partition": "decay"}, ["G_beta_F_chunk_least"]),
    ({"schedule": "walk", "arch": "sm_90a", "partition": "decay"}, []),  # which reads k
    ({"schedule": "prepared"}, []), ({"schedule": "walk", "arch": "sm_90a"}, []), ({"schedule": "fused"}, []),
    ({"target": "triton"}, []), ({"target": "pto"}, [])])
def test_kernels_of_vectors_alone(options, names):
    assert together(lowered(**options)) == dict.fromkeys(names, HOPPER.heads["threads"])


def test_what_is_computed_of_numbers():
    """Numbers of a chunk go back into vectors, and into a workspace."""
    @algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
    def page(q, k, v, g, S):
        G = cumsum(g)
        total = last(G)
        kept = exp(total - G)
        o = exp(G)[:, None] * (q @ S)
        S = exp(total) * S + k.T @ (kept[:, None] * v)
        return o, S

    p = lower(page.trace(), "tilelang", Schedule("mine", (("G", "total", "kept"), ("o", "S"))), SIZES, "float16")
    assert together(p) == {"G_total_kept": HOPPER.heads["threads"]}


def test_print_and_parse_keep_it():
    p = lowered()
    assert "batch=(16, 'threads')" in program_text(p) and parse_program(program_text(p)) == p


def test_a_kernel_of_tiles_is_refused():
    p = lowered()
    for name, tiles in (("A", "k, "), ("S_U", "none|S")):
        kernels = tuple(replace(k, batch=Batch(16, "threads")) if k.name == name else k for k in p.kernels)
        with pytest.raises(VerifyError, match=rf"kernel {name}: has Batch\(heads=16.*{tiles}"):
            verify(replace(p, kernels=kernels))
