// Vector instructions, all on tiles in UB.
#ifndef PTO_SIM_VECTOR_HPP
#define PTO_SIM_VECTOR_HPP

#include <pto_sim/tile.hpp>

namespace pto_sim {

enum class Op : uint8_t { add, sub, mul, div, max, min, exp, log, sqrt, rsqrt, neg, abs, exp_of_difference };

// vector.cpp
void unary(Op op, const char* name, const TileRef& dst, const TileRef& src, Site site);
void binary(Op op, const char* name, const TileRef& dst, const TileRef& a, const TileRef& b, Site site);
void with_scalar(Op op, const char* name, const TileRef& dst, const TileRef& a, double b, Site site);
void expand_scalar(const TileRef& dst, double value, Site site);
void cast(const TileRef& dst, const TileRef& src, pto::RoundMode mode, Site site);
// expand.cpp
void row_expand(const TileRef& dst, const TileRef& src, bool broadcast_form, Site site);
void row_expand_op(Op op, const char* name, const TileRef& dst, const TileRef& a, const TileRef& b, const TileRef* tmp,
                   Site site);
void col_expand(const TileRef& dst, const TileRef& src, Site site);
void col_expand_op(Op op, const char* name, const TileRef& dst, const TileRef& a, const TileRef& b, Site site);
void row_sum(const TileRef& dst, const TileRef& src, const TileRef& tmp, Site site);
void col_sum(const TileRef& dst, const TileRef& src, const TileRef* tmp, bool binary_tree, Site site);
void transpose(const TileRef& dst, const TileRef& src, const TileRef& tmp, Site site);
void compare(const TileRef& dst, const TileRef& a, const TileRef* b, double scalar, pto::CmpMode mode, const char* name,
             Site site);
void select(const TileRef& dst, const TileRef& mask, const TileRef& a, const TileRef& b, const TileRef& tmp, Site site);

template <typename T>
constexpr bool arithmetic_type = one_of<T, float, half, int32_t, int16_t>;

template <typename T>
constexpr bool nd_vec = T::Loc == pto::TileType::Vec && T::isRowMajor && !T::isBoxedLayout;
template <typename T>
constexpr bool dn_column = T::Loc == pto::TileType::Vec && !T::isRowMajor && !T::isBoxedLayout && T::Cols == 1;

}  // namespace pto_sim

