"""row_pieces: rows of the state in pieces of 128 bytes. The interpreter compares the program with the one before the pass
(tests/conftest.py)."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.ir.core import loops, map_ops, walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.types import BYTES
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.loops.row_pieces import ROW
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract

SERVED = "beta=sigmoid,g=raw,k=l2norm,q=l2norm,state=vk/bfloat16/pool/in_place"


def build(accept="state=vk", K=128, chunk=1, algorithm="gated_delta_rule", layout="vk", target="triton"):
    return Build(target, chunk, algorithm=algorithm, schedule=varied("fused", v_block=16, state_layout=layout), dtype="float32",
                 head_dim_k=K, head_dim_v=32, contract=Contract.parse(accept))


@pytest.mark.parametrize("algorithm, accept, dtype", [
    ("gated_delta_rule", "state=vk", "float32"), ("gated_delta_rule", SERVED, "bfloat16"), ("simple_gla", "state=vk", "float32"),
    ("gated_delta_rule", "state=vk/bfloat16/pool/in_place/slots/accepted", "bfloat16"),
    ("gated_delta_rule", "state=vk/rows", "float32")])
def test_a_tile_has_128_bytes_of_each_row_and_a_sum_adds_the_pieces_first(algorithm, accept, dtype):
    b = build(accept, algorithm=algorithm)
    p = lowered(b)
    (k,) = p.kernels
    (loop,) = loops(k.body)
    columns = ROW // BYTES[dtype]
    assert {o.type.dims[-1] for o in walk(k.body) if o.type and o.type.rank == 2} - {1} == {columns}
    for kind in ("load", "store"):
        moved = [o.attr("piece") for o in walk(k.body) if o.kind == kind and len(p.tensor(o.attr("tensor")).dims) == 2
                 and p.tensor(o.attr("tensor")).dims[-1] == "K" and not o.attr("ahead")]
        assert moved and moved == [(n, columns) for n in range(0, 128, columns)] * (len(moved) * columns // 128)
    one = [o for o in loop.ops if o.kind == "row_sum" and o.type.rank == 1]
    whole = render(build(accept, K=columns, algorithm=algorithm)).count("axis=1)")
    assert len(one) == whole == render(b).count("axis=1)"), "as many sums as for rows of one piece"


@pytest.mark.parametrize("b", [
    build("", layout="kv"), build("", layout="vk"), build("state=vk", layout="kv"), build(K=32), build("state=vk/bfloat16", K=64),
    build("state=vk/bfloat16", K=96), build(chunk=16), build("state=vk/rows/parents"), build(target="tilelang")],
    ids=lambda b: b.name)
def test_other_builds_have_whole_rows(b):
    """Memory in another order than tiles, rows of one piece or of a broken number, chunks of several tokens, and trees."""
    assert not [o for k in lowered(b).kernels for o in walk(k.body) if o.attr("piece")]


def test_results_are_those_of_the_recurrence():
    lengths = [0, 1, 4, 5]
    x = problem(lengths, 1, 2, 128, 32, torch.float32, gate="mixed", same_keys=True, seed=3)
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"].mT}
    want = expected(x)
    got = interpret(lowered(build()), Problem(lengths, 1, 2), given, {"scale": x["scale"]})
    assert rms_error(got["o"], want[0]) < 1e-6 and rms_error(got["final_state"].mT, want[1]) < 1e-6


def test_a_piece_outside_of_a_row_is_refused():
    p = lowered(build())
    (k,) = p.kernels
    for piece in ((96, 64), (-32, 32), (0, 0)):
        wrong = map_ops(k.body, lambda o, piece=piece: [o.with_attrs(piece=piece) if o.attr("piece") == (96, 32) else o])
        with pytest.raises(VerifyError, match="moves the columns"):
            verify(replace(p, kernels=(replace(k, body=wrong),)))
