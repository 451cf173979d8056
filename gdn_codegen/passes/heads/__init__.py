"""Batching of heads: an instance of a kernel over chunks handles several value heads.

One head is often too little work: an instance waits for its loads, or one unit of the device idles while another works. A head
also shares what depends on the key head alone with the other value heads of that key head. `Kernel.batch` says how many heads
an instance handles, and how (`ir.types.WAYS`). `Device.heads` has the ways of a device, with a number of heads each. The
schedule's `value_heads` sets the number where a schedule can choose it.

| way | module | kernels | devices |
| --- | --- | --- | --- |
| "product" | product.py | running sums alone | cores (PTO) |
| "threads" | threads.py | vectors and numbers alone | thread blocks (TileLang) |
| "key_head" | key_head.py | with products | thread blocks (TileLang) |
| "interleaved" | interleaved.py | whose ops leave a pipe and return to it | cores (PTO) |

`batch_heads` is the pass. Interleaved heads need room, so there `storage.arrange` tries how many fit.
"""
