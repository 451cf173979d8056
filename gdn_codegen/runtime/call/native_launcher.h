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

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace {

constexpr int64_t kArgument = 0, kWorkspace = 1, kFixed = 2;
constexpr uintptr_t kAligned = 16;  // what kernels take of callers
constexpr int64_t kWorkspaceAlign = 256;
constexpr const char* kName = "gdn_codegen native launcher";

// The C interfaces of TVM's FFI and of CUDA's driver, as far as they are used here.
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
using FfiCall = int (*)(void*, const FfiAny*, int32_t, FfiAny*);
using FfiSetStream = int (*)(int32_t, int32_t, void*, void**);
using FfiDrop = int (*)(void*);
using CuGetContext = int (*)(void**);
using CuLaunch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

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
  bool ffi;
  void* kernel;
  unsigned grid, block, shared;
  std::vector<Parameter> given;
};

// One call: where its tensors are, and what it allocates.
struct Memory {
  c10::SmallVector<char*, 32> at;  // of arguments, then of results, then of cu_seqlens
  c10::SmallVector<at::Tensor, 4> made;
  at::Tensor rows, held;
  double number;
  void* stream = nullptr;
};
}  // namespace
