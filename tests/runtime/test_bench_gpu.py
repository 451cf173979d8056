"""What of `bench` on a GPU needs none: shapes, inputs, errors, peers' adapters, costs, attribution, table, JSON, plots."""
import importlib.machinery
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from choices import choice_for
from reference import expected

import gdn_codegen
from gdn_codegen.algorithms import find
from gdn_codegen.cli import main
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import tables
from gdn_codegen.runtime.roofline import Ceilings, costs
from gdn_codegen.schedule import SCHEDULES
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.tools import bench_calls, bench_gpu
from gdn_codegen.tools.bench_gpu import attribute, medians
from gdn_codegen.tools.cases import MIXED
from gdn_codegen.tools.peer_ops import peers_of, rivals
from gdn_codegen.tools.peers import Absent, Problem, Refused
from gdn_codegen.tools.problems import GATES, errors, problem, reference
from gdn_codegen.tools.shapes import Shape, shapes

ROOT = Path(__file__).parents[2]
OWN = f"{ROOT}/examples/my_linear_attention.py:decayed_linear_attention"
RAGGED = Shape("ragged", (100, 30), 2, 4)
TOP = Ceilings(4.3e12, 790e12)
PEERS = peers_of(find("gated_delta_rule"))


# --- shapes ----------------------------------------------------------------------------------------------------------
def test_committed_shapes():
    found = {s.name: s for f in (ROOT / "benchmarks" / "shapes").glob("*.json") for s in shapes(f)}
    assert len(found) == 10
    assert found["8 x 4096, 4/16"] == Shape("8 x 4096, 4/16", (4096,) * 8, 4, 16)
    for s in found.values():
        assert s.name.endswith(f", {s.H}/{s.HV}")
        lens = [int(n) for part in [s.name.split(",")[0]] for n in part.replace("x", "+").split("+")]
        assert sum(s.lens) == (math.prod(lens) if " x " in s.name else sum(lens))


GOOD = {"name": "a", "lens": [4], "H": 1, "HV": 2}


@pytest.mark.parametrize("text, why", [
    ("{", "Expecting"), ("[]", "nothing"), ("{}", "nothing"), (json.dumps(GOOD), "dict"),
    (json.dumps([{**GOOD, "lens": []}]), "'lens': \\[\\]"),
    (json.dumps([{**GOOD, "lens": [0]}]), "'lens': \\[0\\]"), (json.dumps([{**GOOD, "H": 2, "HV": 3}]), "'HV': 3"),
    (json.dumps([{**GOOD, "K": 128}]), "'K': 128"), (json.dumps([GOOD, GOOD]), "a name twice"),
    (json.dumps([{**GOOD, "H": True}]), "'H': True"), (json.dumps([{**GOOD, "name": 1}]), "'name': 1")])
def test_a_bad_file_of_shapes_says_what_is_wrong(text, why, tmp_path):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=rf"shapes: got .*{why}"):
        shapes(tmp_path / "s.json")
    with pytest.raises(ValueError, match=r"shapes: got .*missing"):
        shapes(tmp_path / "missing.json")


# --- inputs and errors -----------------------------------------------------------------------------------------------
def small(s=RAGGED, dtype="float16", K=32, V=16, **options):
    return problem(s, dtype, K, V, device="cpu", **options)


@pytest.mark.parametrize("gates", ["layer", "uniform"])
def test_inputs(gates):
    x, again, other = small(gates=gates), small(gates=gates).inputs, small(gates=gates, seed=1).inputs
    q, k, v, g, beta = x.inputs.values()
    assert torch.equal(g, again["g"]) and torch.equal(v, again["v"]) and not torch.equal(q, other["q"])
    assert x.ends.tolist() == [0, 100, 130] and g.dtype == beta.dtype == torch.float32 and v.dtype == torch.float16
    assert (g <= 0).all() and ((beta > 0) & (beta < 1)).all()
    assert torch.allclose(k.float().norm(dim=-1), torch.ones(1, 130, 2), atol=1e-3)
    assert (gates == "uniform") == bool(g.mean(1).std() < 0.05)  # else heads differ


