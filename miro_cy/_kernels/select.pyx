"""Chooses the instruction-set build of the kernels: the best one the machine can run, or what MIRO_ISA names."""

import os
from importlib import import_module
from importlib.util import find_spec

from cpython.pycapsule cimport PyCapsule_GetPointer

from miro_cy.errors import ConfigError

cdef extern from *:
    """
    #if defined(__aarch64__) && defined(__linux__)
    #include <sys/auxv.h>
    #endif

    /* The compiler's own feature test asks the operating system too (XSAVE). */
    static int mi_runs(int level) {
    #if defined(__x86_64__)
        __builtin_cpu_init();
        int v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt")
            && __builtin_cpu_supports("ssse3");
        int v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
            && __builtin_cpu_supports("bmi2");
        int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
            && __builtin_cpu_supports("avx512cd");
        int vnni = v4 && __builtin_cpu_supports("avx512vnni");
        return level == 0 || (level == 2 && v2) || (level == 3 && v3) || (level == 4 && v4) || (level == 5 && vnni);
    #elif defined(__aarch64__) && defined(__linux__)
        return level == 0 || (level == 1 && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP));
    #else
        return level == 0;
    #endif
    }
    """
    bint mi_runs(int level)

#: Best first; dotprod is ARM's, the v levels are x86-64's.
LEVELS = {"v4_vnni": 5, "v4": 4, "v3": 3, "v2": 2, "dotprod": 1, "generic": 0}

cdef const KernelTable* active = NULL
cdef str active_name = ""
cdef list capsules = []          # keeps every table's module alive


def available():
    """Names of the builds that exist here and that this machine can run, best first."""
    return [name for name, level in LEVELS.items() if mi_runs(level) and find_spec(f"miro_cy._kernels.isa.{name}")]


def active_isa():
    """Name of the build in use."""
    return active_name


def use(str name):
    """Switch to a build (for tests and benchmarks; an executor keeps the one it was made with)."""
    global active, active_name
    names = available()
    if name not in names:
        raise ConfigError(
            f"MIRO_ISA={name}: not one of {', '.join(names)}, which this build and machine offer", field="MIRO_ISA",
        )
    capsule = import_module(f"miro_cy._kernels.isa.{name}").table()
    capsules.append(capsule)
    active = <const KernelTable*>PyCapsule_GetPointer(capsule, "miro_cy.KernelTable")
    active_name = name


cdef const KernelTable* kernels() noexcept:
    return active


use(os.environ.get("MIRO_ISA") or available()[0])
