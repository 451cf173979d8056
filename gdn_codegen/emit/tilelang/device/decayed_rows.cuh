// Reads rows of tiles, and scales them by decays, for operands of mma.m16n8k16 (PTX ISA).

// Two elements of 16 bit as float32.
template <bool bf16> static __device__ __forceinline__ float2 two_elements(unsigned x) {
  if constexpr (bf16) return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  float2 y;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(y.x), "=f"(y.y) : "r"(x));
  return y;
}

// Two numbers, rounded to 16 bit, the first one in the lower half.
template <bool bf16> static __device__ __forceinline__ unsigned two_rounded(float x, float y) {
  unsigned z;
  if constexpr (bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
  return z;
}

// What a lane has of 8 columns of a block: rows lane / 4 and lane / 4 + 8, two neighbouring columns each. Rows of the tile of
// values and of the sums G have x_row and g_row elements. Values in rows of a multiple of 64 elements are swizzled.
template <bool bf16, int x_row, int g_row> struct DecayedRows {
  const unsigned short *values;
  const float *sums, *others;  // those of rows, and of rows that they are compared with
  int column, turn;  // the lane's first column, and what all of its rows are modulo 8

  // Where the lane's columns of block n lie in row r. `turn` stands for r % 8, so that rows share what depends on n.
  __device__ __forceinline__ int place(int r, int n) const {
    const int piece = column / 8 + n;
    return x_row % 64 ? r * x_row + column + n * 8 : piece / 8 * 4096 + (piece % 8 ^ turn) * 8 + column % 8 + r * 64;
  }
  // The values of row r and of the row 8 below, times e.
  __device__ __forceinline__ void scaled(float *x, const float *e, int r, int n) const {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float2 y = two_elements<bf16>(*reinterpret_cast<const unsigned *>(values + place(r + i * 4, n)));
      x[i] = y.x * e[i], x[i + 1] = y.y * e[i + 1];
    }
  }
  __device__ __forceinline__ float2 sum(int r, int n) const {
    return *reinterpret_cast<const float2 *>(sums + r * g_row + column + n * 8);
  }
  __device__ __forceinline__ float2 other(int r, int n) const {
    return *reinterpret_cast<const float2 *>(others + r * g_row + column + n * 8);
  }
  // Whether the sums of row r and of the row 8 below differ by at most `limit` from those of row `from`. No for NaN.
  __device__ __forceinline__ bool within(float limit, int r, int from, int n) const {
    const float2 u = sum(r, n), v = sum(r + 8, n), w = other(from, n);
    return fabsf(u.x - w.x) <= limit && fabsf(u.y - w.y) <= limit && fabsf(v.x - w.x) <= limit && fabsf(v.y - w.y) <= limit;
  }
  // exp of the differences between the sums of row r and those of row `from`, and between the sums of the row 8 below r and those
  // of row `from_8`, times sign. Returns the largest difference of either sign. at_once: by one FMA each, which rounds the sums of
  // `from` times log2 e; these cancel in a product of two decays from the same row.
  template <bool at_once = false>
  __device__ __forceinline__ float decays(float *e, int r, int from, int from_8, int n, float sign) const {
    const float2 u = sum(r, n), v = sum(r + 8, n), w = other(from, n), w_8 = other(from_8, n);
    constexpr float log2e = 1.44269504f;
    const float d[4] = {u.x - w.x, u.y - w.y, v.x - w_8.x, v.y - w_8.y};
    if constexpr (at_once) {
      const float x[4] = {u.x, u.y, v.x, v.y}, to[4] = {w.x * log2e, w.y * log2e, w_8.x * log2e, w_8.y * log2e};
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = exp2f(fmaf(x[i], log2e * sign, to[i] * -sign));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = __expf(d[i] * sign);
    }
    return fmaxf(fmaxf(fabsf(d[0]), fabsf(d[1])), fmaxf(fabsf(d[2]), fabsf(d[3])));
  }
};
