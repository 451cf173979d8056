// The last sequence n whose first slot, cu_seqlens[n] / size + n, is not after `slot`. All threads of a warp call it. They test
// 32 sequences at a time, so that an instance waits for few loads that depend on each other.
__device__ inline int find_sequence(const int* cu_seqlens, int slot, int sequences, int size) {
  int n = 0, end = sequences, lane = threadIdx.x % 32;
  while (end - n > 1) {
    int step = (end - n + 31) / 32, at = n + lane * step;
    bool before = at < end && cu_seqlens[at] / size + at <= slot;
    n += (__popc(__ballot_sync(0xffffffffu, before)) - 1) * step;
    end = min(end, n + step);
  }
  return n;
}
