// Lanes of a warp as threads, for device code of products with decays. In place of functions with PTX: what PTX ISA says that
// ldmatrix, movmatrix, cvt and mma.m16n8k16 do. A test puts the rest of the device code at the mark below.
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

struct float2 {
  float x, y;
};
static std::barrier<> together(32);
static unsigned shown[32][6];  // what each lane shows the others
static thread_local int lane_of_thread;

#define __expf std::exp  // of one float
static float as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
static unsigned as_bits(float x) {
  unsigned y;
  std::memcpy(&y, &x, 4);
  return y;
}
static bool __all_sync(unsigned, bool x) {
  shown[lane_of_thread][0] = x;
  together.arrive_and_wait();
  bool all = true;
  for (auto &each : shown) all = all && each[0];
  together.arrive_and_wait();
  return all;
}
// One number of 16 bit, in a half of `x`.
template <bool bf16> static float element(unsigned x, int half) {
  const unsigned short bits = half ? x >> 16 : x & 0xffff;
  if constexpr (bf16) return as_float(unsigned(bits) << 16);
  _Float16 y;
  std::memcpy(&y, &bits, 2);
  return float(y);
}
template <bool bf16> static unsigned rounded(float x) {
  if constexpr (bf16) {
    const unsigned y = as_bits(x);
    return std::isnan(x) ? 0x7fc0 : (y + 0x7fff + (y >> 16 & 1)) >> 16;  // to the nearest, ties to even
  }
  const _Float16 y = _Float16(x);
  unsigned short bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}
template <bool bf16> static float2 two_elements(unsigned x) { return {element<bf16>(x, 0), element<bf16>(x, 1)}; }
template <bool bf16> static unsigned two_rounded(float x, float y) { return rounded<bf16>(x) | rounded<bf16>(y) << 16; }
template <bool bf16> static unsigned second_operand(float &x, float &y) {
  const unsigned rows = two_rounded<bf16>(x, y);
  x -= element<bf16>(rows, 0), y -= element<bf16>(rows, 1);
  shown[lane_of_thread][0] = rows;
  together.arrive_and_wait();
  const int column = lane_of_thread / 4, row = lane_of_thread % 4 * 2;  // of 8 x 8: each lane has two neighbours of a row
  unsigned out = 0;
  for (int i = 0; i < 2; ++i) out |= (shown[(row + i) * 4 + column / 2][0] >> column % 2 * 16 & 0xffff) << i * 16;
  together.arrive_and_wait();
  return out;
}
template <bool transposed> static void square_block(unsigned *a, const void *p, int lane, int r, int c) {
  const auto *tile = static_cast<const unsigned short *>(p);  // 64 x 64, swizzled
  for (int i = 0; i < 4; ++i) {
    a[i] = 0;
    for (int j = 0; j < 2; ++j) {
      const int m = lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8 + j;
      const int row = r * 16 + (transposed ? k : m), column = c * 16 + (transposed ? m : k);
      a[i] |= unsigned(tile[row * 64 + (column / 8 ^ row % 8) * 8 + column % 8]) << j * 16;
    }
  }
}
template <bool bf16> static void warp_mma(float *c, const unsigned *a, unsigned b0, unsigned b1) {
  for (int i = 0; i < 4; ++i) shown[lane_of_thread][i] = a[i];
  shown[lane_of_thread][4] = b0, shown[lane_of_thread][5] = b1;
  together.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    const int row = lane_of_thread / 4, column = lane_of_thread % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      c[i] += element<bf16>(shown[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2], k % 2)
              * element<bf16>(shown[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
  }
  together.arrive_and_wait();
}

// DEVICE CODE

// Runs `f(thread)` for all threads of a block, a warp at a time.
template <typename F> static void block(int threads, F f) {
  for (int first = 0; first < threads; first += 32) {
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; ++lane) lanes.emplace_back([=] { lane_of_thread = lane, f(first + lane); });
    for (auto &x : lanes) x.join();
  }
}
