"""Tiles between registers and shared memory by ldmatrix and stmatrix: the addresses, and that registers hold what they should."""
import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from reference import module
from test_tilelang_barriers import cuda

import gdn_codegen
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import Schedule, varied
from gdn_codegen.targets import machine

tilelang = pytest.importorskip("tilelang")


@pytest.fixture(scope="module")
def walk():
    return module(render(Build("tilelang", schedule="fused_walk", arch="sm_90a")))


@pytest.fixture(scope="module")
def address(walk, tmp_path_factory):
    """tile_address<transposed, columns>(tile at 0, thread), compiled for the CPU."""
    if not machine.cxx():
        pytest.skip("needs a C++ compiler")
    text = walk.HELPERS[walk.HELPERS.index("template <bool transposed, int columns>"):]
    text = text[:text.index("template <int columns> static __device__ __forceinline__ void load_transposed")]
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "a.cc").write_text(f"""#define __device__
#define __forceinline__ inline
static unsigned long __cvta_generic_to_shared(const void *x) {{ return reinterpret_cast<unsigned long>(x); }}
{text}
extern "C" unsigned address(bool transposed, int columns, int thread) {{
  return !transposed ? tile_address<false, 64>(nullptr, thread) : columns == 16 ? tile_address<true, 16>(nullptr, thread)
    : columns == 32 ? tile_address<true, 32>(nullptr, thread) : tile_address<true, 64>(nullptr, thread);
}}
""")
    subprocess.run([machine.cxx(), "-std=c++17", "-shared", "-fPIC", folder / "a.cc", "-o", folder / "a.so"], check=True)
    return ctypes.CDLL(str(folder / "a.so")).address


def register(row, column):
    """Who holds an entry of a sum of wgmma, rows by warp groups of 64 (PTX ISA, wgmma, fragment D): thread, index."""
    return row // 64 * 128 + row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row % 16 // 8 * 2 + column % 2


@pytest.mark.parametrize("transposed, rows, columns", [(True, 128, 64), (True, 64, 64), (False, 128, 64), (False, 64, 64),
                                                       (True, 128, 16), (True, 64, 16), (True, 128, 32)])
