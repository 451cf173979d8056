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
from gdn_codegen.pto_sim import INPUT, OUTPUT, UNITS, WORKSPACE, PtoSimError, Step
from gdn_codegen.tools import bench_pto
from gdn_codegen.tools.pto_time import Interval, cost, cycles, first_use, replay, table

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


def test_a_small_kernel(twice):
    a, b = torch.ones(8 * 8192), torch.full((8 * 8192,), -1.0)
    def run():
        with pto_sim.record(2) as seen:
            pto_sim.launch(twice, "twice", 1, [a, b], [INPUT, OUTPUT], [8])
        ((name, steps),) = seen.launches
        assert name == "twice" and {s.block for s in steps} == {0}
        return replay(steps)
    r = run()
    # blocks 0 and 1 share 8 tiles, so each core has two; a tile goes through its pipes one after another
    assert r.cycles == 2 + 2 * (560 + 128 + 2 * 149) and r.busy[V1, "V"] == 2 * 128
    assert sorted(r.path.values()) == [2, 256, 596, 1120]  # of either core
    assert run() == r
    assert set(b.reshape(8, -1)[:, 0].tolist()) == {2.0, -1.0}  # block 1 did not run
    pto_sim.launch(twice, "twice", 2, [a, b], [INPUT, OUTPUT], [8])
    assert torch.equal(b, 2 * a)


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
    bench_pto.plot({"s": [bench_pto.Stage("a", replay(steps)), bench_pto.Stage("b", replay(steps))]}, tmp_path / "y.png")
    assert (tmp_path / "y.png").read_bytes().startswith(b"\x89PNG")


def test_bench_refuses_other_targets(capsys):
    assert main(["bench", "--target", "triton"]) == 2
    assert "accepted: pto" in capsys.readouterr().err


def test_matplotlib_is_imported_late():
    text = Path(bench_pto.__file__).read_text()
    assert not [line for line in text.splitlines() if line.startswith(("import matplotlib", "from matplotlib"))]


def test_hand_written_figures():
    assert sum(n for _, n in bench_pto.HAND) == 559692
    from gdn_codegen.runtime.build import Build
    b = Build("pto", 128, schedule="staged")
    assert bench_pto.hand_sum(b, bench_pto.Problem()) == 559692
    assert bench_pto.hand_sum(b, bench_pto.Problem(tokens=1024)) is None
    assert bench_pto.hand_sum(replace(b, chunk=64), bench_pto.Problem()) is None
