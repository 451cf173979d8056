// The fewest of the last of `chunks` chunks whose totals sum to -bound or less; -1 if that is more than `most`. If their sum stays
// above: all; but -1 if the call has summaries (`summed`) and `most` such chunks would not reach the bound. totals: of the chunk
// after the last one. stride: from one chunk to the next. All threads of a warp call it. They add 32 totals at a time.
__device__ inline float warm_up_length(const float* totals, int stride, int chunks, int most, float bound, int summed) {
  int limit = min(chunks, most), lane = threadIdx.x % 32;
  float before = 0;
  for (int done = 0; done < limit; done += 32) {
    bool given = done + lane < limit;
    float sum = given ? totals[-(long long)(done + lane + 1) * stride] : 0;
    for (int n = 1; n < 32; n *= 2) {
      float nearer = __shfl_up_sync(0xffffffffu, sum, n);
      if (lane >= n) sum += nearer;
    }
    unsigned enough = __ballot_sync(0xffffffffu, given && before + sum <= -bound);
    if (enough) return done + __ffs(enough);
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return chunks <= most && (!summed || before * most <= -bound * chunks) ? chunks : -1;
}
