"""Time of the PTO target: the cost table, the rules of the replay, whole kernels, and what `bench` writes."""
from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gdn_codegen import pto_sim
from gdn_codegen.cli import main
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.devices.cycle_model import Transfer, saturating
from gdn_codegen.pto_sim import INPUT, OUTPUT, UNITS, WORKSPACE, PtoSimError, Step
from gdn_codegen.tools import bench_pto
from gdn_codegen.tools.pto_time import Interval, cost, cycles, first_use, moved, replay, table

CUBE, V0, V1 = "cube", "vector 0", "vector 1"
LOAD, MUL = 560, 256  # a 64 x 128 float tile: TLOAD on MTE2, TMUL on V


def op(name, pipe, core=V0, rows=64, cols=128, dtype="float", extra=(0, 0, 0)):
    return Step(0, core, pipe, name, rows, cols, dtype, 1, extra)


def flag(what, src, dst, core=V0, number=0):
    return op(what, src if what == "set_flag" else dst, core, 0, 0, "uint8", (UNITS.index(src, 1), UNITS.index(dst, 1), number))


def cross(pipe, number, core, mode=2):
    return op("ffts_cross_core_sync", pipe, core, 0, 0, "uint8", (UNITS.index(pipe, 1), mode, number))


def cross_wait(number, core):
    return op("wait_flag_dev", "S", core, 0, 0, "uint8", (1, -1, number))


def barrier(pipe, core=V0):
    return op("pipe_barrier", pipe, core, 0, 0, "uint8", (-1, -1, 0) if pipe == "S" else (UNITS.index(pipe, 1),) * 2 + (0,))


load, mul = op("TLOAD", "MTE2"), op("TMUL", "V")


def spans(r):
    return [(i.core, i.name, i.start, i.end) for i in r.intervals]


# --- costs
@pytest.mark.parametrize(("key", "rows"), table().items(), ids=lambda x: "-".join(map(str, x)) if isinstance(x[0], str) else "")
def test_a_row_of_the_table(key, rows):
    name, pipe, r, c, dtype = key
    if pipe == "CUBE":  # the table names the sum's dtype; its operands are float16 with k = 128
        got = {cycles(name, pipe, r, c, "half", depth=128)}
    elif pipe == "MTE1":  # L0A's rate and L0B's
        got = {cycles(name, pipe, r, c, dtype, right=right) for right in (False, True)}
    else:
        least = cycles(name, pipe, r, c, dtype)
        got = {least, least + first_use(name)}
    # one row is a cycle off: L0B without the cycle that a move to it takes whatever its size
    assert all(n in got or (n == 256 and 257 in got) for n in rows)
    assert min(rows) in got


def test_scaling_beyond_the_table():
    assert cycles("TADD", "VEC", 128, 128, "float") == 2 * cycles("TADD", "VEC", 64, 128, "float")
    assert cycles("TADD", "VEC", 64, 128, "half") == 128  # half the repeats
    assert cycles("TMULS", "VEC", 1, 8, "float") == 1 + 18  # the lane mask
    assert cycles("TLOAD", "MTE2_AIC", 256, 128, "half") == 2 * 418
    assert cycles("TLOAD", "MTE2_AIV", 128, 1, "float") == cycles("TLOAD", "MTE2_AIV", 128, 8, "float")  # 32 bytes a value
    assert cycles("TMATMUL", "CUBE", 64, 64, "half", depth=32) == 6 + 4 * 2 * 4
    assert cycles("TMATMUL", "CUBE", 128, 128, "float", depth=128) == 6 + 2 * 1024
    assert cycles("TSTORE", "FIXP", 128, 64, "float") == 404
    assert cycles("TROWEXPANDMUL", "VEC", 64, 128, "float", spread=True) == 256  # FACTS: 256 to 282
    assert cycles("TROWEXPANDMUL", "VEC", 64, 128, "float") == 282
    assert cycles("TROWSUM", "VEC", 64, 128, "float") == 64 * 9
    assert cycles("TNEG", "VEC", 64, 128, "float") == 256  # not in the table: as TADD
    assert cycles("GetValue", "S", 1, 1, "float") == 24


