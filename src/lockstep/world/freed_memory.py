"""Memory that a step frees stays with the process, and the next step uses it again.

Tensors on a CPU are allocated by the C library. Gradients and activations are freed and allocated again in every step;
glibc returns large pieces to the system meanwhile, and the kernel clears their pages anew at the first access of each.
That is up to half of the step of a model whose gradients are large. On a GPU torch itself keeps what is freed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's options
# At most this much free memory stays at the end of the heap: the largest value that mallopt takes.
KEPT_BYTES: Final = 2**31 - 1
# A larger tensor gets memory of its own from the system. glibc before 2.35 accepts the second value at most.
MAPPED_FROM_BYTES: Final = (2**30, 2**25)


def keep_freed_memory(env: Mapping[str, str]) -> bool:
    """Let the C library keep freed memory, for the rest of the process. Returns whether it does.

    Nothing changes if the user has chosen settings of glibc's allocator (MALLOC_..., GLIBC_TUNABLES), or with a C
    library that has none.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in env):
        return False
    with suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        if any(mallopt(M_MMAP_THRESHOLD, size) for size in MAPPED_FROM_BYTES):
            return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
    return False
