// Zeros in the rows of a tile from `first` on, by the threads of a warp. The tile lies in shared memory in blocks of 128 bytes of
// columns. A row of a block is contiguous, as swizzling moves pieces within it, and so are all rows that become zero.
template <int rows, int blocks> static __device__ __forceinline__ void zero_tail(void *tile, int first, int lane) {
#pragma unroll
  for (int block = 0; block < blocks; ++block) {
    uint4 *to = static_cast<uint4 *>(tile) + block * rows * 8;
#pragma unroll 4
    for (int i = first * 8 + lane; i < rows * 8; i += 32) to[i] = make_uint4(0, 0, 0, 0);
  }
}

// The first rows of a tile, which lies swizzled in such blocks, to memory, by the threads of a warp. first, second: two rows there.
template <int rows, int blocks>
static __device__ __forceinline__ void store_tail(const void *tile, void *first, const void *second, int count, int lane) {
  const long long stride = static_cast<const char *>(second) - static_cast<char *>(first);
  const int piece = lane % (8 * blocks);
  const uint4 *from = static_cast<const uint4 *>(tile) + piece / 8 * rows * 8;
#pragma unroll 4
  for (int row = lane / (8 * blocks); row < count; row += 4 / blocks)
    *reinterpret_cast<uint4 *>(static_cast<char *>(first) + row * stride + piece * 16) = from[row * 8 + (piece % 8 ^ row % 8)];
}
