"""Every rule: a kernel that breaks it stops, with a message that names the rule, the place and the other place."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from gdn_codegen import pto_sim
from gdn_codegen.pto_sim import INPUT, OUTPUT, WORKSPACE, PtoSimError, launch

SOURCE = (Path(__file__).parent / "bad.cpp").read_text()


def case(kernel: str, name: str) -> int:
    """The number of the case called `name` in `kernel`."""
    body = SOURCE[SOURCE.index(f"PTO_ENTRY void {kernel}("):]
    found = re.search(rf"case (\d+):[ {{]*// {name}\b", body)
    assert found, name
    return int(found[1])


def line(mark: str) -> str:
    """bad.cpp:N of the line marked `mark`."""
    lines = [i for i, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"// mark {mark}")]
    assert len(lines) == 1, mark
    return f"bad.cpp:{lines[0]}"


def run(lib, kernel: str, name: str | int, blocks: int = 1, **options: int) -> str:
    """The message that stops the case, or '' if nothing does."""
    which = name if isinstance(name, int) else case(kernel, name)
    first = torch.ones(64 * 64, dtype=torch.float16) if kernel == "cube_rules" else torch.ones(512)
    tensors = [first, torch.zeros(64 * 64 if kernel == "cube_rules" else 512), torch.zeros(1024)]
    try:
        launch(lib, kernel, blocks, tensors, [INPUT, OUTPUT, WORKSPACE], [which], **options)
    except PtoSimError as error:
        assert f"[{error.category}]" in str(error)
        return str(error)
    return ""


pytestmark = pytest.mark.slow  # the broken kernels take a while to compile


@pytest.fixture(scope="module")
def lib(compiled):
    return compiled("bad")


VEC = {
    "raw": ["[race] RAW on UB, bytes [0, 32)", "TMULS at {raw reads} on pipe V of block 0 vector 0 reads",
            "TLOAD at {raw wrote} on pipe MTE2", "a flag from MTE2 to V"],
    "war": ["[race] WAR on UB", "TLOAD at {war writes} on pipe MTE2", "TMULS at {war reads} on pipe V", "flag from V to MTE2"],
    "waw": ["[race] WAW on UB", "TLOAD at {waw writes}", "TEXPANDS at {waw wrote}"],
    "store-before-compute": ["[race] RAW on UB", "TSTORE at {store reads} on pipe MTE3", "a flag from V to MTE3"],
    "gm-round-trip": ["[race] RAW on GM buffer 2", "TLOAD at {gm reads} on pipe MTE2", "TSTORE at {gm wrote} on pipe MTE3"],
    "v-after-v-raw": ["[v-after-v] RAW", "TADDS at {vv reads} reads", "TEXPANDS at {vv wrote} wrote", "pipe_barrier(PIPE_V)"],
    "v-after-v-waw": ["[v-after-v] WAW"],
    "v-after-v-war": ["[v-after-v] WAR"],
    "v-after-v-in-place": ["[v-after-v] WAR"],
    "scalar-read": ["[race] RAW on UB, bytes [12, 14)", "GetValue at {scalar reads} on pipe S", "a flag from MTE2 to S"],
    "scalar-write": ["[race] WAW on UB", "SetValue at {scalar wrote} on pipe S", "a flag from S to V"],
    "tile-overlap": ["[race] WAW on UB, bytes [1024, 1056)"],
    "address-overlap": ["[race] WAR on UB|[overlap]|[race] WAW on UB"],
    "wait-without-set": ["[wait-without-set] wait_flag at {lonely wait}", "deadlock", "from V to MTE3, EVENT_ID2"],
    "set-twice": ["[flag-set-twice] set_flag at {second set}", "EVENT_ID3, is still set by set_flag at {first set}"],
    "flag-left": ["[flag-left] block 0 vector 0", "from V to MTE3, EVENT_ID4, still set by set_flag at {left set}"],
    "event-id": ["[event-id]", "event id 8 is not 0 to 7"],
    "pipe-of-other-core": ["[pipe]", "a vector core has no pipe M"],
    "flag-to-itself": ["[pipe]", "a flag from V to itself"],
    "ub-capacity": ["[capacity]", "2048 bytes at 195584 do not fit in the 196608 bytes of UB"],
    "misaligned": ["[alignment]", "UB address 16 is not a multiple of 32"],
    "no-address": ["[address]", "TASSIGN comes first"],
    "gm-bounds": ["[bounds] TLOAD at {bounds}",
                  "line 7 of the global tensor is bytes [2048, 2304) of GM buffer 0, which has 2048"],
    "gm-foreign": ["[bounds]", "in no buffer of the launch", "the nearest is GM buffer"],
    "write-input": ["[read-only]", "GM buffer 0, which is an input"],
    "uninitialised": ["[uninitialised] TADDS at {unknown}", "UB bytes [0, 2048)", "nobody wrote byte 0"],
    "uninitialised-tail": ["[uninitialised]", "nobody wrote byte 160"],
    "uninitialised-workspace": ["[uninitialised]", "GM buffer 2"],
    "uninitialised-output": ["[uninitialised]", "GM buffer 1"],
    "header-scratch": ["[uninitialised]", "UB bytes [188416"],
    "scratch-too-small": ["[scratch]", "8 rows of 256 want a scratch tile of 8 x 128, not 8 x 64"],
    "shifted-overlap": ["[overlap]"], "columns-overlap": ["[overlap]"],
    "shape-mismatch": ["[shape]", "operand 1 has 4 x 64 valid elements, the result 8 x 64"],
    "load-shape": ["[shape]", "the tile has 8 x 64 valid elements, the global tensor 4 x 64"],
    "no-rows": ["[shape]", "0 x 64 valid elements"],
    "valid-too-large": ["[shape]", "8 x 64 cannot have 9 x 64"],
    "cross-wait-alone": ["[deadlock] no core can go on",
                         "block 0 vector 0 waits for cross-core flag 5 in wait_flag_dev at {waits}"],
    "cross-config": ["[ffts-config]", "0x231"],
    "cross-half": ["[ffts-left]", "flag 4 signalled by ffts_cross_core_sync at {half} but not by every core"],
    "fills-as-if-narrow": ["[layout]", "DYNAMIC"],
    "row-expand-flags": ["[flag-set-twice]", "EVENT_ID0"],
    "vectors-race": ["[race] WAW on GM buffer 1", "block 0 vector 0", "block 0 vector 1", "a cross-core flag"],
}

CUBE = {
    "l1-before-load": ["[race] RAW on L1", "TMOV at {l1 reads} on pipe MTE1", "TLOAD at {l1 wrote} on pipe MTE2"],
    "no-ffts-base": ["[ffts-base]", "set_ffts_base_addr comes first"],
    "l0-reuse": ["[race] WAR on L0A", "TMOV at {l0 writes}", "TMATMUL at {l0 reads} on pipe M", "a flag from M to MTE1"],
    "store-before-matmul": ["[race] RAW on L0C", "pipe FIX"],
    "vector-instruction": ["[core] TEXPANDS", "a cube core does not have"],
    "vec-tile-on-cube": ["[core] TLOAD", "a cube core has no UB"],
    "cube-instruction": ["[core] TMATMUL", "a vector core does not have"],
    "tail-not-filled": ["[uninitialised] TMOV", "L1"],
    "packed-k": ["[layout]", "left tile by its valid cols, 48, but the tile is laid out for 64"],
    "matmul-shapes": ["[shape]", "(64 x 64) @ (32 x 64) into 64 x 64"],
    "two-accumulators": ["[address] TMATMUL_ACC", "accumulates in place"],
    "extract-bounds": ["[bounds]", "[0, 64) x [48, 80) of a tile of 64 x 64"],
    "extract-alignment": ["[alignment]", "row 0 and col 8 are not multiples of 16 and 16"],
    "l1-capacity": ["[capacity]", "524288 bytes of L1"],
    "l0a-capacity": ["[capacity]", "65536 bytes of L0A"],
    "l0b-capacity": ["[capacity]", "65536 bytes of L0B"],
    "l0c-capacity": ["[capacity]", "131072 bytes of L0C"],
    "accumulate-on-nothing": ["[uninitialised] TMATMUL_ACC", "L0C"],
    "stride-too-long": ["[shape]", "a row stride of 70000"],
}

CROSS = {
    "signal-before-store": ["[race] RAW on GM buffer 2", "TLOAD at {cross reads} on pipe MTE2 of block 0 cube reads",
                            "TSTORE at {cross wrote} on pipe MTE3 of block 0 vector 0 wrote", "a cross-core flag"],
    "wrong-pipe": ["[race] RAW on GM buffer 2"],
    "crossed-waits": ["[deadlock]", "block 0 cube waits for cross-core flag 4 in wait_flag_dev at {cube waits}",
                      "block 0 vector 1 waits for cross-core flag 3 in wait_flag_dev at {vector waits}"],
    "signal-left": ["[ffts-left] block 0 vector 0 ends with cross-core flag 5 at 1", "{left signal}"],
    "too-many-signals": ["[ffts-overflow]", "would exceed 15"],
    "one-vector-missing": ["[deadlock]", "waits for cross-core flag 7"],
    "early-reuse": ["[race]", "{early writes}", "{early reads}"],
}


def check(message: str, parts: list[str]) -> None:
    for part in parts:
        wanted = re.sub(r"{([^}]*)}", lambda m: line(m[1]), part)
        assert any(w in message for w in wanted.split("|")), f"{wanted!r} is not in {message!r}"


@pytest.mark.parametrize("name", VEC)
def test_vector_rule(lib, name):
    check(run(lib, "vec_rules", name), VEC[name])


@pytest.mark.parametrize("name", CUBE)
def test_cube_rule(lib, name):
    check(run(lib, "cube_rules", name), CUBE[name])


@pytest.mark.parametrize("name", CROSS)
def test_cross_core_rule(lib, name):
    check(run(lib, "cross_rules", name), CROSS[name])


def test_wrong_ffts_base(lib):
    check(run(lib, "cube_rules", 2), ["[ffts-base]", "not the address that the launch passed"])


@pytest.mark.parametrize("concurrent", [0, 1])
def test_blocks_race(lib, concurrent):
    assert run(lib, "vec_rules", "blocks-race", blocks=1) == ""
    message = run(lib, "vec_rules", "blocks-race", blocks=2, concurrent=concurrent)
    check(message, ["[race] WAW on GM buffer 1", "{blocks}", "block 1 vector 0", "of block 0 vector 0",
                    "only a device-wide barrier"])


def test_other_columns_of_the_same_rows_do_not_overlap(lib):
    assert run(lib, "vec_rules", "other-columns") == ""


def test_neighbours_in_one_block_of_bytes_do_not_race(lib):
    assert run(lib, "vec_rules", "neighbours") == ""


def test_v_after_v_can_be_turned_down(lib):
    assert run(lib, "vec_rules", "v-after-v-war", v_after_v=1) == ""
    assert "[v-after-v] RAW" in run(lib, "vec_rules", "v-after-v-raw", v_after_v=1)
    for name in ("v-after-v-raw", "v-after-v-waw", "v-after-v-war"):
        assert run(lib, "vec_rules", name, v_after_v=0) == ""


def test_missing_waits_can_be_left_unreported(lib):
    """For traces of kernels from elsewhere. Other errors stay errors."""
    for kernel, name in (("vec_rules", "raw"), ("vec_rules", "v-after-v-raw"), ("vec_rules", "flag-left")):
        assert run(lib, kernel, name) and run(lib, kernel, name, order=0) == ""
    assert "[wait-without-set]" in run(lib, "vec_rules", "wait-without-set", order=0)


def test_an_endless_loop_times_out(lib):
    check(run(lib, "vec_rules", "endless", timeout_s=1), ["[timeout]", "more than 1 s"])


def test_a_failed_run_leaves_nothing_behind(lib):
    for _ in range(2):
        assert "[flag-left]" in run(lib, "vec_rules", "flag-left")
        assert "[deadlock]" in run(lib, "cross_rules", "crossed-waits")
        assert run(lib, "vec_rules", "neighbours") == ""


STATIC = {
    "dtype of TADD": ("Vec<bfloat16_t> a, b, c; TADD(a, b, c);", "not bfloat16_t"),
    "dtypes of a matmul": ("TileAcc<float, 16, 16> c; TileLeft<half, 16, 16> a; TileRight<float, 16, 16> b; "
                           "TMATMUL(c, a, b);", "TMATMUL: float from"),
    "Left laid out as on A5": ("Tile<TileType::Left, half, 16, 16, BLayout::ColMajor, 16, 16, SLayout::RowMajor> a;",
                               "Left on A2/A3 is Zz"),
    "rows of 20 bytes": ("Tile<TileType::Vec, float, 4, 5> a;", "a row of an ND tile is a multiple of 32 bytes"),
    "ND into ZN": ("Tile<TileType::Mat, half, 16, 16, BLayout::RowMajor, 16, 16, SLayout::ColMajor> m; "
                   "Gm<half> g(nullptr); TLOAD(m, g);", "ND to NZ or DN to ZN"),
    "Acc to Vec": ("TileAcc<float, 16, 16> c; Tile<TileType::Vec, float, 16, 16> v; TMOV(v, c);", "A5 only"),
    "Acc to Mat of float": ("TileAcc<float, 16, 16> c; Tile<TileType::Mat, float, 16, 16, BLayout::ColMajor, 16, 16, "
                            "SLayout::RowMajor> m; TMOV(m, c);", "float to half or bfloat16_t"),
    "cast between 16-bit floats": ("Vec<half> a; Vec<bfloat16_t> b; TCVT(b, a, RoundMode::CAST_RINT);", "TCVT: float to"),
    "store of another dtype": ("Vec<half> a; Gm<float> g(nullptr); TSTORE(g, a);", "TSTORE from Vec: one dtype"),
    "pad of Null": ("Vec<half> a; TFILLPAD(a, a);", "pad value is not Null"),
}


@pytest.mark.parametrize("cxx", ["g++"])
def test_what_the_types_forbid_does_not_compile(tmp_path, cxx):
    """One unit with all the mistakes: each static assertion shows."""
    body = "".join(f"void f{i}() {{ {code} }}\n" for i, (code, _) in enumerate(STATIC.values()))
    source = tmp_path / "static.cpp"
    source.write_text(
        "#include <pto/pto-inst.hpp>\nusing namespace pto;\ntemplate <typename T> using Vec = Tile<TileType::Vec, T, 16, 32>;\n"
        "template <typename T> using Gm = GlobalTensor<T, Shape<1, 1, 1, 16, 16>, Stride<1, 1, 1, 16, 1>>;\n" + body)
    done = subprocess.run([cxx, "-std=c++17", "-fsyntax-only", f"-I{pto_sim.include_dir()}", str(source)],
                          capture_output=True, text=True)
    assert done.returncode
    for name, (_, message) in STATIC.items():
        assert message in done.stderr, name
