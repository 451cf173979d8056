// Turns a kernel, compiled once for each kind of core, into a C function that runs it on host buffers.
#ifndef PTO_SIM_DRIVER_HPP
#define PTO_SIM_DRIVER_HPP

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>

#include <acl/acl.h>
#include <pto/pto-inst.hpp>
#include <runtime/rt_ffts.h>

namespace pto_sim {

constexpr uint64_t ffts_address = 0xFF75;
// What Python's DIVIDED and REGION are.
constexpr int divided = 4, region = 8;

struct Launch {
    const char* name;
    void (*entry)(const void* arguments, bool cube);
    const void* arguments;
    int block_dim;
    void** pointers;
    const int64_t* bytes;
    const int* kinds;
    int n_pointers;
    char* message;
    int message_len;
};

// launch.cpp
int run(const Launch& launch);
int refuse(char* message, int message_len, const char* name, const char* what, int wants, int got);

struct Arguments {
    void** pointers;
    const int64_t* ints;
    const double* floats;
    int next_pointer = 0, next_int = 0, next_float = 0;

    template <typename T>
    T take() {
        if constexpr (std::is_pointer<T>::value) return reinterpret_cast<T>(pointers[next_pointer++]);
        else if constexpr (std::is_floating_point<T>::value) return static_cast<T>(floats[next_float++]);
        else if constexpr (std::is_same<T, uint64_t>::value) return ffts_address;
        else return static_cast<T>(ints[next_int++]);
    }
};

template <typename T>
constexpr int is_pointer_arg = std::is_pointer<T>::value ? 1 : 0;
template <typename T>
constexpr int is_float_arg = std::is_floating_point<T>::value ? 1 : 0;
template <typename T>
constexpr int is_int_arg = std::is_integral<T>::value && !std::is_same<T, uint64_t>::value ? 1 : 0;

template <typename... A>
struct Kernel {
    void (*cube)(A...);
    void (*vec)(A...);
    std::tuple<A...> arguments;

    static void enter(const void* self, bool cube) {
        const Kernel& k = *static_cast<const Kernel*>(self);
        std::apply(cube ? k.cube : k.vec, k.arguments);
    }
};

template <typename... A>
int launch(const char* name, void (*cube)(A...), void (*vec)(A...), int block_dim, void** pointers,
           const int64_t* bytes, const int* kinds, int n_pointers, const int64_t* ints, int n_ints,
           const double* floats, int n_floats, char* message, int message_len) {
    constexpr int wants_pointers = (is_pointer_arg<A> + ... + 0);
    constexpr int wants_ints = (is_int_arg<A> + ... + 0);
    constexpr int wants_floats = (is_float_arg<A> + ... + 0);
    int passed = 0;  // regions come last, and no argument points to them
    for (int i = 0; i < n_pointers; ++i) passed += !(kinds[i] & region);
    if (passed != wants_pointers) return refuse(message, message_len, name, "pointers", wants_pointers, passed);
    if (n_ints != wants_ints) return refuse(message, message_len, name, "integers", wants_ints, n_ints);
    if (n_floats != wants_floats) return refuse(message, message_len, name, "floats", wants_floats, n_floats);
    Arguments taken{pointers, ints, floats};
    Kernel<A...> kernel{cube, vec, std::tuple<A...>{taken.template take<A>()...}};
    return run({name, &Kernel<A...>::enter, &kernel, block_dim, pointers, bytes, kinds, n_pointers, message,
                message_len});
}

}  // namespace pto_sim

// Included twice, the source must not define C functions of one name: each role has its own namespace.
#define PTO_ENTRY inline

#define PTO_SIM_KERNEL(NAME)                                                                                         \
    extern "C" __attribute__((visibility("default"))) int NAME##_sim(                                                \
        int block_dim, void** pointers, const int64_t* bytes, const int* kinds, int n_pointers, const int64_t* ints, \
        int n_ints, const double* floats, int n_floats, char* message, int message_len) {                            \
        return ::pto_sim::launch(#NAME, &pto_sim_cube::NAME, &pto_sim_vec::NAME, block_dim, pointers, bytes, kinds,  \
                                 n_pointers, ints, n_ints, floats, n_floats, message, message_len);                  \
    }

#endif
