"""Builds the extensions; metadata is in pyproject.toml.

Kernels are one source, compiled once for each instruction-set level: `_kernels/isa/<level>.pyx` are two-line stubs that
include `_kernels/impl/`, and `_kernels/select.pyx` imports the best one the machine can run. Everything else is built
for the baseline.

Environment: CC; MIRO_NO_OPENMP=1 builds without OpenMP; MIRO_DEBUG=1 makes the debug build (it checks bounds and the
assertions of include/check.h), and MIRO_SANITIZE=address,undefined beside it has the compiler watch memory. Each build
has objects and a library folder of its own below build/; only --inplace puts one beside the sources.
"""

import os
import platform
import subprocess
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("MIRO_DEBUG", "0") != "0"
SANITIZERS = os.environ.get("MIRO_SANITIZE", "")
MODE = "sanitized" if SANITIZERS else "debug" if DEBUG else "release"

# Contraction into FMA is written out in the kernels (`fma`), never left to the compiler: a row's bits must not depend
# on which tile of a matmul computed it. The other flags let plain loops vectorise, without licence to reorder sums or
# to drop NaN.
FLAGS = [
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-tree-loop-distribute-patterns",
    "-fno-strict-aliasing",
    "-Wno-unused-function",
    "-Wno-unused-but-set-variable",
    "-g0",
]
GCC_ONLY = ["--param", "max-completely-peel-times=8"]
# These come last and win. What decides a result's bits (no contraction, no reordering) stays as it is.
DEBUG_FLAGS = [
    "-O1",
    "-g",
    "-UNDEBUG",
    "-DMIRO_DEBUG=1",
    f'-DMIRO_BUILD="{MODE}"',
    "-include",
    "miro_cy/_kernels/include/loud.h",
]
# Kernels that are watched as well keep their -O3: their tests would take an hour without.
WATCHED_KERNELS = ["-O3"] if SANITIZERS else []
SANITIZER_FLAGS = [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
#: Beside the generic level, which is SSE2 on x86-64 and NEON on ARM.
X86_LEVELS = {
    "v2": ["-march=x86-64-v2"],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "v4_vnni": ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"],
    "v4_amx": [
        *["-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16", "-mavx512fp16", "-mamx-tile"],
        *["-mamx-bf16", "-mprefer-vector-width=512"],
    ],
}
ARM_LEVELS = {"dotprod": ["-march=armv8.2-a+dotprod"]}
LEVELS: dict[str, list[str]] = {"generic": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS |= X86_LEVELS
elif platform.machine() in ("aarch64", "arm64"):
    LEVELS |= ARM_LEVELS
if SANITIZERS:  # minutes each, and the tests run on the best alone
    LEVELS = {name: flags for name, flags in LEVELS.items() if name not in ("v2", "v4")}

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "embedsignature": True,
}
# Division stays C's: the other kind gives negative numbers another quotient. Without nonecheck, which would have the
# threads of a step take the GIL: what it would find ends the process anyway.
DEBUG_DIRECTIVES = DIRECTIVES | {"boundscheck": True, "initializedcheck": True}
#: Modules that wrap integers on purpose, in random numbers and exponents; in the others an overflow raises.
WRAPPING = ("miro_cy._kernels.", "miro_cy.sampling.")
PLAIN = [
    "miro_cy.native",
    "miro_cy.batch",
    "miro_cy._kernels.select",
    "miro_cy._kernels.kv",
    "miro_cy.cache.prefix",
    "miro_cy.cache.block_pool",
    "miro_cy.cache.block_table",
    "miro_cy.cache.windows",
    "miro_cy.cache.sharing",
    "miro_cy.model.step",
    "miro_cy.sampling.sampler",
    "miro_cy.sched.sequence",
    "miro_cy.sched.blocks",
    "miro_cy.sched.request",
    "miro_cy.sched.forks",
    "miro_cy.sched.sets",
    "miro_cy.sched.room",
    "miro_cy.sched.visible",
    "miro_cy.sched.relatives",
    "miro_cy.sched.scheduler",
]
OPENMP = [
    "miro_cy._kernels.team",
    "miro_cy._kernels.weights",
    "miro_cy._kernels.ops",
    "miro_cy._kernels.probe",
    "miro_cy.model.executor",
]


def compiler() -> str:
    return os.environ.get("CC", "cc").split()[0]


def accepts(flags: list[str], source: str = "int main(void) { return 0; }") -> bool:
    """Whether the compiler (not this machine) takes these flags."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.c")
        path.write_text(source)
        command = [compiler(), *flags, str(path), "-o", str(Path(folder, "probe"))]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def openmp_flags() -> list[str]:
    source = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }"
    if os.environ.get("MIRO_NO_OPENMP") == "1" or not accepts(["-fopenmp"], source):
        return []
    return ["-fopenmp"]


def extensions() -> list[Extension]:
    flags = FLAGS + (GCC_ONLY if accepts(GCC_ONLY) else [])
    flags += (DEBUG_FLAGS if DEBUG else []) + (SANITIZER_FLAGS if SANITIZERS else [])
    openmp = openmp_flags()
    sanitizers = SANITIZER_FLAGS[:1] if SANITIZERS else []

    def extension(name: str, extra: list[str], link: list[str]) -> Extension:
        source = name.replace(".", "/") + ".pyx"
        return Extension(
            name,
            [source],
            include_dirs=["miro_cy/_kernels/include"],
            depends=[str(p) for p in Path("miro_cy/_kernels").glob("include/*.h")],
            extra_compile_args=flags + extra,
            extra_link_args=link + sanitizers,
        )

    found = [extension(name, [], []) for name in PLAIN]
    found += [extension(name, openmp, openmp) for name in OPENMP]
    for level, march in LEVELS.items():
        if accepts(march):
            found.append(extension(f"miro_cy._kernels.isa.{level}", march + WATCHED_KERNELS, []))
    return found


class Build(build):
    """Keeps the debug builds away from the other one: packages and extensions go to build/debug/lib, say."""

    def initialize_options(self) -> None:
        super().initialize_options()
        if DEBUG:
            self.build_base = f"build/{MODE}"
            self.build_lib = f"build/{MODE}/lib"


class BuildInParallel(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = os.cpu_count() or 1

    def copy_extensions_to_source(self) -> None:
        # Whatever is there: where two builds take turns, the one to be put there may be the older one.
        self.force = True
        super().copy_extensions_to_source()


def cythonized() -> list[Extension]:
    from Cython.Build import cythonize

    jobs = os.cpu_count() or 1
    if not DEBUG:
        return cythonize(extensions(), nthreads=jobs, compiler_directives=DIRECTIVES, build_dir="build/cython")
    found = []
    for wraps in (True, False):
        found += cythonize(
            [extension for extension in extensions() if extension.name.startswith(WRAPPING) == wraps],
            nthreads=jobs,
            compiler_directives=DEBUG_DIRECTIVES | {"overflowcheck": not wraps},
            build_dir=f"build/{MODE}/cython",
            emit_linenums=True,
        )
    return found


if __name__ == "__main__":
    if SANITIZERS and not DEBUG:
        raise SystemExit("MIRO_SANITIZE needs MIRO_DEBUG=1 beside it")
    # Without: an editable install would compile in a folder of its own what `build_ext --inplace` then compiles again.
    found = [] if os.environ.get("MIRO_NO_EXTENSIONS") == "1" else cythonized()
    setup(ext_modules=found, cmdclass={"build": Build, "build_ext": BuildInParallel})
