// What a settled call does on the host, without Python between its kernels: compare the kinds of its tensors with those it was
// made for, allocate workspaces, launch. Knows no algorithm: runtime/call/native_launcher.py says what the arguments are.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace {
using namespace tvm::ffi;

constexpr int64_t kArgument = 0, kWorkspace = 1, kFixed = 2;
constexpr uintptr_t kAligned = 16;      // what kernels take of callers
constexpr int64_t kWorkspaceAlign = 256;

struct Kind {
  std::vector<int64_t> shape, strides;
  DLDataType dtype;
  DLDevice device;

  explicit Kind(const DLTensor& x) : shape(x.shape, x.shape + x.ndim), strides(x.strides, x.strides + x.ndim), dtype(x.dtype),
                                     device(x.device) {}

  bool operator==(const DLTensor& x) const {
    return x.ndim == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), x.shape) && x.strides &&
           std::equal(strides.begin(), strides.end(), x.strides) && x.dtype.code == dtype.code && x.dtype.bits == dtype.bits &&
           x.dtype.lanes == dtype.lanes && x.device.device_type == device.device_type &&
           x.device.device_id == device.device_id && (reinterpret_cast<uintptr_t>(x.data) + x.byte_offset) % kAligned == 0;
  }
};

// A tensor as kernels see it: dense, at an argument's address, within the workspaces, or always the same.
struct Slot {
  int64_t from, index;  // of the argument; in bytes, for a workspace
  std::vector<int64_t> shape, strides;
  DLDataType dtype;
  std::optional<Tensor> fixed;
};

struct Launch {
  Function kernel;
  std::vector<int64_t> slots, ints, numbers;
};

DLTensor* Given(const AnyView& x) {
  std::optional<DLTensor*> found = x.try_cast<DLTensor*>();
  return found ? *found : nullptr;
}

struct Launcher {
  std::vector<std::optional<Kind>> kinds;
  std::vector<Slot> slots;
  std::vector<Launch> launches;
  int64_t bytes = 0, numbers = 0;
  DLDevice device;

  // arguments: (example or None, ...), the first a tensor; slots: (kArgument, index, shape), (kWorkspace, like) or
  // (kFixed, tensor); launches: (kernel, slots, whole numbers, indices of numbers). After the arguments a call passes numbers.
  Launcher(Array<Any> arguments, Array<Array<Any>> given, Array<Array<Any>> kernels) {
    for (const Any& x : arguments) {
      DLTensor* t = Given(x);
      kinds.push_back(t ? std::optional<Kind>(*t) : std::nullopt);
    }
    device = kinds.at(0).value().device;
    for (const Array<Any>& row : given) {
      Slot s{row[0].cast<int64_t>(), 0, {}, {}, {}, std::nullopt};
      if (s.from == kArgument) {
        s.index = row[1].cast<int64_t>();
        s.dtype = kinds.at(s.index).value().dtype;
        for (int64_t n : row[2].cast<Array<int64_t>>()) s.shape.push_back(n);
      } else {
        Tensor like = row[1].cast<Tensor>();
        s.dtype = like.dtype();
        s.shape.assign(like.shape().begin(), like.shape().end());
        if (s.from == kFixed) s.fixed = like;
      }
      s.strides.resize(s.shape.size());
      int64_t size = 1;
      for (size_t i = s.shape.size(); i-- > 0; size *= s.shape[i] ? s.shape[i] : 1) s.strides[i] = size;
      if (s.from == kWorkspace) {
        s.index = bytes;
        bytes += (size * s.dtype.bits / 8 + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
      }
      slots.push_back(std::move(s));
    }
    for (const Array<Any>& row : kernels) {
      Launch l{row[0].cast<Function>(), {}, {}, {}};
      std::vector<int64_t>* lists[] = {&l.slots, &l.ints, &l.numbers};
      for (int i = 0; i < 3; ++i)
        for (int64_t n : row[i + 1].cast<Array<int64_t>>()) lists[i]->push_back(n);
      for (int64_t n : l.numbers) numbers = std::max(numbers, n + 1);
      launches.push_back(std::move(l));
    }
  }

  // Whether these arguments are of the kinds it was made for; only then anything runs.
  bool operator()(PackedArgs args) const {
    int n = static_cast<int>(kinds.size());
    if (args.size() < n + numbers) return false;
    std::vector<const DLTensor*> tensors(n);
    for (int i = 0; i < n; ++i) {
      tensors[i] = Given(args[i]);
      if (kinds[i] ? !(tensors[i] && *kinds[i] == *tensors[i]) : args[i].type_index() != TypeIndex::kTVMFFINone) return false;
    }
    std::optional<Tensor> held;
    if (bytes) held = Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ShapeView(&bytes, 1), DLDataType{kDLUInt, 8, 1}, device);
    std::vector<DLTensor> seen(slots.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& s = slots[i];
      if (s.fixed) {
        seen[i] = *s.fixed->GetDLTensorPtr();
        continue;
      }
      char* data = s.from == kArgument ? static_cast<char*>(tensors[s.index]->data) + tensors[s.index]->byte_offset
                                       : static_cast<char*>(held->data_ptr()) + s.index;
      seen[i] = DLTensor{data, device, static_cast<int>(s.shape.size()), s.dtype, const_cast<int64_t*>(s.shape.data()),
                         const_cast<int64_t*>(s.strides.data()), 0};
    }
    std::vector<AnyView> passed;
    for (const Launch& l : launches) {
      passed.clear();
      for (int64_t i : l.slots) passed.push_back(&seen[i]);
      for (int64_t i : l.ints) passed.push_back(i);
      for (int64_t i : l.numbers) passed.push_back(args[n + static_cast<int>(i)]);
      Any result;
      l.kernel.CallPacked(passed.data(), static_cast<int32_t>(passed.size()), &result);
    }
    return true;
  }
};

Function MakeLauncher(Array<Any> arguments, Array<Array<Any>> slots, Array<Array<Any>> launches) {
  return Function::FromPacked(
      [launcher = Launcher(arguments, slots, launches)](PackedArgs args, Any* result) { *result = launcher(args); });
}
}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(native_launcher, MakeLauncher)
