// Entries below the diagonal of products over channels of two tiles, with decays between their rows (the op decayed_pairs). Each
// warp has 16 rows of the result, and the columns of its warp group, in the order of sums of wgmma, as blocks of 16 x 16.

// Adds a b to the warp's blocks `from_block` to `to_block`, for one or two tiles a. Rows of a decay from those in `from` and
// `from_8`, rows of b to these. first_block: the first one of the warp group. Returns the largest exponent of either sign in
// rows of a. Those of rows of b are no larger where an entry is below the diagonal, and no gate is positive.
template <bool bf16, int products, int channels, int blocks, typename Rows, typename Others>
static __device__ __forceinline__ float add_pairs(float (*out)[blocks * 8], const Rows *of, const Others &by, int row, int from,
                                                  int from_8, int first_block, int from_block, int to_block, int lane) {
  float most = 0;
#pragma unroll(blocks < 4 ? 2 : 1)
  for (int n = 0; n < channels / 8; n += 2) {
    unsigned a[products][4], b[4];
    float e[4], x[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most = fmaxf(most, of[0].template decays<true>(e, row, from, from_8, n + half, 1.f));
#pragma unroll
      for (int p = 0; p < products; ++p) {
        of[p].scaled(x, e, row, n + half);
        a[p][half * 2] = two_rounded<bf16>(x[0], x[1]), a[p][half * 2 + 1] = two_rounded<bf16>(x[2], x[3]);
      }
    }
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
      if (first_block + block < from_block || first_block + block > to_block) continue;
      const int r = (first_block + block) * 16 + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        by.template decays<true>(e, r, from, from_8, n + half, -1.f);
        by.scaled(x, e, r, n + half);
        b[half] = two_rounded<bf16>(x[0], x[1]), b[half + 2] = two_rounded<bf16>(x[2], x[3]);
      }
#pragma unroll
      for (int p = 0; p < products; ++p) {
        warp_mma<bf16>(out[p] + block * 8, a[p], b[0], b[1]);
        warp_mma<bf16>(out[p] + block * 8 + 4, a[p], b[2], b[3]);
      }
    }
  }
  return most;
}

// Whether entry i of what a lane has of a block on the diagonal is below the diagonal, and in the lower left size x size block of a
// 2 size x 2 size block, if size is not 0.
static __device__ __forceinline__ bool in_level(int i, int size, int lane) {
  const int r = lane / 4 + i / 2 % 2 * 8, c = i / 4 * 8 + lane % 4 * 2 + i % 2;
  return r > c && (!size || (r / (2 * size) == c / (2 * size) && r / size != c / size));
}

// result, other_result: registers, `blocks` blocks of each warp group side by side. before: the sums by which rows of a decay, g
// itself or those before each row. limit: of exponents of either sign. bounded: none is larger.
// Exponents are relative to the middle row of the warp's rows where that makes none larger than the limit. Otherwise a block on the
// diagonal is computed level by level, as decayed_products does it for larger blocks, and others relative to the row before the
// warp's, so that no exponent is positive if no gate is.
template <bool bf16, int products, bool bounded, int channels, int a_row, int b_row, int g_row, int blocks>
static __device__ __forceinline__ void decayed_pairs(void *result, void *other_result, const void *a, const void *other_a,
                                                     const void *b, const void *g, const void *before, float limit,
                                                     int thread) {
  static_assert(channels % 16 == 0 && a_row % 2 == 0 && b_row % 2 == 0 && g_row % 2 == 0, "no such tile");
  using Rows = DecayedRows<bf16, a_row, g_row>;
  using Others = DecayedRows<bf16, b_row, g_row>;
  const int lane = thread % 32, warp = thread / 32 % 4, first_block = thread / 128 * blocks, row = warp * 16 + lane / 4;
  const float *sums = static_cast<const float *>(g), *own = static_cast<const float *>(before);
  const Rows of[2] = {{static_cast<const unsigned short *>(a), own, sums, lane % 4 * 2, lane / 4},
                      {static_cast<const unsigned short *>(other_a), own, sums, lane % 4 * 2, lane / 4}};
  const Others by = {static_cast<const unsigned short *>(b), sums, sums, lane % 4 * 2, lane / 4};
  float out[products][blocks * 8] = {};
  float most = 0;
  if (first_block <= warp) {
    const int middle = warp * 16 + 7;
    most = add_pairs<bf16, products, channels, blocks>(out, of, by, row, middle, middle, first_block, 0, warp, lane);
  }
  const int block = warp - first_block;  // the one on the diagonal, if it is one of the warp's
  const bool levels = !bounded && !__all_sync(~0u, most <= limit);
  if (levels) {
#pragma unroll
    for (int p = 0; p < products; ++p)
#pragma unroll
      for (int i = 0; i < blocks * 8; ++i) out[p][i] = 0;
    if (warp) add_pairs<bf16, products, channels, blocks>(out, of, by, row, warp * 16 - 1, warp * 16 - 1, first_block, 0, warp - 1,
                                                          lane);
#pragma unroll 1
    for (int size = 8; size && block < blocks; size /= 2) {
      const int middle = row / (2 * size) * 2 * size + size - 1;
      float level[products][blocks * 8] = {};
      add_pairs<bf16, products, channels, blocks>(level, of, by, row, middle, middle + (size < 8 ? 8 : 0), first_block, warp, warp,
                                                  lane);
#pragma unroll
      for (int p = 0; p < products; ++p)
#pragma unroll
        for (int i = 0; i < blocks * 8; ++i)
          if (i / 8 == block && in_level(i % 8, size, lane)) out[p][i] += level[p][i];
    }
  }
  float *to[2] = {static_cast<float *>(result), static_cast<float *>(other_result)};
#pragma unroll
  for (int p = 0; p < products; ++p)
#pragma unroll
    for (int i = 0; i < blocks * 8; ++i) to[p][i] = i / 8 == block && !in_level(i % 8, 0, lane) ? 0.f : out[p][i];
}
