// Data movement: GM to and from the chip, pad fills.
#ifndef PTO_SIM_MOVE_HPP
#define PTO_SIM_MOVE_HPP

#include <pto_sim/tile.hpp>

namespace pto_sim {
// move.cpp
void load(const TileRef& dst, const GlobalRef& src, Site site);
void store(const GlobalRef& dst, const TileRef& src, Site site);
void fill_pad(const TileRef& dst, const TileRef& src, bool in_place, Site site);
void fill_pad_mat(const TileRef& dst, const TileRef& src, Site site);
}  // namespace pto_sim

namespace pto {

template <typename T, typename G>
void TLOAD(T& dst, G& src, PTO_SIM_HERE) {
    using E = typename T::DType;
    static_assert(T::Loc == TileType::Vec || T::Loc == TileType::Mat, "TLOAD: the target is Vec (UB) or Mat (L1)");
    static_assert(std::is_same<E, std::remove_cv_t<typename G::DType>>::value, "TLOAD: one dtype on both sides");
    static_assert(T::Rows < 4096 || T::Loc != TileType::Vec, "TLOAD: at most 4095 rows");
    if constexpr (T::Loc == TileType::Vec) {
        static_assert((G::layout == Layout::ND && T::isRowMajor) || (G::layout == Layout::DN && !T::isRowMajor),
                      "TLOAD to Vec: ND to ND or DN to DN");
    } else {
        static_assert(sizeof(E) <= 4, "TLOAD to Mat: elements of at most 4 bytes");
        static_assert((G::layout == Layout::ND && !T::isRowMajor) || (G::layout == Layout::DN && T::isRowMajor),
                      "TLOAD to Mat: ND to NZ or DN to ZN");
        static_assert(G::Shape::fixed[0] == 1 && G::Shape::fixed[1] == 1 && G::Shape::fixed[2] == 1,
                      "TLOAD to Mat: the first three dims of the shape are the constant 1");
    }
    pto_sim::load(dst.ref(), src.ref(), site);
}

template <typename G, typename T>
void TSTORE(G& dst, T& src, PTO_SIM_HERE) {
    using E = typename T::DType;
    using O = std::remove_cv_t<typename G::DType>;
    static_assert(T::Loc == TileType::Vec || T::Loc == TileType::Acc, "TSTORE: the source is Vec (UB) or Acc (L0C)");
    if constexpr (T::Loc == TileType::Vec) {
        static_assert(std::is_same<E, O>::value, "TSTORE from Vec: one dtype on both sides");
        static_assert((G::layout == Layout::ND && T::isRowMajor) || (G::layout == Layout::DN && !T::isRowMajor),
                      "TSTORE from Vec: ND to ND or DN to DN");
    } else {
        static_assert(std::is_same<E, float>::value && pto_sim::one_of<O, float, half, bfloat16_t>,
                      "TSTORE from Acc: float to float, half or bfloat16_t");
        static_assert(G::layout == Layout::ND, "TSTORE from Acc: the simulator stores ND");
        static_assert(T::Cols <= 4095 && T::Rows <= 8192, "TSTORE from Acc: at most 8192 rows and 4095 cols");
    }
    pto_sim::store(dst.ref(), src.ref(), site);
}

template <typename D, typename S>
void TFILLPAD(D& dst, S& src, PTO_SIM_HERE) {
    static_assert(D::Loc == S::Loc && D::Rows == S::Rows && D::Cols == S::Cols, "TFILLPAD: tiles of one shape");
    static_assert(sizeof(typename D::DType) == sizeof(typename S::DType), "TFILLPAD: one dtype");
    if constexpr (D::Loc == TileType::Mat) {
        static_assert(std::is_same<D, S>::value, "TFILLPAD of Mat: the same tile twice");
        static_assert(D::PadVal == PadValue::Zero || D::PadVal == PadValue::Null, "TFILLPAD of Mat: pad Zero or Null");
        static_assert(!D::isRowMajor, "TFILLPAD of Mat: NZ only");
        pto_sim::fill_pad_mat(dst.ref(), src.ref(), site);
    } else {
        static_assert(D::Loc == TileType::Vec && D::isRowMajor && S::isRowMajor, "TFILLPAD: ND tiles in UB, or Mat");
        static_assert(D::PadVal != PadValue::Null, "TFILLPAD: the target's pad value is not Null");
        pto_sim::fill_pad(dst.ref(), src.ref(), false, site);
    }
}

template <typename D, typename S>
void TFILLPAD_INPLACE(D& dst, S& src, PTO_SIM_HERE) {
    static_assert(D::Loc == TileType::Vec && S::Loc == TileType::Vec, "TFILLPAD_INPLACE: tiles in UB");
    static_assert(D::Rows == S::Rows && D::Cols == S::Cols && D::isRowMajor && S::isRowMajor,
                  "TFILLPAD_INPLACE: ND tiles of one shape");
    static_assert(sizeof(typename D::DType) == sizeof(typename S::DType), "TFILLPAD_INPLACE: one dtype");
    static_assert(D::PadVal != PadValue::Null, "TFILLPAD_INPLACE: the target's pad value is not Null");
    pto_sim::fill_pad(dst.ref(), src.ref(), true, site);
}

}  // namespace pto

#endif
