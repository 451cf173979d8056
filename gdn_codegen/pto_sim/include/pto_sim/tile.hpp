// Tiles (on-chip) and global tensors, and the plain descriptions of them that the engine works on.
#ifndef PTO_SIM_TILE_HPP
#define PTO_SIM_TILE_HPP

#include <pto_sim/types.hpp>

namespace pto_sim {

enum class Form : uint8_t { ND, DN, NZ, ZN, ZZ };

struct TileRef {
    pto::TileType loc;
    Dtype dtype;
    Form form;
    bool compact;
    bool narrow;  // static valid cols fewer than cols
    int size;     // bytes of an element
    int block;    // elements along the contiguous side of a fractal
    int rows, cols, vrow, vcol;
    uint64_t pad;
    int64_t addr;  // -1 until TASSIGN
};

struct GlobalRef {
    void* data;
    Dtype dtype;
    int size;
    pto::Layout layout;
    int64_t shape[5], stride[5];
};

// tile.cpp
void assign(const TileRef& tile, int64_t addr, Site site);
void scalar_read(const TileRef& tile, uint32_t offset, void* out, Site site);
void scalar_write(const TileRef& tile, uint32_t offset, const void* in, Site site);
[[noreturn]] void bad_valid(int rows, int cols, int vrow, int vcol);

}  // namespace pto_sim

namespace pto {

struct TileConfig {
    static constexpr int alignedSize = 32;
    static constexpr int fractalABSize = 512;
    static constexpr int fractalCSize = 1024;
};

template <TileType Loc_, typename Element_, int Rows_, int Cols_, BLayout BFractal_ = BLayout::RowMajor,
          int RowValid_ = Rows_, int ColValid_ = Cols_, SLayout SFractal_ = SLayout::NoneBox,
          int SFractalSize_ = TileConfig::fractalABSize, auto PadVal_ = PadValue::Null,
          CompactMode Compact_ = CompactMode::Null>
struct Tile {
    using DType = Element_;
    static constexpr TileType Loc = Loc_;
    static constexpr int Rows = Rows_;
    static constexpr int Cols = Cols_;
    static constexpr int ValidRow = RowValid_;
    static constexpr int ValidCol = ColValid_;
    static constexpr int Numel = Rows_ * Cols_;
    static constexpr BLayout BFractal = BFractal_;
    static constexpr SLayout SFractal = SFractal_;
    static constexpr int SFractalSize = SFractalSize_;
    static constexpr auto PadVal = PadVal_;
    static constexpr CompactMode Compact = Compact_;
    static constexpr bool isRowMajor = BFractal_ == BLayout::RowMajor;
    static constexpr bool isBoxedLayout = SFractal_ != SLayout::NoneBox;
    static constexpr bool isInnerRowMajor = SFractal_ == SLayout::RowMajor;
    static constexpr bool isInnerColMajor = SFractal_ == SLayout::ColMajor;
    static constexpr int RowStride = isRowMajor ? Cols_ : 1;
    static constexpr int ColStride = isRowMajor ? 1 : Rows_;
    static constexpr int c0 = SFractalSize_ == TileConfig::fractalCSize ? 16 : 32 / int(sizeof(Element_));
    static constexpr int InnerRows = !isBoxedLayout ? 1 : (isInnerColMajor ? c0 : 16);
    static constexpr int InnerCols = !isBoxedLayout ? 1 : (isInnerColMajor ? 16 : c0);

