"""`build --check` of Triton: compiled for GPUs that are not here, and what comes of it against their limits."""
from dataclasses import replace

import pytest

from gdn_codegen import options
from gdn_codegen.cli import main
from gdn_codegen.cli_parser import parser
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call import choose
from gdn_codegen.schedule import SCHEDULES
from gdn_codegen.targets import find
from gdn_codegen.tools.check import check

pytest.importorskip("triton")
from gdn_codegen.tools import check_triton
from gdn_codegen.tools.check_triton import UNITS, Compiled, compiled

SMALL = dict(head_dim_k=16, head_dim_v=16)


def written(tmp_path, b):
    path = tmp_path / f"{b.name}.py"
    path.write_text(render(b))
    return path


def test_limits_are_those_of_the_devices():
    assert set(UNITS) == set(find("triton").toolchain.check_archs)
    assert [u.shared // 1024 for u in UNITS.values()] == [163, 99, 227, 227, 99, 64, 64, 160]
    assert [UNITS["sm_90"].registers(w) for w in (4, 8, 16)] == [255, 255, 128]
    assert [UNITS["gfx942"].registers(w) for w in (1, 4, 8, 16)] == [512, 512, 256, 128]


def test_a_table_of_kernels_and_architectures(tmp_path):
    b = Build("triton", 16, schedule="replay", **SMALL)
    lines = check(b, written(tmp_path, b), ("gfx950", "gfx942"))
    assert all(ok for _, ok in lines)
    _, *rows = [x.split("  ") for x, _ in lines]
    rows = [[x.strip() for x in r if x.strip()] for r in rows]
    assert [r[:2] for r in rows] == [["G_Tinv", "gfx950"], ["G_Tinv", "gfx942"], ["o_S", "gfx950"], ["o_S", "gfx942"]]
    for row in rows:
        shared, registers = row[3].split(" of "), row[4].split(" of ")
        assert 0 < int(registers[0]) <= int(registers[1]) == 512 and row[-1] == "0"
        assert int(shared[0]) <= int(shared[1]) == UNITS[row[1]].shared


@pytest.mark.slow
@pytest.mark.parametrize("few", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_the_op_takes_fits_every_gpu(few, tmp_path):
    """The walk of calls that leave schedule and chunk open, whole and in parts, at K = V = 128."""
    b, _ = next(choose.modelled(Build("triton"), "", few, (0, 0, 0), None))
    arches = tuple(UNITS)[few::2]
    found = compiled(written(tmp_path, b), arches, ["o_S"])
    assert b.chunk == 32 and [c.arch for c in found] == list(arches) and all(c.shared > 30_000 for c in found)
    assert [(c.arch, c.error) for c in found if c.error or c.spills > 500] == []


@pytest.mark.slow
def test_waves_of_64_lanes_are_half_as_many_but_four(tmp_path):
    """A walk that carries 128 x 128 takes 8 warps of 32."""
    from gdn_codegen.runtime.load import import_path
    m = import_path(written(tmp_path, Build("triton", schedule=replace(SCHEDULES["staged"], v_block=128))))
    assert m.NUM_WARPS["S_U"] == 8 and m.NUM_WARPS["o"] == m.NUM_WARPS["A"] == 4
    assert [m._launcher.warps(n, lanes) for n in ("S_U", "A") for lanes in (32, 64)] == [8, 4, 4, 4]
    few = import_path(written(tmp_path, Build("triton", schedule=replace(SCHEDULES["staged"], name="few", warps=2))))
    assert [few._launcher.warps("o", lanes) for lanes in (32, 64)] == [2, 2]
    many = import_path(written(tmp_path, Build("triton", schedule=replace(SCHEDULES["staged"], name="many", warps=16))))
    assert [many._launcher.warps("o", lanes) for lanes in (32, 64)] == [16, 8]


@pytest.mark.slow
def test_a_kernel_over_the_limit_is_an_error(tmp_path):
    """Chunks of 128 keep more in LDS than MI300 has, and no more than MI350."""
    b = Build("triton", 128, schedule="prepared")
    small, large = compiled(written(tmp_path, b), ("gfx942", "gfx950"), ["S_U"])
    assert small.shared > 64 * 1024 and "bytes of shared memory, gfx942 has 65536" in small.error
    assert not large.error and small.remark.startswith("error: S_U on gfx942 (schedule prepared, C 128, K 128, V 128, v_block 64")


def test_a_smaller_limit_makes_an_error_of_what_was_none(tmp_path, monkeypatch, capsys):
    words = ["build", "--target", "triton", "--check", "--chunk", "16", "--head-dim-k", "16", "--head-dim-v", "16",
               "--schedule", "replay", "--arch", "gfx942", "--out", str(tmp_path)]
    assert main(words) == 0
    for limits, text in ((dict(shared=64), "bytes of shared memory"), (dict(most=8), "registers per lane")):
        monkeypatch.setitem(UNITS, "gfx942", replace(check_triton.UNITS["gfx942"], **limits))
        assert main(words) == 1
        said = capsys.readouterr().out
        assert "error: o_S on gfx942 (schedule replay" in said and text in said


@pytest.mark.slow
def test_a_spill_is_a_warning_that_names_the_configuration(tmp_path):
    b = Build("triton", 64, schedule=replace(SCHEDULES["prepared"], name="narrow", warps=1))
    found = compiled(written(tmp_path, b), ("sm_90", "gfx942"), ["S_U"])
    assert all(c.spills and not c.error for c in found)
    assert found[0].remark == ("warning: S_U on sm_90 (schedule narrow, C 64, K 128, V 128, v_block 64, 1 warps, 2 stages) "
                               f"spills {found[0].spills} bytes per lane")


@pytest.mark.parametrize("gpu, want", [("sm_90", "--schedule walk --chunk 32 --set stages=3 --set descriptors=1"),
                                       ("gfx942", "--schedule walk --chunk 32 --set stages=3")])
def test_a_warning_of_spills_names_the_schedule_that_the_op_takes(gpu, want, monkeypatch, tmp_path):
    monkeypatch.setattr(check_triton, "compiled", lambda path, arches: [Compiled("o_S", gpu, 4, "as it is", 1, 255, spills=632)])
    said = check(Build("triton"), tmp_path, (gpu,))[-1]
    assert said == (f"warning: o_S on {gpu} (as it is) spills 632 bytes per lane: {want} is what the op takes there", True)
    words = want.split()
    taken = options.builds(parser().parse_args(["build", "--target", "triton", *words]))[0]
    assert options.builds(parser().parse_args(["build", "--target", "triton", "--arch", gpu])) == [taken]
    assert check(taken, tmp_path, (gpu,))[-1][0].endswith("bytes per lane, and is what the op takes there all the same")


def test_registers_that_no_tool_reads_are_not_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(check_triton, "compiled", lambda path, arches: [Compiled("o_S", "sm_90", 4, "as it is", 1)])
    line, ok = check(Build("triton"), tmp_path, ("sm_90",))[-1]
    assert ok is None and line.startswith("not read: registers and spills of o_S on sm_90")


def test_a_kernel_that_does_not_compile_is_an_error(tmp_path):
    b = Build("triton", 16, schedule="fused", **SMALL)
    path = tmp_path / "bad.py"
    path.write_text(render(b).replace("k_kT = tl.dot(k, tl.trans(k))", "k_kT = tl.dot(k, k[None])"))
    (*_, (line, ok)) = check(b, path, ("gfx942",))
    assert not ok and "does not compile" in line and "k[None]" not in line


def test_an_error_in_a_device_function_says_what_is_wrong(tmp_path):
    """Triton's own last line is a mark below the call."""
    b = Build("triton", 16, schedule="staged", **SMALL)
    path, text = tmp_path / "bad.py", render(b)
    path.write_text(text.replace("low = tl.full([], 0, tl.int32)", "low = tl.nothing"))
    assert path.read_text() != text
    (*_, (line, ok)) = check(b, path, ("sm_90",))
    assert not ok and "has no attribute 'nothing'" in line


@pytest.mark.parametrize("words, said", [
    (["--arch", "gfx942", "--schedule", "walk"], "got 'gfx942' with --schedule walk; accepted for triton: --arch without"),
    (["--arch", "gfx942,gfx906", "--check"], "got 'gfx942,gfx906'; accepted for triton: any of sm_80, sm_89"),
    (["--arch", "sm_90a", "--target", "pto"], "accepted: none for pto"),
    (["--arch", "gfx942", "--target", "tilelang", "--check"], "accepted: sm_90a for tilelang"),
])
def test_architectures_that_are_none(words, said, tmp_path, capsys):
    assert main(["build", "--target", "triton", *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
