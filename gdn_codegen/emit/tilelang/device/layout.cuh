// Helpers below address tiles by themselves: rows of 64 16-bit elements, piece p of 16 bytes of row r at p ^ r % 8. TileLang may choose
// another layout for a tile, whatever it is told. Then the comparison below is not folded away, this function stays in the kernel, and
// since nobody defines it, ptxas refuses the kernel.
extern "C" __device__ void this_tile_needs_rows_of_128_bytes_swizzled();

template <typename X> static __device__ __forceinline__ void expect_element(const X *first, const X *element, int offset) {
  if (element != first + offset) this_tile_needs_rows_of_128_bytes_swizzled();
}