def packed(x):
    return dict(lengths=list(x.lengths), S=None, **{n: t[0] for n, t in x.inputs.items()}, **x.numbers)


def test_inputs_of_other_gates():
    """Numbers are the log decay of all tokens, a chunk has gates of all sizes, and equal keys are equal within a sequence."""
    assert (small(gates="-50").inputs["g"] == -50).all() and (small(gates="0").inputs["g"] == 0).all()
    assert set(small(gates="mixed").inputs["g"][0, :64].unique().tolist()) == set(torch.tensor(MIXED).tolist())
    _, k, v, g, beta = small(gates="alike").inputs.values()
    assert torch.equal(k[0, :100], k[0, :1].expand(100, -1, -1)) and torch.equal(k[0, 100:], k[0, 100:101].expand(30, -1, -1))
    assert not torch.equal(k[0, 0], k[0, 100]) and not torch.equal(v[0, 0], v[0, 1])
    assert (g < 0).all() and 1 < beta.max() < 2


@pytest.mark.parametrize("gates", [*GATES, "0", "-5", "-50"])
def test_the_reference_is_the_recurrence(gates):
    x = small(gates=gates)
    o, state = expected(packed(x))
    ref = reference(x, heads=(0, 2, -1))
    assert ref.heads == (0, 2, 3)
    (ref_o,), (ref_state,) = ref.outputs, ref.states
    assert (ref_o - o[:, [0, 2, 3]]).abs().max() < 1e-12 and (ref_state - state[:, [0, 2, 3]]).abs().max() < 1e-12


def test_errors_tell_zeros_nan_and_transposed_states():
    x = small(V=32)
    o, state = expected(packed(x))
    ref = reference(x)
    assert max(errors((o[None], state), ref)) < 1e-12
    assert errors((o[None] * 0, state * 0), ref) == (1.0, 1.0)
    assert errors((o[None], state.mT), ref)[1] > 0.1
    half = o.clone()
    half[:, 3] = 0  # one head of those looked at
    assert errors((half[None], state), ref)[0] == 1.0
    half[5, 0] = math.nan
    assert math.isnan(errors((half[None], state), ref)[0])
    with pytest.raises(ValueError, match=r"output: got shape \[129, 4, 32\]"):
        errors((o[None, 1:], state), ref)


# --- bytes and operations --------------------------------------------------------------------------------------------
def of(schedule, **changes):
    plan = replace(SCHEDULES[schedule], **changes)
    return costs(lowered(Build("tilelang", schedule=plan)), RAGGED.lens, RAGGED.H, RAGGED.HV, ["initial_state"])


# 130 tokens, 3 chunks of 64, 2 heads, 4 value heads, K = V = 128, float16
CHUNKS = 3 * 4
Q = K_ = 130 * 2 * 128 * 2
V_ = O_ = 130 * 4 * 128 * 2
GATE = 130 * 4 * 4
G_WS, CC, CK = CHUNKS * 64 * 4, CHUNKS * 64 * 64, CHUNKS * 64 * 128
FINAL = 2 * 4 * 128 * 128 * 4
SQUARE, WIDE, STATE = (2 * n * CHUNKS for n in (64**3, 64 * 64 * 128, 64 * 128 * 128))
INVERSE = 0  # of whole tiles, by one op
HAND = {
    "staged": {"G": (GATE + G_WS, 0), "A": (K_ + G_WS + GATE + CC * 4, WIDE), "Tinv": (CC * 4 + CC * 2, INVERSE),
               "U_weight_U_offset": (G_WS + CC * 2 + K_ + V_ + GATE + CK * 4 + CK * 2, 2 * WIDE),
               "S_U": (G_WS + CK * 4 + CK * 2 + K_ + CHUNKS * 128 * 128 * 2 + CK * 2 + FINAL, 2 * STATE),
               "o": (G_WS + CHUNKS * 128 * 128 * 2 + CK * 2 + Q + K_ + O_, 2 * WIDE + STATE)},
    "replay": {"G_Tinv": (K_ + 2 * GATE + G_WS + CC * 2, WIDE + INVERSE),
               "o_S": (G_WS + CC * 2 + Q + K_ + V_ + GATE + O_ + FINAL, 3 * WIDE + 3 * STATE)},
    "fused": {"o_S": (Q + K_ + V_ + 2 * GATE + O_ + FINAL, 4 * WIDE + 3 * STATE + INVERSE)},
}