    static_assert(Rows_ > 0 && Cols_ > 0, "tile: rows and cols are positive");
    static_assert(RowValid_ <= Rows_ && ColValid_ <= Cols_, "tile: valid size exceeds the tile");
    static_assert((RowValid_ > 0 || RowValid_ == DYNAMIC) && (ColValid_ > 0 || ColValid_ == DYNAMIC),
                  "tile: a static valid size is positive");
    static_assert(SFractalSize_ == 512 || SFractalSize_ == 1024, "tile: fractal of 512 or 1024 bytes");
    static_assert(isBoxedLayout || !isRowMajor || Cols_ * sizeof(Element_) % 32 == 0,
                  "tile: a row of an ND tile is a multiple of 32 bytes");
    static_assert(isBoxedLayout || isRowMajor || Rows_ * sizeof(Element_) % 32 == 0,
                  "tile: a column of a DN tile is a multiple of 32 bytes");
    static_assert(Rows_ % InnerRows == 0 || Loc_ == TileType::Vec || Rows_ == 1,
                  "tile: rows are a multiple of the fractal's rows");
    static_assert(Cols_ % InnerCols == 0, "tile: cols are a multiple of the fractal's cols");
    static_assert(Loc_ != TileType::Vec || !isBoxedLayout, "tile: the simulator knows ND and DN tiles in UB");
    static_assert(Loc_ != TileType::Mat || (isBoxedLayout && SFractalSize_ == 512 && isRowMajor == isInnerColMajor),
                  "tile: Mat is NZ (ColMajor, RowMajor) or ZN (RowMajor, ColMajor) with fractal 512");
    static_assert(Loc_ != TileType::Left || (isRowMajor && isInnerRowMajor && SFractalSize_ == 512),
                  "tile: Left on A2/A3 is Zz: BLayout::RowMajor, SLayout::RowMajor, fractal 512");
    static_assert(Loc_ != TileType::Right || (isRowMajor && isInnerColMajor && SFractalSize_ == 512),
                  "tile: Right is Zn: BLayout::RowMajor, SLayout::ColMajor, fractal 512");
    static_assert(Loc_ != TileType::Acc || (!isRowMajor && isInnerRowMajor && SFractalSize_ == 1024),
                  "tile: Acc is NZ: BLayout::ColMajor, SLayout::RowMajor, fractal 1024");
    static_assert(Loc_ != TileType::Acc || pto_sim::one_of<Element_, float, int32_t>, "tile: Acc holds float or int32");

    Tile() = default;

    template <int R = RowValid_, int C = ColValid_>
    Tile(std::enable_if_t<R == DYNAMIC && C == DYNAMIC, unsigned> vr, unsigned vc) : vrow_(vr), vcol_(vc) {
        check();
    }
    template <int R = RowValid_, int C = ColValid_>
    Tile(std::enable_if_t<R == DYNAMIC && (C > 0), unsigned> vr) : vrow_(vr) {
        check();
    }
    template <int R = RowValid_, int C = ColValid_, int = 0>
    Tile(std::enable_if_t<(R > 0) && C == DYNAMIC, unsigned> vc) : vcol_(vc) {
        check();
    }

    unsigned GetValidRow() const { return RowValid_ == DYNAMIC ? vrow_ : unsigned(RowValid_); }
    unsigned GetValidCol() const { return ColValid_ == DYNAMIC ? vcol_ : unsigned(ColValid_); }
    void SetValidRow(unsigned vr) {
        static_assert(RowValid_ == DYNAMIC, "tile: only a DYNAMIC valid row can be set");
        vrow_ = vr;
        check();
    }
    void SetValidCol(unsigned vc) {
        static_assert(ColValid_ == DYNAMIC, "tile: only a DYNAMIC valid col can be set");
        vcol_ = vc;
        check();
    }
    void SetValidShape(unsigned vr, unsigned vc) {
        SetValidRow(vr);
        SetValidCol(vc);
    }

    // The tile's address in its buffer, for arithmetic on it.
    DType* data() const { return reinterpret_cast<DType*>(static_cast<uintptr_t>(sim_addr)); }
    DType GetValue(uint32_t offset, PTO_SIM_HERE) const {
        static_assert(Loc_ == TileType::Vec, "GetValue: the tile is in UB");
        DType out;
        pto_sim::scalar_read(ref(), offset, &out, site);
        return out;
    }
    void SetValue(uint32_t offset, DType value, PTO_SIM_HERE) {
        static_assert(Loc_ == TileType::Vec, "SetValue: the tile is in UB");
        pto_sim::scalar_write(ref(), offset, &value, site);
    }

    pto_sim::TileRef ref() const {
        using pto_sim::Form;
        constexpr Form form = !isBoxedLayout ? (isRowMajor ? Form::ND : Form::DN)
                              : isInnerColMajor ? Form::ZN
                              : isRowMajor ? Form::ZZ
                                           : Form::NZ;
        return {Loc_, pto_sim::DtypeOf<Element_>::value, form, Compact_ == CompactMode::Normal,
                ColValid_ > 0 && ColValid_ < Cols_, int(sizeof(Element_)), c0, Rows_, Cols_,
                int(GetValidRow()), int(GetValidCol()), static_cast<uint64_t>(PadVal_), sim_addr};
    }

