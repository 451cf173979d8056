// Tiles of 16 rows in the registers of one warp, in the order of sums of mma.m16n8k16 (PTX ISA). In that order a tile in 16 bit is a
// first operand, and with its rows as columns a second one.

// sum = a b^T, or sum + a b^T, for tiles of 16 rows and `depth` columns.
template <int depth, bool bf16, bool clear>
static __device__ __forceinline__ void warp_product(const void *first, const void *second, void *sum) {
  const unsigned *a = static_cast<const unsigned *>(first), *b = static_cast<const unsigned *>(second);
  float *c = static_cast<float *>(sum);
  if constexpr (clear) {
#pragma unroll
    for (int n = 0; n < 8; ++n) c[n] = 0;
  }
#pragma unroll
  for (int n = 0; n < depth / 4; n += 4) {
    warp_mma<bf16>(c, a + n, b[n], b[n + 2]);
    warp_mma<bf16>(c + 4, a + n, b[n + 1], b[n + 3]);
  }
}

// Such a tile between registers and shared memory, where it lies in blocks of 64 columns, whose rows of 128 bytes are swizzled.
// registers: of so many columns, from piece `piece` of 16 columns on. Volatile is enough: no other instruction of the warp touches it.
template <bool load, int columns>
static __device__ __forceinline__ void warp_tile(void *registers, const void *tile, int piece, int lane) {
  unsigned *x = static_cast<unsigned *>(registers);
  const unsigned row = lane % 16, first = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + row * 128;
#pragma unroll
  for (int n = piece; n < piece + columns / 16; ++n, x += 4) {
    const unsigned at = first + n / 4 * 2048 + (n % 4 * 2 + lane / 16 ^ row % 8) * 16;
    if constexpr (load)
      asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
    else
      asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};"
                   :: "r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
  }
}

// The registers of such a tile in an array that TileLang indexes by itself.
template <int count> static __device__ __forceinline__ void warp_entries(const void *registers, void *entries) {
#pragma unroll
  for (int n = 0; n < count; ++n) static_cast<unsigned *>(entries)[n] = static_cast<const unsigned *>(registers)[n];
}
