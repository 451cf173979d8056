// Ends the calling thread if `done`. waits: only after the kernels of its call that started earlier have ended.
__device__ inline void end_if(bool done, bool waits) {
  if (done) {
    if (waits) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("exit;" ::: "memory");
    __builtin_unreachable();  // or what comes after might be loaded before
  }
}
// Ends the calling thread if the counter is zero, or if it is not (`set`), when the kernels that started earlier have ended, since
// these still read the counter.
__device__ inline void return_if(const int* counter, bool set) { end_if((*(const volatile int*)counter != 0) == set, true); }