    int64_t sim_addr = -1;

private:
    void check() const {
        if (int(GetValidRow()) > Rows_ || int(GetValidCol()) > Cols_ || int(GetValidRow()) < 0 ||
            int(GetValidCol()) < 0)
            pto_sim::bad_valid(Rows_, Cols_, int(GetValidRow()), int(GetValidCol()));
    }
    unsigned vrow_ = 0, vcol_ = 0;
};

template <typename T, int R, int C, int VR = R, int VC = C>
using TileLeft = Tile<TileType::Left, T, R, C, BLayout::RowMajor, VR, VC, SLayout::RowMajor, 512>;
template <typename T, int R, int C, int VR = R, int VC = C>
using TileLeftCompact = Tile<TileType::Left, T, R, C, BLayout::RowMajor, VR, VC, SLayout::RowMajor, 512, PadValue::Null,
                             CompactMode::Normal>;
template <typename T, int R, int C, int VR = R, int VC = C>
using TileRight = Tile<TileType::Right, T, R, C, BLayout::RowMajor, VR, VC, SLayout::ColMajor, 512>;
template <typename T, int R, int C, int VR = R, int VC = C>
using TileRightCompact = Tile<TileType::Right, T, R, C, BLayout::RowMajor, VR, VC, SLayout::ColMajor, 512,
                              PadValue::Null, CompactMode::Normal>;
template <typename T, int R, int C, int VR = R, int VC = C>
using TileAcc = Tile<TileType::Acc, T, R, C, BLayout::ColMajor, VR, VC, SLayout::RowMajor, 1024>;
template <typename T, int R, int C, int VR = R, int VC = C>
using TileAccCompact = Tile<TileType::Acc, T, R, C, BLayout::ColMajor, VR, VC, SLayout::RowMajor, 1024, PadValue::Null,
                            CompactMode::Normal>;

// Shape and Stride differ only in what an unset dynamic dim is called, so one base serves both.
template <int64_t... N>
struct Dims {
    static constexpr int64_t fixed[5] = {N...};
    static constexpr int dynamic_dims = ((N == DYNAMIC ? 1 : 0) + ...);
    int64_t dim[5] = {N == DYNAMIC ? 1 : N...};

    Dims() = default;
    template <typename... I>
    Dims(int64_t first, I... rest) {
        constexpr int given = 1 + int(sizeof...(rest));
        static_assert(given == 5 || given == dynamic_dims, "Shape, Stride: one argument a dynamic dim, or all five");
        const int64_t values[] = {first, static_cast<int64_t>(rest)...};
        for (int i = 0, next = 0; i < 5; ++i) {
            if (fixed[i] == DYNAMIC) dim[i] = values[given == 5 ? i : next++];
        }
    }
};

template <int64_t N1 = DYNAMIC, int64_t N2 = DYNAMIC, int64_t N3 = DYNAMIC, int64_t N4 = DYNAMIC, int64_t N5 = DYNAMIC>
struct Shape : Dims<N1, N2, N3, N4, N5> {
    using Dims<N1, N2, N3, N4, N5>::Dims;
    static constexpr int64_t staticShape[5] = {N1, N2, N3, N4, N5};
    int64_t (&shape)[5] = this->dim;
    Shape() = default;
    Shape(const Shape& other) : Dims<N1, N2, N3, N4, N5>(other) {}
    Shape& operator=(const Shape& other) {
        Dims<N1, N2, N3, N4, N5>::operator=(other);
        return *this;
    }
};

template <int64_t N1 = DYNAMIC, int64_t N2 = DYNAMIC, int64_t N3 = DYNAMIC, int64_t N4 = DYNAMIC, int64_t N5 = DYNAMIC>
struct Stride : Dims<N1, N2, N3, N4, N5> {
    using Dims<N1, N2, N3, N4, N5>::Dims;
    static constexpr int64_t staticStride[5] = {N1, N2, N3, N4, N5};
    int64_t (&stride)[5] = this->dim;
    Stride() = default;
    Stride(const Stride& other) : Dims<N1, N2, N3, N4, N5>(other) {}
    Stride& operator=(const Stride& other) {
        Dims<N1, N2, N3, N4, N5>::operator=(other);
        return *this;
    }
};

template <typename Element_, typename Shape_, typename Stride_, Layout Layout_ = Layout::ND>
struct GlobalTensor {
    using Shape = Shape_;
    using Stride = Stride_;
    using DType = Element_;
    static constexpr Layout layout = Layout_;

