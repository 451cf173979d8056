"""Stores of tiles from registers by rows: each thread stores 16 bytes that four threads held, on a CPU's model of a warp."""
import subprocess
from pathlib import Path

import pytest

import gdn_codegen
from gdn_codegen.targets import machine

ROWS = Path(gdn_codegen.__file__).parent / "emit" / "tilelang" / "device" / "rows.cuh"
PROGRAM = """#include "{warp}"
#include <cstdio>
#include <cstring>
#define __forceinline__ inline
struct uint4 {{ unsigned x, y, z, w; }};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {{ return {{x, y, z, w}}; }}
{text}
// Entry (i, j) is 256 i + j. Registers hold it as sums of wgmma do (PTX ISA, wgmma, fragment D).
template <int high, int columns, bool transposed> void run(int rows) {{
  const int wide = transposed ? high : columns, stride = wide + 16, all = transposed ? columns : high;
  std::vector<unsigned short> memory(all * stride, 0xffff);
  for (int warp = 0; warp < high / 16; ++warp)
    as_warp([&] {{
      unsigned short x[columns / 2];
      for (int n = 0; n < columns / 2; ++n) {{
        const int i = warp * 16 + n / 2 % 2 * 8 + threadIdx.x / 4, j = n / 4 * 8 + threadIdx.x % 4 * 2 + n % 2;
        x[n] = i * 256 + j;
      }}
      unsigned words[columns / 4];
      memcpy(words, x, sizeof x);
      store_rows<columns, transposed>(words, memory.data(), memory.data() + stride, rows, warp * 32 + threadIdx.x);
    }});
  int wrong = 0;
  for (int r = 0; r < all; ++r)
    for (int c = 0; c < stride; ++c)
      wrong += memory[r * stride + c] != (r < rows && c < wide ? (transposed ? c * 256 + r : r * 256 + c) : 0xffff);
  printf("%d\\n", wrong);
}}
int main() {{
  for (int rows : {{64, 63, 37, 8, 1}}) run<64, 128, false>(rows), run<64, 64, false>(rows), run<128, 64, true>(rows);
  run<128, 128, false>(128);
}}
"""
#: movmatrix, as the PTX ISA describes it: a lane has two entries of row lane / 4 of a matrix, and gets those of its transpose.
MOVMATRIX = """inline unsigned transposed_block(unsigned x) {
  return warp_wide(x, [] {
    const int lane = threadIdx.x;
    unsigned y = 0;
    for (int e = 0; e < 2; ++e)
      y |= (unsigned(exchanged[(lane % 4 * 2 + e) * 4 + lane / 8]) >> lane / 4 % 2 * 16 & 0xffff) << 16 * e;
    return y;
  });
}"""


@pytest.mark.skipif(not machine.cxx(), reason="needs a C++ compiler")
def test_rows_in_memory_are_those_of_the_tile(tmp_path):
    """Rows past those that are stored, and what lies between rows, keep their contents."""
    text = ROWS.read_text()
    at = text.index("static __device__ __forceinline__ unsigned transposed_block")
    text = text[:at] + MOVMATRIX + text[text.index("\n}", at) + 2:]
    (tmp_path / "rows.cpp").write_text(PROGRAM.format(warp=Path(__file__).with_name("warp.h"), text=text))
    subprocess.run([machine.cxx(), "-std=c++20", "-O1", "rows.cpp", "-o", "rows"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "rows"], capture_output=True, text=True, check=True).stdout.split() == ["0"] * 16
