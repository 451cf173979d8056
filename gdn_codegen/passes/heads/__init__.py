"""Batching of heads: an instance of a kernel over chunks handles several value heads.

One head is often too little work: an instance waits for its loads, or one unit of the device idles while another works. A head
also shares what depends on the key head alone with the other value heads of that key head. `Kernel.batch` says how many heads
an instance handles, and how (`ir.types.WAYS`). `Device.heads` has the ways of a device, with a number of heads each. The
schedule's `value_heads` sets the number where a schedule can choose it.

| way | pass | kernels | devices |
| --- | --- | --- | --- |
| "columns" | heads_by_columns | running sums alone | cores (PTO) |
| "threads" | heads_by_threads | vectors and numbers alone | thread blocks (TileLang) |
| "key_head" | heads_by_key_head | with products | thread blocks (TileLang) |
| "interleaved" | arrange | whose ops leave a pipe and return to it | cores (PTO) |

A kernel is batched once, by the first of these passes that it suits. Interleaved heads need room, so `storage.arrange` tries how
many of them fit. `added_rows` then computes the sums of "columns" by additions of rows.
"""