def test_costs_of_steps():
    assert cost(op("TMATMUL", "M", CUBE, 128, 128, "half", (128, 0, 0))) == 518
    assert cost(op("TEXTRACT", "MTE1", CUBE, 128, 128, "half")) == 129
    assert cost(op("TEXTRACT", "MTE1", CUBE, 128, 128, "half", (1, 0, 0))) == 257
    assert cost(op("TLOAD", "MTE2", CUBE, 128, 128, "half")) == 418
    assert cost(op("TCVT", "V", dtype="half", extra=(4, 0, 0))) == 130  # by the wider side
    assert cost(op("TCVT", "V", extra=(2, 0, 0))) == 130
    assert cost(op("TROWEXPAND", "V")) == 1796
    assert cost(op("TLOAD", "MTE2", dtype="bfloat16_t")) == 280


# --- the fitted model
TO_GM = {"vector": op("TSTORE", "MTE3"), "cube": op("TSTORE", "FIX", CUBE)}
FROM_GM = {"vector": load, "cube": op("TLOAD", "MTE2", CUBE, dtype="half")}


def test_a_transfer_takes_its_latency_and_its_bytes():
    t = Transfer(latency=100, bandwidth=16)
    assert [t.cycles(n) for n in (1, 16, 17, 1600)] == [101, 101, 102, 200]
    assert t.cycles(0) == 0
    # at `half` bytes the bandwidth is half of the peak: of 64 GiB/s at 1 GHz, 32
    half = saturating(64, 4096, 1.0)
    assert half.latency + 4096 / half.bandwidth == pytest.approx(4096 / (32 * 2**30) * 1e9)
    assert half.bandwidth == pytest.approx(64 * 2**30 / 1e9)


@pytest.mark.parametrize(("s", "peak", "half"), [
    (FROM_GM["vector"], 247.16, 30643), (FROM_GM["cube"], 28.61, 1107), (TO_GM["vector"], 28.19, 1755),
    (TO_GM["cube"], 41.25, 29104)], ids=("GM to UB", "GM to L1", "UB to GM", "L0C to GM"))
def test_fitted_transfers_are_those_of_pto_isa(s, peak, half):
    """Bytes over a bandwidth of peak * B / (half + B) GiB/s at 1.85 GHz. L0C counts 2 bytes for each element."""
    n = 64 * 128 * (4 if s.core == V0 else 2)
    bandwidth = peak * n / (half + n)
    assert abs(cost(s, "fitted") - n / 2**30 / bandwidth * 1.85e9) <= 1  # it rounds up


@pytest.mark.parametrize("s", [*FROM_GM.values(), *TO_GM.values()], ids=lambda s: f"{s.core} {s.name}")
def test_fitted_transfers_have_one_latency_each(s):
    """One transfer of all rows is cheaper than two of half, by the latency. The flat model makes no difference."""
    whole, halves = cost(s, "fitted"), 2 * cost(replace(s, rows=32), "fitted")
    latency = ASCEND_A2.cycle_models["fitted"].transfers[s.core.split()[0], s.pipe].latency
    assert abs(halves - whole - latency) <= 2
    assert abs(2 * cost(replace(s, rows=32)) - cost(s)) <= 1


@pytest.mark.parametrize("s", [
    mul, op("TMATMUL", "M", CUBE, 128, 128, "half", (128, 0, 0)), op("TMOV", "FIX", CUBE, dtype="half"),
    op("TEXTRACT", "MTE1", CUBE, dtype="half"), op("TFILLPAD", "MTE2", CUBE, dtype="half")], ids=lambda s: s.name)
def test_work_on_the_chip_costs_the_same_in_both_models(s):
    assert cost(s, "fitted") == cost(s) == cost(s, "flat") > 0


def test_row_expand_is_priced_as_pto_isa_does():
    """The larger of a scalar read for each row and PTO-ISA's line through measurements, 0.1176 * 64 * 128 + 34.5 = 998."""
    whole = op("TROWEXPAND", "V")
    assert cost(whole) == cost(whole, "fitted") == 1796
    blocks = op("TROWEXPAND", "V", cols=8, extra=(1, 0, 0))  # 32 bytes for each row: 1.7596 * 64 * 8 + 33.4
    assert (cost(blocks), cost(blocks, "fitted")) == (26, 934)
    assert cost(replace(whole, cols=200), "fitted") == cost(replace(whole, cols=200))  # no line