@pytest.mark.parametrize("schedule", HAND)
def test_costs_are_those_counted_by_hand(schedule):
    assert {n: (c.bytes, c.flops) for n, c in of(schedule).items()} == HAND[schedule]


def test_what_instances_ask_for():
    """k and q once a value head; with V in two blocks once a block, and products without V twice."""
    whole, split = of("replay")["o_S"], of("replay", v_block=64)["o_S"]
    assert whole.asked == whole.bytes + Q + K_
    assert split.bytes == whole.bytes and split.flops == whole.flops + WIDE
    assert split.asked == whole.asked + 2 * Q + 2 * K_ + G_WS + CC * 2 + GATE


def test_triton_costs_the_same():
    """But for the inverse, where it solves no tile and merges five times; the last entry of G is asked for once more."""
    b = Build("triton", schedule=replace(SCHEDULES["replay"], v_block=128))
    theirs, ours = costs(lowered(b), RAGGED.lens, 2, 4, ["initial_state"]), of("replay")
    assert theirs["o_S"].asked > ours["o_S"].asked
    assert replace(theirs["o_S"], asked=0) == replace(ours["o_S"], asked=0)
    assert theirs["G_Tinv"] == replace(ours["G_Tinv"], flops=ours["G_Tinv"].flops + 10 * SQUARE)


@pytest.mark.slow
@pytest.mark.parametrize("every, rows", [(1, 10), (3, 2), (6, 0)])
def test_checkpoints_are_stored_after_whole_chunks(every, rows):
    """Two sequences of five whole chunks and a tail: only the kernel that walks has more to write, a state a checkpoint."""
    for plan in (SCHEDULES["replay"], replace(SCHEDULES["replay"], v_block=64)):
        plain, with_ = (costs(lowered(Build("tilelang", schedule=plan, contract=Contract.parse(f"state=bfloat16{more}"))),
                              (330, 330), 2, 4, every=every) for more in ("", "/checkpoints"))
        more = rows * 4 * 128 * 128 * 2
        walk = plain["o_S"]
        assert with_ == {**plain, "o_S": replace(walk, bytes=walk.bytes + more, asked=walk.asked + more)}


def test_share_of_the_roofline():
    known = of("replay")
    times = {"G_Tinv_kernel_kernel": 0.001, "o_S_kernel": 0.002, "void at::fill<o_S_kernel>": 0.5}
    rows = bench_gpu.kernel_rows(times, known, TOP)
    assert [r["name"] for r in rows] == ["G_Tinv", "o_S", "void at::fill<o_S_kernel>"] and "share" not in rows[2]
    c = known["o_S"]
    assert rows[1]["share"] == pytest.approx(max(c.bytes / 4.3e12, c.flops / 790e12) / 2e-6)


# --- attribution -----------------------------------------------------------------------------------------------------
def test_kernels_belong_to_the_call_they_began_in():
    calls = [(100.0, 200.0), (300.0, 400.0), (500.0, 600.0)]
    kernels = [("flush", 50.0, 60.0), ("a", 120.0, 10.0), ("b", 140.0, 5.0), ("flush", 250.0, 70.0), ("b", 330.0, 7.0),
               ("a", 310.0, 20.0), ("a", 350.0, 1.0), ("flush", 450.0, 70.0), ("a", 510.0, 12.0), ("b", 530.0, 6.0)]
    runs = attribute(calls, kernels)
    assert runs == [{"a": 10.0, "b": 5.0}, {"a": 21.0, "b": 7.0}, {"a": 12.0, "b": 6.0}]
    assert medians(runs) == (18.0, {"a": 12.0, "b": 6.0})


