// Products of a tile of 64 x 64, lower left, and a tile of values, with decays between their rows (the op decayed_blocks). Each
// warp has 16 rows of the result, and all columns of its warp group, in the order of sums of wgmma. That order is also the one of
// sums of mma.m16n8k16 (PTX ISA). `p` is the square tile, in 16 bit, swizzled.

// The first operand of mma.m16n8k16: the block of `p` in the rows of block `r` and the columns of block `c`, or it transposed.
template <bool transposed> static __device__ __forceinline__ void square_block(unsigned *a, const void *p, int lane, int r, int c) {
  const unsigned row = r * 16 + lane % 8 + (transposed ? lane / 16 : lane / 8 % 2) * 8;
  const unsigned piece = c * 2 + (transposed ? lane / 8 % 2 : lane / 16);
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(p)) + row * 128 + (piece ^ row % 8) * 16;
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}

// A second operand of mma.m16n8k16 from rows of 8 x 8 numbers, of which each lane has two neighbours of a row. x and y become
// what rounding leaves of them.
template <bool bf16> static __device__ __forceinline__ unsigned second_operand(float &x, float &y) {
  const unsigned rows = two_rounded<bf16>(x, y);
  unsigned columns;
  const float2 rounded = two_elements<bf16>(rows);
  x -= rounded.x, y -= rounded.y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// Adds a x to d, where a lane has x[0], x[1] of one row and x[2], x[3] of the row 8 below. In two parts: a pair of tokens adds to
// the gradient of a gate at one of them and takes away at the other. Rounded once, the two terms would not cancel.
template <bool bf16> static __device__ __forceinline__ void add_product(float *d, const unsigned *a, float *x) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const unsigned b0 = second_operand<bf16>(x[0], x[1]), b1 = second_operand<bf16>(x[2], x[3]);
    warp_mma<bf16>(d, a, b0, b1);
  }
}

// Adds what rows of earlier blocks give, or of later ones if transposed, relative to row `from`. No exponent is positive if no
// gate is and `from` is in the warp's block, or next to it. of: the rows of x.
template <bool bf16, bool transposed, int columns, typename Rows>
static __device__ __forceinline__ void add_other_blocks(float *out, const void *p, const Rows &of, int from, int lane, int warp) {
#pragma unroll 1
  for (int other = transposed ? warp + 1 : 0; other < (transposed ? 4 : warp); ++other) {
    unsigned a[4];
    square_block<transposed>(a, p, lane, transposed ? other : warp, transposed ? warp : other);
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      float e[4], x[4];
      of.decays(e, other * 16 + lane / 4, from, from, n, transposed ? 1.f : -1.f);
      of.scaled(x, e, other * 16 + lane / 4, n);
      add_product<bf16>(out + n * 4, a, x);
    }
  }
}

// All pairs of rows at once, relative to the middle row of the warp's block. of, by: the rows of x, and those of the result.
template <bool bf16, bool transposed, int columns, typename Rows>
static __device__ __forceinline__ void decayed_at_once(float *out, const unsigned *a, const void *p, const Rows &of, const Rows &by,
                                                       int lane, int warp) {
  const int row = warp * 16 + lane / 4, middle = warp * 16 + 7;
  add_other_blocks<bf16, transposed, columns>(out, p, of, middle, lane, warp);
#pragma unroll
  for (int n = 0; n < columns / 8; ++n, out += 4) {
    float e[4], x[4];
    of.decays(e, row, middle, middle, n, transposed ? 1.f : -1.f);
    of.scaled(x, e, row, n);
    add_product<bf16>(out, a, x);
    by.decays(e, row, middle, middle, n, transposed ? -1.f : 1.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] *= e[i];
  }
}

// Within the warp's block level by level, as decayed_products does it for larger blocks, so that no exponent is positive if no
// gate is. The other rows relative to the row before the block, or to its last one if transposed.
template <bool bf16, bool transposed, int columns, typename Rows>
static __device__ __forceinline__ void decayed_by_levels(float *out, const unsigned *a, const void *p, const Rows &of, const Rows &by,
                                                         int lane, int warp) {
  const int first = warp * 16, row = first + lane / 4, from = transposed ? first + 15 : warp ? first - 1 : 0;
  const Rows &later = transposed ? of : by, &earlier = transposed ? by : of;
  add_other_blocks<bf16, transposed, columns>(out, p, of, from, lane, warp);
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    float e[4];
    by.decays(e, row, from, from, n, transposed ? -1.f : 1.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n * 4 + i] *= e[i];
  }
#pragma unroll 1
  for (int size = 8; size; size /= 2) {
    const int r = lane / 4, c = lane % 4 * 2;  // in a quarter of 8 x 8. `p` has one triangle, and nothing on its diagonal
    const bool on = size < 8 && r / (2 * size) == c / (2 * size) && (size == 1 || r / size != c / size);
    const unsigned level[4] = {on ? a[0] : 0, size < 8 ? 0 : a[1], size < 8 ? 0 : a[2], on ? a[3] : 0};
    const int middle = first + (size < 8 ? r / (2 * size) * 2 * size + size - 1 : 7), middle_8 = middle + (size < 8 ? 8 : 0);
    const bool second = size < 8 && r / size % 2, second_8 = size == 8 || r / size % 2;  // whether row r, r + 8 is in a second half
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      float d[4] = {}, x[4], e[4], of_second[4];
      earlier.decays(e, row, middle, middle_8, n, -1.f);
      later.decays(of_second, row, middle, middle_8, n, 1.f);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = (i < 2 ? second : second_8) ? of_second[i] : e[i];
      of.scaled(x, e, row, n);
      add_product<bf16>(d, level, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n * 4 + i] += d[i] * e[i];
    }
  }
}

// registers: the result, `columns` of each warp group. before: the sums by which the later row of a pair decays, g itself or those
// before each row. limit: of exponents of either sign. bounded: none is larger.
template <bool bf16, bool transposed, bool bounded, int x_row, int g_row, int columns>
static __device__ __forceinline__ void decayed_blocks(void *registers, const void *p, const void *x, const void *g,
                                                      const void *before, float limit, int thread) {
  static_assert(columns % 8 == 0 && x_row % 2 == 0 && g_row % 2 == 0, "no such tile");
  using Rows = DecayedRows<bf16, x_row, g_row>;
  const int lane = thread % 32, warp = thread / 32 % 4, column = thread / 128 * columns + lane % 4 * 2;
  const float *sums = static_cast<const float *>(g), *later = static_cast<const float *>(before);
  const unsigned short *values = static_cast<const unsigned short *>(x);
  const Rows of = {values, transposed ? later : sums, sums, column, lane / 4};
  const Rows by = {values, transposed ? sums : later, sums, column, lane / 4};
  unsigned a[4];
  square_block<transposed>(a, p, lane, warp, warp);
  float *out = static_cast<float *>(registers);
#pragma unroll
  for (int i = 0; i < columns / 2; ++i) out[i] = 0;
  bool small = true;
#pragma unroll
  for (int n = 0; n < (bounded ? 0 : columns / 8); ++n)
    small = small && of.within(limit, warp * 16 + lane / 4, warp * 16 + 7, n)
            && (later == sums || by.within(limit, warp * 16 + lane / 4, warp * 16 + 7, n));
  if (bounded || __all_sync(~0u, small)) decayed_at_once<bf16, transposed, columns>(out, a, p, of, by, lane, warp);
  else decayed_by_levels<bf16, transposed, columns>(out, a, p, of, by, lane, warp);
}
