// Numbers: conversions between the dtypes, fills, and the product of two matrices.
#include "engine.hpp"

namespace pto_sim {

static inline uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

float f16_value(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7FFF;
    if (rest >= 0x7C00) return float_of(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest < 0x400) return float_of(sign | bits_of(float(rest) * 5.9604644775390625e-8f));
    return float_of(sign | ((rest << 13) + (112u << 23)));
}

// Keeps `keep` mantissa bits of a magnitude of 32 bits, rounded as asked; `drop` low bits go.
static inline uint32_t round_bits(uint32_t value, int drop, bool negative, pto::RoundMode mode) {
    if (drop <= 0) return value;
    if (drop > 31) drop = 31;
    const uint32_t kept = value >> drop, rest = value & ((1u << drop) - 1), half_way = 1u << (drop - 1);
    bool raise = false;
    switch (mode) {
        case pto::RoundMode::CAST_ROUND: raise = rest >= half_way; break;
        case pto::RoundMode::CAST_FLOOR: raise = rest && negative; break;
        case pto::RoundMode::CAST_CEIL: raise = rest && !negative; break;
        case pto::RoundMode::CAST_TRUNC: break;
        case pto::RoundMode::CAST_ODD: return rest ? kept | 1 : kept;
        default: raise = rest > half_way || (rest == half_way && (kept & 1));
    }
    return kept + (raise ? 1 : 0);
}

static uint16_t to_f16(float value, pto::RoundMode mode) {
    const uint32_t u = bits_of(value), magnitude = u & 0x7FFFFFFF;
    const uint16_t sign = uint16_t(u >> 16 & 0x8000);
    if (magnitude > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (magnitude >= 0x7F800000) return uint16_t(sign | 0x7C00);
    const int exponent = int(magnitude >> 23) - 112;
    uint32_t out;
    if (exponent > 0) {
        out = round_bits(magnitude - (112u << 23), 13, sign, mode);
    } else {
        out = round_bits((magnitude & 0x7FFFFF) | (magnitude >> 23 ? 0x800000 : 0), 14 - exponent, sign, mode);
    }
    return uint16_t(sign | (out > 0x7C00 ? 0x7C00 : out));
}

uint16_t f16_bits(float value) { return to_f16(value, pto::RoundMode::CAST_RINT); }

static uint16_t to_bf16(float value, pto::RoundMode mode) {
    const uint32_t u = bits_of(value), magnitude = u & 0x7FFFFFFF;
    const uint32_t sign = u >> 16 & 0x8000;
    if (magnitude > 0x7F800000) return uint16_t(sign | 0x7FC0);
    return uint16_t(sign | round_bits(magnitude, 16, sign, mode));
}

uint16_t bf16_bits(float value) { return to_bf16(value, pto::RoundMode::CAST_RINT); }

float bf16_value(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

static const float* f16_table() {
    static const std::vector<float> table = [] {
        std::vector<float> t(65536);
        for (uint32_t i = 0; i < 65536; ++i) t[i] = f16_value(uint16_t(i));
        return t;
    }();
    return table.data();
}

void to_float(Dtype t, const void* from, float* to, size_t n) {
    switch (t) {
        case Dtype::f32: memcpy(to, from, n * 4); break;
        case Dtype::f16: {
            const uint16_t* h = static_cast<const uint16_t*>(from);
            const float* table = f16_table();
            for (size_t i = 0; i < n; ++i) to[i] = table[h[i]];
            break;
        }
        case Dtype::bf16: {
            const uint16_t* h = static_cast<const uint16_t*>(from);
            for (size_t i = 0; i < n; ++i) to[i] = float_of(uint32_t(h[i]) << 16);
            break;
        }
        case Dtype::i32:
            for (size_t i = 0; i < n; ++i) to[i] = float(static_cast<const int32_t*>(from)[i]);
            break;
        case Dtype::i16:
            for (size_t i = 0; i < n; ++i) to[i] = float(static_cast<const int16_t*>(from)[i]);
            break;
        default: fail("internal", "no conversion from %s", dtype_name(t));
    }
}

static int32_t to_i32(float v, pto::RoundMode mode) {
    double r;
    switch (mode) {
        case pto::RoundMode::CAST_ROUND: r = std::round(double(v)); break;
        case pto::RoundMode::CAST_FLOOR: r = std::floor(double(v)); break;
        case pto::RoundMode::CAST_CEIL: r = std::ceil(double(v)); break;
        case pto::RoundMode::CAST_RINT: r = std::nearbyint(double(v)); break;
        default: r = std::trunc(double(v));
    }
    if (!(r > -2147483648.0)) return std::isnan(r) ? 0 : INT32_MIN;
    return r >= 2147483647.0 ? INT32_MAX : int32_t(r);
}

void from_float(Dtype t, const float* from, void* to, size_t n, pto::RoundMode mode) {
    switch (t) {
        case Dtype::f32: memcpy(to, from, n * 4); break;
        case Dtype::f16:
            for (size_t i = 0; i < n; ++i) static_cast<uint16_t*>(to)[i] = to_f16(from[i], mode);
            break;
        case Dtype::bf16:
            for (size_t i = 0; i < n; ++i) static_cast<uint16_t*>(to)[i] = to_bf16(from[i], mode);
            break;
        case Dtype::i32:
            for (size_t i = 0; i < n; ++i) static_cast<int32_t*>(to)[i] = to_i32(from[i], mode);
            break;
        case Dtype::i16:
            for (size_t i = 0; i < n; ++i) static_cast<int16_t*>(to)[i] = int16_t(to_i32(from[i], mode));
            break;
        default: fail("internal", "no conversion to %s", dtype_name(t));
    }
}

uint32_t pad_bits(Dtype t, uint64_t pad) {
    enum { null, zero, max, min };
    if (pad == null || pad == zero) return 0;
    if (pad > min) {
        // PTO keeps a custom value as float bits in the upper half.
        const float value = float_of(uint32_t(pad >> 32));
        if (t == Dtype::f32) return bits_of(value);
        if (t == Dtype::f16) return f16_bits(value);
        if (t == Dtype::bf16) return bf16_bits(value);
        return uint32_t(int32_t(value));
    }
    const bool high = pad == max;
    switch (t) {
        case Dtype::f32: return high ? 0x7F800000u : 0xFF800000u;
        case Dtype::f16: return high ? 0x7C00u : 0xFC00u;
        case Dtype::bf16: return high ? 0x7F80u : 0xFF80u;
        case Dtype::i32: return high ? 0x7FFFFFFFu : 0x80000000u;
        case Dtype::i16: return high ? 0x7FFFu : 0x8000u;
        case Dtype::i8: return high ? 0x7Fu : 0x80u;
        default: return high ? 0xFFFFFFFFu : 0;
    }
}

void fill(int size, uint32_t bits, void* to, size_t n) {
    if (size == 4) {
        for (size_t i = 0; i < n; ++i) static_cast<uint32_t*>(to)[i] = bits;
    } else if (size == 2) {
        for (size_t i = 0; i < n; ++i) static_cast<uint16_t*>(to)[i] = uint16_t(bits);
    } else {
        memset(to, int(bits & 0xFF), n * size_t(size));
    }
}

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
void multiply(const float* a, const float* b, float* c, int m, int k, int n) {
    for (int i = 0; i < m; ++i) {
        float* row = c + size_t(i) * size_t(n);
        for (int p = 0; p < k; ++p) {
            const float x = a[size_t(i) * size_t(k) + size_t(p)];
            const float* from = b + size_t(p) * size_t(n);
            for (int j = 0; j < n; ++j) row[j] += x * from[j];
        }
    }
}

float* scratch(int slot, size_t n) {
    static std::vector<float> slots[4];
    if (slots[slot].size() < n) slots[slot].resize(n);
    return slots[slot].data();
}

}  // namespace pto_sim
