"""Token t: u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q.

Generated TileLang: schedule fused, chunks of 64 tokens, layout bthd, float16. Needs torch and tilelang (0.1.15).
Made by: gdn_codegen build --target tilelang --chunk 64 --layout bthd --algorithm delta_rule --schedule fused --dtype float16 --head-dim-k 128 --head-dim-v 128
"""
import contextlib
import functools
import hashlib
import itertools
import math
import operator
import os
import platform
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import torch

os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
import tilelang
import tilelang.language as T
import tvm_ffi
from tilelang.contrib import nvcc

# sizes of dims in memory; P: in tiles, where these are padded
C = 64
K = 128
V = 128

# --- device functions: kernels call NAME_cuda, NAME_cpu or NAME as t.NAME -----------------------------------------------
HELPERS = r"""
// Helpers below address tiles by themselves: rows of 64 16-bit elements, piece p of 16 bytes of row r at p ^ r % 8. TileLang may choose
// another layout for a tile, whatever it is told. Then the comparison below is not folded away, this function stays in the kernel, and
// since nobody defines it, ptxas refuses the kernel.
extern "C" __device__ void this_tile_needs_rows_of_128_bytes_swizzled();

template <typename X> static __device__ __forceinline__ void expect_element(const X *first, const X *element, int offset) {
  if (element != first + offset) this_tile_needs_rows_of_128_bytes_swizzled();
}

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

// (I + A)^-1 of a strictly lower 64 x 64 tile in 16 bit, over A, its columns times `scale` if that is given, by one warp; `strict`:
// without the ones of its diagonal.
// A row of a tile is eight pieces of 16 bytes; piece p of row r lies at p ^ r % 8. Blocks of 8 on the diagonal are inverted by
// forward substitution, in float32, a lane two columns; products (mma.sync) join them to blocks of 16, and block forward
// substitution gives the rest. In bfloat16 their sums are float32; in float16 they are what they are rounded to anyway. What does not depend on one another stands side by side, for a warp alone waits for each
// result.
template <bool bf16, bool scaled, bool strict> struct UnitLowerInverse {
  struct Tile { unsigned x[4]; };  // 16 x 16: quadrants by columns; a lane has entries (lane / 4, 2 (lane % 4)) and the next
  struct Wide { float x[8]; };
  using Sum = std::conditional_t<bf16, Wide, Tile>;

  static __device__ unsigned pack(float lo, float hi) {
    unsigned out;
    if constexpr (bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    return out;
  }
  static __device__ Tile pack(const Wide &s) {
    return {pack(s.x[0], s.x[1]), pack(s.x[2], s.x[3]), pack(s.x[4], s.x[5]), pack(s.x[6], s.x[7])};
  }
  static __device__ Tile pack(const Tile &s) { return s; }
  static __device__ float2 unpack(unsigned x) {
    if constexpr (bf16) return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&x));
    else return __half22float2(*reinterpret_cast<__half2 *>(&x));
  }
  static __device__ Sum sum(const Tile &t) {
    if constexpr (bf16) {
      const float2 a = unpack(t.x[0]), b = unpack(t.x[1]), c = unpack(t.x[2]), d = unpack(t.x[3]);
      return {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
    } else return t;
  }
  static __device__ void mma(float *d, const Tile &a, unsigned b0, unsigned b1) {
    if constexpr (bf16)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
    else
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
  }
  static __device__ void mma(unsigned *d, const Tile &a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 { %0, %1}, { %2, %3, %4, %5}, { %6, %7}, { %0, %1};"
        : "+r"(d[0]), "+r"(d[1]) : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
  }
  // acc + a b, with b transposed
  static __device__ Sum product(const Tile &a, const Tile &bt, Sum acc = {}) {
    mma(acc.x, a, bt.x[0], bt.x[2]);
    mma(acc.x + (bf16 ? 4 : 2), a, bt.x[1], bt.x[3]);
    return acc;
  }
  // Where a lane's part of block (0, 0) lies for ldmatrix, and for its transpose.
  static __device__ unsigned ldmatrix(const void *tile, unsigned lane) {
    return base(tile) + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
  }
  static __device__ unsigned ldmatrix_transposed(const void *tile, unsigned lane) {
    return base(tile) + (lane % 8 + lane / 16 * 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
  }
  static __device__ unsigned base(const void *tile) { return static_cast<unsigned>(__cvta_generic_to_shared(tile)); }
  static __device__ unsigned at(unsigned first, unsigned i, unsigned j) { return first + i * 2048 ^ j * 32; }

  static __device__ Tile load(unsigned first, unsigned i, unsigned j) {
    Tile t;
    asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(t.x[0]), "=r"(t.x[1]), "=r"(t.x[2]), "=r"(t.x[3]) : "r"(at(first, i, j)) : "memory");
    return t;
  }
  static __device__ Tile load_transposed(unsigned first, unsigned i, unsigned j) {
    Tile t;
    asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(t.x[0]), "=r"(t.x[1]), "=r"(t.x[2]), "=r"(t.x[3]) : "r"(at(first, i, j)) : "memory");
    return t;
  }
  // Block (i, j) of the result, which is s, or -s.
  static __device__ void store(void *tile, const void *scale, unsigned i, unsigned j, unsigned lane, Sum s, float sign = 1.f) {
    if constexpr (scaled) {
      float x[4];
#pragma unroll
      for (unsigned n = 0; n < 4; n += 2)
        asm volatile("ld.shared.v2.f32 { %0, %1}, [%2];" : "=f"(x[n]), "=f"(x[n + 1])
                     : "r"(base(scale) + (16 * j + 4 * n + lane % 4 * 2) * 4));
      if constexpr (bf16)
#pragma unroll
        for (unsigned n = 0; n < 8; ++n) s.x[n] *= x[n / 4 * 2 + n % 2];
      else
#pragma unroll
        for (unsigned n = 0; n < 4; ++n) s.x[n] = times(s.x[n], pack(x[n / 2 * 2], x[n / 2 * 2 + 1]));
    }
    const Tile t = sign < 0.f ? minus(pack(s)) : pack(s);
    const unsigned first = at(base(tile) + lane / 4 * 144 + lane % 4 * 4, i, j);
#pragma unroll
    for (unsigned n = 0; n < 4; ++n)
      asm volatile("st.shared.b32 [%0], %1;" :: "r"((first ^ n / 2 * 16) + n % 2 * 1024), "r"(t.x[n]) : "memory");
  }
  static __device__ unsigned times(unsigned x, unsigned y) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
  }
  static __device__ Tile minus(Tile t) {
#pragma unroll
    for (unsigned n = 0; n < 4; ++n) t.x[n] ^= 0x80008000u;
    return t;
  }
  static __device__ unsigned transposed(unsigned x) {
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    return x;
  }

  // The blocks of 16 on the diagonal become their inverses, transposed.
  static __device__ void diagonal(void *a, unsigned lane) {
    const unsigned j = lane % 8;
    float x[2][8];
#pragma unroll
    for (unsigned h = 0; h < 2; ++h)
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) x[h][i] = i == j ? 1.f : 0.f;
#pragma unroll
    for (unsigned i = 1; i < 8; ++i)
#pragma unroll
      for (unsigned h = 0; h < 2; ++h) {
        const unsigned first = base(a) + (lane / 8 + 4 * h) * 1040;
        unsigned m[4];
        asm volatile("ld.shared.v4.b32 { %0, %1, %2, %3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"((first ^ i * 16) + i * 128));
#pragma unroll
        for (unsigned r = 0; r < i; ++r) {
          const float2 pair = unpack(m[r / 2]);
          x[h][i] -= (r % 2 ? pair.y : pair.x) * x[h][r];
        }
      }
    __syncwarp();
#pragma unroll
    for (unsigned h = 0; h < 2; ++h)
      asm volatile("st.shared.v4.b32 [%0], { %1, %2, %3, %4};"
                   :: "r"((base(a) + (lane / 8 + 4 * h) * 1040 ^ j * 16) + j * 128), "r"(pack(x[h][0], x[h][1])),
                      "r"(pack(x[h][2], x[h][3])), "r"(pack(x[h][4], x[h][5])), "r"(pack(x[h][6], x[h][7])) : "memory");
    __syncwarp();
    // Of two blocks of 16: X11, M10 and X00, each an 8 x 8 block of which lanes know a row.
    const unsigned left = base(a) + j * 128 + lane / 8 % 2 * 2080;
    unsigned m[2][4], y[2][2];
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
      asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 { %0, %1, %2, %3}, [%4];"
                   : "=r"(m[h][0]), "=r"(m[h][1]), "=r"(m[h][2]), "=r"(m[h][3])
                   : "r"(left + h * 4160 + 1024 ^ (lane < 16 ? j ^ 1 : j) * 16) : "memory");
      asm volatile("ldmatrix.sync.aligned.x2.m8n8.shared.b16 { %0, %1}, [%2];" : "=r"(y[h][0]), "=r"(y[h][1])
                   : "r"(left + h * 4160 ^ j * 16) : "memory");
    }
    float p[2][4] = {}, q[2][4] = {};
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) mma(p[h], {m[h][0], 0u, 0u, m[h][1]}, m[h][2], m[h][3]);
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) mma(q[h], {pack(p[h][0], p[h][1]), 0u, 0u, pack(p[h][2], p[h][3])}, y[h][0], y[h][1]);
    __syncwarp();
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) {
      const unsigned t = transposed(pack(q[k / 2][k % 2 * 2], q[k / 2][k % 2 * 2 + 1]) ^ 0x80008000u);
      const unsigned row = base(a) + k * 2080 + lane / 4 * 128 + lane % 4 * 4;
      asm volatile("st.shared.b32 [%0], %1;" :: "r"(row ^ (lane / 4 ^ 1) * 16), "r"(t) : "memory");
      asm volatile("st.shared.b32 [%0], %1;" :: "r"(row + 1024 ^ lane / 4 * 16), "r"(0) : "memory");
    }
    __syncwarp();
  }

  // All lanes have come here with what they read, which a store may overwrite. Without a clobber of memory, as __syncwarp has:
  // volatile statements keep their order by themselves.
  static __device__ void sync_warp() { asm volatile("bar.warp.sync 0xffffffff;"); }

  // The other blocks, from those on the diagonal, which lie transposed; these at last.
  static __device__ void rest(void *a, const void *scale, unsigned lane) {
    const unsigned plain = ldmatrix(a, lane), by_columns = ldmatrix_transposed(a, lane);
    // Block (1, 0), transposed as a second operand is.
    const Tile t10t = pack(product(minus(pack(product(load(plain, 0, 0), load(plain, 1, 0)))), load_transposed(by_columns, 1, 1)));
    sync_warp();
    store(a, scale, 1, 0, lane,
          sum(Tile{transposed(t10t.x[0]), transposed(t10t.x[2]), transposed(t10t.x[1]), transposed(t10t.x[3])}));
#pragma unroll
    for (unsigned r = 3; r > 1; --r) {  // row 3 reads what lies in row 2
      Sum y0, y1;
      {
        const Tile own = load_transposed(by_columns, r, r);
        y1 = product(own, load_transposed(by_columns, r, 1));
        y0 = product(own, load_transposed(by_columns, r, 0));
        if (r == 3) {
          const Sum s = product(minus(pack(product(own, load_transposed(by_columns, 3, 2)))), load(plain, 2, 2));
          const Tile t32 = pack(s);
          y1 = product(t32, load_transposed(by_columns, 2, 1), y1);
          y0 = product(t32, load_transposed(by_columns, 2, 0), y0);
          sync_warp();
          store(a, scale, 3, 2, lane, s);
        }
      }
      const Tile z1 = pack(y1), z0 = pack(y0);
      y1 = product(z1, load(plain, 1, 1));
      y0 = product(z1, t10t, product(z0, load(plain, 0, 0)));
      sync_warp();
      store(a, scale, r, 1, lane, y1, -1.f);
      store(a, scale, r, 0, lane, y0, -1.f);
    }
    const unsigned kept = !strict || lane / 8 != lane % 4 ? 0xffffffffu : lane / 4 % 2 ? 0x0000ffffu : 0xffff0000u;
#pragma unroll
    for (unsigned n = 0; n < 4; n += 2) {
      Tile x = load_transposed(by_columns, n, n), y = load_transposed(by_columns, n + 1, n + 1);
      if constexpr (strict) {
        x.x[0] &= kept, x.x[3] &= kept;
        y.x[0] &= kept, y.x[3] &= kept;
      }
      sync_warp();
      store(a, scale, n, n, lane, sum(x));
      store(a, scale, n + 1, n + 1, lane, sum(y));
    }
  }

  static __device__ void clear_above(void *a, unsigned lane) {
    const unsigned first = base(a) + lane / 2 * 128 + (lane % 2 ^ lane / 2 % 8) * 16;
#pragma unroll
    for (unsigned i = 0; i < 3; ++i)
#pragma unroll
      for (unsigned j = i + 1; j < 4; ++j)
        asm volatile("st.shared.v4.b32 [%0], { %1, %1, %1, %1};" :: "r"(at(first, i, j)), "r"(0) : "memory");
  }
};

template <bool bf16, bool scaled, bool strict> static __device__ void unit_lower_inverse(void *a, const void *scale) {
  using Inverse = UnitLowerInverse<bf16, scaled, strict>;
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // volatile: what follows from it is not kept from one iteration to the next
  Inverse::clear_above(a, lane);
  Inverse::diagonal(a, lane);
  Inverse::rest(a, scale, lane);
}

// Each of up to four tiles by another warp, from warp 0 on: one text of the above. All warps call it, so that a barrier that TileLang
// puts before is all warps' barrier.
template <bool bf16, bool scaled, bool strict> static __device__ void unit_lower_inverses(
    int warp, void *a, const void *s, void *b = nullptr, const void *t = nullptr, void *c = nullptr, const void *u = nullptr,
    void *d = nullptr, const void *v = nullptr) {
  if (warp >= 0 && warp < (c ? 4 : b ? 2 : 1))
    unit_lower_inverse<bf16, scaled, strict>(warp & 2 ? warp & 1 ? d : c : warp & 1 ? b : a, warp & 2 ? warp & 1 ? v : u : warp & 1 ? t : s);
}
"""


copy_cuda = T.copy
parallel_cuda = T.Parallel
shared_cuda = T.alloc_shared
shared_cpu = T.alloc_local
fragment_cuda = T.alloc_fragment
fragment_cpu = T.alloc_local
staged_cpu = T.alloc_local


@T.macro
def copy_cpu(src, dst):
    """A copy of a tile, element by element."""
    for i, j in T.grid(dst.shape[0], dst.shape[1]):
        dst[i, j] = src[i, j]