def test_time_in_which_a_kernel_waits_for_another_counts_once():
    """b starts 8 us before a has ended, and c while b still runs, and ends before it."""
    kernels = [("a", 10.0, 20.0), ("b", 22.0, 18.0), ("c", 25.0, 10.0)]
    assert attribute([(0.0, 100.0)], kernels) == [{"a": 20.0, "b": 10.0, "c": 0.0}]


# --- peers -----------------------------------------------------------------------------------------------------------
def installed(monkeypatch, **modules):
    """Modules of these names, dots as two underscores, with what they hold."""
    for name, holds in modules.items():
        parts = name.split("__")
        for i in range(len(parts)):
            full = ".".join(parts[: i + 1])
            m = sys.modules.get(full) if i < len(parts) - 1 else None
            m = m or ModuleType(full)
            m.__spec__, m.__path__ = importlib.machinery.ModuleSpec(full, None), []
            monkeypatch.setitem(sys.modules, full, m)
        vars(m).update(holds)


def exact(q, k, v, g, beta, lengths, scale):
    """o and states of all heads, from the reference."""
    given = {"q": q * (scale * q.shape[-1] ** 0.5), "k": k, "v": v, "g": g.float(), "beta": beta.float()}
    x = Problem(find("gated_delta_rule"), given, torch.tensor([0, *lengths]).cumsum(0), lengths, (q.shape[2], v.shape[2]),
                (q.shape[3], v.shape[3]), v.dtype)
    ref = reference(x, range(v.shape[2]))
    return ref.outputs[0][None], ref.states[0]


@pytest.fixture
def peers(monkeypatch):
    """Stand-ins for all peers, with their signatures and results, which compute exactly what they are given."""
    lengths = [None]

    def fla(q, k, v, g, beta, scale, output_final_state, cu_seqlens=None):
        assert output_final_state and (cu_seqlens is None) == (len(lengths[0]) == 1)
        return exact(q, k, v, g, beta, lengths[0], scale)

    def flashqla(q, k, v, g, beta, scale, output_final_state, cu_seqlens=None):
        o, state = exact(q, k, v, g, beta, lengths[0], scale)
        return None, None, o, None, state

    def tileops(chunk_size):
        return lambda q, k, v, g, beta: exact(q, k, v, g, beta, lengths[0], 1.0)

    def into(o, state, q, k, v, alpha, beta, ends, scale):
        assert ends.tolist() == [0, *torch.tensor(lengths[0]).cumsum(0).tolist()]
        got, final = exact(q[None], k[None], v[None], alpha.log()[None], beta[None], lengths[0], scale)
        o.copy_(got[0])
        state.copy_(final.mT)

    installed(
        monkeypatch, fla__ops__gated_delta_rule=dict(chunk_gated_delta_rule=fla),
        flash_qla=dict(chunk_gated_delta_rule_fwd=flashqla), tileops__ops=dict(GatedDeltaNetPrefillBTHDFwdOp=tileops),
        flashinfer__gdn_kernels__delta_rule_dsl__delta_rule_cp_sm90=dict(
            cp_delta_rule_dsl_sm90=lambda *a, max_seqlen: into(*a)),
        flashinfer__gdn_kernels__delta_rule_dsl__delta_rule_sm90=dict(
            delta_rule_prefill_dsl_sm90=lambda o, s, q, k, v, none, *rest: into(o, s, q, k, v, *rest)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=12))
    for p in PEERS.values():
        p.served.clear()
    return lengths


@pytest.mark.parametrize("shape", [Shape("one", (70,), 2, 2), Shape("groups", (70,), 1, 2), RAGGED,
                                   Shape("many", (9,) * 4, 2, 2)])
@pytest.mark.parametrize("name", PEERS)
def test_each_peer_is_fed_what_it_takes(name, shape, peers):
    peers[0] = shape.lens
    x = small(shape, K=128, V=128)
    if PEERS[name].refusal(x):
        assert name == "tileops" and shape.name != "one"
        return
    error_o, error_state = errors(PEERS[name].prepare(x)(), reference(x))
    limit = 5e-3 if name == "tileops" else 1e-3  # its gates are rounded
    assert error_o < limit and error_state < limit


