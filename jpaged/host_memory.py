"""How the C library hands out the memory in which XLA:CPU computes."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
_KEPT_BYTES = 2**30


def keep_freed_memory() -> bool:
    """Makes glibc keep what is freed for the next who asks; False, and nothing done, where there is no glibc.

    XLA:CPU takes a program's temporaries anew for each run and frees them after it. By default glibc gives blocks of
    more than 32 MiB back to the system at once, so each step touches thousands of fresh pages, and the kernel has to
    zero every one. There is one arena, for others hold 64 MiB at most. It concerns the whole process, and whatever
    passes 1 GiB (a pool) is given back as ever.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return all([mallopt(name, value) == 1 for name, value in settings])
