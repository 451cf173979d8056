// Keywords, scalar types and enums of PTO C++ on A2/A3.
#ifndef PTO_SIM_TYPES_HPP
#define PTO_SIM_TYPES_HPP

#include <cstddef>
#include <cstdint>
#include <type_traits>

#define __global__
#define AICORE
#define __aicore__
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __tf__
#define PTO_INLINE inline
#define PTO_INST inline
#define PTO_INTERNAL inline
#ifndef MEMORY_BASE
#define MEMORY_BASE
#endif
#define PTO_NPU_ARCH_A2A3
#define PTO_SIM 1

namespace pto_sim {

// Where an instruction stands in the emitted source: every instruction takes one as its last, defaulted, argument.
struct Site {
    const char* file;
    int line;
    static constexpr Site here(const char* f = __builtin_FILE(), int l = __builtin_LINE()) { return {f, l}; }
};
#define PTO_SIM_HERE ::pto_sim::Site site = ::pto_sim::Site::here()

uint16_t f16_bits(float value);   // nearest, ties to even
float f16_value(uint16_t bits);
uint16_t bf16_bits(float value);  // nearest, ties to even
float bf16_value(uint16_t bits);

enum class Dtype : uint8_t { f32, f16, bf16, i32, u32, i16, u16, i8, u8, i64, u64 };

}  // namespace pto_sim

// g++ 12 has no _Float16 in C++, and no compiler here has the NPU's names.
struct half {
    uint16_t bits;
    half() = default;
    template <typename T, std::enable_if_t<std::is_arithmetic<T>::value, int> = 0>
    half(T value) : bits(pto_sim::f16_bits(static_cast<float>(value))) {}
    operator float() const { return pto_sim::f16_value(bits); }
};

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    template <typename T, std::enable_if_t<std::is_arithmetic<T>::value, int> = 0>
    bfloat16_t(T value) : bits(pto_sim::bf16_bits(static_cast<float>(value))) {}
    operator float() const { return pto_sim::bf16_value(bits); }
};

namespace pto_sim {

template <typename T>
struct DtypeOf;
template <> struct DtypeOf<float> { static constexpr Dtype value = Dtype::f32; };
template <> struct DtypeOf<half> { static constexpr Dtype value = Dtype::f16; };
template <> struct DtypeOf<bfloat16_t> { static constexpr Dtype value = Dtype::bf16; };
template <> struct DtypeOf<int32_t> { static constexpr Dtype value = Dtype::i32; };
template <> struct DtypeOf<uint32_t> { static constexpr Dtype value = Dtype::u32; };
template <> struct DtypeOf<int16_t> { static constexpr Dtype value = Dtype::i16; };
template <> struct DtypeOf<uint16_t> { static constexpr Dtype value = Dtype::u16; };
template <> struct DtypeOf<int8_t> { static constexpr Dtype value = Dtype::i8; };
template <> struct DtypeOf<uint8_t> { static constexpr Dtype value = Dtype::u8; };
template <> struct DtypeOf<int64_t> { static constexpr Dtype value = Dtype::i64; };
template <> struct DtypeOf<uint64_t> { static constexpr Dtype value = Dtype::u64; };

template <typename T, typename... Of>
constexpr bool one_of = (std::is_same<T, Of>::value || ...);

}  // namespace pto_sim

enum pipe_t : int {
    PIPE_S = 0,
    PIPE_V = 1,
    PIPE_M = 2,
    PIPE_MTE1 = 3,
    PIPE_MTE2 = 4,
    PIPE_MTE3 = 5,
    PIPE_ALL = 6,
    PIPE_FIX = 10,
};

enum event_t : int {
    EVENT_ID0 = 0,
    EVENT_ID1,
    EVENT_ID2,
    EVENT_ID3,
    EVENT_ID4,
    EVENT_ID5,
    EVENT_ID6,
    EVENT_ID7,
};

namespace pto {

enum class TileType { Vec, Mat, Left, Right, Acc };
enum class BLayout { RowMajor = 0, ColMajor = 1 };
enum class SLayout { NoneBox = 0, RowMajor = 1, ColMajor = 2 };
enum class Layout { ND, DN, NZ };
enum class PadValue : uint64_t { Null = 0, Zero = 1, Max = 2, Min = 3 };
enum class CompactMode { Null, Normal };
enum class CmpMode : uint8_t { EQ = 0, NE = 1, LT = 2, LE = 3, GT = 4, GE = 5 };
enum class RoundMode : uint8_t {
    CAST_NONE = 0,
    CAST_RINT = 1,
    CAST_ROUND = 2,
    CAST_FLOOR = 3,
    CAST_CEIL = 4,
    CAST_TRUNC = 5,
    CAST_ODD = 6,
};

constexpr int DYNAMIC = -1;

}  // namespace pto

#endif
