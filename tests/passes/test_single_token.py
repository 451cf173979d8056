"""Chunks of one token: what becomes of a page's ops, which builds there are, and their results. After each pass the interpreter
compares the program with the one before (tests/conftest.py)."""
import shutil
from math import inf

import pytest
import torch
from reference import DELTA, PLAIN, TOLERANCE, expected, problem, rms_error

from gdn_codegen.devices import HOPPER
from gdn_codegen.ir.builder import (
    algorithm,
    apply,
    carried,
    cumsum,
    exp,
    last,
    log,
    lower,
    row_norm,
    row_sum,
    strictly_lower,
    unit_lower_inverse,
)
from gdn_codegen.ir.core import walk
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.tools.check_tilelang import compiled

TARGETS = ("triton", "tilelang")
SERVED = "beta=sigmoid,g=raw,k=l2norm,q=l2norm,state=vk/bfloat16/pool/in_place"


@algorithm(q="C K", k="C K", v="C V", a="C K", b="C K", w="C K", S=carried("K V"), Z=carried("K"))
def odd(q, k, v, a, b, w, S, Z):
    """Ops that our own pages do not have: tiles [C, K] beside a row [1, K], two states, products of [C, C]."""
    total = cumsum(row_sum(w * w))
    near = exp(lower(total[None, :] - total[:, None], fill=-inf))
    B = strictly_lower((a @ b.T) * near)
    y = unit_lower_inverse(B) @ (v + (a * last(w)[None, :]) @ S) + B @ v
    o = lower(q @ k.T) @ y + (q * Z[None, :]) @ S + log(1 + total * total)[:, None] * v
    S = exp(-last(total)) * S + k.T @ y
    Z = Z + row_sum(k.T @ w)
    return o, S, Z


def build(target, algorithm="gated_delta_rule", dtype="bfloat16", K=32, V=32, accept="", **fields):
    return Build(target, 1, algorithm=algorithm, schedule=varied("fused", **fields), dtype=dtype, head_dim_k=K, head_dim_v=V,
                 contract=Contract.parse(accept))


@pytest.mark.parametrize("accept", ["", SERVED, "state=vk/checkpoints,g=linear"])
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("target", TARGETS)
def test_no_value_has_an_axis_of_tokens_and_nothing_is_a_product(target, layout, accept):
    p = lowered(build(target, accept=accept, state_layout=layout, v_block=16))
    ops = [o for k in p.kernels for o in walk(k.body)]
    assert not [o for o in ops if o.type is not None and "C" in o.type.dims]
    of_tiles = {"matmul", "unit_lower_inverse", "diag_inverse", "cumsum", "lower", "strictly_lower", "eye"}
    assert not of_tiles & {o.kind for o in ops}
    of_gates = [o for o in ops if o.kind == "exp" and o.args[0].startswith("G") and "first" not in o.out]
    assert len(of_gates) == 1  # D and the decay to the chunk's end are 1
    render(build(target, accept=accept, state_layout=layout, v_block=16))


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_a_page_of_other_ops_means_the_same(layout):
    render(build("triton", odd, state_layout=layout))
    with pytest.raises(ScheduleError, match=r"tiles of .* and .*; accepted for TileLang: tiles of one shape"):
        lowered(build("tilelang", odd, state_layout=layout))


@algorithm(q="C K", k="C K", v="C V", a="C K", S=carried("K V"), Z=carried("K V"))
def two_states(q, k, v, a, S, Z):
    """Two states of one shape."""
    total = cumsum(row_sum(a * a))
    y = (q @ S) * exp(-total)[:, None] + lower(q @ k.T) @ v + a @ Z
    S = exp(-last(total)) * S + k.T @ v
    Z = Z + a.T @ v
    return y, S, Z


@pytest.mark.parametrize("target", TARGETS)
def test_two_states_of_one_shape(target):
    for layout in ("kv", "vk"):
        render(build(target, two_states, state_layout=layout))


