"""include/vec.h at each instruction-set level: all of its primitives against plain C, in a program of their own.

Levels of this machine run as they are; those of ARM, elsewhere, under emulation. include/tiles.h has another program,
at the only level that has tile registers.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from miro_cy._kernels import select

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "miro_cy" / "_kernels" / "include"
ARM = platform.machine() in ("aarch64", "arm64")
X86 = platform.machine() in ("x86_64", "AMD64")
#: Level -> what vec_check.c must say that vec.h made of it: another body would pass as well, and slowly.
BODIES = {
    "generic": "neon: 4 lanes" if ARM else "portable: 4 lanes",
    "v2": "ssse3: 4 lanes",
    "v3": "avx2: 8 lanes",
    "v4": "avx512: 16 lanes",
    "v4_vnni": "avx512vnni: 16 lanes",
    "v4_amx": "avx512vnni: 16 lanes",
    "dotprod": "dotprod: 4 lanes",
}
CROSS = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"


def compiled(build: Any, compiler: str, flags: list[str], folder: Path, name: str = "vec_check") -> Path:
    program = folder / name
    command = [compiler, *build.flags, *flags, "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", f"-I{INCLUDE}"]
    command += [str(HERE / f"{name}.c"), "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def check(command: list[str], body: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{body}, "), done.stdout
    assert int(done.stdout.split(",")[1].split()[0]) > 2_000_000


@pytest.mark.parametrize(
    "level", ["generic", *(["v2", "v3", "v4", "v4_vnni", "v4_amx"] if X86 else []), *(["dotprod"] if ARM else [])]
)
def test_primitives_equal_plain_c(build, level, tmp_path):
    if level not in build.levels:
        pytest.skip(f"the compiler, or this kind of build, has no {level}")
    program = compiled(build, build.compiler, build.levels[level], tmp_path)
    if level not in select.available():
        pytest.skip(f"compiled, but this machine cannot run {level}")
    check([str(program)], BODIES[level])


def test_tiles_equal_plain_c(build, tmp_path):
    """The program asks for tile registers by itself, after all that needs none."""
    if select.TILES not in build.levels:
        pytest.skip(f"the compiler, or this kind of build, has no {select.TILES}")
    program = compiled(build, build.compiler, build.levels[select.TILES], tmp_path, "tiles_check")
    if select.TILES not in select.available():
        pytest.skip("compiled, but this machine has no tile registers")
    check([str(program)], "tiles")


@pytest.mark.skipif(ARM, reason="this machine runs the ARM levels itself")
@pytest.mark.parametrize(("level", "body"), [("generic", "neon: 4 lanes"), ("dotprod", "dotprod: 4 lanes")])
def test_primitives_equal_plain_c_on_arm(build, level, body, tmp_path):
    if not shutil.which(CROSS):
        pytest.skip(f"no {CROSS} (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)")
    program = compiled(build, CROSS, ["-static", *build.arm_levels.get(level, [])], tmp_path)
    if not shutil.which(EMULATOR):
        pytest.skip(f"compiled, but no {EMULATOR} to run it (Debian: qemu-user)")
    check([EMULATOR, str(program)], body)
