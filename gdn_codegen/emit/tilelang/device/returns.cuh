// Ends the calling thread if the counter is zero, or if it is not (`set`). It ends only after the kernels of its call that started
// earlier, since these still read the counter.
__device__ inline void return_if(const int* counter, bool set) {
  if ((*(const volatile int*)counter != 0) == set) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("exit;");
  }
}
