"""Rows of ragged tails in shared memory: the device functions, compiled for the CPU, against TileLang's swizzled layout."""
import ctypes
import itertools
import subprocess

import pytest

from gdn_codegen.emit.tilelang import functions
from gdn_codegen.targets import machine

tilelang = pytest.importorskip("tilelang")
ROWS, STRIDE = 64, 300


@pytest.fixture(scope="module")
def tails(tmp_path_factory):
    """zero and store of tiles of 64 and 128 columns, for one lane."""
    if not machine.cxx():
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("tails")
    calls = "".join(f"""
extern "C" void zero{64 * n}(void *tile, int first, int lane) {{ zero_tail<{ROWS}, {n}>(tile, first, lane); }}
extern "C" void store{64 * n}(void *tile, char *to, int count, int lane) {{
  store_tail<{ROWS}, {n}>(tile, to, to + {2 * STRIDE}, count, lane);
}}""" for n in (1, 2))
    (folder / "a.cc").write_text(f"""#define __device__
#define __forceinline__ inline
struct uint4 {{ unsigned x, y, z, w; }};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {{ return {{x, y, z, w}}; }}
{(functions.FOLDER / "tails.cuh").read_text()}{calls}""")
    subprocess.run([machine.cxx(), "-std=c++17", "-shared", "-fPIC", folder / "a.cc", "-o", folder / "a.so"], check=True)
    return ctypes.CDLL(str(folder / "a.so"))


@pytest.fixture(scope="module", params=(64, 128))
def places(request):
    """The place in memory of each piece of eight columns of a swizzled tile: (row, column) -> index of an entry."""
    tir, analyzer = tilelang.tvm.tirx, tilelang.tvm.arith.Analyzer()
    layout = tilelang.layout.make_swizzled_layout(tir.decl_buffer((ROWS, request.param), "bfloat16", scope="shared.dyn"))
    out = {}
    for row, column in itertools.product(range(ROWS), range(0, request.param, 8)):
        at = 0
        for x, extent in zip(layout.map_forward_index([tir.const(row, "int32"), tir.const(column, "int32")]),
                             layout.get_output_shape(), strict=True):
            at = at * int(extent) + int(analyzer.simplify(x))
        out[row, column] = at
    return out


def tile(places):
    """A tile whose entries are 1 + row * 256 + column."""
    x = (ctypes.c_uint16 * (8 * len(places)))()
    for (row, column), at in places.items():
        x[at:at + 8] = [1 + row * 256 + column + n for n in range(8)]
    return x


@pytest.mark.parametrize("first", [1, 2, 33, 63])
def test_rows_past_the_end_become_zero_and_no_others(tails, places, first):
    x, columns = tile(places), 8 * len(places) // ROWS
    for lane in range(32):
        getattr(tails, f"zero{columns}")(x, first, lane)
    for (row, column), at in places.items():
        assert x[at:at + 8] == ([0] * 8 if row >= first else [1 + row * 256 + column + n for n in range(8)])


@pytest.mark.parametrize("count", [1, 2, 31, 63])
def test_the_first_rows_are_stored_and_no_others(tails, places, count):
    x, columns = tile(places), 8 * len(places) // ROWS
    to = (ctypes.c_uint16 * (STRIDE * ROWS))()
    for lane in range(32):
        getattr(tails, f"store{columns}")(x, to, count, lane)
    for row in range(ROWS):
        stored = [1 + row * 256 + n for n in range(columns)] if row < count else [0] * columns
        assert to[row * STRIDE:row * STRIDE + columns] == stored and not any(to[row * STRIDE + columns:(row + 1) * STRIDE])