def test_traffic_through_global_memory_costs_more_when_fitted():
    """A tile that leaves and comes back takes longer by what the two transfers take longer; work on the chip does not."""
    there = [flag("set_flag", "V", "MTE3"), flag("wait_flag", "V", "MTE3"), op("TSTORE", "MTE3"),
             flag("set_flag", "MTE3", "MTE2"), flag("wait_flag", "MTE3", "MTE2"), load]
    stays, leaves = [mul, mul, mul], [mul, mul, mul, *there]
    assert replay(stays, "fitted") == replay(stays)
    longer = sum(cost(s, "fitted") - cost(s) for s in (op("TSTORE", "MTE3"), load))
    assert longer > 0 and replay(leaves, "fitted").cycles - replay(leaves).cycles == longer
    more = replay([*leaves, *there], "fitted").cycles - replay(leaves, "fitted").cycles
    assert more > replay([*leaves, *there]).cycles - replay(leaves).cycles > 0


@pytest.mark.parametrize("ask", [lambda m: replay([], m), lambda m: replay([mul], m), lambda m: cost(mul, m)])
def test_an_unknown_model(ask):
    with pytest.raises(ValueError, match="model: got 'guessed'; accepted: flat, fitted"):
        ask("guessed")


def test_bytes_of_a_transfer():
    assert moved("MTE2_AIV", 64, 128, "float") == 64 * 128 * 4
    assert moved("MTE3", 128, 1, "float") == 128 * 32  # a column moves a block a value
    assert moved("FIXP", 128, 128, "float") == moved("FIXP", 128, 128, "half") == 128 * 128 * 2


# --- order
def test_a_pipe_is_a_queue():
    r = replay([mul, mul])
    assert spans(r) == [(V0, "TMUL", 2, 2 + MUL), (V0, "TMUL", 2 + MUL, 2 + 2 * MUL)]
    assert r.cycles == 2 + 2 * MUL and r.busy == {(V0, "V"): 2 * MUL} and r.waiting == {}
    assert r.path == {(V0, "V"): 2 * MUL, (V0, "issue"): 2}


def test_pipes_and_cores_overlap():
    r = replay([load, mul, replace(load, core=V1)])
    assert spans(r) == [(V0, "TLOAD", 2, 562), (V1, "TLOAD", 2, 562), (V0, "TMUL", 4, 260)]
    assert r.cycles == 562


def test_a_wait_holds_its_pipe_only():
    r = replay([load, flag("set_flag", "MTE2", "V"), flag("wait_flag", "MTE2", "V"), mul, op("TSTORE", "MTE3", dtype="half")])
    assert spans(r) == [(V0, "TLOAD", 2, 562), (V0, "TSTORE", 10, 159), (V0, "TMUL", 562, 562 + MUL)]
    assert r.waiting == {(V0, "V"): 562 - 6} and sum(r.path.values()) == r.cycles == 562 + MUL


def test_a_flag_stands_for_what_was_issued_before_it():
    early = [load, flag("set_flag", "MTE2", "V"), load, flag("wait_flag", "MTE2", "V"), mul]
    assert Interval(V0, "V", "TMUL", 562, 562 + MUL, 1) in replay(early).intervals


def test_the_scalar_unit_holds_all_that_follows():
    r = replay([mul, flag("set_flag", "V", "S"), flag("wait_flag", "V", "S"), load])
    assert spans(r)[1] == (V0, "TLOAD", 260, 260 + LOAD) and r.waiting == {(V0, "S"): 258 - 6}
    r = replay([mul, barrier("V"), load])
    assert spans(r)[1] == (V0, "TLOAD", 6, 6 + LOAD)  # a queue needs no barrier with itself
    r = replay([mul, load, barrier("S"), mul])
    assert spans(r)[2] == (V0, "TMUL", 566, 566 + MUL)
    r = replay([op("TROWEXPAND", "V"), load])  # reads a scalar a row
    assert spans(r)[1][2] == 2 + 1796 + 2


def test_first_use_costs_more():
    add = op("TADD", "V")
    assert first_use("TADD") == 24 and first_use("TMUL") == 0
    assert [i.end - i.start for i in replay([add, add]).intervals] == [280, 256]


