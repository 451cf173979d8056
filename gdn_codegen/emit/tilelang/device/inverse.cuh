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
