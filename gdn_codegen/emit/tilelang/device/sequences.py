"""Searches: the sequence of an instance, the choice of parts, the length of a warm-up, and whether an instance ends at once."""
import tilelang.language as T

from .headers import HELPERS


@T.macro
def find_sequence_cuda(cu_seqlens, slot, sequences, size):
    """The last sequence whose first slot, of as many tokens as `size`, cu_seqlens[n] // size + n, is not after `slot`."""
    T.import_source(HELPERS)
    n = T.alloc_var(T.int32, init=T.call_extern("int32", "find_sequence", cu_seqlens.access_ptr("r"), slot, sequences, size))
    return n


@T.macro
def find_sequence_cpu(cu_seqlens, slot, sequences, size):
    """The last sequence whose first slot, of as many tokens as `size`, cu_seqlens[n] // size + n, is not after `slot`."""
    n = T.alloc_var(T.int32, init=0)
    end = T.alloc_var(T.int32, init=sequences)
    while end - n > 1:
        middle = (n + end) // 2
        if T.truncdiv(cu_seqlens[middle], size) + middle <= slot:
            n = middle
        else:
            end = middle
    return n


@T.macro
def by_length_cuda(cu_seqlens, rank, sequences):
    """The sequence with this rank, the longest first."""
    T.import_source(HELPERS)
    return T.call_extern("int32", "by_length", cu_seqlens.access_ptr("r"), rank, sequences)


@T.macro
def choose_parts_cuda(places, cu_seqlens, sequences, size, least, whole, instances, units, costs):
    """Store which chunks each part has: as many as take the least time for these lengths, at least `least`. For their number
    `whole` if each sequence is one part. Nothing if `units` is 0, for parts of the host. costs: those of the op choose_parts."""
    T.import_source(HELPERS)
    T.call_extern("void", "choose_parts", places.access_ptr("w"), cu_seqlens.access_ptr("r"), sequences, size, least, whole,
                  instances, units, *costs)


@T.macro
def warm_up_length_cuda(totals, slot, head, chunks, most, bound, summed, step=1):
    """The fewest of the last of `chunks` chunks whose totals sum to -bound or less; -1 if that is more than `most`. If their
    sum stays above: all; but -1 if the call has summaries (`summed`) and `most` such chunks would not reach the bound. The
    first is that of `slot`. step: from one to the next, -1 in a walk back."""
    T.import_source(HELPERS)
    last = T.alloc_var(T.int32, init=chunks)  # a variable, since the expression would be repeated
    return T.call_extern("float32", "warm_up_length", T.address_of(totals[slot + step * last, head]), step * totals.shape[1],
                         last, most, bound, summed)


@T.macro
def warm_up_length_cpu(totals, slot, head, chunks, most, bound, summed, step=1):
    """The fewest of the last of `chunks` chunks whose totals sum to -bound or less; -1 if that is more than `most`. If their
    sum stays above: all; but -1 if the call has summaries (`summed`) and `most` such chunks would not reach the bound. The
    first is that of `slot`. step: from one to the next, -1 in a walk back."""
    # variables, since expressions would be repeated, divisions and all
    every = T.alloc_var(T.int32, init=chunks)
    limit = T.alloc_var(T.int32, init=T.min(chunks, most))
    last = T.alloc_var(T.int32, init=slot + step * (chunks - 1))
    done = T.alloc_var(T.int32, init=0)
    total = T.alloc_var(T.float32, init=0.0)
    found = T.alloc_var(T.float32, init=-1.0)
    while found < 0.0 and done < limit:
        total = total + totals[last - step * done, head]
        done = done + 1
        if total <= -bound:
            found = T.cast(done, T.float32)
    if found < 0.0 and every <= most and (summed == 0 or total * most <= -bound * every):
        found = T.cast(every, T.float32)
    return found


@T.macro
def end_if_cuda(done, waits):
    """End the thread if `done`. All threads of a block do so. waits: only after kernels that started earlier."""
    T.import_source(HELPERS)
    T.call_extern("void", "end_if", done, waits)


@T.macro
def return_if_zero_cuda(counter):
    """End the thread if the counter is zero. All threads of a block do so."""
    T.import_source(HELPERS)
    T.call_extern("void", "return_if", counter.access_ptr("r"), 0)


@T.macro
def return_if_set_cuda(counter):
    """End the thread if the counter is not zero. All threads of a block do so."""
    T.import_source(HELPERS)
    T.call_extern("void", "return_if", counter.access_ptr("r"), 1)
