// A warp on a CPU: 32 threads that exchange values at the calls that all lanes of a warp make.
#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>
#define __device__
using std::max;
using std::min;
struct Lane { int x; };
inline thread_local Lane threadIdx;
inline std::barrier warp_barrier(32);
inline int exchanged[32];
template <class F> auto warp_wide(int given, F found) {
  exchanged[threadIdx.x] = given;
  warp_barrier.arrive_and_wait();
  auto result = found();
  warp_barrier.arrive_and_wait();
  return result;
}
inline unsigned __ballot_sync(unsigned, bool x) {
  return warp_wide(x, [] { unsigned all = 0; for (int n = 0; n < 32; ++n) all |= unsigned(exchanged[n]) << n; return all; });
}
inline int __shfl_sync(unsigned, int x, int lane) { return warp_wide(x, [lane] { return exchanged[lane]; }); }
inline int __shfl_xor_sync(unsigned, int x, int mask) { return warp_wide(x, [mask] { return exchanged[threadIdx.x ^ mask]; }); }
inline int __reduce_max_sync(unsigned, int x) { return warp_wide(x, [] { return *std::max_element(exchanged, exchanged + 32); }); }
inline int __reduce_min_sync(unsigned, int x) { return warp_wide(x, [] { return *std::min_element(exchanged, exchanged + 32); }); }
inline int __reduce_add_sync(unsigned, int x) {
  return warp_wide(x, [] { int all = 0; for (int n : exchanged) all += n; return all; });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
// Runs `lane` as each of the 32 lanes.
template <class F> void as_warp(F lane) {
  std::vector<std::thread> all;
  for (int n = 0; n < 32; ++n) all.emplace_back([n, &lane] { threadIdx.x = n; lane(); });
  for (auto& x : all) x.join();
}
