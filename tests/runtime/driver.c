// Stands for CUDA's driver: notes how kernels are launched. cuCtxGetCurrent gives `context`, cuLaunchKernel `status`.
#include <string.h>

void *context;
int status, launches;
unsigned long long config[8];
struct { unsigned long long handle; unsigned long long values[64]; } seen;
int parameters;  // how many to read, the scratch among them

int cuCtxGetCurrent(void **current) {
  *current = context;
  return 0;
}

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **params, void **extra) {
  const unsigned long long about[8] = {gx, gy, gz, bx, by, bz, shared, (unsigned long long)stream};
  ++launches;
  if (status) return status;
  memcpy(config, about, sizeof about);
  seen.handle = (unsigned long long)f;
  for (int i = 0; i < parameters; ++i) memcpy(&seen.values[i], params[i], 8);
  return extra != 0;
}