def async_parallel_cuda(*extents):
    """A loop over a tile in shared memory whose assignments are asynchronous copies from global memory, of up to 16 bytes each. A
    copy whose condition does not hold (`T.if_then_else` with 0) reads nothing and writes zeros, so that no thread waits in a
    branch. `commit_copy` follows. The annotations are those of TileLang's `T.Parallel(prefer_async=True)` and `T.async_copy`."""
    return T.Parallel(*extents, annotations={"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True})


def commit_copy_cuda():
    """End a group (cp.async.commit_group): `wait_copies` counts the copies that were started since the last group as one."""
    return T.ptx_commit_group()


@T.macro
def wait_copies_cuda(pending=0):
    """All threads wait for all asynchronous copies, but for so many that were started last."""
    T.ptx_wait_group(pending)
    T.sync_threads()


def wait_copies_cpu(pending=0):
    """Nothing: copies are complete where they stand."""


def parallel_cpu(*extents):
    """A loop over a tile, in order."""
    return T.serial(extents[0]) if len(extents) == 1 else T.grid(*extents)


def async_parallel_cpu(*extents):
    """A loop over a tile, in order."""
    return T.serial(extents[0]) if len(extents) == 1 else T.grid(*extents)


def commit_copy_cpu():
    """Nothing: copies are complete where they stand."""


@T.macro
def substituted(A, X, size, scale, strict):
    """Inverses of the `size` x `size` blocks of A, in X, by forward substitution. scale: a vector that multiplies the columns,
    or None. strict: without the ones of the diagonal."""
    x = T.alloc_local((size, size), T.float32)
    for n in T.serial(X.shape[0] // size):
        for i in T.serial(size):
            for j in T.serial(size):
                x[i, j] = T.if_then_else(i == j, 1.0, 0.0)
            for r, j in T.grid(i, size):
                x[i, j] -= T.cast(A[n * size + i, n * size + r], T.float32) * x[r, j]
        for i, j in T.grid(size, X.shape[1]):
            X[n * size + i, j] = 0.0
        for i, j in T.grid(size, size):
            X[n * size + i, n * size + j] = x[i, j] if scale is None else x[i, j] * scale[n * size + j]
        if strict:
            for i in T.serial(size):
                X[n * size + i, n * size + i] = 0.0


@T.macro
def inverted_by_warps(tiles, scales, strict, warp, warps):
    """Inverses of tiles, each by a warp, that of number 0 and the next; all warps come here. warps: how many take turns."""
    T.import_source(HELPERS)
    dtype = (tiles[0].buffer if hasattr(tiles[0], "region") else tiles[0]).dtype
    which = ("true" if x else "false" for x in (dtype == "bfloat16", scales[0] is not None, strict))
    each = [x for A, scale in zip(tiles, scales, strict=True)
            for x in (pointer(A, "rw"), T.reinterpret("handle", T.uint64(0)) if scale is None else pointer(scale, "r"))]
    for n in T.unroll(-(-len(tiles) // warps)):
        T.call_extern("handle", f"unit_lower_inverses<{', '.join(which)}>", n * warps + warp, *each)


def whole_inverses_cuda(tiles, scales, strict=False, thread=None, warp=0):
    """Inverses of one, two or four tiles of 64 x 64, in place, each by a warp. scales: for each tile, a vector that multiplies
    the columns, or None. strict: without the ones of the diagonal. thread: of those that share the work, None for those of the
    block. warp: of theirs, the one that inverts the first tile."""
    if thread is None:
        return inverted_by_warps(tiles, scales, strict, T.get_thread_binding() // 32, T.get_thread_extent() // 32)
    return inverted_by_warps(tiles, scales, strict, thread // 32 - warp, len(tiles))


def whole_inverses_cpu(tiles, scales, strict=False):
    """Inverses of tiles of 64 x 64, in place."""
    for A, scale in zip(tiles, scales, strict=True):
        substituted(A, A, 64, scale, strict)


def kernel_cuda(*grid, threads):
    """The grid of a kernel, with `threads` threads in a block."""
    return T.Kernel(*grid, threads=threads)


def kernel_cpu(*grid, threads):
    """The grid of a kernel, as loops."""
    return T.Kernel(*grid)


def staged_cuda(shape, dtype):
    """A tile in shared memory, swizzled."""
    x = T.alloc_shared(shape, dtype)
    T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x)})
    return x


def gemm_cuda(A, B, acc, transpose_A=False, transpose_B=False, clear_accum=True):
    """acc = A @ B, or acc + A @ B, on the matrix units. Warps share out rows first: TileLang 0.1.15 then has sums of columns of a
    product by mma.sync (GPUs before Hopper) with 64 rows. It has none if warps share out rows and columns, or of 128 rows."""
    return T.gemm(A, B, acc, transpose_A=transpose_A, transpose_B=transpose_B, policy=T.GemmWarpPolicy.FullRow,
                  clear_accum=clear_accum)


@T.macro
def widened(src, dst, transpose):
    """A copy in float32 and row-major, which the C compiler vectorises."""
    for i, j in T.grid(dst.shape[0], dst.shape[1]):
        dst[i, j] = T.cast(src[j, i] if transpose else src[i, j], T.float32)


@T.macro
def gemm_cpu(A, B, acc, transpose_A=False, transpose_B=False, clear_accum=True):
    """acc = A @ B, or acc + A @ B, in float32."""
    rows, cols, depth = int(acc.shape[0]), int(acc.shape[1]), int(A.shape[0 if transpose_A else 1])
    step = math.gcd(depth, 8)  # rows of B in one pass over a row of acc
    a = T.alloc_local((rows, depth), T.float32)
    b = T.alloc_local((depth, cols), T.float32)
    widened(A, a, transpose_A)
    widened(B, b, transpose_B)
    if clear_accum:
        for i, j in T.grid(rows, cols):
            acc[i, j] = 0.0
    for i, k in T.grid(rows, depth // step):
        for j in T.serial(cols):
            acc[i, j] = acc[i, j] + sum(a[i, k * step + r] * b[k * step + r, j] for r in range(step))


def expect_swizzled_cuda(x):
    """The kernel compiles only if a tile, or slots of one, lies as the helpers address it: where rows and columns 1, 2, 4... lie
    says where all of it does."""
    T.import_source(HELPERS)
    slot, (rows, columns) = (0,) * (len(x.shape) - 2), (int(n) for n in x.shape[-2:])
    for r, c in [(1 << n, 0) for n in range(rows.bit_length() - 1)] + [(0, 1 << n) for n in range(3, columns.bit_length() - 1)]:
        offset = c // 64 * rows * 64 + r * 64 + (c % 64 // 8 ^ r % 8) * 8
        first, place = (*slot, 0, 0), (*slot, r, c)
        T.evaluate(T.call_extern("handle", "expect_element", T.address_of(x[first]), T.address_of(x[place]), offset))


def expect_swizzled_cpu(x):
    """Nothing: there are no helpers that address tiles."""


def pointer(x, access):
    """The address of a buffer, or of a slot of one."""
    if not hasattr(x, "region"):
        return x.access_ptr(access)
    return x.buffer.access_ptr(access, offset=x.region[0].min * math.prod(int(n) for n in x.buffer.shape[1:]))


DEVICE_FUNCTIONS = {
    "cuda": SimpleNamespace(
        async_parallel=async_parallel_cuda, commit_copy=commit_copy_cuda, copy=copy_cuda,
        expect_swizzled=expect_swizzled_cuda, fragment=fragment_cuda, gemm=gemm_cuda, kernel=kernel_cuda,
        parallel=parallel_cuda, shared=shared_cuda, staged=staged_cuda, wait_copies=wait_copies_cuda,
        whole_inverses=whole_inverses_cuda),
    "cpu": SimpleNamespace(
        async_parallel=async_parallel_cpu, commit_copy=commit_copy_cpu, copy=copy_cpu,
        expect_swizzled=expect_swizzled_cpu, fragment=fragment_cpu, gemm=gemm_cpu, kernel=kernel_cpu,
        parallel=parallel_cpu, shared=shared_cpu, staged=staged_cpu, wait_copies=wait_copies_cpu,
        whole_inverses=whole_inverses_cpu),
}


# --- kernels: B batches of L tokens, or one of packed sequences that end at cu_seqlens --------------------------------
def o_S_kernel(t):
    B, L, H, HV, ends = T.dynamic("B, L, H, HV, ends")
    n_initial_state, n_final_state = T.dynamic("n_initial_state, n_final_state")

    @T.prim_func
    def o_S_kernel(
        q_in: T.Tensor((B, L, H, K), T.float16),
        k_in: T.Tensor((B, L, H, K), T.float16),
        v_in: T.Tensor((B, L, HV, V), T.float16),
        beta_in: T.Tensor((B, L, HV), T.float32),
        o_out: T.Tensor((B, L, HV, V), T.float16),
        initial_state_in: T.Tensor((n_initial_state, HV, K, V), T.float32),
        final_state_out: T.Tensor((n_final_state, HV, K, V), T.float32),
        cu_seqlens: T.Tensor((ends,), T.int32),
        batched: T.int32,
        has_initial_state: T.int32,
        has_final_state: T.int32,
        clear_o: T.int32,
        scale: T.float32,
    ):
        with t.kernel((ends - 1) * HV, threads=256) as instance:
            n = T.alloc_var(T.int32, init=T.truncdiv(instance, HV))
            hv = T.alloc_var(T.int32, init=instance - n * HV)
            h = T.alloc_var(T.int32, init=T.truncdiv(hv, T.truncdiv(HV, H)))
            b = n * batched
            start = cu_seqlens[n]
            length = cu_seqlens[n + 1] - start
            S = t.fragment((K, V), T.float32)
            q_then_U = t.shared((C, K), T.float16)
            k = t.shared((C, K), T.float16)
            v_then_beta_v_minus_k_S = t.shared((C, V), T.float16)
            beta = t.shared((C,), T.float32)
            k_kT = t.fragment((C, C), T.float32)
            beta_k_kT_f16 = t.fragment((C, C), T.float16)
            tile_C_C = t.staged((C, C), T.float16)
            S_f16 = t.shared((K, V), T.float16)
            k_S = t.fragment((C, V), T.float32)
            beta_v_minus_k_S_f16 = t.fragment((C, V), T.float16)
            U = t.fragment((C, V), T.float32)
            o_sum = t.fragment((C, V), T.float32)
            q_kT = t.fragment((C, C), T.float32)
            o_f16 = t.fragment((C, V), T.float16)
            o_f16_out = t.staged((C, V), T.float16)
            if clear_o != 0:
                row_end = T.if_then_else(batched == 0 and n + 1 == ends - 1, L - start, length)
                clear_begin = T.alloc_var(T.int32, init=length)
                clear_end = T.alloc_var(T.int32, init=row_end)
                for rest in T.serial(T.ceildiv(T.max(clear_end - clear_begin, 0), C)):
                    row = start - b * L + clear_begin + rest * C
                    rows = clear_end - clear_begin - rest * C
                    for i, j in t.parallel(C, V):
                        if i < rows:
                            o_out[b, row + i, hv, j] = 0
            for i, j in t.parallel(K, V):
                S[i, j] = T.if_then_else(has_initial_state != 0, initial_state_in[n, hv, i, j], 0)
            for chunk in T.serial(T.ceildiv(length, C)):
                row = start - b * L + chunk * C
                rows = length - chunk * C
                for i, j in t.async_parallel(C, K):
                    q_then_U[i, j] = T.if_then_else(i < rows, q_in[b, row + i, h, j], 0)
                t.commit_copy()
                for i, j in t.async_parallel(C, K):
                    k[i, j] = T.if_then_else(i < rows, k_in[b, row + i, h, j], 0)
                t.commit_copy()
                for i, j in t.async_parallel(C, V):
                    v_then_beta_v_minus_k_S[i, j] = T.if_then_else(i < rows, v_in[b, row + i, hv, j], 0)
                t.commit_copy()
                for i in t.async_parallel(C):
                    beta[i] = T.if_then_else(i < rows, beta_in[b, row + i, hv], 0)
                t.commit_copy()
                t.wait_copies()
                # Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T)))
                t.gemm(k, k, k_kT, transpose_B=True)
                for i, j in t.parallel(C, C):
                    beta_k_kT_f16[i, j] = beta[i] * k_kT[i, j]
                t.copy(beta_k_kT_f16, tile_C_C)
                t.expect_swizzled(tile_C_C)
                t.whole_inverses((tile_C_C,), (None,))
                t.copy(S, S_f16)
                # U = Tinv @ (beta[:, None] * (v - k @ S))
                t.gemm(k, S_f16, k_S)
                for i, j in t.parallel(C, V):
                    beta_v_minus_k_S_f16[i, j] = beta[i] * (
                        T.cast(v_then_beta_v_minus_k_S[i, j], T.float32) - k_S[i, j]
                    )
                t.copy(beta_v_minus_k_S_f16, v_then_beta_v_minus_k_S)
                t.gemm(tile_C_C, v_then_beta_v_minus_k_S, U)
                # o = scale * (q @ S + lower(q @ k.T) @ U)
                t.gemm(q_then_U, S_f16, o_sum)
                t.gemm(q_then_U, k, q_kT, transpose_B=True)
                for i, j in t.parallel(C, C):
                    tile_C_C[i, j] = T.if_then_else(i >= j, q_kT[i, j], 0.0)
                t.copy(U, q_then_U)
                t.gemm(tile_C_C, q_then_U, o_sum, clear_accum=False)
                # S = S + k.T @ U
                t.gemm(k, q_then_U, S, transpose_A=True, clear_accum=False)
                # o = scale * (q @ S + lower(q @ k.T) @ U)
                for i, j in t.parallel(C, V):
                    o_f16[i, j] = scale * o_sum[i, j]
                t.copy(o_f16, o_f16_out)
                for i, j in t.parallel(C, V):
                    if i < rows:
                        o_out[b, row + i, hv, j] = o_f16_out[i, j]
            if has_final_state != 0:
                for i, j in t.parallel(K, V):
                    final_state_out[n, hv, i, j] = S[i, j]

    return o_S_kernel


# --- host: the same text in every generated module -------------------------------------------------------------------
@dataclass(frozen=True)
class PartCost:
    """The cost of parts of a sequence that run side by side, from which the number of parts follows.

    chunk_us: microseconds in which a walk does one chunk.
    fold_us: microseconds in which one part's summary is applied to the state.
    launch_us: microseconds of one kernel for summaries, besides its chunks, where all parts need them; idle_us: of one that finds
      that none is needed.
    split_us: microseconds that parts with warm-ups cost besides their chunks: kernels that bound the length of warm-ups, and the
      longer start of a walk.
    summary_us: microseconds in which one chunk is summed up.
    warm_up_chunks: length of the warm-up that a part's walk has on average, in chunks.
    longest_warm_up_chunks: how many more chunks the longest warm-up of a sequence has.
    least_part_chunks: in parts of fewer chunks some heads need summaries.
    resident: walks that one multiprocessor runs at a time.
    start_chunks: what a walk costs besides its chunks, in chunks: its first loads, and its final state.
    warm_up_limit: in a call with summaries the longest warm-up has this many chunks more than a part. A longer one takes more
      time than summaries.
    crowded: how many times its chunks' time a part takes where there are more parts of uneven sequences than the GPU runs at a
      time. Warm-ups of the heads that forget slowly then delay other parts.
    """

    chunk_us: float
    fold_us: float
    launch_us: float
    split_us: float
    summary_us: float
    warm_up_chunks: float
    longest_warm_up_chunks: float
    least_part_chunks: float
    resident: int
    idle_us: float
    crowded: float
    start_chunks: float = 0.0
    warm_up_limit: int = 50


@dataclass
class NativeCall:
    """A call as data, for the native launcher (runtime/call/native_launcher.py).

    sources: for each tensor of `Tables.tensors`, where it comes from: ("given", its index in (*given, *states, *outs, *buffers,
      indices), the shape that kernels see), ("fixed", the tensor), ("result", a tensor like it, the shape that kernels see) or
      ("workspace", a tensor like it).
    launches: (launch, indices of its tensors in `Tables.tensors`, indices of its numbers in `Tables.scalars`).
    rows: makes cu_seqlens for rows of equal length, for calls without it.
    """

    sources: list[tuple[Any, ...]]
    launches: list[tuple[Any, list[int], list[int]]]
    rows: Callable[[], Any]


@dataclass(frozen=True)
class Tables:
    """The facts of a build. A row of a tensor begins with its name. Dims are those of one tile. Dtypes are torch's names.

    name: the name of the build. function: the name of the generated function. chunk: tokens of a chunk. layout: "bthd" or
    "bhtd". dtype: the dtype of input tiles.
    inputs: (name, "H" or "HV", dims after [batch, tokens, heads], dtype).
    head_inputs: (name, default, dims after [value heads], dtype): one number or vector for each value head. The default is None
    if the caller must give it.
    chunk_inputs: (name, dims, dtype): one tile for each chunk slot and value head, such as the state before each chunk.
    chunk_dims: for each of chunk_inputs and saved, the extents of its tiles without padding, in the page's order. None stands for
    the tokens of a chunk. held: those of chunk_inputs whose rows past a sequence's end repeat the last one, as running sums do.
    sums: those that are running sums of rows -> the name of what is summed, and whether a token's sum leaves out its own row.
    initial, final: (name, dims): one tile of `state_dtype` for each sequence and value head.
    checkpoints: (name, dims): one tile of `state_dtype` for each checkpoint and value head. rows: they lie in rows of the
    caller's memory, one row for each sequence and one tile for each token. slots: they lie in the pool. positions: they lie in
    rows of the caller's memory, one tile each, which `checkpoint_rows` gives for each chunk.
    outputs: (name, dims after [batch, tokens, value heads], dtype).
    workspaces: (name, dims, dtype): one tile for each chunk slot and value head. saved: those that a call returns. zeroed: those
    of saved that callers add up over all slots: a gradient's shares by chunk. The host clears them first.
    backward: chunks are walked from the last to the first.
    end_workspaces: one tile for each sequence and value head. counters: (name,): one integer. declined: the counter that is not
    zero if the first of two builds has declined a call; both run only in a pair. shared: (name,), if all tiles between kernels
    and cores lie in one workspace, which the launcher divides. places: (name,), if kernels choose the chunks of parts.
    part_workspaces: one tile for each part and value head.
    indices: names of the tensors of integers: pool slots and the like. by_token: those with an integer for each token.
    scalars: the caller's numbers and their defaults. A default is None if the caller must give the number.
    kernels: (name, grid: one instance for each of "chunks", "parts" or "sequences", blocks of a split dim, tensors, numbers).
    ints: for each kernel, the integers that it gets besides the sizes.
    heads: head counts compiled in, by name. heads_per_instance: value heads of a key head that one kernel instance handles.
    units: elements that divide the strides of a tensor. Kernels get strides in these units. The default is 1.
    pool: states are slots of a pool. in_place: the final state overwrites the initial state. strided: kernels get strides.
    cleared: kernels clear rows that no sequence covers, if the host asks for it.

    part_cost: the cost model that gives the number of parts that run side by side; None for a build without such. pipelined: True
    if kernels are launched once for each part, one part after the other. part_chunks: chunks of a part, 0 to choose. most: the
    most parts that a warm-up may reach back. summaries: kernels that compute summaries of parts. bounds: kernels that bound the
    length of a warm-up. They run in calls with several parts; with `declined` in all calls, as one of them clears the counter.
    warm_ups: True if the length of a warm-up is found at run time. forgets: the one of chunk_inputs of which it is found.

    decays: inputs that are logs of decays. state: "kv" or "vk",
    the order of a state's dims. tf32: True if a GPU multiplies float32 as tf32. check_chunks: chunks of the longest sequence of
    the self-check.
    """

    #: The fields whose tensors a call holds, in this order. `indices` come last.
    ORDER: ClassVar[tuple[str, ...]] = ("inputs", "head_inputs", "chunk_inputs", "initial", "final", "checkpoints", "outputs",
                                        "workspaces", "end_workspaces", "counters", "shared", "places", "part_workspaces")

    name: str
    function: str
    chunk: int
    layout: str
    dtype: str
    inputs: tuple[tuple[str, str, tuple[int, ...], str], ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    kernels: tuple[tuple[str, str, int, tuple[str, ...], tuple[str, ...]], ...]
    ints: Mapping[str, tuple[str, ...]]
    scalars: Mapping[str, float | None] = field(default_factory=dict)
    head_inputs: tuple[tuple[str, float | None, tuple[int, ...], str], ...] = ()
    chunk_inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    initial: tuple[tuple[str, tuple[int, ...]], ...] = ()
    final: tuple[tuple[str, tuple[int, ...]], ...] = ()
    checkpoints: tuple[tuple[str, tuple[int, ...]], ...] = ()
    workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    saved: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    chunk_dims: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    sums: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    backward: bool = False
    end_workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    counters: tuple[tuple[str], ...] = ()
    declined: str = ""
    shared: tuple[tuple[str], ...] = ()
    places: tuple[tuple[str], ...] = ()
    part_workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    indices: tuple[str, ...] = ()
    by_token: tuple[str, ...] = ()
    rows: bool = False
    slots: bool = False
    positions: bool = False
    heads: Mapping[str, int] = field(default_factory=dict)
    heads_per_instance: int = 1
    units: Mapping[str, int] = field(default_factory=dict)
    state: str = "kv"
    state_dtype: str = "float32"
    pool: bool = False
    in_place: bool = False
    strided: bool = False
    cleared: bool = False
    part_cost: PartCost | None = None
    pipelined: bool = False
    part_chunks: int = 0
    most: int = 0
    summaries: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    warm_ups: bool = False
    forgets: str = ""
    decays: tuple[str, ...] = ()
    tf32: bool = False
    check_chunks: int = 3

    @property
    def in_parts(self) -> bool:
        """Whether kernels run over parts of sequences."""
        return self.part_cost is not None or self.pipelined

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of a call's tensors, in the order in which the host holds them."""
        return (*(row[0] for rows in self.ORDER for row in getattr(self, rows)), *self.indices)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Those of `indices` that the caller gives."""
        return tuple(n for n in self.indices if n != "final_indices")

    def place(self, rows: str) -> slice:
        """The slice of `tensors` that belongs to the field `rows`."""
        before = self.ORDER[:self.ORDER.index(rows)]
        first = sum(len(getattr(self, n)) for n in before)
        return slice(first, first + len(getattr(self, rows)))

    @property
    def outs(self) -> tuple[str, ...]:
        """Names of the arguments for the caller's output memory."""
        return ("out",) if len(self.outputs) == 1 else tuple(f"out_{row[0]}" for row in self.outputs)

    def kernel(self, name: str) -> tuple[str, str, int, tuple[str, ...], tuple[str, ...]]:
        """The row of a kernel."""
        return next(row for row in self.kernels if row[0] == name)


_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_kept: dict[Any, torch.Tensor] = {}
_counts: dict[Any, torch.Tensor] = {}


def _fail(argument: str, got: object, accepted: str) -> NoReturn:
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


# --- what kernels can read -------------------------------------------------------------------------------------------
def _is_transformed() -> bool:
    """Whether tensors of torch.func's transforms, or dual ones, may be among those of a call."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def _check_memory(name: str, x: torch.Tensor) -> None:
    """A dense tensor whose values are those in its memory, because kernels see memory alone."""
    if x.is_nested or x.layout != torch.strided:
        _fail(name, "a nested tensor" if x.is_nested else x.layout, "a dense tensor")
    if torch.compiler.is_compiling():
        return
    if torch._C._is_tracing():
        _fail(name, "a tensor of torch.jit.trace, which does not see kernels", "a call under torch.compile or torch.export")
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        _fail(name, "a tensor of vmap, grad, jvp or another transform", "a plain tensor: backward() and torch.autograd.grad "
              "differentiate the op, transforms do not")
    if torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        _fail(name, "a dual tensor of forward-mode differentiation", "its primal, because the op computes gradients only")
    if x.is_neg():
        _fail(name, "a view with torch's negative bit", "x.resolve_neg(), which copies it")


# --- numbers ---------------------------------------------------------------------------------------------------------
def _python_number(x: Any) -> Any:
    """The int or float that a scalar of numpy holds, or an array or tensor of rank 0 on the CPU. `x` itself if it is anything
    else: also a tensor whose value a trace does not know, or whose gradient the number would lose."""
    if type(x) in (int, float) or x is None:
        return x
    if isinstance(x, torch.Tensor):
        if type(x) is not torch.Tensor or x.ndim or x.device.type != "cpu" or x.requires_grad or _is_transformed():
            return x
        seen = torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack()
        return x if seen else x.item()
    kind = getattr(getattr(x, "dtype", None), "kind", "") if getattr(x, "ndim", None) == 0 else ""
    return float(x) if kind == "f" else int(x) if kind in ("i", "u") else x


def _integer(x: Any) -> Any:
    """The int that an integer of numpy holds, `x` itself if it is anything else. What a call decides by its options is kept, so
    arrays and tensors, whose values may change, are no options."""
    if type(x) is int or x is None or isinstance(x, torch.Tensor) or type(x).__hash__ is None:
        return x
    return _python_number(x)


# --- strides and copies ----------------------------------------------------------------------------------------------
def _is_apart(x: torch.Tensor) -> bool:
    """True if no two indices of `x` share an element: the stride of each dim exceeds the reach of all finer dims."""
    reach = 1
    for far, n in sorted((far, n) for far, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if far < reach:
            return x.numel() == 0
        reach += far * (n - 1)
    return True


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    out, far = [], 1
    for n in reversed(shape):
        out.append(far)
        far *= n or 1
    return tuple(reversed(out))


def _is_plain(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if `x` has this dtype and the strides of a contiguous tensor."""
    return x.dtype == dtype and x.stride() == _dense(x.shape)


def _plain(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`, contiguous, aligned to 16 bytes and with the strides of its shape: torch does not normalise those of
    size 1."""
    x = x.to(dtype).contiguous()
    return (x.clone() if x.data_ptr() % 16 else x).view(-1).view(x.shape)


def _flat(name: str, x: torch.Tensor) -> torch.Tensor:
    """A pool as a flat view of its elements from the first to the last, with the gaps between slots."""
    if x.data_ptr() % 16:
        _fail(name, f"an address of {x.data_ptr() % 16} past a multiple of 16 bytes", "memory aligned to 16 bytes")
    slots, each = x.shape[0], math.prod(x.shape[1:])
    return x.as_strided((min(slots, 1) * ((slots - 1) * x.stride(0) + each),), (1,))


def _steps(strides: Sequence[int], layout: str) -> tuple[int, ...]:
    """The strides of batch, token and head, in elements."""
    return strides[0], *(strides[1:3] if layout == "bthd" else strides[2:0:-1])


def _is_elsewhere(device: torch.device) -> bool:
    """True if `device` is a CUDA device other than the current one."""
    return device.type == "cuda" and torch._C._cuda_getDevice() != device.index


# --- tensors that a call makes ---------------------------------------------------------------------------------------
#: `_new(x)`: an uninitialised tensor with the shape, dtype and device of `x`. With `_kin(...)` as `x` it takes half the time of
#: `torch.empty`.
_new = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that calls share, in inference mode or not. Kernels do not write to it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _kin(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A one-element tensor expanded to a shape: an argument for `_new`."""
    return _made((1,), dtype, device).expand(shape)


def _stream(device: torch.device) -> Any:
    """The current stream: its address if torch gives it, because the object costs 4 us."""
    address = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return address(device.index) if address else torch.cuda.current_stream(device)


def _filled(make: Callable[..., torch.Tensor], *about: Any) -> torch.Tensor:
    """The tensor make(*about). Calls on one stream share it. The last item of `about` is the device. A captured graph makes a
    tensor of its own, and fills it each time it runs."""
    cuda = about[-1].type == "cuda"
    key = (make, *about, _stream(about[-1]) if cuda else None)
    kept = not (cuda and torch.cuda.is_current_stream_capturing())
    x = _kept.get(key) if kept else None
    if x is None:
        x = make(*about)
        if kept:
            if len(_kept) >= 64:
                _kept.clear()
            _kept[key] = x
    return x


def _equal_rows(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """cu_seqlens of rows of equal length: int32 [batch + 1]."""
    if not tokens:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)


def _unread_rows(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """In place of cu_seqlens of equal rows, for kernels over single tokens: they compute it, and do not read this. So a captured
    graph does not fill it."""
    return torch.empty(batch + 1, dtype=torch.int32, device=device)


def _in_order(count: int, device: torch.device) -> Any:
    """The numbers 0, 1, ... as int32 [count]. All streams and captured graphs share them, so they are never freed. None while a
    graph is captured and they do not exist."""
    size = max(1024, 1 << (count - 1).bit_length())
    if (size, device) not in _counts:
        cuda = device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            _counts[size, device] = torch.arange(size, dtype=torch.int32, device=device)
        if cuda:
            torch.cuda.current_stream(device).synchronize()
    return _counts[size, device][:count]


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def _picker(at: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks the tensors at these indices, as a tuple. `itemgetter` is faster, but gives a single item bare."""
    return operator.itemgetter(*at) if len(at) > 1 else lambda memory: tuple(memory[i] for i in at)


#: What the integers of a tensor say.
_WHAT = {"state_indices": "slot", "num_accepted_tokens": "number", "intermediate_state_indices": "row",
         "retrieve_parent_token": "parent", "checkpoint_rows": "row"}
_ANY_FLOAT = tuple(_FLOATS.values())
_LARGEST = torch.finfo(torch.float32).max


# --- one argument ----------------------------------------------------------------------------------------------------
def _check_tensor(name: str, x: Any) -> None:
    """A tensor, whatever its dtype."""
    if not isinstance(x, torch.Tensor):
        _fail(name, type(x).__name__, "a torch.Tensor")


def _check_dtype(name: str, dtype: Any, accepted: Sequence[torch.dtype], why: str = "") -> None:
    """One of some dtypes. why: what the text adds to them."""
    if dtype not in accepted:
        _fail(name, dtype, ", ".join(map(str, accepted)) + why)


def _check_built_for(name: str, x: Any, dtype: str, number: bool) -> None:
    """A tensor of `dtype`. number: one value for each token or head. 16-bit ones are accepted where the module takes float32."""
    _check_tensor(name, x)
    widens = number and dtype == "float32"
    _check_dtype(name, x.dtype, *((_ANY_FLOAT,) if widens else ((_FLOATS[dtype],), " (this module was built for it)")))


def _check_integers(name: str, x: Any) -> None:
    """A tensor of integers."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64):
        _fail(name, getattr(x, "dtype", type(x).__name__), "an int32 or int64 tensor")


def _check_rank(name: str, x: torch.Tensor, rank: int, layout: str) -> None:
    """A tensor of so many dims."""
    if x.ndim != rank:
        _fail(name, f"rank {x.ndim}", f"rank {rank}, layout {layout}")


def _check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    """A tensor on this device."""
    if x.device != device:
        _fail(name, f"device {x.device}", f"device {device}")


def _check_number(name: str, x: Any) -> float:
    """`x` as a float. A tensor on a GPU is refused, because reading it would wait for its device."""
    number = _python_number(x)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        _fail(name, type(x).__name__, "a number, or None")
    if not abs(number) <= _LARGEST:
        _fail(name, number if isinstance(number, float) else f"an int of {len(str(number))} digits",
              "a number that float32 holds")
    return float(number)


def _check_flag(name: str, x: Any) -> bool:
    """`x`, which must be True or False."""
    if x is not True and x is not False:
        _fail(name, type(x).__name__ if isinstance(x, torch.Tensor) else repr(x), "True or False")
    return bool(x)


def _check_chunks(name: str, x: Any, least: int) -> int:
    """`x` as a number of chunks."""
    chunks = _integer(x)
    if isinstance(chunks, bool) or not isinstance(chunks, int) or not least <= chunks < 2**31:
        _fail(name, repr(x), f"a number of chunks from {least} to {2**31 - 1}")
    return chunks


def _check_given(tensors: Iterable[tuple[str, Any]]) -> None:
    """No tensor that kernels cannot read, and none that requires grad where torch records. tensors: (name, tensor or None)."""
    recorded, seen = torch.is_grad_enabled(), _is_transformed() or torch._C._is_tracing()
    for name, x in tensors:
        if isinstance(x, torch.Tensor):
            if recorded and x.requires_grad:
                _fail(name, "a tensor that requires grad", "inference only: call under torch.no_grad(), or detach it")
            if seen or x.is_neg() or x.is_nested or x.layout != torch.strided:  # each call waits for these
                _check_memory(name, x)


# --- the arguments of a call -----------------------------------------------------------------------------------------
def _check_inputs(given: Sequence[Any], inputs: Sequence[tuple[str, str, tuple[int, ...], str]],
                  head_inputs: Sequence[tuple[str, float | None, tuple[int, ...], str]], layout: str, compiled: Mapping[str, int],
                  batched: int) -> tuple[int, int, int, int, torch.device]:
    """B, T, H, HV and the device of a call's inputs.

    given: a tensor for each row of `inputs`, [B, T, heads, ...] or [B, heads, T, ...] by `layout`, then one [HV, ...] or None for
      each row of `head_inputs`. compiled: head counts that the kernels have, by name. batched: value heads of a key head that
      one kernel instance handles.
    """
    seen: dict[str, int] = {}
    device = getattr(given[0], "device", None)
    for (name, heads, dims, dtype), x in zip(inputs, given, strict=False):
        _check_built_for(name, x, dtype, not dims)
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {inputs[0][0]}")
        tokens, head = (1, 2) if layout == "bthd" else (2, 1)
        _check_rank(name, x, 3 + len(dims), layout)
        if tuple(x.shape[3:]) != dims:
            _fail(name, f"shape {tuple(x.shape)}", f"last dim {dims[0]} (this module was built for it)")
        if compiled and x.shape[head] != compiled[heads]:
            _fail(name, f"shape {tuple(x.shape)}", f"{heads} = {compiled[heads]} heads (this module was built for them)")
        for key, size in (("B", x.shape[0]), ("T", x.shape[tokens]), (heads, x.shape[head])):
            if seen.setdefault(key, size) != size:
                _fail(name, f"shape {tuple(x.shape)}", f"{key} = {seen[key]}, as the inputs before it have")
    value_heads = seen.get("HV", seen.get("H", 0))
    key_heads = seen.get("H", value_heads)
    if min(key_heads, value_heads) < 1 or value_heads % key_heads:
        _fail("heads", f"H = {key_heads}, HV = {value_heads}", "HV a multiple of H, both at least 1")
    if value_heads // key_heads % batched:
        _fail("heads", f"H = {key_heads}, HV = {value_heads}",
              f"HV a multiple of {batched} H: an instance of this module has {batched} value heads of one key head")
    for (name, default, dims, dtype), x in zip(head_inputs, given[len(inputs):], strict=False):
        if x is None and default is not None:
            continue
        _check_built_for(name, x, dtype, True)
        if tuple(x.shape) != (value_heads, *dims):
            _fail(name, f"shape {tuple(x.shape)}",
                  f"shape {(value_heads, *dims)}, one {'vector' if dims else 'number'} for each value head")
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {inputs[0][0]}")
    return seen["B"], seen["T"], key_heads, value_heads, given[0].device


def _check_sequences(cu_seqlens: Any, batch: int, device: torch.device) -> int:
    """The number of sequences in cu_seqlens."""
    _check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        _fail("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "shape [N + 1] with N >= 1")
    _check_device("cu_seqlens", cu_seqlens, device)
    if batch != 1:
        _fail("cu_seqlens", f"inputs with B = {batch}", "inputs with B = 1, because cu_seqlens packs the sequences into one row")
    sequences: int = cu_seqlens.numel() - 1
    return sequences


def _check_ends(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Check the values of cu_seqlens. On a GPU this waits for the device."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > tokens or any(a > b for a, b in itertools.pairwise(ends)):
        _fail("cu_seqlens", ends if len(ends) < 12 else f"{ends[:5]} ... {ends[-3:]}",
              f"values that start at 0, never fall and end at most at T = {tokens}")


def _check_state(name: str, x: Any, shape: tuple[int, ...], device: torch.device, dtypes: Sequence[torch.dtype],
                 written: bool = False) -> None:
    """Check a state [N, HV, ...]. written: True if the call writes to it. Then no two indices may share an element."""
    _check_tensor(name, x)
    if tuple(x.shape) != shape:
        _fail(name, tuple(x.shape), f"shape {shape}")
    _check_dtype(name, x.dtype, dtypes)
    _check_device(name, x, device)
    if written and not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "elements that do not overlap")


def _check_pool(name: str, x: Any, tile: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> int:
    """Elements from one slot to the next of a pool [slots, *tile]. There may be gaps between slots. Each slot has to be dense and
    aligned to 16 bytes."""
    _check_tensor(name, x)
    if tuple(x.shape[1:]) != tile or x.ndim != 1 + len(tile):
        _fail(name, tuple(x.shape), f"shape [slots, {', '.join(map(str, tile))}]")
    _check_dtype(name, x.dtype, (dtype,))
    _check_device(name, x, device)
    dense, size = _dense(tile), math.prod(tile)
    inner = tuple(own if n == 1 else given for n, own, given in zip(tile, dense, x.stride()[1:], strict=True))
    stride = size if x.shape[0] < 2 else x.stride(0)
    if inner != dense or stride < size or stride * x.element_size() % 16:
        _fail(name, f"strides {x.stride()}", f"strides (n, {', '.join(map(str, dense))}), n at least {size} and "
                                             "n elements a multiple of 16 bytes")
    return stride


def _check_indices(name: str, indices: Any, sequences: int, device: torch.device, least: int = -1) -> None:
    """Check a tensor of integers: one for each sequence, or `least` or more for each if that is not -1."""
    _check_integers(name, indices)
    shape = tuple(indices.shape)
    if least < 0 and shape != (sequences,):
        _fail(name, f"shape {shape}", f"shape ({sequences},), one {_WHAT[name]} for each sequence")
    if least >= 0 and not (indices.ndim == 2 and shape[0] == sequences and shape[1] >= least):
        _fail(name, f"shape {shape}", f"shape ({sequences}, {least} or more), one {_WHAT[name]} for each token of each sequence")
    _check_device(name, indices, device)


def _check_rows(name: str, x: Any, tile: tuple[int, ...], tokens: int, device: torch.device, dtype: torch.dtype) -> int:
    """Elements from one row to the next of a buffer [rows, tokens or more, *tile] for states by token."""
    _check_tensor(name, x)
    if x.ndim != 2 + len(tile) or tuple(x.shape[2:]) != tile or x.shape[1] < tokens:
        _fail(name, f"shape {tuple(x.shape)}", f"shape [rows, {tokens} or more, {', '.join(map(str, tile))}]")
    return _check_pool(name, x, tuple(x.shape[1:]), device, dtype)


def _check_slots(seen: Sequence[int], name: str, slots: int, written: bool) -> None:
    """Check the values of a tensor with the slot or row of each sequence. written: True if states are written there. Sequences
    run side by side, so two of them would race for one slot. They may share a slot that is only read."""
    what = _WHAT[name]
    if any(not -1 <= i < slots for i in seen):
        _fail(name, seen if len(seen) < 12 else f"{seen[:5]} ... {seen[-3:]}",
              f"{what}s from 0 to {slots - 1}, or -1 to skip a sequence")
    owner: dict[int, int] = {}
    for n, i in enumerate(seen):
        if written and i >= 0 and owner.setdefault(i, n) != n:
            _fail(name, f"{what} {i} for sequences {owner[i]} and {n}",
                  f"a different {what} for each sequence whose state is written, or -1 to skip a sequence")


def _check_accepted(accepted: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
    """Check the values of num_accepted_tokens. slots: those of each sequence."""
    for n, (count, own) in enumerate(zip(accepted, slots, strict=True)):
        if not 1 <= count <= len(own):
            _fail("num_accepted_tokens", f"{count} for sequence {n}", f"1 to {len(own)}, as many as state_indices has slots")


def _check_slots_by_token(slots: Sequence[Sequence[int]], first: Sequence[int], lengths: Sequence[int], pool: int, written: bool
                          ) -> None:
    """Check the values of state_indices [N, tokens]. first: the slot of each sequence's initial state. written: True if states
    are written to the slots. Then no other token may write a slot, and no other sequence may start from it."""
    owner: dict[int, tuple[int, int]] = {}
    for n, (own, at, length) in enumerate(zip(slots, first, lengths, strict=True)):
        if length > len(own):
            _fail("state_indices", f"{len(own)} slots for the {length} tokens of sequence {n}", "a slot for each token")
        for i in (at, *own[:length]):
            if not -1 <= i < pool:
                _fail("state_indices", f"slot {i} for sequence {n}", f"slots from 0 to {pool - 1}, or -1")
        for t, i in enumerate(own[:length] if written else ()):
            if i >= 0 and owner.setdefault(i, (n, t)) != (n, t):
                _fail("state_indices", f"slot {i} for token {owner[i][1]} of sequence {owner[i][0]} and token {t} of {n}",
                      "a different slot for each token of each sequence, or -1 to store no state")
    for n, at in enumerate(first):
        if at in owner and owner[at][0] != n:
            _fail("state_indices", f"slot {at}, from which sequence {n} starts, for a token of sequence {owner[at][0]}",
                  "a different slot for each token of each sequence")


def _check_parents(parents: Sequence[Sequence[int]], lengths: Sequence[int], kept: Sequence[Sequence[bool]]) -> None:
    """Check the values of retrieve_parent_token. kept: for each token of each sequence, whether its state is stored. The parent
    of a first token is not read."""
    for n, (own, length, there) in enumerate(zip(parents, lengths, kept, strict=True)):
        if length > len(own):
            _fail("retrieve_parent_token", f"{len(own)} parents for {length} tokens of sequence {n}", "a parent for each token")
        for t in range(1, length):
            if not -1 <= own[t] < t or (0 <= own[t] < t - 1 and not there[own[t]]):
                _fail("retrieve_parent_token", f"{own[t]} for token {t} of sequence {n}",
                      f"an earlier token whose state is stored, from 0 to {t - 1}, or -1 for the initial state")


def _check_out(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Check the caller's memory for an output."""
    _check_tensor(name, x)
    if tuple(x.shape) != shape:
        _fail(name, tuple(x.shape), f"shape {shape}")
    if x.dtype != dtype or x.device != device:
        _fail(name, f"{x.dtype} on {x.device}", f"{dtype} on {device}")
    if x.stride(-1) != 1 or not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "a last dim that is dense, and elements that do not overlap")


def _check_buffers(buffers: Sequence[Any], shapes: Sequence[tuple[str, tuple[int, ...], Any]], device: torch.device,
                   dtype: torch.dtype) -> list[bool]:
    """Check callers' buffers for results with these names and shapes. Returns, for each, True if kernels can use it directly."""
    for x, (name, shape, _) in zip(buffers, shapes, strict=True):
        if x is not None:
            _check_state(name, x, shape, device, (dtype,), written=True)
    return [x is None or _is_plain(x, dtype) for x in buffers]


#: How much of the longest walk the last of uneven walks takes after the rest have ended. Fitted to 32 packs on an H100.
TAIL = 0.4
#: Where kernels choose the chunks of a part, a call has kernels for summaries if a sequence may have more chunks than the limit
#: of warm-ups (`warm_up_limit`) times this. Without them a head that forgets nothing warms up from the start of its sequence. Of
#: packs with a sequence of 52 to 69 chunks on an H200, calls without them took 0.78 to 0.91 times as long with gates as a layer
#: draws them, and 0.90 to 1.66 times where a quarter of the heads forgot slowly.
ALL_WARMED = 1.5
#: The most sequences whose lengths a kernel compares to choose the parts. With more it would take as long as a few chunks.
COMPARED = 256
#: Where kernels choose the chunks of a part, they choose at least so many that parts fill the GPU once, and of long sequences
#: FINEST times, with LONG chunks or more. The host launches instances for the shortest parts, and so many as run at a time take a
#: microsecond if they have no part.
FINEST, LONG = 3, 32
#: How many parts that follow one another a sequence has, and the least chunks of one.
PIPELINED, LEAST_PIPELINED = 3, 16


@dataclass(frozen=True)
class _Lengths:
    """What a host knows of the sequences of a call, in chunks.

    longest: the longest sequence. others, rest: how many others there are, and how long each of them is. possible: the longest
    that summaries may be needed for. The values of cu_seqlens may change after the choice, so that is one with all tokens, except
    where kernels choose the chunks of a part (`chosen`).
    """

    longest: int
    others: int
    rest: float
    possible: int
    chosen: bool = False


def _lengths(tokens: int, sequences: int, packed: bool, longest: int, chunk: int, chosen: bool = False) -> _Lengths:
    """What is known of `sequences` sequences with so many tokens in all.

    packed: whether they may differ in length. longest: tokens of the longest, 0 if the host does not know. A pack then counts as
    one sequence of all tokens: a long one is split whatever the others are. Otherwise the others have the same length. So do
    all if the longest, which may be a little more, is at most an eighth longer than the mean. chosen: whether kernels choose the
    chunks of a part.
    """
    possible = max(1, -(-tokens // (chunk if packed else chunk * sequences)))
    if not packed:
        return _Lengths(possible, sequences - 1, possible, possible)
    if not longest or sequences == 1:
        return _Lengths(possible, 0, 0, possible, chosen and sequences > 1)
    if 8 * longest * sequences <= 9 * tokens:
        mean = -(-tokens // (chunk * sequences))
        return _Lengths(mean, sequences - 1, mean, -(-longest // chunk) if chosen else possible, chosen)
    longest = min(tokens, longest)
    chunks = -(-longest // chunk)
    rest = max(1, (tokens - longest) / (chunk * (sequences - 1)) + .5)  # the last chunk of a sequence is half full on average
    return _Lengths(chunks, sequences - 1, rest, chunks if chosen else possible, chosen)


def _needs_summaries(chunks: int, span: int, most: int, cost: PartCost, chosen: bool = False) -> bool:
    """True if a call with a sequence of `chunks` chunks has kernels for summaries: warm-ups may take more time than these.

    That is so if a whole part may begin later than the longest warm-up reaches. span: chunks of a part. most: the longest
    warm-up, in parts. chosen: whether kernels choose the chunks of a part; then the length of the sequence decides (ALL_WARMED).

    Results are right in any case. Without summaries a warm-up may reach back to the start of the sequence, however far that is.
    """
    if chosen:
        return chunks > ALL_WARMED * cost.warm_up_limit
    return chunks - span > min(most * span, span + cost.warm_up_limit)


def _split_parts(parts: int, tokens: int, size: int) -> int:
    """Of the parts of a pack, how many belong to sequences of several parts, at most. size: the fewest tokens of a
    part. Such a sequence has more, and so fewer than 2 parts for each `size` of them. Where kernels choose parts, these come
    first (choose_parts.cuh)."""
    return min(parts, max(1, 2 * tokens // size))


def _cheapest_span(x: _Lengths, instances: int, units: int, cost: PartCost, summaries: int, most: int, warms_up: bool
                   ) -> int | None:
    """The number of chunks of a part with the least `cost`; None for no parts. It tries parts that fill the GPU up to four times.

    instances: kernel instances of a part. units: instances that the GPU runs at a time.
    most: the longest warm-up, in parts. summaries: the number of kernels that a call launches for summaries.
    warms_up: True if the walk of a part may start with a warm-up. Otherwise each part needs a summary of the parts before it.
    """
    sequences, chunks, even = 1 + x.others, x.longest + x.others * x.rest, x.others == 0 or x.rest == x.longest

    def makespan(walk: float, walks: int, total: float, crowded: float = 1.0) -> float:
        """Chunks until all walks have ended. The longest one has `walk` chunks, all have `total` times `instances`.

        Equal walks run in waves. Of others, the last one to start ends a part of a walk after the rest. Equal parts of several
        sequences that run in waves are `crowded`, too.
        """
        waves = -(-walks * instances // units)
        if even:
            return waves * walk * (crowded if waves > 1 and sequences > 1 else 1)
        walk, share = walk + cost.start_chunks, (total + walks * cost.start_chunks) * instances / units
        return max(walk, share if waves == 1 else crowded * share + TAIL * walk)

    best, least = None, makespan(x.longest, sequences, chunks) * cost.chunk_us
    for n in range(2, x.longest + 1):
        span = -(-x.longest // n)
        of_longest = -(-x.longest // span)
        parts = of_longest * sequences if even else of_longest + x.others * max(1, math.ceil(x.rest / span))
        if ((n - 1) * sequences if even else parts - sequences) * instances > 4 * units:
            break
        if warms_up:
            before = (of_longest - 1) * span
            warm_up = min(cost.warm_up_chunks, before)
            done = makespan(span + warm_up, parts, chunks + (parts - sequences) * warm_up, cost.crowded)
            us = cost.split_us + (done + min(cost.longest_warm_up_chunks, before - warm_up)) * cost.chunk_us
            if _needs_summaries(x.possible, span, most, cost, x.chosen):
                us += summaries * cost.idle_us  # most heads need none
                if span < cost.least_part_chunks:
                    us += 3 * span * cost.summary_us
        else:
            summed = -(-(parts - sequences) * instances // units)
            us = (makespan(span, parts, chunks) + 2 * summed * span) * cost.chunk_us
            us += of_longest * cost.fold_us + summaries * cost.launch_us
        if us < least:
            best, least = span, us
    return best


class Plan:
    """The plan of calls whose arguments differ only in their values. Raises ValueError that names a bad argument.

    given: one tensor for each row of `Tables.inputs`, `head_inputs` and `chunk_inputs`. states: one for each row of `initial`.
    outs: one for each row of `outputs`. buffers: the caller's memory for `final` and `checkpoints`, or None. wanted: True if
    final states are wanted. every: chunks from one checkpoint to the next. longest: tokens of the longest sequence, 0 if not
    known; parts and their summaries depend on it, and nothing else. call: runs the plan (host/call.py).
    """

    call: Callable[..., list[Any]]

    def __init__(self, host: Any, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
                 buffers: Sequence[Any], wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> None:
        """Checks the arguments, then lays out results and workspaces, then chooses the launches."""
        t: Tables = host.tables
        self.host, self.tables, self.wanted, self.every, self.longest = host, t, wanted, every, longest
        self.state = _FLOATS[t.state_dtype]
        self.batch, self.tokens, self.heads, self.value_heads, self.device = _check_inputs(
            given, t.inputs, t.head_inputs, t.layout, t.heads, t.heads_per_instance)
        self.packed = cu_seqlens is not None
        self.equal_rows = _unread_rows if t.chunk == 1 and self.tokens else _equal_rows
        self.sequences = _check_sequences(cu_seqlens, self.batch, self.device) if self.packed else self.batch
        self.slots = self.batch * self.tokens // t.chunk + self.sequences
        # for each argument: what replaces None, whether it is passed without a copy, its alignment in bytes, its dtype
        self.expected: list[tuple[Any, bool, int, torch.dtype]] = []
        self.lacking: list[tuple[Any, ...]] = []  # for absent head inputs: index, then arguments of _full
        self.ints: dict[str, int] = {}  # integers that kernels get, by name
        self.pool_slots: list[int] = []  # slots of each pool
        self.expect_inputs(given)
        self.expect_chunk_inputs(given[len(given) - len(t.chunk_inputs):])
        self.expect_numbers(indices, buffers)
        self.expect_states(states)
        self.expect_buffers(buffers)
        self.expect_outs(outs)
        self.lay_out()
        self.count(given, states, outs)
        self.launches, self.more = self.launched(), list[torch.Tensor]()  # more: like tensors that only an earlier build has
        self.ends_as_they_are = self.packed and _is_plain(cu_seqlens, torch.int32)
        looks = host.check or self.device.type == "cpu"
        self.check_ends, self.check_numbers = self.packed and looks, bool(t.indices) and looks
        self.native = self.native_arguments(given, states, outs, buffers)

    # --- arguments ---
    def expect_inputs(self, given: Sequence[Any]) -> None:
        """Inputs. Strided kernels read an input without a copy if they accept it as a view."""
        t = self.tables
        for (name, _, dims, dtype), x in zip(t.inputs, given, strict=False):
            plain = self.host.is_view(name, x, dims, _FLOATS[dtype]) if t.strided else _is_plain(x, _FLOATS[dtype])
            self.expected.append((None, plain, 1 if t.strided else 16, _FLOATS[dtype]))
        first = len(t.inputs)
        for n, ((_, default, dims, dtype), x) in enumerate(zip(t.head_inputs, given[first:], strict=False), first):
            self.expected.append((None, x is None or _is_plain(x, _FLOATS[dtype]), 16, _FLOATS[dtype]))
            if x is None:
                self.lacking.append((n, (self.value_heads, *dims), default, _FLOATS[dtype], self.device))

    def expect_chunk_inputs(self, given: Sequence[Any]) -> None:
        """Tensors with a tile for each chunk slot, as another module stored them."""
        for (name, dims, dtype), x in zip(self.tables.chunk_inputs, given, strict=True):
            _check_state(name, x, (self.slots, self.value_heads, *dims), self.device, (_FLOATS[dtype],))
            self.expected.append((None, _is_plain(x, _FLOATS[dtype]), 16, _FLOATS[dtype]))

    def expect_numbers(self, indices: Sequence[Any], buffers: Sequence[Any]) -> None:
        """Tensors of integers: pool slots and the like. `as_integers`: for each that the caller may give, True if none is copied.
        `in_order`: those that are 0, 1, ... for the sequences: rows without indices, and final states outside a pool."""
        t = self.tables
        self.in_order = [name for name, x in zip(t.numbers, indices, strict=True) if x is None]
        if "final_indices" in t.indices and buffers[0] is None:
            self.in_order.append("final_indices")
        self.as_integers: list[bool] = []
        for name, x in zip(t.numbers, indices, strict=True):
            if x is not None or name != "intermediate_state_indices":  # without it sequences have rows in order
                least = 0 if self.packed else -(-self.tokens // t.chunk)
                _check_indices(name, x, self.sequences, self.device, least if name in t.by_token else -1)
            if name in t.by_token:
                self.ints[f"{name}_width"] = x.shape[1]
            self.as_integers.append(x is None or _is_plain(x, torch.int32))

    def expect_states(self, states: Sequence[Any]) -> None:
        """Initial states: slots of a pool, or one tile for each sequence, or None."""
        t = self.tables
        for (name, dims), x in zip(t.initial, states, strict=True):
            tile = (self.value_heads, *dims)
            if t.pool:
                self.ints[f"{name}_stride"] = _check_pool(name, x, tile, self.device, self.state)
                self.pool_slots.append(x.shape[0])
                continue
            if t.in_place:
                _check_state(name, x, (self.sequences, *tile), self.device, (self.state,), written=True)
            elif x is not None:
                dtypes = _ANY_FLOAT if t.state_dtype == "float32" else (self.state,)
                _check_state(name, x, (self.sequences, *tile), self.device, dtypes)
            absent = _made((0, *tile), self.state, self.device)
            self.expected.append((absent, x is None or _is_plain(x, self.state), 16, self.state))

    def expect_buffers(self, buffers: Sequence[Any]) -> None:
        """The caller's memory for final states and checkpoints. `as_they_are`: for each, True if it is passed without a copy.
        `state_kin`: for each, the tensor that replaces an unwanted one or None, and a tensor like the one that a call makes."""
        t = self.tables
        lent: list[tuple[str, tuple[int, ...], Any]] = []
        for (name, dims), x in zip(t.final, buffers, strict=False):
            shape, tile = (self.sequences, self.value_heads, *dims), (self.value_heads, *dims)
            absent = None if self.wanted else _made((0, *tile), self.state, self.device)
            if t.pool:
                self.ints[f"{name}_stride"] = math.prod(tile)
                if x is not None:
                    self.ints[f"{name}_stride"] = _check_pool(name, x, tile, self.device, self.state)
                    self.pool_slots.append(x.shape[0])
                    shape, absent = tuple(x.shape), None
            lent.append((name, shape, absent))
        self.stored_rows = self.row_tokens = 0
        if t.rows:
            for (name, dims), x in zip(t.checkpoints, buffers[len(t.final):], strict=True):
                self.ints[f"{name}_stride"] = _check_rows(name, x, (self.value_heads, *dims), 0 if self.packed else self.tokens,
                                                          self.device, self.state)
                self.stored_rows, self.row_tokens = x.shape[:2]
                lent.append((name, tuple(x.shape), None))
        elif t.positions:
            for (name, dims), x in zip(t.checkpoints, buffers[len(t.final):], strict=True):
                self.ints[f"{name}_stride"] = _check_pool(name, x, (self.value_heads, *dims), self.device, self.state)
                self.stored_rows = x.shape[0]
                lent.append((name, tuple(x.shape), None))
        elif t.checkpoints:
            rows = self.batch * self.tokens // (self.every * t.chunk)
            lent += [(name, (rows, self.value_heads, *dims), None) for name, dims in t.checkpoints]
        self.as_they_are = _check_buffers(buffers, lent, self.device, self.state)
        if t.rows or t.positions:  # they are written where they lie
            self.as_they_are[len(t.final):] = [True] * len(t.checkpoints)
        if t.pool:
            self.as_they_are[:len(t.final)] = [True] * len(t.final)
        self.state_kin = [(absent, _kin(shape, self.state, self.device)) for _, shape, absent in lent]

    def expect_outs(self, outs: Sequence[Any]) -> None:
        """The caller's memory for outputs. `made`: shapes and dtypes of the tensors that a call makes. `fits`: for each output,
        True if the caller's memory is used without a copy."""
        t = self.tables
        rows = ((self.batch, self.tokens, self.value_heads) if t.layout == "bthd" else
                (self.batch, self.value_heads, self.tokens))
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = [((*rows, *dims), _FLOATS[dtype]) for _, dims, dtype in t.outputs]
        self.fits: list[bool] = []
        for argument, (name, dims, _), x, (shape, dtype) in zip(t.outs, t.outputs, outs, self.made, strict=True):
            if x is not None:
                _check_out(argument, x, shape, dtype, self.device)
            self.fits.append(x is not None and (self.host.is_view(name, x, dims, dtype) if t.strided else _is_plain(x, dtype)))

    # --- what the call makes ---
    def lay_out(self) -> None:
        """Shapes of workspaces, the number of parts, and their chunks. Without summaries no kernel reads the workspaces of
        parts, and empty tensors replace them (`unread`). Where kernels choose the chunks of a part, `span` is the fewest."""
        t = self.tables
        self.span = self.parts = self.summed = 0
        unread: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.made += [((self.slots, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.workspaces]
        self.made += [((self.sequences, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.end_workspaces]
        self.made += [((1,), torch.int32)] * len(t.counters)
        if t.shared:
            held = self.host.shared_bytes(self.slots, self.sequences, self.value_heads, self.device)
            self.made.append(((held,), torch.uint8))
        if t.part_cost is not None:
            self.span = self.host.span(self.batch * self.tokens, self.sequences, self.value_heads, self.device, self.packed,
                                       self.longest)
            chooses = self.host.chooses_parts(self.device, self.packed, self.sequences)
            longest = min(self.longest, self.tokens) if chooses and self.longest else self.tokens
            self.summed = int(bool(t.summaries) and _needs_summaries(-(-longest // t.chunk), self.span, t.most, t.part_cost,
                                                                     chooses))
            if chooses:
                self.span = self.host.finest(self.span, self.tokens, self.value_heads, self.device)
            self.ints["part_instances"] = self.host.part_instances(self.value_heads)
            self.ints["units"], self.ints["least_span"] = self.host.units(self.device) if chooses else 0, self.span
            self.parts = self.batch * self.tokens // (t.chunk * self.span) + self.sequences
            self.made += [((4 + 4 * self.parts * chooses,), torch.int32)] * len(t.places)
            shapes = [((self.parts, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.part_workspaces]
            if self.summed:
                self.made += shapes
            else:
                unread = [((0, *shape[1:]), dtype) for shape, dtype in shapes]
        if t.pipelined:
            self.span = self.host.pipelined_span(self.tokens)
            if self.sequences * self.span * self.value_heads >= 2 ** 31:
                _fail("cu_seqlens", f"{self.sequences} sequences in {self.tokens} tokens",
                      "fewer, as partition='pipelined' has a block for each chunk that each sequence may have")
            self.parts = self.batch * self.tokens // (t.chunk * self.span) + self.sequences
            self.made += [((self.parts, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.part_workspaces]
        self.unread = [_made(shape, dtype, self.device) for shape, dtype in unread]
        self.kin = [_kin(shape, dtype, self.device) for shape, dtype in self.made]

    def count(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any]) -> None:
        """The integers that kernels get besides the sizes, by name."""
        t, ints = self.tables, self.ints
        ints.update({f"has_{name}": int(x is not None) for (name, _), x in zip(t.initial, states, strict=True)})
        ints.update({f"has_{name}": int(self.wanted) for name, _ in t.final})
        # outputs that a call makes are zero in rows that no sequence covers
        self.clears = t.pool or self.packed
        if t.cleared:
            ints.update({f"clear_{row[0]}": int(self.clears and x is None) for row, x in zip(t.outputs, outs, strict=True)})
        ints["summed"], ints["checkpoint_chunks"] = self.summed, self.every
        if any("blocks_at_a_time" in names for names in t.ints.values()):
            ints["blocks_at_a_time"] = torch.cuda.get_device_properties(self.device).multi_processor_count
        if not t.strided:
            return
        goes = [plain for _, plain, *_ in self.expected[:len(t.inputs)]]
        places = [x.stride() if plain else _dense(x.shape) for x, plain in zip(given, goes, strict=False)]
        places += [x.stride() if fit else _dense(shape) for x, fit, (shape, _) in zip(outs, self.fits, self.made, strict=False)]
        for name, strides in zip([row[0] for row in t.inputs] + [row[0] for row in t.outputs], places, strict=True):
            for axis, far in zip("bth", _steps(strides, t.layout), strict=True):
                ints[f"{name}_stride_{axis}"] = far // t.units.get(name, 1)

    def launched(self) -> list[tuple[Any, list[int], list[int]]]:
        """For each kernel that a call launches: the launch, the indices of its tensors, and those of its numbers."""
        t = self.tables
        counts = {"chunks": self.slots, "parts": self.parts, "sequences": self.sequences}
        if t.pipelined:
            counts = {"chunks": self.sequences * self.span, "parts": self.sequences}
        sizes = (self.sequences, self.tokens, int(not self.packed and self.tokens > 0), self.heads, self.value_heads, self.slots)
        first = bool(t.declined) and self.host.earlier is None  # of a pair: such a kernel clears the counter
        skipped = *(() if self.summed else t.summaries), *(t.bounds if self.span * t.chunk >= self.tokens and not first else ())
        fewer: dict[str, int] = {}  # parts of kernels that have nothing to do for a sequence of one part
        if self.ints.get("units"):
            split = _split_parts(self.parts, self.tokens, t.chunk * self.span)
            fewer = {n: split for n, grid, *_ in t.kernels if grid == "parts" and n in (*t.summaries, *t.bounds)}
        instances = {row[0]: fewer.get(row[0], counts[row[1]]) * self.value_heads * row[2]
                     for row in t.kernels if row[0] not in skipped}
        if together := getattr(self.host.launcher, "together", None):
            together(tuple(n for n, count in instances.items() if count), self.device)
        found, order, numbers = [], {n: at for at, n in enumerate(t.tensors)}, list(t.scalars)
        many = max(1, -(-self.tokens // (t.chunk * self.span))) if t.pipelined else 1
        for part, (name, _, _, tensors, scalars) in itertools.product(range(many), t.kernels):
            of_parts = (part if t.pipelined else fewer.get(name, self.parts), self.span) if self.span else ()
            if count := instances.get(name):
                launch = self.host.launcher(name, count, (*sizes, *of_parts), [self.ints[n] for n in t.ints[name]], self.device)
                found.append((launch, [order[n] for n in tensors], [numbers.index(n) for n in scalars]))
        return found

    # --- as data ---
    def native_arguments(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]
                    ) -> NativeCall | None:
        """The call as data. None if a call copies, fills or checks the values of some tensor."""
        t = self.tables
        as_it_is = (all(plain for _, plain, *_ in self.expected) and all(self.as_they_are) and not self.lacking
                    and all(x is None or fit for x, fit in zip(outs, self.fits, strict=True)))
        looked_at = self.check_ends or self.check_numbers or (self.packed and not self.ends_as_they_are) or bool(t.zeroed)
        in_order = _in_order(self.sequences, self.device) if self.in_order else None
        if not as_it_is or looked_at or not all(self.as_integers) or (self.in_order and in_order is None):
            return None
        first_out = len(given) + len(states)
        first_buffer = first_out + len(outs)
        sources: list[tuple[Any, ...]] = [
            ("fixed", absent) if x is None else ("given", n, tuple(x.shape))
            for n, (x, (absent, *_)) in enumerate(zip(given if t.pool else (*given, *states), self.expected, strict=True))]
        if t.pool:
            sources += [("given", n, tuple(_flat(name, x).shape))
                        for n, ((name, _), x) in enumerate(zip(t.initial, states, strict=True), len(given))]
        for n, (x, (absent, like)) in enumerate(zip(buffers, self.state_kin, strict=True), first_buffer):
            flat = t.pool if n < first_buffer + len(t.final) else t.rows or t.positions
            lies = functools.partial(_flat, "") if flat else lambda x: x
            sources.append(("given", n, tuple(lies(x).shape)) if x is not None else
                           ("result", like, (math.prod(like.shape),) if flat else tuple(like.shape)) if absent is None else
                           ("fixed", lies(absent)))
        sources += [("given", n, tuple(x.shape)) if x is not None else ("result", like, tuple(like.shape))
                    for n, (x, like) in enumerate(zip(outs, self.kin, strict=False), first_out)]
        sources += [("workspace", like) for like in self.kin[len(outs):]]
        sources += [("fixed", x) for x in self.unread]
        first_number = first_buffer + len(buffers)
        for name in t.indices:
            n = first_number + t.numbers.index(name if name in t.numbers else "state_indices")
            width = (self.ints[f"{name}_width"],) if name in t.by_token else ()
            sources.append(("fixed", in_order) if name in self.in_order else ("given", n, (self.sequences, *width)))
        rows = functools.partial(_filled, self.equal_rows, self.batch, self.tokens, self.device)
        return NativeCall(sources, self.launches, rows)


def _launch_first(plan: Plan, first: Plan) -> None:
    """Let `plan` launch the kernels of `first` before its own. Both have the same arguments and results, and `first` declines
    calls by a counter (`Tables.declined`), which both share. The workspaces of `first` lie after all tensors of `plan`."""
    tables, others, place = plan.tables, first.tables, dict[int, int]()
    # neither copies what the other reads as it is, and strides have the same units
    read = [[x[1:] for x in p.expected] for p in (plan, first)]
    assert read[0] == read[1] and (plan.fits, tables.units) == (first.fits, others.units)
    assert not first.unread and not others.shared
    workspaces = range(others.place("workspaces").start, others.place("part_workspaces").stop)
    more: list[torch.Tensor] = []
    for n, name in enumerate(others.tensors):
        if n not in workspaces:
            place[n] = tables.tensors.index(name)
        elif name == others.declined:
            place[n] = tables.tensors.index(tables.declined)
        else:
            place[n] = len(tables.tensors) + len(more)
            more.append(first.kin[n - workspaces.start + len(others.outputs)])
    numbers = [list(tables.scalars).index(n) for n in others.scalars]
    launches = [(launch, [place[n] for n in tensors], [numbers[n] for n in used]) for launch, tensors, used in first.launches]
    plan.more, plan.launches = more, [*launches, *plan.launches]
    if plan.native is not None:
        sources = [*plan.native.sources, *(("workspace", x) for x in more)]
        plan.native = None if first.native is None else NativeCall(sources, plan.launches, plan.native.rows)


def _aligned(given: Sequence[Any], outs: Sequence[Any]) -> list[bool]:
    """For each tensor: True if its address is a multiple of 16 bytes. None counts as aligned."""
    return [x is None or x.data_ptr() % 16 == 0 for x in (*given, *outs)]


def _plain_ones(tensors: Iterable[tuple[Any, bool]], dtype: torch.dtype) -> list[Any]:
    """Each tensor itself if kernels accept it, else a contiguous copy. tensors: (tensor, True if its strides fit)."""
    return [x if fits and x.data_ptr() % 16 == 0 else _plain(x, dtype) for x, fits in tensors]


def _in_pools(t: Tables, states: Sequence[Any], buffers: Sequence[Any], held: Sequence[Any]) -> list[Any]:
    """Pools as flat tensors: first those of initial states, then those of final states, from the caller or from this call."""
    if any(x is not None and x.data_ptr() == y.data_ptr() for x in buffers[:len(t.final)] for y in states):
        _fail(t.final[0][0], "the memory of an initial state",
              "another pool, or a build with state=pool/in_place, which overwrites initial states")
    return [_flat(row[0], x) for row, x in (*zip(t.initial, states, strict=True), *zip(t.final, held, strict=False))]


def _take_outs(memory: list[Any], first: int, outs: Sequence[Any], fits: Sequence[bool], aligned: int) -> list[tuple[int, Any]]:
    """Put the caller's outputs into `memory`, from index `first` on. Returns (index, caller's tensor) of the outputs for which
    kernels write a copy first."""
    copied = []
    for at, (x, fit) in enumerate(zip(outs, fits, strict=True), first):
        if x is not None:
            memory[at] = x if fit and x.data_ptr() % aligned == 0 else _plain(x, x.dtype)
            if memory[at] is not x:
                copied.append((at, x))
    return copied


def _give_back(memory: list[Any], wanted: Iterable[tuple[int, Any]]) -> None:
    """Copy results to the caller's tensors, and put these into `memory`. wanted: (index, caller's tensor)."""
    for at, x in wanted:
        if memory[at].data_ptr() != x.data_ptr():
            x.copy_(memory[at])
        memory[at] = x


def _touch(*tensors: Any) -> None:
    """Tell torch that the caller's tensors were overwritten: one that a gradient needs is then an error in its backward pass."""
    torch.autograd.graph.increment_version([x for x in tensors if x is not None])


def _fill(p: Plan, memory: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Fill the tensors that this call allocated: with NaN if tests ask for it, and outputs with zeros, for the rows that no
    sequence covers. A gradient's shares by chunk start as zeros, because callers add up all slots, also those without a chunk."""
    if p.host.poison:
        for x, buffer in itertools.zip_longest(memory[p.tables.place("final").start:], buffers):
            if buffer is None:
                x.fill_(float("nan") if x.is_floating_point() else -1)
    if p.clears and not p.tables.cleared:
        for x, out in zip(memory[p.host.outputs], outs, strict=True):
            if out is None:
                x.zero_()
    for name in p.tables.zeroed:
        memory[p.tables.tensors.index(name)].zero_()


def _looked_at(p: Plan, given: Sequence[Any], cu_seqlens: Any, buffers: Sequence[Any], indices: Any) -> Sequence[Any]:
    """The inputs, with defaults for absent ones. The values of cu_seqlens and of indices are checked if the plan says so."""
    if p.check_ends:
        _check_ends(cu_seqlens, p.tokens)
    if p.check_numbers:
        _check_numbers(p, cu_seqlens, buffers, indices)
    if p.lacking:
        given = list(given)
        for at, *about in p.lacking:
            given[at] = _filled(_full, *about)
    return given


def _check_numbers(p: Plan, cu_seqlens: Any, buffers: Sequence[Any], indices: Any) -> None:
    """Check the values of the tensors of integers. On a GPU this waits for the device."""
    t = p.tables
    found = {name: x.tolist() for name, x in zip(t.numbers, indices, strict=True) if x is not None}
    lengths = [p.tokens] * p.sequences if cu_seqlens is None else cu_seqlens.diff().tolist()
    slots, rows = found.get("state_indices", []), found.get("intermediate_state_indices", list(range(p.sequences)))
    kept = [[True] * p.tokens] * p.sequences
    if "state_indices" in t.by_token:
        accepted = found.get("num_accepted_tokens", [1] * p.sequences)
        _check_accepted(accepted, slots)
        first = [own[n - 1] for own, n in zip(slots, accepted, strict=True)]
        lengths = [0 if at < 0 else n for at, n in zip(first, lengths, strict=True)]  # a skipped sequence has no tokens
        _check_slots_by_token(slots, first, lengths, min(p.pool_slots), t.slots)
        kept = [[x >= 0 for x in own] for own in slots] if t.slots else kept
    elif t.pool:
        _check_slots(slots, "state_indices", min(p.pool_slots), t.in_place or any(x is not None for x in buffers[:len(t.final)]))
        lengths = [0 if at < 0 else n for at, n in zip(slots, lengths, strict=True)]
    if t.rows:
        if max(lengths, default=0) > p.row_tokens:
            _fail(t.checkpoints[0][0], f"rows of {p.row_tokens} states", f"{max(lengths)} or more, as a sequence has tokens")
        _check_slots(rows, "intermediate_state_indices", p.stored_rows, True)
        kept = [[row >= 0] * p.tokens for row in rows]
    for n, row in enumerate(found.get("checkpoint_rows", ())):
        if any(not -1 <= i < p.stored_rows for i in row):
            _fail("checkpoint_rows", f"{row} for sequence {n}", f"rows from 0 to {p.stored_rows - 1}, or -1 to store no state")
    if "retrieve_parent_token" in found:
        _check_parents(found["retrieve_parent_token"], lengths, kept)


def _integers(p: Plan, indices: Any) -> list[Any]:
    """The tensors of integers that kernels read. Final states in other memory than initial ones have the same slots."""
    found = {name: x if fits and x.data_ptr() % 16 == 0 else _plain(x, torch.int32)
             for name, x, fits in zip(p.tables.numbers, indices, p.as_integers, strict=True) if x is not None}
    for name in p.in_order:
        found[name] = _in_order(p.sequences, p.device)
        if found[name] is None:  # a graph that is captured before they exist has its own
            found[name] = torch.arange(p.sequences, dtype=torch.int32, device=p.device)
    return [found.get(name, found.get("state_indices")) for name in p.tables.indices]


def _last(p: Plan, indices: Any) -> list[Any]:
    """The last tensors of a call: those of integers, and those that only an earlier build has."""
    made = [x.fill_(math.nan) if p.host.poison and x.is_floating_point() else x for x in map(_new, p.more)]
    return [*_integers(p, indices), *made] if p.tables.indices else made


def caller(p: Plan, given: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]) -> Callable[..., list[Any]]:
    """A function that runs the plan: (given, numbers, states, outs, cu_seqlens, buffers, indices) -> the call's tensors, in the
    order of `Tables.tensors`. The arguments here are those that the plan was made for."""
    host, t, device, batch, tokens, state = p.host, p.tables, p.device, p.batch, p.tokens, p.state
    equal_rows = p.equal_rows
    pool, expected, state_kin, as_they_are, kin = t.pool, p.expected, p.state_kin, p.as_they_are, p.kin
    unread, fits, ends_are_plain = p.unread, p.fits, p.ends_as_they_are
    picked = [(launch, _picker(tensors), numbers) for launch, tensors, numbers in p.launches]
    unwanted = [x for x, _ in state_kin] if all(x is not None for x, _ in state_kin) else None
    any_out, lends = any(x is not None for x in outs), any(x is not None for x in buffers)
    moved, fills = lends or pool or t.in_place, p.clears and not t.cleared or host.poison or bool(t.zeroed)
    touches = any_out or lends or t.in_place
    special = p.check_ends or p.check_numbers or bool(p.lacking)
    lies = _aligned(given, outs) if t.strided else None
    rows = t.checkpoints if t.rows or t.positions else ()
    first_out, first_final = t.place("outputs").start, host.final.start

    def call(given: Any, numbers: Any, states: Any, outs: Any, cu_seqlens: Any, buffers: Any, indices: Any = ()) -> list[Any]:
        """Launch the plan's kernels on these arguments."""
        if _is_elsewhere(device):
            with torch.cuda.device(device):
                return call(given, numbers, states, outs, cu_seqlens, buffers, indices)
        if lies is not None and _aligned(given, outs) != lies:
            return host.run(given, numbers, states, outs, cu_seqlens, buffers, p.wanted, indices,  # type: ignore[no-any-return]
                            p.every, p.longest)
        if special:
            given = _looked_at(p, given, cu_seqlens, buffers, indices)
        memory = [absent if x is None else x if plain and x.data_ptr() % aligned == 0 else _plain(x, dtype)
                  for x, (absent, plain, aligned, dtype) in zip(given if pool else (*given, *states), expected)]
        held = unwanted or [x if x is not None else _new(like) if absent is None else absent
                            for x, (absent, like) in zip(buffers, state_kin)]
        if pool:
            memory += _in_pools(t, states, buffers, held)
            memory += _plain_ones(list(zip(held, as_they_are))[len(t.final):], state)
        else:
            memory += _plain_ones(zip(held, as_they_are), state) if lends else held
        if rows:
            memory[-len(rows):] = [_flat(name, x) for (name, _), x in zip(rows, held[-len(rows):])]
        memory += map(_new, kin)
        memory += unread
        if fills:
            _fill(p, memory, outs, buffers)
        copied = _take_outs(memory, first_out, outs, fits, 1 if t.strided else 16) if any_out else ()
        if cu_seqlens is None:
            ends = _filled(equal_rows, batch, tokens, device)
        else:
            ends = cu_seqlens if ends_are_plain and cu_seqlens.data_ptr() % 16 == 0 else _plain(cu_seqlens, torch.int32)
        if t.indices or p.more:
            memory += _last(p, indices)
        for launch, tensors, used in picked:
            launch(tensors(memory), ends, [numbers[i] for i in used] if used else [])
        if copied:
            _give_back(memory, copied)
        if moved:
            _give_back(memory, enumerate((*states, *held) if t.in_place else held, first_final))
        if touches:
            _touch(*outs, *buffers, *(states if t.in_place else ()))
        return memory

    return call


def _kind(x: Any) -> Any:
    """The properties of an argument that a plan depends on."""
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else type(x)


def _kind_and_place(x: Any) -> Any:
    """`_kind` for strided kernels. Alignment decides whether they read a tensor without a copy."""
    return (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else type(x)


def _untraced(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """call(*args, **named), at which torch.compile breaks its graph. It could not trace launches."""
    from torch._dynamo import disable  # torch.compile has imported it, which takes seconds
    return disable(call)(*args, **named)  # type: ignore[no-untyped-call]


_untraced._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `disable` sets


def _parts_wanted(build: int) -> int:
    """Chunks of a part, from GDN_CODEGEN_PART_CHUNKS, else from the build; 0 to choose."""
    said = os.environ.get("GDN_CODEGEN_PART_CHUNKS", str(build))
    if not said.isdecimal():
        raise ValueError(f"GDN_CODEGEN_PART_CHUNKS: got {said!r}; accepted: the chunks of a part, 0 to choose")
    return int(said)


class Host:
    """The calls of one module.

    launcher: (kernel, instances, sizes, integers, device) -> a function that launches the kernel on its tensors, cu_seqlens and
      numbers. sizes: sequences, tokens of a row, 1 if rows are equal sequences, H, HV, chunk slots. A build with parts adds the
      number of parts, and chunks of a part.
    accepts_view: accepts_view(name, tensor): True if strided kernels can read this tensor without a copy. Its rows are dense.

    poison: outputs and workspaces start as NaN, for tests (GDN_CODEGEN_POISON=1). check: the values of cu_seqlens and
    state_indices are checked on a GPU too, and the call waits for that (GDN_CODEGEN_CHECK=1). partition, part_chunks: True if
    sequences are split into parts, and chunks of a part, 0 to choose (GDN_CODEGEN_PARTITION, GDN_CODEGEN_PART_CHUNKS). plans: by
    kind of arguments. earlier: of the second module of a pair, the Host of the first one (`Tables.declined`).
    """

    def __init__(self, tables: Tables, launcher: Callable[..., Callable[..., None]],
                 accepts_view: Callable[[str, torch.Tensor], bool] = lambda name, x: True) -> None:
        """Reads the environment variables once, and works out which results a call returns. It plans nothing yet."""
        self.tables, self.launcher, self.accepts_view = tables, launcher, accepts_view
        self.shared_bytes: Any = getattr(launcher, "workspace_bytes", None)  # of a launcher that divides one workspace
        self.poison = os.environ.get("GDN_CODEGEN_POISON") == "1"
        self.check = os.environ.get("GDN_CODEGEN_CHECK") == "1"
        self.partition = os.environ.get("GDN_CODEGEN_PARTITION") != "0"
        self.part_chunks = _parts_wanted(tables.part_chunks) if tables.in_parts else 0
        self.plans: dict[Any, Plan] = {}
        self.earlier: Host | None = None
        self.kind = _kind_and_place if tables.strided else _kind
        self.outputs = tables.place("outputs")
        self.checkpoints = slice(0) if tables.rows or tables.positions else tables.place("checkpoints")  # the caller has its rows
        self.final = tables.place("initial") if tables.in_place else tables.place("final")
        places = range(len(tables.tensors))
        self.saved = [tables.tensors.index(n) for n in tables.saved]
        self.returned = _picker([*(n for x in (self.outputs, self.final, self.checkpoints) for n in places[x]), *self.saved])

    # --- a call ---
    def __call__(self, given: Sequence[Any], numbers: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
                 buffers: Sequence[Any], output_final_state: Any, indices: Sequence[Any] = (), every: Any = 0) -> tuple[Any, ...]:
        """Outputs, final states or None, checkpoints, tiles of chunks. Arguments: those of Plan, the caller's numbers."""
        if torch.compiler.is_dynamo_compiling():
            return _untraced(self, given, numbers, states, outs, cu_seqlens, buffers, output_final_state, indices, every)  # type: ignore[no-any-return]
        t = self.tables
        _check_given(zip(t.tensors, (*given, *states), strict=False))
        values = self.numbers_of(numbers)
        if t.checkpoints and not (t.rows or t.positions):
            every = _check_chunks("checkpoint_chunks", every, 1)
        wanted = t.in_place
        if t.final:
            wanted = _check_flag("output_final_state", output_final_state) or any(x is not None for x in buffers[:len(t.final)])
        return self.results(self.run(given, values, states, outs, cu_seqlens, buffers, wanted, indices, every), wanted)

    def run(self, given: Sequence[Any], numbers: Sequence[float], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
            buffers: Sequence[Any], wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> list[Any]:
        """Launch every kernel; the call's tensors, as Tables.tensors names them."""
        plan = self.prepare(given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
        return plan.call(given, numbers, states, outs, cu_seqlens, buffers, indices)

    def prepare(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any, buffers: Sequence[Any],
                wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> Plan:
        """The plan of arguments of this kind. It is made once, and checks them then. It launches those of `earlier` first."""
        by_cost = any(x is not None and x.tables.part_cost is not None for x in (self, self.earlier))
        kind, longest = self.kind, longest if by_cost else 0
        key = (*map(kind, given), *map(kind, states), *map(kind, outs), kind(cu_seqlens), *map(kind, buffers), wanted,
               *map(kind, indices), every, longest)
        plan = self.plans.get(key)
        if plan is None:
            if self.tables.declined and self.earlier is None:
                _fail("schedule", self.tables.name, "a build that runs alone; this one is half of a pair, which ops choose")
            plan = Plan(self, given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
            if self.earlier is not None:
                first = Plan(self.earlier, given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
                _launch_first(plan, first)
            plan.call = caller(plan, given, outs, buffers)
            if len(self.plans) >= 256:
                self.plans.clear()
            self.plans[key] = plan
        return plan

    def numbers_of(self, given: Sequence[Any]) -> tuple[float, ...]:
        """The caller's numbers, the page's defaults where None is given."""
        values = []
        for (name, default), x in zip(self.tables.scalars.items(), given, strict=True):
            if x is not None:
                values.append(_check_number(name, x))
            elif default is not None:
                values.append(float(default))
            else:
                _fail(name, None, "a number: the page has no default")
        return tuple(values)

    def results(self, memory: Sequence[Any], wanted: bool) -> tuple[Any, ...]:
        """What a call returns, of its tensors."""
        if wanted:
            return self.returned(memory)
        return (*memory[self.outputs], *(None for _ in self.tables.initial), *memory[self.checkpoints],
                *(memory[n] for n in self.saved))

    # --- what a build makes of sizes ---
    def is_view(self, name: str, x: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether kernels that go by strides read and write `x` where it lies."""
        return x.dtype == dtype and (not dims or x.stride(-1) == 1) and self.accepts_view(name, x)

    def span(self, tokens: int, sequences: int, value_heads: int, device: torch.device, packed: bool = True,
             longest: int = 0) -> int:
        """Chunks of a part: those that the build's costs make cheapest, or all that there are.

        packed, longest: whether sequences may differ in length, and tokens of the longest, 0 if it is known to the device alone.
        """
        t, every = self.tables, tokens // self.tables.chunk + 1
        if not self.partition or t.part_cost is None:
            return every
        if self.part_chunks or not sequences or device.type == "cpu":
            return min(self.part_chunks or every, every)
        known = _lengths(tokens, sequences, packed, longest, t.chunk, self.chooses_parts(device, packed, sequences))
        return _cheapest_span(known, self.part_instances(value_heads), self.units(device), t.part_cost, len(t.summaries), t.most,
                              t.warm_ups) or every

    def pipelined_span(self, tokens: int) -> int:
        """Chunks of a part where parts follow one another. tokens: the most that a sequence may have."""
        chunks = max(1, -(-tokens // self.tables.chunk))
        wanted = self.part_chunks or max(LEAST_PIPELINED, -(-chunks // PIPELINED))
        return min(wanted, chunks) if self.partition else chunks

    def chooses_parts(self, device: torch.device, packed: bool, sequences: int) -> bool:
        """Whether kernels choose the chunks of a part from the lengths of packed sequences."""
        given = any("units" in names for names in self.tables.ints.values())
        several = packed and 1 < sequences <= COMPARED
        return given and several and self.partition and not self.part_chunks and device.type != "cpu"

    def finest(self, span: int, tokens: int, value_heads: int, device: torch.device) -> int:
        """The fewest chunks of a part that kernels may choose, if `span` is best for one sequence of all tokens."""
        chunks = -(-tokens // self.tables.chunk)
        share = -(-chunks * self.part_instances(value_heads) // self.units(device))
        return min(span, max(2, min(share, max(-(-share // FINEST), LONG))))

    def part_instances(self, value_heads: int) -> int:
        """The instances of a part in the kernels that walk parts."""
        t = self.tables
        others = (*t.bounds, *t.summaries)
        return value_heads * max(row[2] for row in t.kernels if row[1] == "parts" and row[0] not in others)

    def units(self, device: torch.device) -> int:
        """How many instances of a part the GPU runs at a time."""
        assert self.tables.part_cost is not None
        return self.tables.part_cost.resident * torch.cuda.get_device_properties(device).multi_processor_count

    def workspace_bytes(self, tokens: int, sequences: int, value_heads: int, device: Any = "cpu") -> int:
        """Bytes that a call holds between its kernels, and between cores: `tokens` in all, of `sequences` sequences. device: that
        of the call, for builds that make parts or whose launcher divides one workspace. With those of `earlier`; without
        integers."""
        t = self.tables
        held = [(tokens // t.chunk + sequences, t.workspaces), (sequences, t.end_workspaces)]
        if t.part_cost is not None:
            span = self.span(tokens, sequences, value_heads, torch.device(device))
            chooses = self.chooses_parts(torch.device(device), True, sequences)
            if _needs_summaries(-(-tokens // t.chunk), span, t.most, t.part_cost, chooses):
                if chooses:
                    span = self.finest(span, tokens, value_heads, torch.device(device))
                held.append((tokens // (t.chunk * span) + sequences, t.part_workspaces))
        if t.pipelined:
            span = self.pipelined_span(-(-tokens // max(1, sequences)))  # of rows; a pack has longer parts
            held.append((tokens // (t.chunk * span) + sequences, t.part_workspaces))
        others = self.earlier.workspace_bytes(tokens, sequences, value_heads, device) if self.earlier is not None else 0
        if t.shared:
            others += self.shared_bytes(tokens // t.chunk + sequences, sequences, value_heads, torch.device(device))
        return others + sum(n * value_heads * math.prod(dims) * _FLOATS[dtype].itemsize
                            for n, rows in held for _, dims, dtype in rows)


def _unit_lower_inverse(x: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device="cpu")
    inverse: torch.Tensor = torch.linalg.solve_triangular(eye + x, eye.expand_as(x), upper=False, unitriangular=True)
    return inverse


def _decayed_product(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    decay = ((x if before is None else before)[..., :, None, :] - x[..., None, :, :]).exp()  # of positive numbers, too, above
    kept = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device="cpu").tril(0 if before is None else -1) > 0
    return torch.where(kept[..., None], a[..., :, None, :] * b[..., None, :, :] * decay, 0.0).sum(-1)


def _decayed_matmul(p: torch.Tensor, b: torch.Tensor, x: torch.Tensor, before: torch.Tensor | None = None,
                    transposed: bool = False) -> torch.Tensor:
    decay = ((x if before is None else before)[..., :, None, :] - x[..., None, :, :]).exp()  # of positive numbers, too, above
    kept = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device="cpu").tril(-1) > 0
    each = p[..., None] * torch.where(kept[..., None], decay, 0.0)
    return (each * b[..., :, None, :]).sum(-3) if transposed else (each * b[..., None, :, :]).sum(-2)


#: A function of the module: the page on float64 tiles, (inputs, states, numbers) -> outputs, outputs of the chunk, next states.
_Page = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Expected:
    """The page's results in float64. outs: [T, HV, ...]. finals: [N, HV, ...]. after: for each state, by (sequence, chunk), the
    state after a chunk [HV, ...]. saved: for each output of chunks, the same."""

    outs: list[torch.Tensor]
    finals: list[torch.Tensor]
    after: list[dict[tuple[int, int], torch.Tensor]]
    saved: list[dict[tuple[int, int], torch.Tensor]]


def parent_of(n: int, t: int) -> int:
    """The parent of token t of sequence n in a tree of draft tokens: an earlier token, or -1 for the initial state."""
    return (7 * t + n) % (t + 1) - 1


class CheckProblem:
    """The problem of a self-check.

    It has sequences of one token, of one chunk, of no token, and one longer than the pipeline depth, with a ragged tail. One
    token is repeated. Heads forget nothing, little and much; where there are fewer heads than RATES, sequences come in groups
    with rates of their own. There are initial states. Rows are as large as they may be without results that grow beyond what
    every dtype holds.
    """

    DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    #: Half of the distance from 1 to the next number of a dtype.
    ROUNDING = {"float32": 2 ** -24, "float16": 2 ** -11, "bfloat16": 2 ** -8}
    #: Tokens of a chunk of the page here: a divisor of all chunks. A page that reads or gives something of each chunk has the
    #: module's chunk.
    STEP = 16
    #: The mean log decay of a token, by value head, without its sign: strong, none, weak, medium.
    RATES = (2.0, 0.0, 0.02, 0.3)
    #: The largest log decay of a token where all heads forget fast, by value head, without its sign. The least is half of it. So
    #: warm-ups have one chunk of 16 tokens, and several.
    FAST = (4.0, 0.25)
    #: The value of inputs between 0 and 1, such as beta, for the repeated token. The larger it is, the harder is the inverse.
    ALIKE = 1 - 2 ** -8
    #: Factors of the rows that tokens have, in the order in which they are tried, until no result is above LARGEST. A page may
    #: multiply the state by more than 1 for some rows; a repeated token does that once for each token of a chunk.
    FACTORS = (1.0, 0.5, 0.25, 0.125)
    LARGEST = 256.0
    #: The least input between 0 and 1, and the least mean log decay of a head for forms.
    LEAST = 1e-6

    def __init__(self, tables: Tables, page: _Page | None, reads: Mapping[str, Callable[..., torch.Tensor]],
                 draws: Mapping[str, Callable[..., torch.Tensor]]) -> None:
        """tables, page: those of the module. reads, draws: for inputs in callers' forms, functions by name (runtime/tables.py):
        what the page reads, and samples."""
        self.tables, self.page, self.reads, self.draws = tables, page, reads, draws

    @property
    def by_token(self) -> bool:
        """Whether a call keeps or reads a state for each token."""
        return self.tables.rows or any(n != "checkpoint_rows" for n in self.tables.by_token)

    @property
    def without_gates(self) -> bool:
        """Whether log decays are drawn as 0: walks come in parts, whose warm-ups follow from them, and a gradient reads their
        sums and operands of chunks, which are drawn apart. No bound on forgetting but 0 would be true of these."""
        return self.tables.part_cost is not None and any(len(self.tables.chunk_dims[n]) > 1 for n in self.tables.held)

    def groups(self, heads: tuple[int, int]) -> int:
        """Groups of sequences, so that all RATES are there."""
        return -(-len(self.RATES) // heads[1])

    def rate_offsets(self, heads: tuple[int, int]) -> tuple[int, ...]:
        """For each problem the index in RATES of its first head. What heads have, as A_log, is the same in all sequences. So few
        heads have two problems: a strong decay shows sums that overflow, and hides errors of what comes from states."""
        return (0, 2) if self.tables.head_inputs and self.groups(heads) > 1 else (0,)

    def lengths(self, packed: bool, heads: tuple[int, int]) -> list[int]:
        """Tokens of each sequence. If packed, a pool skips the third of each group."""
        chunk = max(self.tables.chunk, self.STEP)
        last = chunk + 3 if self.by_token else self.tables.check_chunks * chunk + chunk // 2 + 3
        return ([1, chunk, chunk // 2 - 1, 0, last] if packed else [chunk + 3] * 2) * self.groups(heads)

    def solved(self, lengths: Sequence[int], heads: tuple[int, int], given: bool, fast: bool = False,
               rate_offset: int = 0) -> tuple[dict[str, torch.Tensor], Expected]:
        """`drawn` with the first of FACTORS for which `expected` is at most LARGEST everywhere, or the last; and `expected`.

        fast: whether all heads forget fast. rate_offset: as for `drawn`."""
        for factor in self.FACTORS:
            x = self.drawn(lengths, heads, factor, fast, rate_offset)
            found = self.expected(x, lengths, heads, given)
            by_chunk = (s for by in (*found.after, *found.saved) for s in by.values())
            if all(float(y.abs().max()) <= self.LARGEST for y in (*found.outs, *found.finals, *by_chunk)):
                break
        return x, found

    def by_rounding(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], given: bool,
                    want: Expected, tf32: bool) -> tuple[list[torch.Tensor], list[dict[tuple[int, int], torch.Tensor]]]:
        """By how much rounding errors of inputs change each output of a gradient, and each of its sums of chunks; 0 for other
        modules."""
        if not self.tables.backward:
            return ([torch.zeros_like(y) for y in want.outs],
                    [{at: torch.zeros_like(y) for at, y in by_chunk.items()} for by_chunk in want.saved])
        gen = torch.Generator(device="cpu").manual_seed(1)
        size = 2 ** -11 if tf32 else self.ROUNDING[self.tables.dtype]
        rows = [*(row[0] for row in self.tables.inputs if row[2]), *(n for n, *_ in self.tables.chunk_inputs if self.rounded(n))]
        near = {n: y.double() * (1 + size * torch.randn(y.shape, generator=gen, dtype=torch.float64, device="cpu"))
                if n in rows else y for n, y in x.items()}
        found = self.expected(near, lengths, heads, given)
        return ([y - of for y, of in zip(found.outs, want.outs, strict=True)],
                [{at: y - of[at] for at, y in by_chunk.items()} for by_chunk, of in zip(found.saved, want.saved, strict=True)])

    def rounded(self, name: str) -> bool:
        """Whether operands of products may be rounded tiles of this input of chunks: no vectors, and no exponents."""
        return name not in self.tables.held and len(self.tables.chunk_dims[name]) > 1

    def drawn(self, lengths: Sequence[int], heads: tuple[int, int], factor: float = 1.0, fast: bool = False,
              rate_offset: int = 0) -> dict[str, torch.Tensor]:
        """Random inputs [T, heads, ...], numbers [HV], states [N, HV, ...] and inputs of chunks [N, chunks, HV, ...] in the
        caller's forms, by name, on the CPU.

        factor: of rows that are not log decays, and of tiles of chunks that are no sums of them. fast: as for `solved`.
        rate_offset: the index in RATES of the first head."""
        tables, gen, total = self.tables, torch.Generator(device="cpu").manual_seed(0), sum(lengths)
        out: dict[str, torch.Tensor] = {}
        on_cpu: Any = {"dtype": torch.float32, "device": "cpu"}
        count = dict(zip(("H", "HV"), heads, strict=True))
        rates = self.FAST if fast else (0.0,) if self.without_gates else self.RATES
        each = max(1, len(lengths) // self.groups(heads))  # sequences of a group
        by_group = torch.tensor([[rates[(rate_offset + n // each * heads[1] + j) % len(rates)] for j in range(heads[1])]
                                 for n in range(len(lengths))], **on_cpu)  # the mean log decays of each sequence's heads
        rate, of_tokens = by_group[0], by_group.repeat_interleave(torch.tensor(lengths, device="cpu"), 0)
        forgets = rate.clamp_min(self.LEAST)  # forms may take its log
        # in the last sequence of each group a token near the first chunk's end, for as long as a chunk
        size = max(tables.chunk, self.STEP)
        repeated = [slice(t, min(t + size, sum(lengths[:n + 1]))) for n in range(each - 1, len(lengths), each)
                    for t in [sum(lengths[:n]) + size - self.STEP // 2]]
        keys = {dims[:1] for _, dims in tables.initial}  # of rows that multiply a state
        for name, of, dims, dtype in tables.inputs:
            normal = torch.randn(total, count[of], *dims, generator=gen, **on_cpu)
            page = normal / normal.norm(dim=-1, keepdim=True) if dims and (of == "H" or dims in keys) else normal
            if not dims or name in tables.decays:
                page = torch.rand(total, count[of], *dims, generator=gen, **on_cpu).clamp(self.LEAST, 1 - self.LEAST)
                if name in tables.decays:
                    means = of_tokens[:, :count[of]].view(total, count[of], *(1 for _ in dims))
                    page = -(0.5 + page / 2 if fast else 2 * page) * means
                else:
                    page[[s.start for s in repeated]] = self.ALIKE
            else:
                page = page * factor
            raw = normal.abs() if fast and name in tables.decays else normal  # raw gates, of which more forget more
            x = self.draws[name](page, raw, forgets[:count[of]]) if name in self.draws else page
            for s in repeated:
                x[s] = x[s.start:s.start + 1].clone()
            out[name] = x.to(self.DTYPES[dtype])
        for name, _, dims, dtype in tables.head_inputs:
            normal = torch.randn(heads[1], *dims, generator=gen, **on_cpu)
            page = -rate.view(-1, *(1 for _ in dims)).expand_as(normal) if name in tables.decays else normal
            x = self.draws[name](None, normal.abs() if fast else normal, forgets) if name in self.draws else page
            out[name] = x.to(self.DTYPES[dtype])
        for name, dims in tables.initial:
            x = torch.randn(len(lengths), heads[1], *dims, generator=gen, **on_cpu) / 2
            out[name] = x.to(self.DTYPES[tables.state_dtype])
        summed = sorted({of for of, _ in tables.sums.values()})
        for name, dims, dtype in tables.chunk_inputs:
            x = torch.zeros(len(lengths), -(-max(lengths) // tables.chunk), heads[1], *dims, **on_cpu)
            of, _ = tables.sums.get(name, ("", False))
            for n, (tiles, length) in enumerate(zip(x, lengths, strict=True)):
                own = torch.Generator("cpu").manual_seed(1000 * (1 + summed.index(of)) + n) if of else gen
                self.fill(name, tiles, length, own, factor, by_group[n])
            out[name] = x.to(self.DTYPES[dtype])
        return out

    def fill(self, name: str, tiles: torch.Tensor, length: int, gen: torch.Generator, factor: float, rates: torch.Tensor
             ) -> None:
        """Random tiles of the chunks of a sequence, with zeros past its end, as modules store them. Those of `held` repeat
        their last row there, and tiles of rows are running sums of log decays. Those of the same decays get generators in the
        same state: of independent sums exp of a difference could grow. What bounds how much tokens forget is not below 0: they
        forget nothing, so that each part starts from what the parts before it give. factor: of other tiles. rates: of heads."""
        for i, of_all in enumerate(tiles[:-(-length // self.tables.chunk)]):
            rows = min(length - i * self.tables.chunk, self.tables.chunk)
            tile = self.of_chunk(name, of_all, rows)
            tile.copy_(torch.randn(tile.shape, generator=gen, dtype=tile.dtype, device="cpu") / 2)
            if name == self.tables.forgets:
                tile.abs_()
            if name not in self.tables.held:
                tile.mul_(factor)
                continue
            if tile.ndim > 2:
                decays = -2 * rates.view(-1, 1, 1) * tile.abs()
                before = name in self.tables.sums and self.tables.sums[name][1]
                tile.copy_(decays.cumsum(1) - (decays if before else 0.0))
            of_all[:, rows:] = of_all[:, rows - 1:rows]

    def of_chunk(self, name: str, tiles: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """A view of tiles of chunks in the page's order of dims, without padding. rows: tokens of the chunk, None for all."""
        dims = self.tables.chunk_dims[name]
        tiles = tiles.mT if name.endswith("_vk") else tiles
        for axis, extent in zip(range(-len(dims), 0), dims, strict=True):
            most = rows if extent is None else extent
            tiles = tiles if most is None else tiles.narrow(axis, 0, most)
        return tiles

    def read(self, name: str, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """An input in the form in which the page reads it, in float64."""
        y = x[name].double()
        if name not in self.reads:
            return y
        of_heads = {n: x[n].double() for n, *_ in self.tables.head_inputs}
        return self.reads[name](y, **{n: z.view(*z.shape, *(1 for _ in y.shape[z.ndim + 1:])) for n, z in of_heads.items()})

    def kv_order(self, state: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """A caller's states in the page's order of dims."""
        return state.mT if self.tables.state == "vk" and len(dims) == 2 else state

    def expected(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], given: bool) -> Expected:
        """The page's results in float64. given: whether initial states count."""
        tables = self.tables
        assert self.page is not None
        share = {"H": heads[1] // heads[0], "HV": 1}
        inputs = [self.read(n, x).repeat_interleave(share[of], 1).transpose(0, 1) for n, of, *_ in tables.inputs]
        of_heads = [x[n].double() for n, *_ in tables.head_inputs if n not in self.draws or not self.reads]
        numbers = [torch.tensor(1.0 if n is None else n, dtype=torch.float64, device="cpu") for n in tables.scalars.values()]
        initial = [self.kv_order(x[n].double(), dims) * given for n, dims in tables.initial]
        count, start, by_page = len(tables.outputs), 0, bool(tables.chunk_inputs or tables.saved)
        shapes = [(heads[1], sum(lengths), *dims) for _, dims, _ in tables.outputs]
        outs = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        finals: list[list[torch.Tensor]] = [[] for _ in initial]
        after: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in initial]
        saved: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in tables.saved]
        for n, length in enumerate(lengths):
            states = [s[n] for s in initial]
            step = tables.chunk if by_page else min(self.STEP, tables.chunk)  # so that there is a state after each chunk
            for t in range(0, length, step)[::-1 if tables.backward else 1]:
                if "retrieve_parent_token" in tables.indices and t:
                    parent = parent_of(n, t)
                    states = [s[n] for s in initial] if parent < 0 else [s[n, parent] for s in after]
                rows = slice(start + t, start + min(t + step, length))
                of_chunk = [self.of_chunk(name, x[name][n, t // step], rows.stop - rows.start).double()
                            for name, *_ in tables.chunk_inputs]
                results = self.page([*(y[:, rows] for y in inputs), *of_heads, *of_chunk], states, numbers)
                states = results[count + len(saved):]
                for kept, y in zip(outs, results, strict=False):
                    kept[:, rows] = y
                for by_chunk, y in zip(saved, results[count:], strict=False):
                    by_chunk[n, t // step] = y
                whole = (t + step) // tables.chunk
                if t + step <= length and (t + step) % tables.chunk == 0:
                    for by_chunk, s in zip(after, states, strict=True):
                        by_chunk[n, whole - 1] = s
            for of_state, s, first in zip(finals, states, initial, strict=True):
                of_state.append(s.expand_as(first[n]))
            start += length
        return Expected([y.transpose(0, 1) for y in outs], [torch.stack(s) for s in finals], after, saved)


class CheckCall:
    """The arguments of a call with the sequences of a `CheckProblem`, in the module's layout, with guards, gaps and marks around
    all that kernels write."""

    #: The value of memory that no call may write.
    MARK = 7.0
    #: Guard elements before and after each tensor of the kernels.
    GUARD = 1 << 16

    def __init__(self, problem: CheckProblem) -> None:
        """problem: of the module that is called."""
        self.problem, self.tables = problem, problem.tables

    # --- memory ---
    def guarded(self, x: torch.Tensor, shape: Sequence[int], fill: float) -> torch.Tensor:
        """A tensor of this shape, like `x`, between guard elements that kernels must not touch."""
        size = math.prod(shape)
        return x.new_full((size + 2 * self.GUARD,), fill)[self.GUARD:self.GUARD + size].view(shape)

    def placed(self, x: torch.Tensor, rows: int, fill: float = math.nan) -> torch.Tensor:
        """[T, heads, ...] in the module's layout. If kernels take strides, there are gaps between heads."""
        x = x.view(rows, len(x) // rows, *x.shape[1:])
        x = x if self.tables.layout == "bthd" else x.transpose(1, 2)
        shape = (*x.shape[:2], x.shape[2] + self.tables.strided, *x.shape[3:])
        return self.guarded(x, shape, fill)[:, :, :x.shape[2]].copy_(x)

    def pool(self, x: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
        """A pool with gaps between slots, `count` in all, of which some are no sequence's."""
        size = x[0].numel()
        pool = x.new_full((count, size + 32), self.MARK)[:, :size].view(count, *x.shape[1:])
        pool[slots] = x
        return pool

    # --- where states lie ---
    def is_skipped(self, n: int) -> bool:
        """True if the pool's slot of this sequence is -1."""
        return self.tables.pool and n % 5 == 2

    def places(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Where states lie: the slot of each sequence's initial state, slots of tokens [N, W], and rows of sequences."""
        count, width = len(lengths), max(lengths) + 1
        rows = torch.arange(count, 0, -1, device="cpu")
        if "state_indices" not in self.tables.by_token:
            return rows, None, rows
        slots = torch.arange(count * width, 0, -1, device="cpu").view(count, width)
        accepted = "num_accepted_tokens" in self.tables.indices
        return slots[torch.arange(count, device="cpu"), [n % 3 * accepted for n in range(count)]], slots, rows

    def rows(self, lengths: Sequence[int]) -> torch.Tensor:
        """The rows of checkpoints, by sequence and chunk: one after each whole chunk, in those of calls with one for every
        chunk."""
        chunk, start = self.tables.chunk, 0
        rows = torch.full((len(lengths), max(lengths) // chunk + 1), -1, device="cpu")
        for n, length in enumerate(lengths):
            rows[n, :length // chunk] = start // chunk + torch.arange(length // chunk, device="cpu")
            start += length
        return rows

    def chunk_slots(self, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
        """The chunk slots of the sequences, as (slot, sequence, chunk)."""
        chunk, starts = self.tables.chunk, [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        return [(starts[n] // chunk + n + i, n, i) for n, length in enumerate(lengths) for i in range(-(-length // chunk))]

    def integers(self, lengths: Sequence[int], once: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of integers, by name. once: how many sequences differ."""
        (first, slots, rows), width = self.places(lengths), max(lengths) + 1
        left_out = torch.tensor([self.is_skipped(n) for n in range(len(lengths))], device="cpu")
        made = {"state_indices": first.where(~left_out, -1) if slots is None else slots.where(~left_out[:, None], -1),
                "num_accepted_tokens": torch.tensor([n % 3 + 1 for n in range(len(lengths))], device="cpu"),
                "intermediate_state_indices": rows,
                "retrieve_parent_token": torch.tensor([[parent_of(n % once, t) for t in range(width)]
                                                       for n in range(len(lengths))], device="cpu"),
                "checkpoint_rows": self.rows(lengths)}
        return {name: made[name].to(torch.int32).to(device) for name in self.tables.numbers}

    # --- the arguments ---
    def arguments(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], device: torch.device,
                  call: tuple[bool, bool, bool]) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The call's arguments, and the slots of the sequences. Rows past the last sequence are NaN. call: whether sequences are
        packed, initial states are given, and final states are wanted."""
        tables, (packed, given, wanted), dtypes = self.tables, call, self.problem.DTYPES
        rows, spare = (1, tables.chunk) if packed else (len(lengths), 0)
        copies = sum(lengths) // x[tables.inputs[0][0]].shape[0]
        arguments: dict[str, Any] = {"output_final_state": wanted} if tables.final or tables.in_place else {}
        arguments.update({n: 1.0 for n, default in tables.scalars.items() if default is None})
        for name, *_ in tables.inputs:
            y = x[name].to(device)
            spare_rows = y.new_full((spare, *y.shape[1:]), math.nan)
            arguments[name] = self.placed(torch.cat([y] * copies + [spare_rows]), rows)
        for name, *_ in tables.head_inputs:
            arguments[name] = x[name].to(device)
        for name, dims, _ in tables.chunk_inputs:
            y = x[name].to(device)
            tiles = y.new_full(((sum(lengths) + spare) // tables.chunk + len(lengths), heads[1], *dims), math.nan)
            for slot, n, i in self.chunk_slots(lengths):
                tiles[slot] = y[n % len(y), i]
            arguments[name] = tiles
        for name, (_, dims, dtype) in zip(tables.outs, tables.outputs, strict=True):
            shape = (sum(lengths) + spare, heads[1], *dims)
            arguments[name] = self.placed(torch.full(shape, self.MARK, dtype=dtypes[dtype], device=device), rows, self.MARK)
        if packed:
            arguments["cu_seqlens"] = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32).to(device)
        arguments.update(self.integers(lengths, len(lengths) // copies, device) if tables.numbers else {})
        slots = self.states(arguments, x, lengths, copies, device, given)
        self.buffers(arguments, x, lengths, (sum(lengths) + spare) // tables.chunk + 1, device, wanted)
        return arguments, slots

    def states(self, arguments: dict[str, Any], x: Mapping[str, torch.Tensor], lengths: Sequence[int], copies: int,
               device: torch.device, given: bool) -> torch.Tensor | None:
        """Add the initial states to the arguments. Returns the slots of the sequences in a pool."""
        tables = self.tables
        for name, _ in tables.initial if given else ():
            y = torch.cat([x[name].to(device)] * copies)
            arguments[name] = self.guarded(y, y.shape, self.MARK).copy_(y)
        if not tables.pool:
            return None
        slots, all_slots, _ = self.places(lengths)
        count = (slots if all_slots is None else all_slots).numel() + 2
        arguments.update({name: self.pool(arguments[name], slots, count) for name, _ in tables.initial})
        return slots

    def buffers(self, arguments: dict[str, Any], x: Mapping[str, torch.Tensor], lengths: Sequence[int], positions: int,
                device: torch.device, wanted: bool) -> None:
        """Add the memory for checkpoints and final states to the arguments. positions: of checkpoints, where callers say them."""
        tables = self.tables
        pairs = list(zip(tables.checkpoints, tables.initial, strict=True)) if tables.rows or tables.positions else []
        for (name, dims), (initial, _) in pairs:
            y = x[initial].to(device)
            lead = (positions,) if tables.positions else (len(lengths) + 2, max(lengths) + 1)
            arguments[name] = self.guarded(y, (*lead, y.shape[1], *dims), self.MARK)
        for (name, dims), (initial, _) in zip(tables.final, tables.initial, strict=True) if wanted and tables.final else ():
            y = x[initial].to(device)
            arguments[name] = (torch.full_like(arguments[initial], self.MARK) if tables.pool else
                               self.guarded(y, (len(lengths), y.shape[1], *dims), self.MARK))

    # --- what it may write ---
    @property
    def kept(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Rows of the tensors that hold a state for each token."""
        return self.tables.checkpoints if self.tables.rows else self.tables.initial if self.tables.slots else ()

    def stored_by_token(self, lengths: Sequence[int], served: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The indices of the tiles in which the states after all tokens of the served sequences are."""
        _, slots, rows = self.places(lengths)
        n, t = torch.tensor(tokens_of(lengths, served), dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
        return (slots[n, t],) if self.tables.slots and slots is not None else (rows[n], t) if self.tables.rows else ()

    def writable(self, arguments: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The arguments that kernels write to, by name: all memory of their storage, with guards and gaps, and a copy of it."""
        states = [n for n, _ in (self.tables.initial if self.tables.in_place else self.tables.final)]
        rows = [n for n, _ in self.tables.checkpoints] if self.tables.rows or self.tables.positions else []
        return {n: (whole(arguments[n]), whole(arguments[n]).clone()) for n in (*self.tables.outs, *states, *rows)
                if n in arguments}

    def beside(self, arguments: Mapping[str, Any], writable: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
               written: torch.Tensor, by_token: tuple[torch.Tensor, ...], slots: Any, lengths: Sequence[int]
               ) -> dict[str, tuple[float, float]]:
        """(inf, 0) by name of memory in which something changed that the call may not write, else (0, 0).

        writable: as `writable` gave it before the call. written: tokens of sequences. by_token, slots: the tiles of states that
        the call writes."""
        tables, found = self.tables, {}
        for name, (now, before) in writable.items():
            own = torch.zeros(now.shape, dtype=torch.bool, device=now.device).as_strided(
                arguments[name].shape, arguments[name].stride(), arguments[name].storage_offset())
            if name in tables.outs:
                own = own if tables.layout == "bthd" else own.transpose(1, 2)
                own[written.view(own.shape[:2]).to(now.device)] = True
            elif name in dict(self.kept):
                own[tuple(at.to(now.device) for at in by_token)] = True
            elif name in dict(tables.checkpoints):
                own[[row for row in self.rows(lengths).flatten().tolist() if row >= 0]] = True
            else:
                own[slots] = True
            found[f"memory beside {name}"] = math.inf if ((now != before) & ~whole(own)).any() else 0.0, 0.0
        return found


def tokens_of(lengths: Sequence[int], served: Sequence[int]) -> list[tuple[int, int]]:
    """The tokens of these sequences, as pairs (sequence, token)."""
    return [(n, t) for n in served for t in range(lengths[n])]


def whole(x: torch.Tensor) -> torch.Tensor:
    """All memory of the storage of a tensor."""
    return x.new_empty(0).set_(x.untyped_storage())


#: By the name of an output: its error, as RMSE over RMS, and the error that is accepted.
_Errors = dict[str, tuple[float, float]]


class Check:
    """Compares a module's kernels with its page in float64 on a `CheckProblem`. A build with parts runs in parts too: some have a
    warm-up, and some need summaries of all parts before them."""

    #: The largest RMSE over RMS of one head in one sequence that rounding may cause, by dtype.
    ACCEPTED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
    #: The same if a GPU multiplies float32 as tf32, which drops 13 bits of each operand.
    ACCEPTED_TF32 = 3e-2
    #: Of gradients: an error may be this many times the change that rounding errors of inputs make, and at most MOST. Sums of a
    #: gradient cancel, so that its entries may be small beside their terms. So may all of a head in a short sequence: an error
    #: there is compared with this many times that change, if that is more than the gradient.
    OF_ROUNDING, MOST = 16, 0.25
    #: Instances on a GPU, by copies of the problem: enough to fill it. Fewer where each token has a state, which takes memory.
    INSTANCES = 512
    INSTANCES_BY_TOKEN = 64

    def __init__(self, tables: Tables, page: _Page | None, host: Any, function: Callable[..., Any] | None,
                 reads: Mapping[str, Callable[..., torch.Tensor]] | None = None,
                 draws: Mapping[str, Callable[..., torch.Tensor]] | None = None) -> None:
        """tables, host, page: those of the module. function: the function under test, as callers see it. reads, draws: as for
        `CheckProblem`."""
        self.tables, self.host, self.function = tables, host, function
        self.problem = CheckProblem(tables, page, reads or {}, draws or {})
        self.call = CheckCall(self.problem)
        self.done: set[tuple[torch.device, tuple[int, int]]] = set()
        self.lock = threading.RLock()

    def __call__(self, device: torch.device | str | None = None, heads: tuple[int, int] | None = None) -> _Errors:
        """Run the kernels and compare. Returns (error, accepted error) by output, as RMSE over RMS. Raises RuntimeError if an
        error is too large. heads: H and HV, if kernels are compiled for them."""
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        with self.lock:
            found = self.errors(device, heads)
            wrong = [f"{n} off by {error:.1e} ({accepted:.0e} is accepted)" for n, (error, accepted) in found.items()
                     if not error <= accepted]
            if wrong:
                self.done.discard((device, heads or self.heads()))
                raise RuntimeError(f"{self.tables.name} gives wrong results on {device}: {', '.join(wrong)}")
        return found

    def once(self, device: torch.device, heads: tuple[int, int]) -> None:
        """Do `__call__` once for these head counts on the device. GDN_CODEGEN_ADMIT=0 turns it off."""
        if os.environ.get("GDN_CODEGEN_ADMIT") == "0":
            return
        with self.lock:  # other threads wait for the result; launches within `errors` find the check done
            if (device, heads) in self.done:
                return
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{self.tables.name}: call this once before a graph is captured, to check its kernels")
            self(device, heads)

    def heads(self) -> tuple[int, int]:
        """H and HV to use if the caller gives none: two value heads for each key head, or as many as one instance handles."""
        if self.tables.heads:
            h, hv = self.tables.heads.values()
            return h, hv
        both = {"H", "HV"} <= {row[1] for row in self.tables.inputs}
        return (2, 2 * max(2, self.tables.heads_per_instance)) if both else (2, 2)

    def errors(self, device: torch.device, heads: tuple[int, int] | None = None,
               calls: Sequence[tuple[bool, bool, bool]] = ((True, True, True), (False, False, True))) -> _Errors:
        """(error, accepted error) by output: the worst of `calls`. A call says whether sequences are packed, initial states are
        given, and final states are wanted."""
        heads = heads or self.heads()
        found: _Errors = {}
        hosts = [x for x in (self.host, self.host.earlier) if x is not None]
        in_parts = [x for x in hosts if x.tables.in_parts]
        parts = (1, 2) if in_parts and device.type != "cpu" else (1,)
        # the first of a pair declines the call unless all heads forget fast
        problems = [(chunks, call, (fast, rate_offset)) for chunks in parts for call in calls
                    for fast in (False, True)[:len(hosts)] for rate_offset in self.problem.rate_offsets(heads)]
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.done.add((device, heads))  # launches below call `once`
            before = [(x.poison, x.part_chunks, x.plans) for x in hosts]
            try:
                for x in hosts:
                    x.poison, x.plans = True, {}
                for chunks, call, rates in problems:
                    for x in in_parts:  # short parts, so that there are many
                        x.part_chunks = chunks
                    for n, (error, accepted) in self.compared(device, heads, *call, *rates).items():
                        known = found.get(n, (0.0, accepted))[0]
                        found[n] = (known if known > error or math.isnan(known) else error), accepted
                    self.host.plans.clear()
            except BaseException:
                self.done.discard((device, heads))
                raise
            finally:
                for x, fields in zip(hosts, before, strict=True):
                    x.poison, x.part_chunks, x.plans = fields
        return found

    def compared(self, device: torch.device, heads: tuple[int, int], packed: bool, given: bool, wanted: bool,
                 fast: bool = False, rate_offset: int = 0) -> _Errors:
        """(error, accepted error) by output of one call. fast, rate_offset: as for `CheckProblem.solved`."""
        tables, once = self.tables, self.problem.lengths(packed, heads)
        given, wanted = given or tables.pool or tables.in_place, wanted or tables.in_place
        instances = self.INSTANCES_BY_TOKEN if self.problem.by_token or tables.positions else self.INSTANCES
        lengths = once * (1 if device.type == "cpu" else 1 + instances // (len(once) * heads[1]))
        x, want = self.problem.solved(once, heads, given, fast, rate_offset)
        arguments, slots = self.call.arguments(x, lengths, heads, device, (packed, given, wanted))
        served = [n for n in range(len(lengths)) if not self.call.is_skipped(n)]
        starts = [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        written = torch.zeros(starts[-1] + packed * tables.chunk, dtype=torch.bool, device="cpu")
        for n in served:
            written[starts[n]:starts[n + 1]] = True
        writable = self.call.writable(arguments)
        assert self.function is not None
        results = self.function(**arguments)

        tf32 = tables.tf32 and device.type == "cuda"
        accepted = self.ACCEPTED_TF32 if tf32 else self.ACCEPTED[tables.dtype]
        if "retrieve_parent_token" in tables.indices:  # tokens start from states as they were stored
            accepted = max(accepted, self.ACCEPTED[tables.state_dtype])
        count = len(want.outs)
        change, change_saved = self.problem.by_rounding(x, once, heads, given, want, tf32)
        found = self.of_outputs(results[:count], want, change, (lengths, once, served), accepted)
        accepted = max(accepted, self.ACCEPTED[tables.state_dtype])
        errors = self.of_states(results[count:], arguments, want, slots, (lengths, once, served))
        saved = results[len(results) - len(want.saved):]
        found |= {n: (error, accepted) for n, error in errors.items()}
        found |= self.of_chunks(saved, want, change_saved, (lengths, once), accepted)
        own = served if slots is None else slots[served].to(device)
        return found | self.call.beside(arguments, writable, written, self.call.stored_by_token(lengths, served), own, lengths)

    def of_outputs(self, results: Sequence[torch.Tensor], want: Expected, change: Sequence[torch.Tensor],
                   rows: tuple[Sequence[int], Sequence[int], Sequence[int]], accepted: float) -> _Errors:
        """(error, accepted error) by output. change: by how much rounding of inputs changes each. rows: lengths of the call's
        sequences, of the problem's, and the numbers of those that are served."""
        (lengths, once, served), found = rows, dict[str, tuple[float, float]]()
        for (name, _, dtype), got, of_all, by_all in zip(self.tables.outputs, results, want.outs, change, strict=True):
            tokens = got if self.tables.layout == "bthd" else got.transpose(1, 2)
            each = torch.split(tokens.flatten(0, 1)[:sum(lengths)].cpu(), list(lengths))
            both = list(zip(*(torch.split(y, list(once)) for y in (of_all, by_all)), strict=True))
            error = worst([off(y + by, y, self.OF_ROUNDING * by) for y, by in both if len(y)])
            errors = [off(each[n], y, self.OF_ROUNDING * by) for n in served for y, by in [both[n % len(once)]] if len(y)]
            found[name] = worst(errors), max(accepted, self.problem.ROUNDING[dtype], min(self.MOST, self.OF_ROUNDING * error))
        return found

    def of_states(self, results: Sequence[torch.Tensor | None], arguments: Mapping[str, Any], want: Expected,
                  slots: torch.Tensor | None, rows: tuple[Sequence[int], Sequence[int], Sequence[int]]) -> dict[str, float]:
        """Errors of final states, of states by token, and of checkpoints, by name. results: those after the outputs. rows: as for
        `of_outputs`."""
        tables, (lengths, once, served), found = self.tables, rows, dict[str, float]()
        starts, kv_order = [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()], self.problem.kv_order
        states, at_chunks = results[:len(want.finals)], results[len(want.finals):]
        names = [n for n, _ in tables.final] or [n.replace("initial", "final") for n, _ in tables.initial]
        for name, (_, dims), got, final in zip(names, tables.initial, states, want.finals, strict=True):
            if got is not None and not tables.slots:
                mine = kv_order(got.cpu() if slots is None else got.cpu()[slots], dims)
                found[name] = worst([off(mine[n][None], final[n % len(once)][None]) for n in served])
        by_token = self.call.stored_by_token(lengths, served)
        for (name, dims), after in zip(self.call.kept, want.after, strict=True) if self.call.kept else ():
            mine = kv_order(arguments[name].cpu()[by_token], dims)
            found[f"{name} by token"] = worst([off(y[None], after[n % len(once), t][None]) for y, (n, t) in
                                               zip(mine, tokens_of(lengths, served), strict=True)])
        if tables.positions:
            at_chunks = [arguments[name] for name, _ in tables.checkpoints]
        for (name, dims), got, after in zip(tables.checkpoints, at_chunks, want.after, strict=False):
            assert got is not None
            mine = kv_order(got.cpu(), dims)
            found[name] = worst([off(mine[starts[n] // tables.chunk + i][None], after[n % len(once), i][None])
                                 for n in served for i in range(lengths[n] // tables.chunk)])
        return found

    def of_chunks(self, results: Sequence[torch.Tensor], want: Expected, change: Sequence[Mapping[tuple[int, int], torch.Tensor]],
                  rows: tuple[Sequence[int], Sequence[int]], accepted: float) -> _Errors:
        """(error, accepted error) by output of chunks. change: by how much rounding of inputs changes each. rows: lengths of the
        call's sequences, and of the problem's."""
        (lengths, once), found = rows, _Errors()
        for m, (name, got, of_chunk, by_rounding) in enumerate(zip(self.tables.saved, results, want.saved, change, strict=True)):
            mine, (_, *columns) = self.problem.of_chunk(name, got), self.tables.chunk_dims[name]
            tiles: dict[tuple[int, int], list[tuple[torch.Tensor, ...]]] = {}
            for slot, n, i in self.call.chunk_slots(lengths):  # states one by one, rows of tokens and sums by sequence
                y, by = of_chunk[n % len(once), i], by_rounding[n % len(once), i]
                x = mine[slot][:, :y.shape[1]].cpu()
                if None in columns:  # a last chunk has fewer columns
                    fill = (0, self.tables.chunk - y.shape[2])
                    x, y, by = (torch.nn.functional.pad(z[..., :y.shape[2]], fill) for z in (x, y, by))
                own = m < len(self.tables.initial) and not self.tables.backward
                tiles.setdefault((n, i if own else 0), []).append((x, y, by))
            each = [[torch.cat(z, 1).transpose(0, 1) for z in zip(*x, strict=True)] for x in tiles.values()]
            error = worst([off(y + by, y, self.OF_ROUNDING * by) for _, y, by in each])
            found[name] = (worst([off(x, y, self.OF_ROUNDING * by) for x, y, by in each]),
                           max(accepted, min(self.MOST, self.OF_ROUNDING * error)))
            if name in self.tables.zeroed:  # callers add up the slots without a chunk, too
                unused = sorted({*range(len(mine))} - {slot for slot, *_ in self.call.chunk_slots(lengths)})
                found[f"memory beside chunks of {name}"] = float(mine[unused].abs().max()) if unused else 0.0, 0.0
        return found


def off(got: torch.Tensor, want: torch.Tensor, least: torch.Tensor | None = None) -> torch.Tensor:
    """RMSE over RMS of the worst head. got, want, least: [tokens, heads, ...]. An RMS is at least that of `least`."""
    got, least = got.double(), torch.zeros_like(want) if least is None else least
    error, size, other = ((y * y).transpose(0, 1).flatten(1).mean(1) for y in (got - want, want, least))
    return (error / size.maximum(other).clamp_min(1e-30)).sqrt().max()


def worst(errors: Sequence[torch.Tensor]) -> float:
    """The largest error; NaN if any is NaN."""
    return float(torch.stack(list(errors)).max()) if errors else 0.0


# all generated modules of a process share it: where two threads parse Python, CPython 3.11 now and then raises SystemError, "AST
# constructor recursion depth mismatch"
_tracing = vars(tilelang).setdefault("_one_trace_at_a_time", threading.Lock())


def _fits_units(t: Tables, name: str, x: torch.Tensor) -> bool:
    """True if kernels can read a tensor with dense rows without a copy: its strides are multiples of its unit, no two indices
    share an element, and rows of tiles are aligned to 16 bytes. The C backend has no bfloat16."""
    if x.ndim == 4 and x.data_ptr() % 16:
        return False
    if 0 in x.stride() or not _is_apart(x) or any(far % t.units[name] for far in _steps(x.stride(), t.layout)):
        return False
    return x.dtype != torch.bfloat16 or x.is_cuda


def _as_dense(x: torch.Tensor) -> torch.Tensor:
    """A tensor with the address and shape of `x`, and dense strides: kernels get strides as separate arguments."""
    dense = _dense(x.shape)
    return x if x.stride() == dense else x.as_strided(x.shape, dense)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """`x`; if it has no tokens, a tensor of the same kind with one token."""
    return x if x.numel() or x.shape[0] == 0 else x.new_empty([max(1, d) for d in x.shape])


def _cpu_flags() -> list[str]:
    """Flags of gcc. The last one identifies the kind of processor, so that different machines can share TileLang's disk cache."""
    features = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            features = next((line for line in f if line.startswith(("flags", "Features"))), features)
    kind = hashlib.sha256(features.encode()).hexdigest()[:8]
    return ["-O2", "-ftree-vectorize", "-march=native", "-fno-math-errno", "-fno-trapping-math", f"-DPROCESSOR_{kind}"]


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_data(run: Any, fixed: Sequence[int], tensors: int, numbers: int) -> tuple[Any, ...]:
    """A launch as data, for the native launcher: the function, no grid, its parameters, and what keeps it.

    Parameters: tensors and cu_seqlens ("t", place), whole numbers ("i", number), numbers ("d", place)."""
    given = [*(("t", n) for n in range(tensors + 1)), *(("i", x) for x in fixed), *(("d", n) for n in range(numbers))]
    return run, None, given, run


class TileLangLauncher:
    """Compiles and launches the kernels of one module.

    file: the path of the module. kernels: name -> a function from the namespace of device functions to the kernel's program.
    functions: these namespaces, for "cuda" and, if kernels run on a CPU, "cpu". stored: for each kernel, the tensors that it
    stores to. groups: kernels with warp groups, whose text has all barriers. arch: the one architecture that the module is for;
    "" if its text runs on any GPU.

    passes: options of TVM's passes, by kernel.
    """

    #: The emitted text keeps every access in bounds.
    PASSES: ClassVar[dict[str, bool]] = {"tl.disable_safe_memory_legalize": True, "tl.enable_fast_math": True}

    def __init__(self, tables: Tables, file: str, kernels: Mapping[str, Callable[[Any], Any]], functions: Mapping[str, Any],
                 stored: Mapping[str, Collection[str]], groups: Collection[str] = (), arch: str = "") -> None:
        self.tables, self.file, self.kernels, self.functions, self.stored = tables, file, kernels, functions, stored
        self.arch = arch
        self.passes = {n: {**self.PASSES, **({"tl.disable_thread_storage_sync": True} if n in groups else {})} for n in kernels}
        self.compiling = threading.Lock()
        self.for_cpu = functools.cache(self._compile_for_cpu)
        self.loaded = functools.cache(self._load)
        self.together = functools.cache(self._together)

    def __call__(self, name: str, instances: int, sizes: Sequence[int], ints: Sequence[int], device: torch.device
                 ) -> Callable[[Sequence[Any], Any, Sequence[float]], None]:
        """A function that launches the kernel on its tensors, cu_seqlens and numbers."""
        if self.arch and device.type != "cuda":
            _fail(self.tables.inputs[0][0], f"device {device}", f"a CUDA device (this module was built for {self.arch})")
        fixed = (sizes[2], *(sizes[6:] if self.tables.kernel(name)[1] == "parts" or self.tables.pipelined else ()), *ints)
        with self.compiling:
            made = self.ready(name, device)
        if device.type == "cpu":
            return lambda tensors, cu, scalars: self.run_on_cpu(name, tensors, (cu, *fixed, *scalars))
        run = made.main  # without TileLang's wrapper, which costs time
        if self.arch and not sizes[1]:  # a copy of a tile describes the whole tensor, which has no empty dim
            return lambda tensors, cu, scalars: run(*map(_with_rows, tensors), cu, *fixed, *scalars)

        def launch(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            run(*tensors, cu, *fixed, *scalars)

        def launch_strided(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            run(*map(_as_dense, tensors), cu, *fixed, *scalars)

        chosen = launch_strided if self.tables.strided else launch
        chosen.compiled = functools.partial(_as_data, run, fixed)  # type: ignore[attr-defined]
        return chosen

    def ready(self, name: str, device: torch.device) -> Any:
        """The kernel, compiled for the device."""
        if device.type == "cpu":
            return self.for_cpu(name)
        with torch.cuda.device(device):
            return self.loaded(name, self.arch or "sm_" + nvcc.get_target_arch(torch.cuda.get_device_capability(device)))

    def _together(self, names: tuple[str, ...], device: torch.device) -> None:
        """Compile the kernels of a call side by side, of which each would wait for the one before. TileLang holds its state for
        each thread, runs its passes without Python's lock, and nvcc and gcc are processes of their own. Raises the error of the
        first of `names` that has one. What is then under way ends by itself."""
        threads = min(len(names), _cores())
        if threads < 2 or (self.arch and device.type != "cuda"):
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # other threads keep away from the device
            return
        with self.compiling:
            pool = ThreadPoolExecutor(threads)
            try:
                for made in [pool.submit(self.ready, name, device) for name in names]:
                    made.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def program(self, name: str, cpu: bool = False) -> Any:
        """The kernel's program for TileLang. One thread of the process traces at a time."""
        with _tracing:
            return self.kernels[name](self.functions["cpu" if cpu else "cuda"])

    def library(self, name: str, arch: str) -> str:
        """The path of a kernel compiled ahead for an architecture (gdn_codegen build --compile), in a folder beside this module.
        The name has a hash of the module's text, the compilers' versions and the kind of machine."""
        with open(self.file, "rb") as f:
            made = hashlib.sha256(f.read() + f"{tilelang.__version__} {tvm_ffi.__version__} {platform.machine()}".encode())
        return os.path.join(os.path.splitext(self.file)[0] + ".kernels", f"{name}_{arch}_{made.hexdigest()[:16]}.so")

    def compiled(self, name: str, arch: str) -> Any:
        """The kernel, compiled by nvcc. TileLang keeps it on disk, in TILELANG_CACHE_DIR, for other processes too."""
        target = {"kind": "cuda", "arch": arch}
        with self.locked(name, arch), tilelang.tvm.target.Target(target):  # some device functions ask for it
            return tilelang.compile(self.program(name), target=target, pass_configs=self.passes[name])

    def run_on_cpu(self, name: str, tensors: Sequence[Any], rest: Sequence[Any]) -> None:
        """Run a kernel compiled for the CPU. Tensors in bfloat16, which the C backend does not have, are widened to float32."""
        tensors = [*map(_as_dense, tensors)] if self.tables.strided else tensors
        wide = [x.float() if x.dtype == torch.bfloat16 else x for x in tensors]
        self.for_cpu(name)(*wide, *rest)
        for n, x, y in zip(self.tables.kernel(name)[3], tensors, wide, strict=True):
            if y is not x and n in self.stored[name]:
                x.copy_(y)

    @contextlib.contextmanager
    def locked(self, name: str, arch: str) -> Iterator[None]:
        """Hold a lock, so that one process compiles and the others find the result in TileLang's cache. Without that cache, or
        without file locks, each process compiles."""
        folder = os.environ.get("TILELANG_CACHE_DIR") or os.path.expanduser("~/.tilelang/cache")
        with contextlib.ExitStack() as held:
            if os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() not in ("1", "true", "yes", "on"):
                with contextlib.suppress(ImportError, OSError):
                    import fcntl
                    os.makedirs(folder, exist_ok=True)
                    lock = os.path.join(folder, f".{os.path.basename(self.library(name, arch))}.lock")
                    f = held.enter_context(open(lock, "a"))
                    fcntl.flock(f, fcntl.LOCK_EX)  # a killed holder frees it
            yield

    def _compile_for_cpu(self, name: str) -> Any:
        """The kernel, compiled by gcc. TileLang keeps it on disk, in TILELANG_CACHE_DIR, for other processes too."""
        with self.locked(name, "cpu"), tilelang.tvm.target.Target("c"):
            return tilelang.compile(self.program(name, cpu=True), target="c", target_host="c", execution_backend="cython",
                                    compile_flags=_cpu_flags(), pass_configs=self.passes[name])

    def _load(self, name: str, arch: str) -> Any:
        """The object with the compiled function: a library compiled ahead, a new executable, or a module of TileLang's cache."""
        ahead = self.library(name, arch)
        if os.path.exists(ahead):
            try:
                return tilelang.tvm.runtime.load_module(ahead)
            except Exception as e:
                warnings.warn(f"{ahead} cannot be loaded, so the kernel is compiled again: {e}", RuntimeWarning, stacklevel=2)
        made = self.compiled(name, arch).adapter.get_exportable_executable()
        return made.jit() if hasattr(made, "jit") else made


# --- this module -----------------------------------------------------------------------------------------------------
TABLES = Tables(
    name="delta_rule_c64_bthd",
    function="chunk_delta_rule",
    chunk=64,
    layout="bthd",
    dtype="float16",
    inputs=(
        ("q", "H", (128,), "float16"),
        ("k", "H", (128,), "float16"),
        ("v", "HV", (128,), "float16"),
        ("beta", "HV", (), "float32"),
    ),
    outputs=(
        ("o", (128,), "float16"),
    ),
    kernels=(
        ("o_S", "sequences", 1, ("q", "k", "v", "beta", "o", "initial_state", "final_state"), ("scale",)),
    ),
    ints={"o_S": ("has_initial_state", "has_final_state", "clear_o")},
    scalars={"scale": 0.08838834764831845},
    initial=(
        ("initial_state", (128, 128)),
    ),
    final=(
        ("final_state", (128, 128)),
    ),
    cleared=True,
)
_launcher = TileLangLauncher(
    TABLES, __file__, {
        "o_S": o_S_kernel,
    }, DEVICE_FUNCTIONS, stored={
        "o_S": ["o", "final_state"],
    }, groups=[], arch="")
HOST = Host(TABLES, _launcher)


def chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, final_state=None, out=None):
    """Token t: u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q.

    Shapes, layout bthd: q [B, T, H, 128] float16, k [B, T, H, 128] float16, v [B, T, HV, 128] float16, beta [B, T, HV] float32.
    initial_state: [N, HV, 128, 128] float32, or what widens to it; zero where absent.
    final_state: [N, HV, 128, 128] float32, to be written to.
    cu_seqlens: int32 or int64 [N + 1], ends of sequences packed into a batch of 1; without it each row is a sequence.
    out: where to write what is returned; rows of no sequence stay as they are, and are zero in what is
        made here. Its last dim is dense. It and a final state lie in memory that the call does not read; the package looks
        at that, this module does not.
    Returns (o, final state or None). CUDA tensors run on the GPU, CPU tensors on the CPU. ValueError on bad input.
    """
    return HOST((q, k, v, beta), (scale,), (initial_state,), (out,), cu_seqlens, (final_state,), output_final_state)


def _page(_inputs, _states, _numbers):
    q, k, v, beta = _inputs
    S, = _states
    scale, = _numbers
    # Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T)))
    beta_col = beta[..., :, None]
    k_kT = k @ k.mT
    beta_k_kT = beta_col * k_kT
    below_beta_k_kT = beta_k_kT.tril(-1)
    Tinv = _unit_lower_inverse(below_beta_k_kT)
    # U = Tinv @ (beta[:, None] * (v - k @ S))
    k_S = k @ S
    v_minus_k_S = v - k_S
    beta_v_minus_k_S = beta_col * v_minus_k_S
    U = Tinv @ beta_v_minus_k_S
    # o = scale * (q @ S + lower(q @ k.T) @ U)
    q_S = q @ S
    q_kT = q @ k.mT
    lower_q_kT = q_kT.tril(0)
    lower_q_kT_U = lower_q_kT @ U
    o_sum = q_S + lower_q_kT_U
    o = scale[..., None, None] * o_sum
    # S = S + k.T @ U
    kT_U = k.mT @ U
    S_next = S + kT_U
    return o, S_next


#: Of a device, and of H and HV where kernels are compiled for them: RuntimeError if the kernels are off on a small problem.
check = Check(TABLES, _page, HOST, chunk_delta_rule)
HOST.accepts_view = functools.partial(_fits_units, TABLES)
