// Sums of a tile in registers, as sums of wgmma of 64 rows a warp group lie there: 16 rows a warp, 8 columns for four registers.
template <int columns> static __device__ __forceinline__ void group_row_sums(float *sums, const float *x, int thread) {
  float above = 0.f, below = 0.f;
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) above += x[4 * n] + x[4 * n + 1], below += x[4 * n + 2] + x[4 * n + 3];
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    above += __shfl_xor_sync(~0u, above, lanes);
    below += __shfl_xor_sync(~0u, below, lanes);
  }
  if (thread % 4) return;
  float *to = sums + thread / 32 * 16 + thread % 32 / 4;
  to[0] = above, to[8] = below;
}

// One row of sums for each warp. Lanes exchange halves of what they have, so that each ends with the columns that it stores.
template <int columns> static __device__ __forceinline__ void group_column_sums(float *sums, const float *x, int thread) {
  float y[columns / 8][2];
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) y[n][0] = x[4 * n] + x[4 * n + 2], y[n][1] = x[4 * n + 1] + x[4 * n + 3];
  int first = 0;
#pragma unroll
  for (int lanes = 16, left = columns / 16; lanes >= 4; lanes /= 2, left /= 2) {
    const bool upper = thread & lanes;
#pragma unroll
    for (int n = 0; n < left; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float kept = upper ? y[n + left][e] : y[n][e], given = upper ? y[n][e] : y[n + left][e];
        y[n][e] = kept + __shfl_xor_sync(~0u, given, lanes);
      }
    first += upper ? left : 0;
  }
#pragma unroll
  for (int n = 0; n < columns / 64; ++n)
    *reinterpret_cast<float2 *>(sums + thread / 32 * columns + (first + n) * 8 + thread % 4 * 2) = make_float2(y[n][0], y[n][1]);
}

// Running sums of a vector of n floats, 32 divides n, in place, by a warp.
template <int n> static __device__ __forceinline__ void warp_cumsum(float *x, int thread) {
  const int lane = thread % 32;
  __syncwarp();
  float y[n / 32], total = 0.f;
#pragma unroll
  for (int i = 0; i < n / 32; ++i) y[i] = total += x[lane * (n / 32) + i];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float below = __shfl_up_sync(~0u, total, offset);
    if (lane >= offset) total += below;
  }
  float before = __shfl_up_sync(~0u, total, 1);
  if (!lane) before = 0.f;
#pragma unroll
  for (int i = 0; i < n / 32; ++i) x[lane * (n / 32) + i] = before + y[i];
  __syncwarp();
}