namespace pto {

#define PTO_SIM_BINARY(NAME, OP)                                                                              \
    template <typename D, typename A, typename B>                                                             \
    void NAME(D& dst, A& src0, B& src1, PTO_SIM_HERE) {                                                       \
        using T = typename D::DType;                                                                          \
        static_assert(std::is_same<T, typename A::DType>::value && std::is_same<T, typename B::DType>::value, \
                      #NAME ": one dtype");                                                                   \
        static_assert(pto_sim::arithmetic_type<T>, #NAME ": float, half, int32 or int16 (not bfloat16_t)");   \
        static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<A> && pto_sim::nd_vec<B>,                         \
                      #NAME ": row-major tiles in UB");                                                       \
        pto_sim::binary(pto_sim::Op::OP, #NAME, dst.ref(), src0.ref(), src1.ref(), site);                     \
    }
PTO_SIM_BINARY(TADD, add)
PTO_SIM_BINARY(TSUB, sub)
PTO_SIM_BINARY(TMUL, mul)
PTO_SIM_BINARY(TMAX, max)
PTO_SIM_BINARY(TMIN, min)
#undef PTO_SIM_BINARY

template <typename D, typename A, typename B>
void TDIV(D& dst, A& src0, B& src1, PTO_SIM_HERE) {
    using T = typename D::DType;
    static_assert(std::is_same<T, typename A::DType>::value && std::is_same<T, typename B::DType>::value,
                  "TDIV: one dtype");
    static_assert(pto_sim::one_of<T, float, half>, "TDIV: float or half");
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<A> && pto_sim::nd_vec<B>, "TDIV: row-major tiles in UB");
    pto_sim::binary(pto_sim::Op::div, "TDIV", dst.ref(), src0.ref(), src1.ref(), site);
}

#define PTO_SIM_SCALAR(NAME, OP)                                                                            \
    template <typename D, typename A>                                                                       \
    void NAME(D& dst, A& src, typename A::DType scalar, PTO_SIM_HERE) {                                     \
        using T = typename A::DType;                                                                        \
        static_assert(std::is_same<T, typename D::DType>::value, #NAME ": one dtype");                      \
        static_assert(pto_sim::arithmetic_type<T>, #NAME ": float, half, int32 or int16 (not bfloat16_t)"); \
        static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<A>, #NAME ": row-major tiles in UB");           \
        pto_sim::with_scalar(pto_sim::Op::OP, #NAME, dst.ref(), src.ref(), double(scalar), site);           \
    }
PTO_SIM_SCALAR(TADDS, add)
PTO_SIM_SCALAR(TSUBS, sub)
PTO_SIM_SCALAR(TMULS, mul)
PTO_SIM_SCALAR(TDIVS, div)
PTO_SIM_SCALAR(TMAXS, max)
PTO_SIM_SCALAR(TMINS, min)
#undef PTO_SIM_SCALAR

#define PTO_SIM_UNARY(NAME, OP)                                                                          \
    template <typename D, typename A>                                                                    \
    void NAME(D& dst, A& src, PTO_SIM_HERE) {                                                            \
        static_assert(std::is_same<typename D::DType, typename A::DType>::value, #NAME ": one dtype");   \
        static_assert(pto_sim::one_of<typename D::DType, float, half>, #NAME ": float or half");         \
        static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<A>, #NAME ": row-major tiles in UB");        \
        pto_sim::unary(pto_sim::Op::OP, #NAME, dst.ref(), src.ref(), site);                              \
    }
PTO_SIM_UNARY(TEXP, exp)
PTO_SIM_UNARY(TLOG, log)
PTO_SIM_UNARY(TSQRT, sqrt)
PTO_SIM_UNARY(TRSQRT, rsqrt)
PTO_SIM_UNARY(TABS, abs)
PTO_SIM_UNARY(TNEG, neg)
#undef PTO_SIM_UNARY

template <typename D>
void TEXPANDS(D& dst, typename D::DType value, PTO_SIM_HERE) {
    static_assert(D::Loc == TileType::Vec || D::Loc == TileType::Mat, "TEXPANDS: a tile in UB or L1");
    static_assert(sizeof(typename D::DType) <= 4, "TEXPANDS: elements of at most 4 bytes");
    pto_sim::expand_scalar(dst.ref(), double(value), site);
}

template <typename D, typename S>
void TCVT(D& dst, S& src, RoundMode mode, PTO_SIM_HERE) {
    using T = typename D::DType;
    using F = typename S::DType;
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<S>, "TCVT: row-major tiles in UB");
    static_assert((std::is_same<F, float>::value && pto_sim::one_of<T, half, bfloat16_t, int32_t, float>) ||
                      (std::is_same<F, half>::value && pto_sim::one_of<T, float, int32_t>) ||
                      (std::is_same<F, bfloat16_t>::value && pto_sim::one_of<T, float, int32_t>) ||
                      (std::is_same<F, int32_t>::value && pto_sim::one_of<T, float>),
                  "TCVT: float to half, bfloat16_t, int32 or float; half, bfloat16_t to float or int32; int32 to float");
    pto_sim::cast(dst.ref(), src.ref(), mode, site);
}

// The column operand is a DN tile [N, 1] (broadcast through scratch), or ND [N, 32 bytes] already broadcast.
#define PTO_SIM_ROW_EXPAND(NAME, OP)                                                                               \
    template <typename D, typename A, typename B>                                                                  \
    void NAME(D& dst, A& src0, B& src1, PTO_SIM_HERE) {                                                            \
        pto_sim::check_row_expand<D, A, B>();                                                                      \
        pto_sim::row_expand_op(pto_sim::Op::OP, #NAME, dst.ref(), src0.ref(), src1.ref(), nullptr, site);          \
    }                                                                                                              \
    template <typename D, typename A, typename B, typename T, std::enable_if_t<is_tile<T>::value, int> = 0>        \
    void NAME(D& dst, A& src0, B& src1, T& tmp, PTO_SIM_HERE) {                                                    \
        pto_sim::check_row_expand<D, A, B>();                                                                      \
        const pto_sim::TileRef scratch = tmp.ref();                                                                \
        pto_sim::row_expand_op(pto_sim::Op::OP, #NAME, dst.ref(), src0.ref(), src1.ref(), &scratch, site);         \
    }
}  // namespace pto

namespace pto_sim {
template <typename D, typename A, typename B>
constexpr void check_row_expand() {
    using T = typename D::DType;
    static_assert(std::is_same<T, typename A::DType>::value && std::is_same<T, typename B::DType>::value,
                  "TROWEXPAND...: one dtype");
    static_assert(arithmetic_type<T>, "TROWEXPAND...: float, half, int32 or int16");
    static_assert(nd_vec<D> && (nd_vec<A> || nd_vec<B>), "TROWEXPAND...: the result and one operand are row-major");
    static_assert((nd_vec<A> || dn_column<A>) && (nd_vec<B> || dn_column<B>),
                  "TROWEXPAND...: the other operand is DN [N, 1] or ND [N, 32 bytes]");
}
}  // namespace pto_sim

namespace pto {
PTO_SIM_ROW_EXPAND(TROWEXPANDADD, add)
PTO_SIM_ROW_EXPAND(TROWEXPANDSUB, sub)
PTO_SIM_ROW_EXPAND(TROWEXPANDMUL, mul)
PTO_SIM_ROW_EXPAND(TROWEXPANDDIV, div)
PTO_SIM_ROW_EXPAND(TROWEXPANDMAX, max)
PTO_SIM_ROW_EXPAND(TROWEXPANDMIN, min)
PTO_SIM_ROW_EXPAND(TROWEXPANDEXPDIF, exp_of_difference)
#undef PTO_SIM_ROW_EXPAND

template <typename D, typename S>
void TROWEXPAND(D& dst, S& src, PTO_SIM_HERE) {
    using T = typename S::DType;
    static_assert(std::is_same<typename D::DType, T>::value, "TROWEXPAND: one dtype");
    static_assert(sizeof(T) <= 4, "TROWEXPAND: elements of at most 4 bytes");
    static_assert(pto_sim::nd_vec<D> && S::Loc == TileType::Vec && !S::isBoxedLayout,
                  "TROWEXPAND: an ND target, an ND or DN source, both in UB");
    constexpr bool fixed = S::Rows == S::ValidRow && S::Cols == S::ValidCol && D::Rows == D::ValidRow &&
                           D::Cols == D::ValidCol && sizeof(T) > 1;
    constexpr bool block = D::Cols == 32 / int(sizeof(T)) &&
                           (S::isRowMajor ? S::Rows == 1 && S::Cols == D::Rows : S::Cols == 1 && S::Rows == D::Rows);
    pto_sim::row_expand(dst.ref(), src.ref(), fixed && block, site);
}

template <typename D, typename S>
void TCOLEXPAND(D& dst, S& src, PTO_SIM_HERE) {
    static_assert(std::is_same<typename D::DType, typename S::DType>::value, "TCOLEXPAND: one dtype");
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<S>, "TCOLEXPAND: row-major tiles in UB");
    pto_sim::col_expand(dst.ref(), src.ref(), site);
}

#define PTO_SIM_COL_EXPAND(NAME, OP)                                                                          \
    template <typename D, typename A, typename B>                                                             \
    void NAME(D& dst, A& src0, B& src1, PTO_SIM_HERE) {                                                       \
        using T = typename D::DType;                                                                          \
        static_assert(std::is_same<T, typename A::DType>::value && std::is_same<T, typename B::DType>::value, \
                      #NAME ": one dtype");                                                                   \
        static_assert(pto_sim::arithmetic_type<T>, #NAME ": float, half, int32 or int16");                    \
        static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<A> && pto_sim::nd_vec<B>,                         \
                      #NAME ": row-major tiles in UB");                                                       \
        pto_sim::col_expand_op(pto_sim::Op::OP, #NAME, dst.ref(), src0.ref(), src1.ref(), site);              \
    }
PTO_SIM_COL_EXPAND(TCOLEXPANDADD, add)
PTO_SIM_COL_EXPAND(TCOLEXPANDSUB, sub)
PTO_SIM_COL_EXPAND(TCOLEXPANDMUL, mul)
PTO_SIM_COL_EXPAND(TCOLEXPANDDIV, div)
PTO_SIM_COL_EXPAND(TCOLEXPANDMAX, max)
PTO_SIM_COL_EXPAND(TCOLEXPANDMIN, min)
PTO_SIM_COL_EXPAND(TCOLEXPANDEXPDIF, exp_of_difference)
#undef PTO_SIM_COL_EXPAND

template <typename D, typename S, typename T>
void TROWSUM(D& dst, S& src, T& tmp, PTO_SIM_HERE) {
    static_assert(std::is_same<typename D::DType, typename S::DType>::value &&
                      std::is_same<typename T::DType, typename S::DType>::value,
                  "TROWSUM: one dtype");
    static_assert(pto_sim::arithmetic_type<typename S::DType>, "TROWSUM: float, half, int32 or int16");
    static_assert(pto_sim::nd_vec<S> && pto_sim::nd_vec<T>, "TROWSUM: the source and the scratch are row-major");
    static_assert(pto_sim::nd_vec<D> || pto_sim::dn_column<D>, "TROWSUM: the result is ND or DN [N, 1]");
    pto_sim::row_sum(dst.ref(), src.ref(), tmp.ref(), site);
}

template <typename D, typename S>
void TCOLSUM(D& dst, S& src, PTO_SIM_HERE) {
    static_assert(std::is_same<typename D::DType, typename S::DType>::value, "TCOLSUM: one dtype");
    static_assert(pto_sim::arithmetic_type<typename S::DType>, "TCOLSUM: float, half, int32 or int16");
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<S>, "TCOLSUM: row-major tiles in UB");
    pto_sim::col_sum(dst.ref(), src.ref(), nullptr, false, site);
}

template <typename D, typename S, typename T>
void TCOLSUM(D& dst, S& src, T& tmp, bool binary_tree, PTO_SIM_HERE) {
    static_assert(std::is_same<typename D::DType, typename S::DType>::value, "TCOLSUM: one dtype");
    static_assert(pto_sim::arithmetic_type<typename S::DType>, "TCOLSUM: float, half, int32 or int16");
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<S> && pto_sim::nd_vec<T>, "TCOLSUM: row-major tiles in UB");
    const pto_sim::TileRef scratch = tmp.ref();
    pto_sim::col_sum(dst.ref(), src.ref(), &scratch, binary_tree, site);
}

template <typename D, typename S, typename T>
void TTRANS(D& dst, S& src, T& tmp, PTO_SIM_HERE) {
    static_assert(sizeof(typename D::DType) == sizeof(typename S::DType), "TTRANS: one dtype");
    static_assert(sizeof(typename S::DType) == 2 || sizeof(typename S::DType) == 4,
                  "TTRANS: the simulator knows elements of 2 and 4 bytes");
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<S> && T::Loc == TileType::Vec, "TTRANS: row-major tiles in UB");
    pto_sim::transpose(dst.ref(), src.ref(), tmp.ref(), site);
}

template <typename D, typename A, typename B>
void TCMP(D& dst, A& src0, B& src1, CmpMode mode, PTO_SIM_HERE) {
    static_assert(std::is_same<typename A::DType, typename B::DType>::value, "TCMP: one dtype");
    static_assert(pto_sim::one_of<typename A::DType, float, half>, "TCMP: float or half");
    static_assert(sizeof(typename D::DType) == 1, "TCMP: the mask is a uint8_t tile, a bit an element");
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<A> && pto_sim::nd_vec<B>, "TCMP: row-major tiles in UB");
    const pto_sim::TileRef other = src1.ref();
    pto_sim::compare(dst.ref(), src0.ref(), &other, 0.0, mode, "TCMP", site);
}

template <typename D, typename A>
void TCMPS(D& dst, A& src0, typename A::DType scalar, CmpMode mode, PTO_SIM_HERE) {
    static_assert(pto_sim::one_of<typename A::DType, float, half>, "TCMPS: float or half");
    static_assert(sizeof(typename D::DType) == 1, "TCMPS: the mask is a uint8_t tile, a bit an element");
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<A>, "TCMPS: row-major tiles in UB");
    pto_sim::compare(dst.ref(), src0.ref(), nullptr, double(scalar), mode, "TCMPS", site);
}

template <typename D, typename M, typename T>
void TSEL(D& dst, M& mask, D& src0, D& src1, T& tmp, PTO_SIM_HERE) {
    static_assert(sizeof(typename D::DType) == 4 || sizeof(typename D::DType) == 2, "TSEL: elements of 2 or 4 bytes");
    static_assert(sizeof(typename M::DType) == 1, "TSEL: the mask is a uint8_t tile, a bit an element");
    static_assert(pto_sim::nd_vec<D> && pto_sim::nd_vec<M> && T::Loc == TileType::Vec, "TSEL: row-major tiles in UB");
    pto_sim::select(dst.ref(), mask.ref(), src0.ref(), src1.ref(), tmp.ref(), site);
}

}  // namespace pto

#endif
