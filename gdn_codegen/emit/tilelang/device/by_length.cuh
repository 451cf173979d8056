// The sequence with this rank by length, the longest first. Lengths are compared in 16 to 31 steps of equal size; of those in one
// step the first comes first. All threads of a warp call it. For more than 256 sequences a search would take as long as a chunk, and
// the order is that of the pack.
// The result comes from votes alone, so the compiler knows that it is the same in all lanes: what an instance computes from it then
// takes no registers of threads.
__device__ inline int by_length(const int* cu_seqlens, int rank, int sequences) {
  int lane = threadIdx.x % 32, most = 0, least = 0x7fffffff;
  if (sequences > 256) return rank;
  for (int n = lane; n < sequences; n += 32) {
    int tokens = cu_seqlens[n + 1] - cu_seqlens[n];
    most = max(most, tokens);
    least = min(least, tokens);
  }
  most = __reduce_max_sync(0xffffffffu, most);
  least = __reduce_min_sync(0xffffffffu, least);
  int bits = max(0, 27 - __clz(most)), key = 0, longer = 0;
  if (most >> bits == least >> bits) return rank;
  for (int step = 16; step >= 0; step = step ? step / 2 : -1) {  // at last, step 0 counts those above the key
    int bound = step ? key + step : key + 1;
    longer = 0;
    for (int first = 0; first < sequences; first += 32) {
      int n = first + lane;
      bool counts = n < sequences && (cu_seqlens[n + 1] - cu_seqlens[n]) >> bits >= bound;
      longer += __popc(__ballot_sync(0xffffffffu, counts));
    }
    if (step && longer > rank) key += step;
  }
  rank -= longer;
  for (int first = 0; first < sequences; first += 32) {
    int n = first + lane;
    bool equal = n < sequences && (cu_seqlens[n + 1] - cu_seqlens[n]) >> bits == key;
    unsigned found = __ballot_sync(0xffffffffu, equal);
    unsigned here = __ballot_sync(0xffffffffu, equal && __popc(found & ((1u << lane) - 1)) == rank);
    if (here) return first + __ffs(here) - 1;
    rank -= __popc(found);
  }
  return 0;
}
