// CUDA's driver, as far as launchers use it, and what a function of TVM's FFI starts through it.
#pragma once
#include "native_launcher.h"

namespace {
// Constants of cuda.h: modes of capturing and of streams, a kind of node, attributes of a launch, and "no such parameter".
constexpr int kRelaxed = 2, kNonBlocking = 1, kKernelNode = 0, kCooperative = 2, kCluster = 4, kInvalid = 1;

// CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h.
struct KernelNode {
  void* function;
  unsigned grid[3], block[3], shared;
  void **parameters, **extra;
  void *kernel, *context;
};

// The address of a tensor, and the number, of the first (0) and second (1) start that is captured. No memory is there.
char* ProbeAddress(int which, int64_t tensor) {
  return reinterpret_cast<char*>(((int64_t{1} + which) << 44) + ((tensor + 1) << 32) + kAligned * which);
}
double ProbeNumber(int which) { return which ? 1.7 : -0.3; }

struct Driver {
  int (*context)(void**) = nullptr;
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) = nullptr;

  explicit Driver(const std::string& path) {
    void* library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW);
    if (!library) return;
    const auto find = [&](const char* name, auto& f) {
      f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(dlsym(library, name));
      return f != nullptr;
    };
    starts = find("cuCtxGetCurrent", context) && find("cuLaunchKernel", launch) && find("cuStreamIsCapturing", capturing);
    observes = starts && find("cuThreadExchangeStreamCaptureMode", exchange) && find("cuStreamCreate", create) &&
               find("cuStreamDestroy_v2", destroy) && find("cuStreamBeginCapture_v2", begin) && find("cuStreamEndCapture", end) &&
               find("cuGraphGetNodes", nodes) && find("cuGraphGetEdges_v2", edges) && find("cuGraphNodeGetType", type) &&
               find("cuGraphKernelNodeGetParams_v2", node) && find("cuGraphKernelNodeGetAttribute", attribute) &&
               find("cuFuncGetParamInfo", parameter) && find("cuGraphDestroy", drop);
  }

  bool starts = false, observes = false;  // whether it has what launches need, and what `Observed` needs

  // Whether a stream is being captured, or nobody knows.
  bool Captures(void* stream) const {
    int status = 0;
    return !starts || capturing(stream, &status) || status;
  }

  // The one kernel that `start` launches, as a launch by the driver. start(which, stream) must start the same on the stream both
  // times, but for addresses of tensors and the number, which are those above; nothing runs, because the stream is captured. So
  // a parameter with the same bytes both times is a constant, and another one must be an address or the number. nullopt if one
  // is neither, as a descriptor of a tensor is not, and if the launch is more than a function, a grid and parameters: several
  // kernels, a cooperative launch, clusters, an early start while the kernel before it runs.
  template <class F>
  std::optional<Launch> Observed(int64_t tensors, const F& start) const {
    std::optional<Launch> found;
    if (!observes) return found;
    int mode = kRelaxed;  // a capture of another stream forbids nothing here, and is not disturbed
    if (exchange(&mode)) return found;
    void *stream = nullptr, *graph = nullptr;
    if (!create(&stream, kNonBlocking)) {
      if (!begin(stream, kRelaxed)) {
        const bool both = start(0, stream) && start(1, stream);
        if (!end(stream, &graph) && graph) {
          if (both) found = Read(graph, tensors);
          drop(graph);
        }
      }
      destroy(stream);
    }
    exchange(&mode);
    return found;
  }

 private:
  int (*capturing)(void*, int*) = nullptr;
  int (*exchange)(int*) = nullptr;
  int (*create)(void**, unsigned) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*begin)(void*, int) = nullptr;
  int (*end)(void*, void**) = nullptr;
  int (*nodes)(void*, void**, size_t*) = nullptr;
  int (*edges)(void*, void**, void**, uint64_t*, size_t*) = nullptr;
  int (*type)(void*, int*) = nullptr;
  int (*node)(void*, KernelNode*) = nullptr;
  int (*attribute)(void*, int, void*) = nullptr;
  int (*parameter)(void*, size_t, size_t*, size_t*) = nullptr;
  int (*drop)(void*) = nullptr;

  // A kernel of a graph, if its launch has no attribute that matters.
  bool Kernel(void* at, KernelNode& x) const {
    int kind = -1;
    if (type(at, &kind) || kind != kKernelNode || node(at, &x) || !x.function || !x.parameters) return false;
    int cooperative[16]{};  // CUlaunchAttributeValue has 64 bytes
    unsigned cluster[16]{};
    return !attribute(at, kCooperative, cooperative) && !cooperative[0] && !attribute(at, kCluster, cluster) && cluster[0] <= 1 &&
           cluster[1] <= 1 && cluster[2] <= 1;
  }

  std::optional<Launch> Read(void* graph, int64_t tensors) const {
    void *all[3], *from[2], *to[2];
    uint64_t how[2];  // CUgraphEdgeData: 0 if the second kernel starts when the first one has ended
    size_t kernels = 3, ordered = 2, offset = 0, size = 0;
    KernelNode a{}, b{};
    if (nodes(graph, all, &kernels) || kernels != 2 || edges(graph, from, to, how, &ordered) || ordered != 1 || how[0] ||
        !Kernel(from[0], a) || !Kernel(to[0], b) || a.function != b.function ||
        !std::equal(a.grid, a.grid + 3, b.grid) || !std::equal(a.block, a.block + 3, b.block) || a.shared != b.shared)
      return std::nullopt;
    Launch l{false, a.function, {a.grid[0], a.grid[1], a.grid[2]}, {a.block[0], a.block[1], a.block[2]}, a.shared, {}};
    int said;
    for (size_t i = 0; !(said = parameter(a.function, i, &offset, &size)); ++i) {
      int64_t x = 0, y = 0;
      if (size > sizeof x) return std::nullopt;
      std::memcpy(&x, a.parameters[i], size), std::memcpy(&y, b.parameters[i], size);
      const auto known = Meant(x, y, size, tensors);
      if (!known) return std::nullopt;
      l.given.push_back(*known);
    }
    return said == kInvalid ? std::optional<Launch>(l) : std::nullopt;
  }

  // What a parameter of so many bytes is, from its bytes at both starts.
  static std::optional<Parameter> Meant(int64_t x, int64_t y, size_t size, int64_t tensors) {
    if (x == y) return Parameter{'i', x};
    for (int64_t n = 0; n < tensors && size == sizeof x; ++n)
      if (x == reinterpret_cast<int64_t>(ProbeAddress(0, n)) && y == reinterpret_cast<int64_t>(ProbeAddress(1, n)))
        return Parameter{'t', n};
    const auto is = [](int64_t bytes, auto number) { return std::memcmp(&bytes, &number, sizeof number) == 0; };
    if (size == sizeof(double) && is(x, ProbeNumber(0)) && is(y, ProbeNumber(1))) return Parameter{'d', 0};
    if (size == sizeof(float) && is(x, float(ProbeNumber(0))) && is(y, float(ProbeNumber(1)))) return Parameter{'f', 0};
    return std::nullopt;
  }
};
}  // namespace