@pytest.mark.parametrize("target, page", [("triton", odd), ("triton", two_states), ("tilelang", two_states)])
@pytest.mark.parametrize("state", ["rows/parents", "vk/float16/pool/in_place/slots/accepted/parents"])
def test_several_states_are_kept_for_each_token(target, page, state):
    """Each in memory of its own, with the same slots, rows and parents."""
    b = build(target, page, accept=f"state={state}", state_layout="vk")
    p = lowered(b)
    kept = [o.attr("tensor") for k in p.kernels for o in walk(k.body) if o.kind == "store" and p.tensor(
        o.attr("tensor")).index == "checkpoint"]
    resumed = [o.attr("tensor") for k in p.kernels for o in walk(k.body) if o.kind == "resume"]
    assert sorted(kept) == sorted(resumed) and len(set(kept)) == 2
    render(b)


@algorithm(k="C K", v="C V", S=carried("K V"))
def columns(k, v, S):
    """Tiles [V, C]: rows of one entry where a chunk has one token. A page may take such a last row only as an op."""
    x = S.T @ k.T
    o = lower((k @ k.T) * apply("last", x)[None, :]) @ v + row_sum(row_norm(x))[None, :] * v
    S = S + k.T @ v
    return o, S


@algorithm(q="C K", v="C V", S=carried("K V"))
def squared(q, v, S):
    """A product of two states, which no token enters."""
    return q @ S + v, S @ (S.T @ S)


def test_rows_along_tokens_have_one_entry():
    with pytest.raises(ScheduleError, match=r"an entry of a vector .*; accepted for TileLang"):
        lowered(build("tilelang", columns))
    p = lowered(build("triton", columns))
    assert [o for k in p.kernels for o in walk(k.body) if o.kind == "last"]


def test_a_product_without_tokens_is_refused():
    with pytest.raises(ScheduleError, match=r"a product without tokens \(.*line \d+\); accepted: chunks of 16"):
        lowered(build("triton", squared))


@pytest.mark.parametrize("target, name, what", [("triton", "staged", "6 kernels"), ("tilelang", "replay", "2 kernels"),
                                                ("pto", "fused", "the device"),
                                                ("tilelang/sm_90a", "fused", "the device sm_90a")])
def test_what_has_no_such_form_is_refused(target, name, what):
    target, _, arch = target.partition("/")
    with pytest.raises(ScheduleError, match=f"schedule {name}: a chunk of one token with .*{what}.*; accepted: one kernel"):
        lowered(Build(target, 1, schedule=name, arch=arch))


def rows(x, n):
    return x[n][None]


def compare(target, algorithm="gated_delta_rule", dtype="bfloat16", K=32, V=32, lengths=(1, 0, 5, 2), layout="kv", **more):
    b = build(target, algorithm, dtype, K, V, "state=vk" if layout == "vk" else "", state_layout=layout, **more)
    x = problem(lengths, 1, 2, K, V, getattr(torch, dtype), gate="mixed", same_keys=True, seed=7)
    delta = DELTA if algorithm == "gated_delta_rule" else PLAIN
    names = ("q", "k", "v", "g", "beta") if delta else ("q", "k", "v", "g")
    state = x["S"].mT.contiguous() if layout == "vk" else x["S"]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    o, S = function(b)(*(rows(x, n) for n in names), scale=x["scale"], initial_state=state, output_final_state=True,
                       cu_seqlens=cu)
    want_o, want = expected(x, delta)
    got = S.mT if layout == "vk" else S
    assert rms_error(o[0], want_o) < TOLERANCE[dtype] and rms_error(got, want) < 1e-5, (target, algorithm, dtype, layout)


