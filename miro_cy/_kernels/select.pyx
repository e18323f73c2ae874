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
    #if defined(__x86_64__) && defined(__linux__)
    #include <cpuid.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    /* Tile registers, with the float16 and bfloat16 vectors beside them. Linux gives a process their state when it
     * asks: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA. */
    static int mi_has_tiles(void) {
        unsigned a, b, c, d, state, high;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
        if (~d & (1u << 22 | 1u << 23 | 1u << 24)) return 0; /* AMX-BF16, AVX512-FP16, AMX-TILE */
        if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return 0; /* AVX512-BF16 */
        __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
        return (state >> 17 & 3) == 3 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    }
    #else
    static int mi_has_tiles(void) { return 0; }
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
        int vbmi = vnni && __builtin_cpu_supports("avx512vbmi");
        return level == 0 || (level == 2 && v2) || (level == 3 && v3) || (level == 4 && v4) || (level == 5 && vnni)
            || (level == 6 && vbmi && mi_has_tiles());
    #elif defined(__aarch64__) && defined(__linux__)
        return level == 0 || (level == 1 && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP));
    #else
        return level == 0;
    #endif
    }
    """
    bint mi_runs(int level)

#: The build with tile registers.
TILES = "v4_amx"

#: Best first; dotprod is ARM's, the v levels are x86-64's. v4_amx is v4_vnni with matmuls in tile registers, in other
#: arithmetic: it is what engines use in compute mode "bf16", and never the active one by itself.
LEVELS = {TILES: 6, "v4_vnni": 5, "v4": 4, "v3": 3, "v2": 2, "dotprod": 1, "generic": 0}

cdef const KernelTable* active = NULL
cdef str active_name = ""
cdef list capsules = []          # keeps every table's module alive


def available():
    """Names of the builds that exist here and that this machine can run, best first."""
    return [name for name, level in LEVELS.items() if mi_runs(level) and find_spec(f"miro_cy._kernels.isa.{name}")]


def plain_levels():
    """The same without the one that has tile registers."""
    return [
        name for name, level in LEVELS.items()
        if name != TILES and mi_runs(level) and find_spec(f"miro_cy._kernels.isa.{name}")
    ]


def active_isa():
    """Name of the build in use."""
    return active_name


def use(str name):
    """Switch to a build (for tests and benchmarks; an executor keeps the one it was made with)."""
    global active, active_name
    active = table_of(name)
    active_name = name


cdef const KernelTable* table_of(str name) except NULL:
    """The kernels of a build that this machine can run."""
    if name not in available():
        raise ConfigError(f"this build and machine have no kernels {name}", field="MIRO_ISA")
    capsule = import_module(f"miro_cy._kernels.isa.{name}").table()
    capsules.append(capsule)
    return <const KernelTable*>PyCapsule_GetPointer(capsule, "miro_cy.KernelTable")


def has_tiles():
    """Whether engines may multiply in tile registers: the machine has them, and MIRO_ISA asks for no lesser level."""
    return active_name in (TILES, plain_levels()[0]) and TILES in available()


def rounds_to():
    """What activations are rounded to before they meet quantised weights in mode "fast": "int8" or "bfloat16"."""
    return "bfloat16" if active.tiles else "int8"


cdef const KernelTable* kernels() noexcept:
    return active


def chosen_level():
    """What MIRO_ISA names, or the best one."""
    names = plain_levels()          # asking for tiles would have the system set their state aside for the process
    name = os.environ.get("MIRO_ISA") or names[0]
    if name not in names:
        raise ConfigError(
            f"MIRO_ISA={name}: not one of {', '.join(names)}, which this build and machine offer", field="MIRO_ISA",
        )
    return name


use(chosen_level())
