// Tiles in 16 bit from registers, as sums of wgmma of 64 rows a warp group lie there, to global memory: 16 bytes a thread, where a
// thread of such a sum has 4 bytes of a row.

// Four words of each of four neighbouring lanes, transposed.
static __device__ __forceinline__ uint4 quad_transposed(unsigned a, unsigned b, unsigned c, unsigned d, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const unsigned ab = __shfl_xor_sync(~0u, odd ? a : b, 1), cd = __shfl_xor_sync(~0u, odd ? c : d, 1);
  if (odd) a = ab, c = cd;
  else b = ab, d = cd;
  const unsigned ac = __shfl_xor_sync(~0u, upper ? a : c, 2), bd = __shfl_xor_sync(~0u, upper ? b : d, 2);
  return upper ? make_uint4(ac, bd, c, d) : make_uint4(a, b, ac, bd);
}

static __device__ __forceinline__ unsigned transposed_block(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// first, second: where the first two rows in memory begin. rows: those that are stored. `transposed`: the columns in registers are
// the rows in memory.
template <int columns, bool transposed>
static __device__ __forceinline__ void store_rows(const void *registers, const void *first, const void *second, int rows, int thread) {
  const unsigned *x = static_cast<const unsigned *>(registers);
  char *to = const_cast<char *>(static_cast<const char *>(first));
  const long long stride = static_cast<const char *>(second) - static_cast<const char *>(first);
  const int lane = thread % 32, warp = thread / 32;
  if constexpr (transposed) {
    to += (lane % 4 / 2 * 8 + lane / 4) * stride + (warp * 16 + lane % 2 * 8) * 2;
    rows -= lane % 4 / 2 * 8 + lane / 4;
#pragma unroll
    for (int n = 0; n < columns / 16; ++n, x += 4, to += 16 * stride) {
      const uint4 y = quad_transposed(transposed_block(x[0]), transposed_block(x[1]), transposed_block(x[2]), transposed_block(x[3]), lane);
      if (n * 16 < rows) *reinterpret_cast<uint4 *>(to) = y;
    }
  } else {
    to += (warp * 16 + lane / 4) * stride + lane % 4 * 16;
    rows -= warp * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < columns / 32; ++n, x += 8)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const uint4 y = quad_transposed(x[below], x[2 + below], x[4 + below], x[6 + below], lane);
        if (below * 8 < rows) *reinterpret_cast<uint4 *>(to + below * 8 * stride + n * 64) = y;
      }
  }
}