@pytest.mark.parametrize("name, change, why", [
    ("fla", dict(g=lambda t: t.half()), r"fla: g: got float16 .*float32"),
    ("flashqla", dict(beta=lambda t: t.bfloat16()), r"flashqla: beta: got bfloat16 .*float32"),
    ("fla", dict(q=lambda t: t.transpose(1, 2)), r"fla: q: got float16 \[1, 2, 70, 128\].*\[1, T, H, K\]"),
    ("flashqla", dict(v=lambda t: t[..., ::2].repeat_interleave(2, -1).transpose(1, 2).contiguous().transpose(1, 2)),
     "flashqla: v: got .*not contiguous"),
    ("flashinfer", dict(k=lambda t: t.bfloat16()), "flashinfer: k: got bfloat16"),
])
def test_another_layout_or_dtype_is_refused(name, change, why, peers):
    peers[0] = (70,)
    x = small(Shape("one", (70,), 2, 2), K=128, V=128)
    wrong = replace(x, inputs={n: change.get(n, lambda t: t)(t) for n, t in x.inputs.items()})
    p = PEERS[name]
    with pytest.raises(Refused, match=why):
        p.start(wrong, lambda **passed: p.check(x.dtype, x.sizes, **passed))


@pytest.mark.parametrize("name, shape, dtype, dim, why", [
    ("tileops", Shape("a", (9,), 2, 2), "bfloat16", 128, "dtype: got bfloat16; tileops accepts float16"),
    ("tileops", Shape("a", (9, 8), 2, 2), "float16", 128, "sequences: got 2"),
    ("tileops", Shape("a", (9,), 1, 2), "float16", 128, "heads: got 1/2"),
    ("fla", Shape("a", (9,), 1, 2), "float32", 128, "dtype: got float32"),
    ("flashinfer", Shape("a", (9,), 1, 2), "float16", 64, "K, V: got 64, 64; flashinfer accepts 128")])
def test_a_problem_that_a_peer_does_not_take(name, shape, dtype, dim, why, peers):
    with pytest.raises(Refused, match=why):
        PEERS[name].prepare(small(shape, dtype, dim, dim))


def test_tileops_serves_one_shape_a_process(peers):
    peers[0] = (9,)
    one, other = (small(Shape("a", (n,), 1, 1), K=128, V=128) for n in (9, 8))
    PEERS["tileops"].prepare(one)
    PEERS["tileops"].prepare(one)
    with pytest.raises(Refused, match="run this one alone with --only"):
        PEERS["tileops"].prepare(other)


def test_absent_peers_say_so(no_peers):
    for p in PEERS.values():
        with pytest.raises(Absent, match=rf"{p.name} is absent: .*{p.module.partition('.')[0]}.* \({p.distributions[0]}"):
            p.prepare(small())


def test_names_of_peers():
    page = find("gated_delta_rule")
    assert [p.name for p in rivals("all", page)] == list(PEERS) and rivals("none", page) == []
    assert [p.name for p in rivals("flashinfer,fla", page)] == ["flashinfer", "fla"]
    with pytest.raises(ValueError, match="peers: got 'aiter' for gated_delta_rule; accepted: all, none, fla, flashqla"):
        rivals("fla,aiter", page)


# --- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(monkeypatch, no_peers):
    """The CPU in a GPU's place, with recorded times."""
    real = bench_gpu.problem
    monkeypatch.setattr(bench_gpu, "problem", lambda *a, **o: real(*a, **o, device="cpu"))
    monkeypatch.setattr(bench_gpu, "compile_first", lambda *a: None)
    monkeypatch.setattr(bench_gpu, "ceilings", lambda: TOP)
    monkeypatch.setattr(bench_gpu, "device_time", lambda run, n: (0.3, {"o_S_kernel": 0.2, "elementwise": 0.1}))
    monkeypatch.setattr(bench_gpu, "wall_time", lambda run, n: 0.31)
    monkeypatch.setattr(bench_gpu, "host_time", lambda run, n: 5.5 if getattr(run, "func", None) else 12.5)
    monkeypatch.setattr(bench_gpu, "graph_time", lambda run, n: 0.305)
    for n, f in dict(is_available=lambda: True, synchronize=lambda: None, empty_cache=lambda: None,
                     get_device_name=lambda: "a GPU").items():
        monkeypatch.setattr(torch.cuda, n, f)