def test_handshake_between_cores():
    r = replay([cross_wait(3, CUBE), op("TLOAD", "MTE2", CUBE, 128, 128, "half"), cross("MTE2", 4, CUBE),
                mul, mul, cross("V", 3, V0), cross_wait(4, V0), load,
                *(replace(s, core=V1) for s in (mul, cross("V", 3, V0), cross_wait(4, V0), load))])
    late = 2 + 2 * MUL  # the slower vector core
    done = late + 2 + 418
    assert spans(r)[-3:] == [(CUBE, "TLOAD", late + 2, done), (V0, "TLOAD", done + 2, done + 2 + LOAD),
                             (V1, "TLOAD", done + 2, done + 2 + LOAD)]
    assert r.waiting[CUBE, "S"] == late - 2 and r.path[V0, "V"] == 2 * MUL and sum(r.path.values()) == r.cycles


def test_joins_of_a_kind():
    both = [s for c in (V0, V1) for s in (replace(mul, core=c), cross("V", 1, c, mode=1), cross_wait(1, c))]
    assert replay([replace(mul, core=V0), *both]).cycles == 2 + 2 * MUL
    assert replay([cross("M", 1, CUBE, mode=0), cross_wait(1, CUBE)]).cycles == 4


def test_what_is_no_trace_of_a_block():
    with pytest.raises(ValueError, match="cube waits for flag 2"):
        replay([cross_wait(2, CUBE)])
    with pytest.raises(ValueError, match="several blocks"):
        replay([mul, replace(mul, block=1)])
    assert replay([]).cycles == 0


# --- whole kernels
SOURCE = """
#include <pto/pto-inst.hpp>
#include "acl/acl.h"
#include <runtime/rt_ffts.h>
using namespace pto;
using Ub = Tile<TileType::Vec, float, 64, 128, BLayout::RowMajor, 64, 128>;
using Gm = GlobalTensor<float, Shape<1, 1, 1, DYNAMIC, DYNAMIC>, Stride<1, 1, 1, DYNAMIC, 1>>;
PTO_ENTRY void twice(__gm__ float *a, __gm__ float *b, int64_t tiles, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
#if defined(__DAV_C220_VEC__)
    Ub x;
    TASSIGN(x, 0);
    for (int64_t i = get_block_idx() * 2 + get_subblockid(); i < tiles; i += get_block_num() * 2) {
        Gm from(a + i * 8192, {64, 128}, {128}), to(b + i * 8192, {64, 128}, {128});
        TLOAD(x, from);
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);
        TMULS(x, x, 2.0f);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);
        TSTORE(to, x);
        set_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID0);
        wait_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID0);
    }
#endif
}
"""


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twice")
    (folder / "twice.cpp").write_text("#ifndef PTO_ENTRY\n#define PTO_ENTRY\n#endif\n" + SOURCE)
    return pto_sim.load(pto_sim.build(folder / "twice.cpp", ["twice"], folder / "twice.so"))


def steps_of(lib, tiles, a, b):
    """The steps of block 0 of 2."""
    with pto_sim.record(2) as seen:
        pto_sim.launch(lib, "twice", 1, [a, b], [INPUT, OUTPUT], [tiles])
    ((name, steps),) = seen.launches
    assert name == "twice" and {s.block for s in steps} == {0}
    return steps


def test_a_small_kernel(twice):
    a, b = torch.ones(8 * 8192), torch.full((8 * 8192,), -1.0)
    def run():
        return replay(steps_of(twice, 8, a, b))
    r = run()
    # blocks 0 and 1 share 8 tiles, so each core has two; a tile goes through its pipes one after another
    assert r.cycles == 2 + 2 * (560 + 128 + 2 * 149) and r.busy[V1, "V"] == 2 * 128
    assert sorted(r.path.values()) == [2, 256, 596, 1120]  # of either core
    assert run() == r
    assert set(b.reshape(8, -1)[:, 0].tolist()) == {2.0, -1.0}  # block 1 did not run
    pto_sim.launch(twice, "twice", 2, [a, b], [INPUT, OUTPUT], [8])
    assert torch.equal(b, 2 * a)


