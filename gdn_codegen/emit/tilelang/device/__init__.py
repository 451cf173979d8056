"""The device functions of TileLang: what kernels call as `t.NAME`, where `t` has the functions for one kind of device.

`NAME_cuda` and `NAME_cpu` are the forms of a function for CUDA and for the C backend. A function without such an ending serves
both. A generated module has copies of the functions that its kernels call, and of those that these need. So the functions use no
names but each other's, T, tilelang, math and HELPERS. Nothing of the package imports these files, since they import tilelang.
"""