SMALL = ["--head-dim-k", "32", "--head-dim-v", "32", "--chunk", "16"]


@pytest.mark.slow
def test_bench_end_to_end(gpu, tmp_path, capsys):
    (tmp_path / "s.json").write_text(json.dumps([{"name": "one", "lens": [40], "H": 1, "HV": 2},
                                                 {"name": "two", "lens": [9, 20], "H": 1, "HV": 1},
                                                 {"name": "three", "lens": [9], "H": 1, "HV": 1}]))
    words = ["bench", "--target", "triton", "--schedule", "fused", *SMALL, "--shapes", str(tmp_path / "s.json"), "--only", "one",
             "--only", "two", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "p.png"), "--gates", "uniform"]
    assert main(words) == 0
    out, data = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "[1/2]" in out and "a GPU: 4.30 TB/s of a copy, 790 TFLOP/s" in out and "fla is absent" in out
    assert data["facts"]["command"].startswith("gdn_codegen bench --target triton") and data["facts"]["gpu"] == "a GPU"
    assert data["facts"]["options"] == {"algorithm": "gated_delta_rule", "gates": "uniform", "seed": 0, "runs": 15,
                                        "dtype": "float16", "K": 32, "V": 32}
    assert data["facts"]["versions"]["torch"] and data["ceilings"] == {"bytes": 4.3e12, "flops": 790e12}
    assert [(r["shape"], r["who"]) for r in data["rows"]] == [
        (s, w) for s in ("one", "two") for w in (*PEERS, "triton fused c16")]
    mine = data["rows"][4]
    assert (mine["device_ms"], mine["host_us"], mine["launch_us"], mine["graph_ms"]) == (0.3, 12.5, 5.5, 0.305)
    assert mine["error_o"] < 5e-3 and mine["error_state"] < 5e-3
    assert mine["kernels"][0]["name"] == "o_S" and 0 < mine["kernels"][0]["share"] < 1
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["p_kernels.png", "p_roofline.png", "p_time.png"]


def test_auto_is_what_the_op_chooses(gpu, monkeypatch, tmp_path, capsys):
    """The package's op is timed, its row names the build, and promises reach both."""
    called = []
    real = gdn_codegen.chunk_gated_delta_rule
    monkeypatch.setattr(gdn_codegen, "chunk_gated_delta_rule", lambda *a, **o: (called.append(o), real(*a, **o))[1])
    words = ["bench", "--target", "triton", "--schedule", "auto", "--accept", "k=unit", "--head-dim-k", "32",
             "--head-dim-v", "32", "--tokens", "20", "--heads", "1", "--peers", "none", "--json",
             str(tmp_path / "out.json"), "--layout", "bhtd"]
    assert main(words) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    x = small(Shape("a", (20,), 1, 1), K=32, V=32)
    q, v = (x.inputs[n].transpose(1, 2) for n in ("q", "v"))
    want = choice_for(q, v, "triton", sequences=1, contract=tables.UNIT, layout="bhtd").build
    assert (row["who"], row["note"]) == ("triton auto", want.name) and "bhtd" in want.name and "error" not in row
    assert row["kernels"][0]["name"] in [k.name for k in lowered(want).kernels]
    told = {tuple(o.get(n) for n in ("target", "layout", "chunk_size", "unit_keys")) for o in called}
    assert told == {("triton", "bhtd", None, True)}
    assert main([*words, "--chunk", "16"]) == 0 and {o.get("chunk_size") for o in called} == {None, 16}


@pytest.mark.parametrize("more, why", [
    (["--partition", "decay"], "partition: got 'decay' with --schedule auto; accepted: nothing, because the op chooses"),
    (["--accept", "g=raw"], "accept: got 'g=raw' with --schedule auto; accepted: k=unit, or nothing"),
    (["--algorithm", OWN], f"algorithm: got '{OWN}' with --schedule auto; accepted: gated_delta_rule,"),
    (["--set", "stages=3"], "set: got")])
