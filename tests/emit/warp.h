// A warp on a CPU: 32 lanes that exchange values at the calls that all lanes of a warp make. They run in turn on one thread, each
// up to its next call: 32 threads with a barrier take ten times as long where all cores are busy.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <vector>
#include <ucontext.h>
#define __device__
using std::max;
using std::min;
struct Lane { int x; };
inline Lane threadIdx;  // the lane that runs
inline const Lane blockDim{32};
struct int4 { int x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline ucontext_t lanes[32], caller;
inline bool ended[32];
inline std::function<void()> of_lane;
inline int exchanged[32];
// Runs the other lanes up to their next calls. All lanes must make the same number of them.
inline void others() {
  int mine = threadIdx.x, next = (mine + 1) % 32;
  if (ended[next]) std::abort();
  threadIdx.x = next;
  swapcontext(&lanes[mine], &lanes[next]);
}
template <class F> auto warp_wide(int given, F found) {
  exchanged[threadIdx.x] = given;
  others();
  auto result = found();
  others();
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
inline void run_lane() {
  of_lane();
  ended[threadIdx.x++] = true;  // the next lane goes on, after the last one the caller
}
// Runs `lane` as each of the 32 lanes.
template <class F> void as_warp(F lane) {
  static std::vector<char> stacks[32];
  of_lane = lane;
  for (int n = 0; n < 32; ++n) {
    stacks[n].resize(1 << 18);
    ended[n] = false;
    getcontext(&lanes[n]);
    lanes[n].uc_stack.ss_sp = stacks[n].data();
    lanes[n].uc_stack.ss_size = stacks[n].size();
    lanes[n].uc_link = n < 31 ? &lanes[n + 1] : &caller;
    makecontext(&lanes[n], run_lane, 0);
  }
  threadIdx.x = 0;
  swapcontext(&caller, &lanes[0]);
  if (!std::all_of(ended, ended + 32, std::identity())) std::abort();
}
