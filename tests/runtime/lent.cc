// lent(f): a function that calls the Python function f with tensors where it is called with pointers to them.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <vector>

namespace {
using namespace tvm::ffi;

struct Lent {
  void AllocData(DLTensor* x, void* data) { x->data = data; }
  void FreeData(DLTensor*) {}
};

Function MakeLent(Function f) {
  return Function::FromPacked([f](PackedArgs args, Any* result) {
    std::vector<Any> owned;
    for (int i = 0; i < args.size(); ++i) {
      auto x = args[i].type_index() == TypeIndex::kTVMFFIDLTensorPtr ? args[i].cast<DLTensor*>() : nullptr;
      owned.push_back(x ? Any(Tensor::FromNDAlloc(Lent{}, ShapeView(x->shape, x->ndim), x->dtype, x->device, x->data))
                        : Any(args[i]));
    }
    std::vector<AnyView> views(owned.begin(), owned.end());
    f.CallPacked(views.data(), static_cast<int32_t>(views.size()), result);
  });
}
}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lent, MakeLent)