#: Of them those that run here; what compiles is slow.
HERE = [pytest.param(t, marks=pytest.mark.slow) if t == "tilelang" else t for t in TARGETS if runs(t, "cpu")]


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("algorithm", ["gated_delta_rule", pytest.param("simple_gla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", HERE)
def test_any_lengths_agree_with_the_recurrence(target, algorithm, layout):
    """Empty sequences, equal keys, gates from 0 to -50, and a state from which nothing was rounded."""
    compare(target, algorithm, layout=layout, v_block=16)


@pytest.mark.slow
@pytest.mark.parametrize("K, V, dtype", [(36, 32, "float32"), (32, 100, "float32"), (96, 64, "float16"), (16, 16, "bfloat16")])
@pytest.mark.parametrize("target", HERE)
def test_padded_heads_and_other_dtypes(target, K, V, dtype):
    for layout in ("kv", "vk"):
        compare(target, dtype=dtype, K=K, V=V, layout=layout)


@pytest.mark.parametrize("target", HERE)
def test_there_is_a_checkpoint_after_each_token(target):
    b = build(target, dtype="float16", accept="state=checkpoints", v_block=16)
    x = problem([3, 2], 1, 2, 32, 32, seed=5)
    one = lambda n: x[n][None]
    *_, states = function(b)(*map(one, ("q", "k", "v", "g", "beta")), scale=x["scale"], initial_state=x["S"],
                             output_final_state=True, cu_seqlens=torch.tensor([0, 3, 5]), checkpoint_chunks=1)
    at = 0
    for n, length in enumerate((3, 2)):
        for t in range(length):
            part = {m: x[m][at:at + t + 1] for m in ("q", "k", "v", "g", "beta")}
            part |= {"scale": x["scale"], "lengths": [t + 1], "S": x["S"][n:n + 1]}
            assert rms_error(states[at + t], expected(part)[1][0]) < 1e-5, (n, t)
        at += length


@pytest.mark.parametrize("states, piece", [("bfloat16", 8), ("float32", 4)])
@pytest.mark.parametrize("layout, columns, lanes", [("vk", 16, 8), ("vk", 8, 8), ("kv", 32, 4), ("kv", 16, 2)])
def test_threads_share_a_row_in_pieces_of_16_bytes(layout, columns, lanes, states, piece):
    accept = SERVED.replace("bfloat16", states)
    (k,) = lowered(build("tilelang", K=128, V=128, accept=accept, state_layout=layout, v_block=columns)).kernels
    assert (k.threads, k.lanes, k.piece) == (32, lanes, piece)
    state = 128 * columns // 32
    assert k.registers >= 2 * state if state <= 64 else not k.registers  # the state, and as much for everything else
    assert k.blocks_per_sm * k.registers * k.threads <= 65536


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("states", ["bfloat16", "float32"])
@pytest.mark.parametrize("K", HOPPER.extents)
@pytest.mark.parametrize("layout, columns", [("vk", 8), ("vk", 16), ("kv", 16), ("kv", 32)])
def test_each_entry_of_a_state_has_a_register_of_its_own(layout, columns, K, states):
    """The text for a GPU places them; the one for a CPU does not."""
    lane_of_column = pytest.importorskip("gdn_codegen.emit.tilelang.device.memory").lane_of_column
    accept = SERVED.replace("bfloat16", states)
    (k,) = lowered(build("tilelang", K=K, V=64, accept=accept, state_layout=layout, v_block=columns)).kernels
    _, width = next(b.shape for b in k.buffers if b.layout == "state_rows")
    places = [lane_of_column(j, width, k.lanes, k.piece) for j in range(width)]
    assert len(set(places)) == width == k.lanes * (1 + max(place for _, place in places))
    assert k.threads % k.lanes == 0 and {lane for lane, _ in places} == set(range(k.lanes))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("layout, columns, most, accept", [
    ("vk", 16, 128, "state=vk/bfloat16/pool/in_place"), pytest.param("kv", 16, 128, SERVED, marks=pytest.mark.long),
    pytest.param("vk", 16, 128, SERVED, marks=pytest.mark.long), pytest.param("vk", 8, 96, SERVED, marks=pytest.mark.long)])
def test_registers_hold_the_state_where_their_number_is_limited(layout, columns, most, accept, tmp_path):
    """TileLang lays out the many vectors of a server's gates and norms for half a minute: those are run by hand."""
    path = tmp_path / "m.py"
    path.write_text(render(build("tilelang", K=128, V=128, accept=accept, state_layout=layout, v_block=columns)))
    (found,) = compiled(path)
    assert not found.error and not found.spills and found.registers <= most


def test_blocks_of_one_sequence_start_side_by_side():
    """Their numbers follow one another: columns first, then heads, then sequences."""
    (text,) = [x for x in render(build("tilelang", v_block=16)).splitlines() if "with t.kernel(" in x]
    assert "((ends - 1) * HV * (V // BV), threads=32) as instance" in text
