"""Rows of ragged tails in shared memory: the device functions, compiled for the CPU, against TileLang's swizzled layout."""
import ctypes
import itertools
import re
import subprocess

import pytest
from reference import module

from gdn_codegen.emit.tilelang import functions
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import varied
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


@pytest.mark.slow
@pytest.mark.parametrize("arch, schedule, dtype", [("sm_90a", varied("operand_walk", "sm_90a", v_block=64), "bfloat16"),
                                                   ("sm_80", varied("prepared"), "float32")], ids=["sm_90a", "sm_80"])
def test_kernels_over_chunks_copy_the_rows_that_a_chunk_has(arch, schedule, dtype):
    """Each load of tokens is one row of asynchronous copies, with the length in their condition, and no other load."""
    b = Build("tilelang", 64, schedule=schedule, dtype=dtype, arch=arch if arch == "sm_90a" else "")
    m, k = module(render(b)), lowered(b).kernels[0]
    loads = [o for o in k.ops if o.kind == "load" and o.attr("channel")]
    target = {"kind": "cuda", "arch": arch}
    with tilelang.tvm.target.Target(target), tilelang.tvm.transform.PassContext(config=m._launcher.passes[k.name]):
        source = tilelang.lower(m._launcher.program(k.name), target=target).kernel_source
    body = source[source.rindex('extern "C" __global__'):]
    copies = re.findall(r"cp_async_gs_conditional<(?:4|16)>\(.*\);", body)
    assert k.grid == "chunks" and len(loads) == len(copies) == body.count("cp_async_commit()") >= 3
    assert all("length" in x[x.rindex("])), ("):] for x in copies)
    inputs = "|".join(o.attr("tensor") for o in loads)
    others = [x for x in body.splitlines()[1:] if re.search(rf"\b(?:{inputs})_in\b", x) and "cp_async" not in x]
    assert not [x for x in others if not x.lstrip().startswith('extern "C"')]
