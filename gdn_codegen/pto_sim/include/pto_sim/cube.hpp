// The cube core: L1 to L0, matmul, and moves between tiles.
#ifndef PTO_SIM_CUBE_HPP
#define PTO_SIM_CUBE_HPP

#include <pto_sim/tile.hpp>

namespace pto_sim {
// cube.cpp
void extract(const TileRef& dst, const TileRef& src, int row, int col, const char* name, Site site);
void acc_to_mat(const TileRef& dst, const TileRef& src, Site site);
void matmul(const TileRef& c, const TileRef& a, const TileRef& b, bool accumulate, Site site);
void same_accumulator(const TileRef& out, const TileRef& in, Site site);
// vector.cpp
void copy(const TileRef& dst, const TileRef& src, Site site);

template <typename D, typename S>
constexpr void check_extract() {
    using E = typename S::DType;
    static_assert(std::is_same<typename D::DType, E>::value, "L1 to L0: one dtype on both sides");
    static_assert(one_of<E, int8_t, half, bfloat16_t, float>, "L1 to L0: int8, half, bfloat16_t or float");
    static_assert(D::SFractal == S::SFractal ||
                      (S::Rows % 16 == 0 && S::Cols % 16 == 0 && D::Rows % 16 == 0 && D::Cols % 16 == 0),
                  "L1 to L0 with a transpose: all sides are multiples of 16");
}
}  // namespace pto_sim

namespace pto {

template <typename D, typename S>
void TEXTRACT(D& dst, S& src, uint16_t row, uint16_t col, PTO_SIM_HERE) {
    static_assert(S::Loc == TileType::Mat && (D::Loc == TileType::Left || D::Loc == TileType::Right),
                  "TEXTRACT: Mat to Left or Right");
    pto_sim::check_extract<D, S>();
    pto_sim::extract(dst.ref(), src.ref(), row, col, "TEXTRACT", site);
}

template <typename D, typename S>
void TMOV(D& dst, S& src, PTO_SIM_HERE) {
    static_assert(S::Rows == D::Rows && S::Cols == D::Cols, "TMOV: tiles of one shape");
    if constexpr (S::Loc == TileType::Mat) {
        static_assert(D::Loc == TileType::Left || D::Loc == TileType::Right, "TMOV from Mat: to Left or Right");
        pto_sim::check_extract<D, S>();
        pto_sim::extract(dst.ref(), src.ref(), 0, 0, "TMOV", site);
    } else if constexpr (S::Loc == TileType::Acc) {
        static_assert(D::Loc == TileType::Mat, "TMOV from Acc: to Mat (Acc to Vec is A5 only)");
        static_assert(!D::isRowMajor, "TMOV from Acc: the Mat tile is NZ");
        static_assert(std::is_same<typename S::DType, float>::value &&
                          pto_sim::one_of<typename D::DType, half, bfloat16_t>,
                      "TMOV from Acc: float to half or bfloat16_t");
        pto_sim::acc_to_mat(dst.ref(), src.ref(), site);
    } else {
        static_assert(S::Loc == TileType::Vec && D::Loc == TileType::Vec, "TMOV: Mat to L0, Acc to Mat, Vec to Vec");
        static_assert(sizeof(typename S::DType) == sizeof(typename D::DType), "TMOV: one element size");
        static_assert(S::BFractal == D::BFractal, "TMOV: one layout");
        pto_sim::copy(dst.ref(), src.ref(), site);
    }
}

template <typename C, typename A, typename B>
constexpr void check_matmul() {
    using EA = typename A::DType;
    static_assert(C::Loc == TileType::Acc && A::Loc == TileType::Left && B::Loc == TileType::Right,
                  "TMATMUL: (Acc, Left, Right)");
    static_assert(std::is_same<EA, typename B::DType>::value && std::is_same<typename C::DType, float>::value &&
                      pto_sim::one_of<EA, half, bfloat16_t, float>,
                  "TMATMUL: float from (half, half), (bfloat16_t, bfloat16_t) or (float, float)");
}

template <typename C, typename A, typename B>
void TMATMUL(C& c, A& a, B& b, PTO_SIM_HERE) {
    check_matmul<C, A, B>();
    pto_sim::matmul(c.ref(), a.ref(), b.ref(), false, site);
}

template <typename C, typename A, typename B>
void TMATMUL_ACC(C& c, A& a, B& b, PTO_SIM_HERE) {
    check_matmul<C, A, B>();
    pto_sim::matmul(c.ref(), a.ref(), b.ref(), true, site);
}

template <typename C, typename A, typename B>
void TMATMUL_ACC(C& out, C& in, A& a, B& b, PTO_SIM_HERE) {
    check_matmul<C, A, B>();
    pto_sim::same_accumulator(out.ref(), in.ref(), site);
    pto_sim::matmul(out.ref(), a.ref(), b.ref(), true, site);
}

}  // namespace pto

#endif