def test_a_matrix_of_each_instruction_is_what_its_registers_hold(walk, address, transposed, rows, columns):
    """Instruction n moves matrices 4 n to 4 n + 3: lane 8 m + r gives the address of row r of matrix m, and lane l holds of each
    matrix the entries (l / 4, 2 (l % 4)) and the next, of its transpose where that is asked for (PTX ISA, ldmatrix)."""
    tir, analyzer = tilelang.tvm.tirx, tilelang.tvm.arith.Analyzer()
    dims = (columns, rows) if transposed else (rows, columns)
    layout = tilelang.layout.make_swizzled_layout(tir.decl_buffer(dims, "float16", scope="shared.dyn"))
    step = (lambda first, n: first + n * 2048) if transposed else (lambda first, n: first ^ n * 32)  # as the text has it
    held = {}
    for thread in range(rows * 2):
        lane, warp = thread % 32, thread - thread % 32
        for n in range(columns // 16):
            for m in range(4):
                for e in range(2):
                    r, c = (2 * (lane % 4) + e, lane // 4) if transposed else (lane // 4, 2 * (lane % 4) + e)
                    held[thread, (4 * n + m) * 2 + e] = step(address(transposed, columns, warp + 8 * m + r), n) + 2 * c
    assert re.search(r"transposed\)\n.*\n.*first \+ n \* 2048", walk.HELPERS) and "first ^ n * 32" in walk.HELPERS
    for row in range(0, rows, 3):
        for column in range(columns):
            i, j = (column, row) if transposed else (row, column)
            there = 0
            for x, extent in zip(layout.map_forward_index([tir.const(i, "int32"), tir.const(j, "int32")]),
                                 layout.get_output_shape(), strict=True):
                there = there * int(extent) + int(analyzer.simplify(x))
            assert held[register(row, column)] == 2 * there, (row, column)


def test_a_mask_compares_each_entry_with_its_own_column(walk):
    """The device function gives a thread's first entry's distance from the diagonal; the emitted comparison adds the rest."""
    text = render(Build("tilelang", schedule="fused_walk", arch="sm_90a"))
    first = re.search(r'"=r"\(rows\) : "r"\((.*)\)\);', walk.HELPERS)[1].replace("/", "//")
    (kept,) = re.findall(r"below \+ .* >= .*(?=,)", text)
    for i in range(64):
        for j in range(64):
            below = eval(first, {"thread": register(i, j)[0]})
            assert eval(kept, {"below": below, "i": i, "j": j}) == (i >= j), (i, j)


@cache
def cuda_of(text):
    """CUDA of the walk of a module's text. Kept, since tests ask for that of the same text."""
    return cuda(module(text), "o_S")


@pytest.mark.slow
def test_loops_that_say_so_run_as_products_lie():
    """TileLang lays out what products make by itself, and refuses a loop that says otherwise."""
    text = render(Build("tilelang", schedule="fused_walk", arch="sm_90a"))
    plain = text.replace("t.as_sums(", "t.parallel(")
    assert text.count("t.as_sums(") == 9 and cuda_of(text) == cuda_of(plain)
    with pytest.raises(Exception, match="conflict"):
        cuda_of(text.replace("i % 8 * 4 + j % 8 // 2,", "i % 8 + j % 8 // 2 * 8,"))


@pytest.mark.slow
def test_products_wait_for_no_fence_of_tilelang():
    """Passes derive fences. TileLang adds one to a product of each iteration, unless one stands before the loop and tiles that
    threads store are no writes to it."""
    text = render(Build("tilelang", schedule="fused_walk", arch="sm_90a"))
    added = r"warpgroup_arrive\(\);\s*tl::fence_proxy_async"
    assert not re.search(added, cuda_of(text))
    assert re.search(added, cuda_of(re.sub(r"(set_max_nreg\(.*\n) +T.fence_proxy_async\(\)\n", r"\1", text)))
    assert re.search(added, cuda_of(text.replace('pointer(tile, "r"), x.access', 'pointer(tile, "w"), x.access')))


@pytest.mark.slow
@pytest.mark.parametrize("kernels, made", [((("G", "Tinv"), ("o", "S")), "Tinv_scaled_f16"),
                                           pytest.param((("G", "A"), ("o", "S")), "A_f16", marks=pytest.mark.long)])
def test_a_tile_that_no_product_made_lies_as_one_too(kernels, made):
    """It is filled from shared memory: without a word each thread has a column, or what else suits that, maybe twice."""
    text = render(Build("tilelang", schedule=Schedule("own", kernels, form="split", state_layout="vk"), arch="sm_90a"))
    pairs = rf"\({made} \+ \(i_\d+ \* 2\)\)"  # of neighbours in a row
    here, plain = cuda_of(text), cuda_of(text.replace("t.as_sums(", "t.parallel("))
    assert f"half_t {made}[32];" in here and re.search(pairs, here)
    assert f"half_t {made}[32];" not in plain or not re.search(pairs, plain)


@pytest.mark.parametrize("b", [
    Build("tilelang", schedule=varied("fused", v_block=64), head_dim_k=256, head_dim_v=256),
    Build("tilelang", schedule=varied("walk", "sm_90a", partition="decay", value_heads=2), arch="sm_90a"),
    Build("tilelang", schedule="fused_walk", arch="sm_90a")], ids=lambda b: b.name)
def test_each_tile_that_a_helper_addresses_is_held_to_its_layout(b):
    """`expect_swizzled` names each tile that an inverse, or a load or store by ldmatrix and stmatrix, addresses."""
    for body in re.split(r"\n    @T\.prim_func", render(b))[1:]:
        helped = [x for call in re.findall(r"t\.(?:whole_inverses|load_transposed|store_tile)\(.*", body)
                  for x in re.findall(r"\b(\w+)\b", call) if re.search(rf"^ +{x} = t\.staged\(", body, re.M)]
        held = re.findall(r"t\.expect_swizzled\((\w+)\)", body)
        assert set(helped) <= set(held), b.name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_tile_that_lies_otherwise_does_not_compile(tmp_path):
    """The comparison of addresses is folded away where a tile lies as it should; else ptxas misses a function."""
    source = (Path(gdn_codegen.__file__).parent / "emit" / "tilelang" / "device" / "layout.cuh").read_text() + """
    extern "C" __global__ void kernel(int *y) {
      extern __shared__ __align__(1024) unsigned char buf[];
      unsigned short *tile = (unsigned short *)buf + 512;
      tile[threadIdx.x] = 0;
      expect_element(&tile[0], &tile[PLACE], 72);
      y[0] = tile[1];
    }"""
    for place, status in ((72, 0), (40, 1)):
        file = tmp_path / f"k{place}.cu"
        file.write_text(source.replace("PLACE", str(place)))
        done = subprocess.run(["nvcc", "-arch=sm_90a", "-O3", "-cubin", str(file), "-o", str(tmp_path / "k.cubin")],
                              capture_output=True, text=True, check=False)
        assert bool(done.returncode) == bool(status), done.stderr
        assert not status or "this_tile_needs_rows_of_128_bytes_swizzled" in done.stderr + done.stdout
