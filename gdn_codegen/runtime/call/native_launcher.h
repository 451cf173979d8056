// The parts of native_launcher.cc: kinds of tensors, launches as data, and the C interfaces that launches go through.
#pragma once
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/EmptyTensor.h>
#include <ATen/dlpack.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace py = pybind11;

namespace {

constexpr int64_t kArgument = 0, kWorkspace = 1, kFixed = 2;
constexpr uintptr_t kAligned = 16;  // what kernels take of callers
constexpr int64_t kWorkspaceAlign = 256;
constexpr const char* kName = "gdn_codegen native launcher";

// The C interface of TVM's FFI, as far as it is used here.
struct FfiAny {
  int32_t type;
  uint32_t padding;
  union {
    int64_t i;
    double f;
    void* p;
  };
};
constexpr int32_t kFfiInt = 1, kFfiFloat = 3, kFfiTensor = 7, kFfiObjects = 64;

template <class F>
F Pointer(const py::handle& address) {
  return reinterpret_cast<F>(address.cast<uintptr_t>());
}

// What is left says how the values of a tensor lie in its memory: whether it is negated, wrapped by a transform, and so on.
c10::DispatchKeySet Keys(const at::Tensor& x) { return x.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView; }

struct Kind {
  std::vector<int64_t> shape, strides;
  at::ScalarType dtype;
  at::Device device;
  c10::DispatchKeySet keys;
  int64_t reach = 0;  // bytes from the first element to the end of the last

  explicit Kind(const at::Tensor& x)
      : shape(x.sizes().vec()), strides(x.strides().vec()), dtype(x.scalar_type()), device(x.device()), keys(Keys(x)) {
    if (!x.numel()) return;
    reach = 1;
    for (size_t i = 0; i < shape.size(); ++i) reach += strides[i] * (shape[i] - 1);
    reach *= x.element_size();
  }

  bool Fits(const at::Tensor& x) const {
    return Keys(x) == keys && x.scalar_type() == dtype && x.device() == device && x.sizes() == at::IntArrayRef(shape) &&
           x.strides() == at::IntArrayRef(strides) && !(x.unsafeGetTensorImpl()->autograd_meta() && x._fw_grad(0).defined());
  }
};

// A tensor as kernels see it: dense, at an argument's address, within the workspaces, or always the same.
struct Slot {
  int64_t from, index = 0;  // of the argument; in bytes, for a workspace
  std::vector<int64_t> shape, strides;
  at::Tensor fixed;
};

struct Parameter {
  char what;      // 't' a tensor, 'i' a whole number, 'f' or 'd' a number as float32 or float64
  int64_t value;  // the slot; the number itself; which of the call's numbers
};

struct Launch {
  bool ffi;  // of a function of TVM's FFI, else by CUDA's driver
  void* kernel;
  std::array<unsigned, 3> grid, block;
  unsigned shared;
  std::vector<Parameter> given;
};

using Values = c10::SmallVector<FfiAny, 40>;

struct Ffi {
  int (*call)(void*, const FfiAny*, int32_t, FfiAny*);
  int (*set_stream)(int32_t, int32_t, void*, void**);
  int (*drop)(void*);

  explicit Ffi(const py::tuple& addresses)
      : call(Pointer<decltype(call)>(addresses[0])), set_stream(Pointer<decltype(set_stream)>(addresses[1])),
        drop(Pointer<decltype(drop)>(addresses[2])) {}

  // Whether the function of a launch started its kernel.
  bool Run(const Launch& l, const Values& values) const {
    FfiAny result{};
    if (call(l.kernel, values.data(), static_cast<int32_t>(values.size()), &result)) return false;
    if (result.type >= kFfiObjects) drop(result.p);
    return true;
  }
};

// What a launch is given. A function of TVM's FFI takes descriptions of tensors, the driver their addresses.
void Fill(Values& values, const Launch& l, DLTensor* tensors, double number) {
  values.clear();
  for (const Parameter& p : l.given) {
    FfiAny v{p.what == 't' ? kFfiTensor : p.what == 'i' ? kFfiInt : kFfiFloat, 0, {p.value}};
    if (p.what == 't') v.p = l.ffi ? &tensors[p.value] : tensors[p.value].data;
    if (p.what == 'd') v.f = number;
    if (p.what == 'f') {
      const float narrow = static_cast<float>(number);
      std::memcpy(&v.f, &narrow, sizeof narrow);
    }
    values.push_back(v);
  }
}

// One call: where its tensors are, and what it allocates.
struct Memory {
  c10::SmallVector<char*, 32> at;  // of arguments, then of results, then of cu_seqlens
  c10::SmallVector<at::Tensor, 4> made;
  at::Tensor rows, held;
  double number;
  void* stream = nullptr;
};
}  // namespace