def test_auto_refuses_what_the_op_chooses(more, why, gpu, capsys):
    assert main(["bench", "--target", "triton", "--schedule", "auto", *more]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("more, why", [
    (["--json", "/proc/x/y"], "json: got /proc/x/y: No such file or directory; accepted: a file that can be written"),
    (["--plot", "/proc/x/y"], "plot: got /proc/x/y: No such"), (["--accept", "beta=sigmoid"], "accept: got 'beta=sigmoid'")])
def test_what_is_refused_before_the_work(more, why, gpu, monkeypatch, capsys):
    monkeypatch.setattr(bench_gpu, "ceilings", lambda: pytest.fail("it worked first"))
    assert main(["bench", "--target", "triton", *SMALL, "--schedule", "fused", *more]) == 2
    assert why in capsys.readouterr().err


def test_wall_time_is_what_a_call_adds_to_a_queue(monkeypatch):
    """By a clock of our own: a flush takes 80 ms, a call 7, an event 2."""
    now = [0.0]

    def takes(ms):
        return lambda *a: now.__setitem__(0, now[0] + ms)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            takes(2)()
            self.at = now[0]

        def elapsed_time(self, end):
            return end.at - self.at

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: None)
    flush = SimpleNamespace(zero_=takes(80))
    monkeypatch.setattr(bench_gpu, "torch", SimpleNamespace(cuda=cuda, int8=None, empty=lambda *a, **k: flush))
    assert bench_gpu.wall_time(takes(7), 4) == pytest.approx(7)
    monkeypatch.setattr(bench_gpu, "time", SimpleNamespace(perf_counter=lambda: now[0] / 1e3))
    assert bench_gpu.host_time(takes(7), 4) == pytest.approx(7e3)
    start = now[0]
    assert bench_gpu.host_time(lambda: takes(11 if now[0] < start + 300 else 7)(), 4) == pytest.approx(7e3)


def test_a_wrong_result_fails_the_run(gpu, monkeypatch, capsys):
    op = lambda q, k, v, g, beta, **options: (torch.zeros_like(v), torch.zeros(1, 2, 32, 32))
    monkeypatch.setattr(bench_calls, "function", lambda b: op)
    words = ["bench", "--target", "triton", *SMALL, "--schedule", "fused", "--tokens", "20", "--heads", "1", "--value-heads", "2"]
    assert main(words) == 1
    assert "off by 1.0e+00 (o) and 1.0e+00 (state); at most 0.005" in capsys.readouterr().out


@pytest.mark.slow
def test_a_row_that_stops_says_why_and_the_others_run(gpu, monkeypatch, capsys):
    def op(*a, **options):
        raise RuntimeError("too many\nresources")
    real, broken = bench_calls.function, Build("triton", 16, head_dim_k=32, head_dim_v=32, schedule="replay").plan.name
    monkeypatch.setattr(bench_calls, "function", lambda b: op if b.plan.name == broken else real(b))
    assert main(["bench", "--target", "triton", *SMALL, "--schedule", "all", "--tokens", "20", "--heads", "1"]) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: too many resources" in out and out.count("0.3000") == len(SCHEDULES) - 1


@pytest.mark.parametrize("words, why", [
    (["--target", "tilelang"], "torch sees none; accepted: pto"),
    (["--target", "all", "--algorithm", "simple"], "algorithm: got 'simple'"),
    (["--target", "triton", "--algorithm", "simple_gla", "--peers", "flashqla"],
     "peers: got 'flashqla' for simple_gla; accepted: all, none, fla"),
    (["--target", "triton", "--shapes", str(ROOT / "benchmarks/shapes/serving.json"), "--only", "none"], "only: got none"),
    (["--target", "triton", "--heads", "2/3x"], "heads: got '2/3x'"), (["--target", "triton", "--peers", "x"], "peers: got 'x'")])
def test_bad_words(words, why, capsys):
    if "no GPU" in why and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["bench", *words]) == 2
    assert why in capsys.readouterr().err