    GlobalTensor() = default;
    GlobalTensor(DType* data, const Shape& shape = Shape(), const Stride& stride = Stride())
        : data_(data), shape_(shape), stride_(stride) {}

    DType* data() { return data_; }
    // A fixed dim stays what the type says, whatever was stored in it.
    int64_t GetShape(int dim) const { return Shape::fixed[dim] == DYNAMIC ? shape_.dim[dim] : Shape::fixed[dim]; }
    int64_t GetStride(int dim) const { return Stride::fixed[dim] == DYNAMIC ? stride_.dim[dim] : Stride::fixed[dim]; }
    void SetAddr(DType* data) { data_ = data; }

    pto_sim::GlobalRef ref() const {
        pto_sim::GlobalRef out = {(void*)data_, pto_sim::DtypeOf<std::remove_cv_t<DType>>::value, int(sizeof(DType)),
                                  Layout_, {}, {}};
        for (int i = 0; i < 5; ++i) {
            out.shape[i] = GetShape(i);
            out.stride[i] = GetStride(i);
        }
        return out;
    }

private:
    DType* data_ = nullptr;
    Shape shape_;
    Stride stride_;
};

template <typename T>
struct is_tile : std::false_type {};
template <TileType L, typename E, int R, int C, BLayout B, int VR, int VC, SLayout S, int F, auto P, CompactMode K>
struct is_tile<Tile<L, E, R, C, B, VR, VC, S, F, P, K>> : std::true_type {};

// A tile lives at a byte address of its buffer; a global tensor at a pointer.
template <typename T, typename A>
void TASSIGN(T& object, A address, PTO_SIM_HERE) {
    if constexpr (is_tile<T>::value) {
        static_assert(std::is_integral<A>::value, "TASSIGN: a tile takes an integer byte address");
        pto_sim::assign(object.ref(), static_cast<int64_t>(address), site);
        object.sim_addr = static_cast<int64_t>(address);
    } else {
        static_assert(std::is_pointer<A>::value, "TASSIGN: a global tensor takes a pointer");
        object.SetAddr(address);
    }
}

// The same bytes under another shape or layout: NZ [r, c] is ZN [c, r], a transpose for free.
template <typename D, typename S>
void TRESHAPE(D& dst, S& src, PTO_SIM_HERE) {
    static_assert(D::Loc == S::Loc, "TRESHAPE: source and target are in the same buffer");
    static_assert(sizeof(typename D::DType) * D::Numel == sizeof(typename S::DType) * S::Numel,
                  "TRESHAPE: the bytes are as many");
    static_assert(D::isBoxedLayout == S::isBoxedLayout, "TRESHAPE: boxed stays boxed");
    pto_sim::assign(dst.ref(), src.sim_addr, site);
    dst.sim_addr = src.sim_addr;
}

template <typename D, typename S>
void TSUBVIEW(D& dst, S& src, uint16_t row, uint16_t col, PTO_SIM_HERE) {
    static_assert(D::Loc == S::Loc, "TSUBVIEW: source and target are in the same buffer");
    static_assert(!D::isBoxedLayout && !S::isBoxedLayout && D::BFractal == S::BFractal,
                  "TSUBVIEW: ND or DN tiles of one layout");
    static_assert((D::isRowMajor ? D::Cols == S::Cols : D::Rows == S::Rows),
                  "TSUBVIEW: keep the stride: the view has the source's cols (ND) or rows (DN)");
    const int64_t at = src.sim_addr + int64_t(row * S::RowStride + col * S::ColStride) * sizeof(typename S::DType);
    pto_sim::assign(dst.ref(), at, site);
    dst.sim_addr = at;
}

}  // namespace pto

#endif
