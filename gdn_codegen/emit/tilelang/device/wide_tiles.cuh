// A tile of several times 64 columns from registers to shared memory, which has blocks of 64 columns.
template <int rows, int columns> static __device__ __forceinline__ void store_wide_tile(void *tile, const void *registers, int thread) {
#pragma unroll
  for (int n = 0; n < columns / 64; ++n)
    store_tile<false, 64>(static_cast<char *>(tile) + n * rows * 128, static_cast<const unsigned *>(registers) + n * 16, thread);
}