def test_a_small_kernel_when_fitted(twice):
    """Each tile goes from global memory through V and back: its two transfers cost what they are fitted to, V what it did."""
    a, b = torch.ones(8 * 8192), torch.ones(8 * 8192)
    once, more = (replay(steps_of(twice, tiles, a, b), "fitted").cycles for tiles in (4, 8))
    tile = cost(load, "fitted") + 128 + cost(op("TSTORE", "MTE3"), "fitted")
    assert (once, more) == (2 + tile, 2 + 2 * tile)
    assert more > replay(steps_of(twice, 8, a, b)).cycles


def test_one_block_alone(twice):
    a, b = torch.ones(8 * 8192), torch.ones(8 * 8192)
    with pytest.raises(PtoSimError, match="only = 2 of 2"):
        pto_sim.launch(twice, "twice", 2, [a, b], [INPUT, OUTPUT], [8], only=2)
    pto_sim.launch(twice, "twice", 2, [a, b], [INPUT, WORKSPACE], [8], only=1)
    assert b.reshape(8, -1)[:, 0].tolist() == [0, 0, 2, 2, 0, 0, 2, 2]


# --- bench
ARGS = ["bench", "--algorithm", "simple_gla", "--schedule", "fused", "--chunk", "16", "--head-dim-k", "16", "--head-dim-v",
        "16", "--tokens", "48", "--heads", "1", "--blocks", "2"]


@pytest.mark.slow
def test_bench_writes_what_it_prints(tmp_path, capsys):
    out, trace = tmp_path / "bench.json", tmp_path / "trace.json"
    assert main([*ARGS, "--detail", "--json", str(out), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())["schedules"]["fused"]
    (stage,) = result["stages"]
    assert result["cycles"] == stage["cycles"] == sum(stage["chain"].values()) > 0
    fitted = stage["fitted"]
    assert result["fitted_cycles"] == fitted["cycles"] == sum(fitted["chain"].values()) > stage["cycles"]  # it goes through GM
    assert fitted["busy"]["vector 0 V"] == stage["busy"]["vector 0 V"]
    assert fitted["instructions"].keys() == stage["instructions"].keys()
    head, row = (line.split() for line in printed.splitlines()[:2])
    assert head[1:6] == ["flat", "by", "hand", "ratio", "fitted"]
    assert row[1:5] == [str(stage["cycles"]), "-", "-", str(fitted["cycles"])]
    count, cycles_of = fitted["instructions"]["vector MTE2 TLOAD"]
    assert f"fitted {cycles_of:8}" in printed and count == stage["instructions"]["vector MTE2 TLOAD"][0]
    assert str(stage["cycles"]) in printed and "cube M TMATMUL" in printed and result["hand_cycles"] is None
    events = json.loads(trace.read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"fused: {c}" for c in (CUBE, V0, V1)}
    assert max(e["ts"] + e["dur"] for e in work) <= stage["cycles"]
    assert sum(e["dur"] for e in work) == sum(stage["busy"].values())


def test_bench_plots_or_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*ARGS, "--plot", str(tmp_path / "x.png")]) == 2
    assert "gdn_codegen[bench]" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    steps = [mul, op("TLOAD", "MTE2", CUBE, 128, 128, "half")]
    bench_pto.plot({"s": [bench_pto.Stage(n, replay(steps), replay(steps, "fitted")) for n in "ab"]}, tmp_path / "y.png")
    assert (tmp_path / "y.png").read_bytes().startswith(b"\x89PNG")


def test_bench_refuses_other_targets(capsys):
    assert main(["bench", "--target", "triton"]) == 2
    assert "accepted: pto" in capsys.readouterr().err


def test_matplotlib_is_imported_late():
    text = Path(bench_pto.__file__).read_text()
    assert not [line for line in text.splitlines() if line.startswith(("import matplotlib", "from matplotlib"))]


def test_hand_written_figures():

    from gdn_codegen.runtime.build import Build
    b = Build("pto", 128, schedule="staged")
    assert bench_pto.hand_sum(b, bench_pto.Problem()) == (554153, 1075004)
    assert bench_pto.hand_sum(b, bench_pto.Problem(tokens=1024)) is None
    assert bench_pto.hand_sum(replace(b, chunk=64), bench_pto.Problem()) is None
