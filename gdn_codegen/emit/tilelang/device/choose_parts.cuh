// Stores which chunks each part has (types.py, INDEXING "places"): first the chunks of a part, or `whole` if each sequence is one
// part; then how many parts there are; then four integers for each part: its sequence, its first chunk, and the first token and the
// number of tokens of the sequence. Parts of the longest sequence come first. A part has as many chunks, at least `least`, as take
// the least time. The model is that of the host (host/parts.py), with all lengths. Each lane tries another number of parts of the
// longest sequence. Each warp makes the same search: times are whole numbers, of 64ths of a chunk. All threads of a block call it. If
// `units` is 0 the host has chosen the parts, and it stores nothing.
// instances: of a part. units: instances that run at a time. warm_up, longest: chunks of a part's warm-up, and how many more the
// longest one has. split: what splitting costs. crowded: the factor for more parts than run at a time. start: of a walk.
__device__ inline void choose_parts(int* places, const int* cu_seqlens, int sequences, int size, int least, int whole, int instances,
                                    int units, int warm_up, int longest, int split, int crowded, int start) {
  int lane = threadIdx.x % 32, walk = 0, shortest = 0x7fffffff, total = 0;
  if (units == 0) return;
  for (int n = lane; n < sequences; n += 32) {
    int chunks = (cu_seqlens[n + 1] - cu_seqlens[n] + size - 1) / size;
    walk = max(walk, chunks);
    shortest = min(shortest, chunks);
    total += chunks;
  }
  walk = __reduce_max_sync(0xffffffffu, walk);
  shortest = __reduce_min_sync(0xffffffffu, shortest);
  total = __reduce_add_sync(0xffffffffu, total);
  int tried = max(1, (walk + least - 1) / least);
  int of_walk = tried <= 32 ? min(lane + 1, tried) : 1 + lane * (tried - 1) / 31;
  int span = max(least, (walk + of_walk - 1) / of_walk), parts = 0;
  float share = 1.0f / span;
  for (int n = 0; n < sequences; n += 32) {
    int mine = n + lane < sequences ? (cu_seqlens[n + lane + 1] - cu_seqlens[n + lane] + size - 1) / size : 0;
    for (int i = 0; i < min(32, sequences - n); ++i) {
      int chunks = __shfl_sync(0xffffffffu, mine, i);
      parts += max(1, int((chunks + span - 0.5f) * share));  // a division, rounded up
    }
  }
  of_walk = (walk + span - 1) / span;
  int splits = parts - sequences, before = 64 * (of_walk - 1) * span, warm = min(warm_up, before);
  int waves = (parts * instances + units - 1) / units, last = 64 * min(span, walk) + start + (splits ? warm : 0);
  unsigned work = unsigned(64 * total + splits * warm + parts * start) * instances / units;
  int time = waves == 1 ? max(last, int(work)) : max(last, int(work * (splits ? crowded : 64) / 64) + 2 * last / 5);
  time = max(time, waves * (64 * min(shortest, span) + start));
  if (splits) time += split + min(longest, before - warm);
  int best = __reduce_min_sync(0xffffffffu, time);
  span = __reduce_max_sync(0xffffffffu, time == best ? span : 0);  // of equal times that of the longest parts
  if (threadIdx.x == 0) places[0] = span >= walk ? whole : span;
  for (int n = threadIdx.x; n < sequences; n += blockDim.x) {
    int chunks = (cu_seqlens[n + 1] - cu_seqlens[n] + size - 1) / size, before = 0, rank = 0;
    for (int m = 0; m < sequences; ++m) {
      int others = (cu_seqlens[m + 1] - cu_seqlens[m] + size - 1) / size;
      if (others > chunks || (others == chunks && m < n)) {
        before += max(1, (others + span - 1) / span);
        ++rank;
      }
    }
    parts = max(1, (chunks + span - 1) / span);
    if (rank == sequences - 1) places[1] = before + parts;
    for (int i = 0; i < parts; ++i)
      ((int4*)places)[1 + before + i] = make_int4(n, i * span, cu_seqlens[n], cu_seqlens[n + 1] - cu_seqlens[n]);
  }
}
