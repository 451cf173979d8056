// A tile in 16 bit between shared memory, whose rows of 128 bytes lie swizzled, and registers, as sums of wgmma of 64 rows a warp
// group lie there. `columns`: those in registers, a multiple of 16. `transposed`: they are the rows in shared memory, which has blocks
// of 64 columns. Otherwise they are 64.
template <bool transposed, int columns> static __device__ __forceinline__ unsigned tile_address(const void *tile, int thread) {
  static_assert(transposed ? columns % 16 == 0 : columns == 64, "no such tile");
  const unsigned lane = thread % 32, warp = thread / 32 % 4;
  const unsigned row = transposed ? lane / 16 * 8 + lane % 8 : warp * 16 + lane % 16;
  const unsigned piece = transposed ? warp * 2 + lane / 8 % 2 : lane / 16;
  const unsigned group = thread / 128 * (transposed ? columns * 128 : 8192);  // where the tile of a warp group begins
  return static_cast<unsigned>(__cvta_generic_to_shared(tile)) + group + row * 128 + (piece ^ lane % 8) * 16;
}

template <int columns> static __device__ __forceinline__ void load_transposed(void *registers, const void *tile, int thread) {
  unsigned *x = static_cast<unsigned *>(registers);
  const unsigned first = tile_address<true, columns>(tile, thread);
#pragma unroll
  for (unsigned n = 0; n < columns / 16; ++n, x += 4)
    asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(first + n * 2048) : "memory");
}

// By how many rows a thread's first entry lies below the diagonal, in a tile that lies as sums of wgmma do. Volatile, so that the
// register is kept: nvcc would otherwise compute rows and columns from the thread's index again for each entry.
static __device__ __forceinline__ int below_diagonal(int thread) {
  int rows;
  asm volatile("mov.s32 %0, %1;" : "=r"(rows) : "r"(thread / 32 * 16 + thread % 32 / 4 - thread % 4 * 2));
  return rows;
}

template <bool transposed, int columns>
static __device__ __forceinline__ void store_tile(void *tile, const void *registers, int thread) {
  const unsigned *x = static_cast<const unsigned *>(registers);
  const unsigned first = tile_address<transposed, columns>(tile, thread);
#pragma unroll
  for (unsigned n = 0; n < columns / 16; ++n, x += 4)
    if constexpr (transposed)
      asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], { %1, %2, %3, %4};"
                   :: "r"(first + n * 2048), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    else
      asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], { %1, %2, %3, %4};"
                   :: "r"(first ^ n * 32), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
