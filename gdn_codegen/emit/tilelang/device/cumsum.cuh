// Running sums of two or four vectors of n floats, 32 divides n, each by another warp. Terms below `least` count as that.
template <int n> static __device__ void running_sums(
    int warp, float least, const float *a, float *A, const float *b, float *B, const float *c = nullptr, float *C = nullptr,
    const float *d = nullptr, float *D = nullptr) {
  if (warp >= (c ? 4 : 2)) return;
  const float *from = warp & 2 ? warp & 1 ? d : c : warp & 1 ? b : a;
  float *to = warp & 2 ? warp & 1 ? D : C : warp & 1 ? B : A;
  const int lane = threadIdx.x % 32;
  float x[n / 32], total = 0.f;
#pragma unroll
  for (int i = 0; i < n / 32; ++i) {
    const float term = from[lane * (n / 32) + i];
    x[i] = total += term < least ? least : term;  // a NaN stays
  }
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float below = __shfl_up_sync(~0u, total, offset);
    if (lane >= offset) total += below;
  }
  float before = __shfl_up_sync(~0u, total, 1);  // no difference of large sums
  if (!lane) before = 0.f;
#pragma unroll
  for (int i = 0; i < n / 32; ++i) to[lane * (n / 32) + i] = before + x[i];
}
