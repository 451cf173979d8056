// Stands for CUDA's driver: notes how kernels are launched. cuCtxGetCurrent gives `context`, cuLaunchKernel `status`.
//
// Launches on a stream that is captured become nodes of a graph instead. `sizes` are those of the kernel's parameters, in bytes,
// 0 after the last; `edge`, `cooperative` and `cluster` are what the graph says of its kernels. `user`: how the stream of a call is
// captured; `unknown`: what asking for that returns.
#include <stddef.h>
#include <string.h>

void *context;
int status, launches;
unsigned long long config[8];
struct { unsigned long long handle; unsigned long long values[64]; } seen;
int parameters;  // how many to read, the scratch among them

int sizes[32], cooperative, cluster, capturing, captured, streams, graphs, mode, invalid, user, unknown;
unsigned long long edge;
static struct { void *function; unsigned about[7]; unsigned char values[32][128]; void *places[32]; } node[4];

int cuCtxGetCurrent(void **current) {
  *current = context;
  return 0;
}

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **params, void **extra) {
  const unsigned long long about[8] = {gx, gy, gz, bx, by, bz, shared, (unsigned long long)stream};
  if (capturing && stream == &capturing) {
    const unsigned kept[7] = {gx, gy, gz, bx, by, bz, shared};
    if (captured == 4) return 1;
    node[captured].function = f;
    memcpy(node[captured].about, kept, sizeof kept);
    for (int i = 0; sizes[i]; ++i) memcpy(node[captured].places[i] = node[captured].values[i], params[i], sizes[i]);
    ++captured;
    return 0;
  }
  ++launches;
  if (status) return status;
  memcpy(config, about, sizeof about);
  seen.handle = (unsigned long long)f;
  for (int i = 0; i < parameters; ++i) memcpy(&seen.values[i], params[i], 8);
  return extra != 0;
}

int cuStreamIsCapturing(void *stream, int *state) {
  *state = user;
  return unknown;
}

int cuThreadExchangeStreamCaptureMode(int *x) {
  const int before = mode;
  mode = *x, *x = before;
  return 0;
}

int cuStreamCreate(void **stream, unsigned flags) {
  *stream = &capturing;
  ++streams;
  return flags != 1;
}

int cuStreamDestroy_v2(void *stream) {
  --streams;
  return stream != &capturing;
}

int cuStreamBeginCapture_v2(void *stream, int how) {
  capturing = 1, captured = 0;
  return stream != &capturing || how != 2 || mode != 2;
}

int cuStreamEndCapture(void *stream, void **graph) {
  capturing = 0;
  if (invalid) return 901;
  *graph = &graphs;
  ++graphs;
  return 0;
}

int cuGraphDestroy(void *graph) {
  --graphs;
  return 0;
}

int cuGraphGetNodes(void *graph, void **nodes, size_t *n) {
  size_t i = 0;
  for (; i < *n && i < (size_t)captured; ++i) nodes[i] = &node[captured - 1 - i];  // in no order
  *n = i;
  return 0;
}

int cuGraphGetEdges_v2(void *graph, void **from, void **to, unsigned long long *how, size_t *n) {
  for (*n = 0; (int)*n + 1 < captured; ++*n) from[*n] = &node[*n], to[*n] = &node[*n + 1], how[*n] = edge;
  return 0;
}

int cuGraphNodeGetType(void *at, int *type) {
  *type = 0;
  return 0;
}

int cuGraphKernelNodeGetParams_v2(void *at, void *into) {
  struct { void *function; unsigned about[7]; void **params, **extra, *kernel, *context; } x = {0};
  const int i = (int)(((char *)at - (char *)node) / sizeof node[0]);
  x.function = node[i].function, x.params = node[i].places;
  memcpy(x.about, node[i].about, sizeof x.about);
  memcpy(into, &x, sizeof x);
  return 0;
}

int cuGraphKernelNodeGetAttribute(void *at, int what, void *value) {
  if (what != 2 && what != 4) return 1;
  *(int *)value = what == 2 ? cooperative : cluster;
  return 0;
}

int cuFuncGetParamInfo(void *function, size_t i, size_t *offset, size_t *size) {
  if (!sizes[i]) return 1;
  *offset = 0, *size = sizes[i];
  return 0;
}
