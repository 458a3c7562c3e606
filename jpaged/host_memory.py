"""How the C library hands out the memory in which XLA:CPU computes."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
_KEPT_BYTES = 2**30


def keep_freed_memory() -> bool:
    """Makes glibc keep what is freed for the next who asks; False, and nothing done, where there is no glibc.

    XLA:CPU takes a program's temporaries anew for each run and frees them after it. By default glibc gives blocks of
    more than 32 MiB back to the system at once, so each step touches thousands of fresh pages, and the kernel has to
    zero every one. All threads share the first arena, for others hold 64 MiB at most; threads that have one already keep
    it, so this comes before JAX makes its own. It concerns the whole process. What passes 1 GiB, a pool, is given back
    as ever.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    settings = (_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES)
    were_taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(were_taken)
