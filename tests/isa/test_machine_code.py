"""The compiled tiles are made of the vector instructions they were written for, and keep to the registers.

Sources alone do not say so: a change of a loop, a flag or a compiler can turn a tile into scalar code, or have it spill
its accumulators, and every result stays right. objdump shows what the extension modules hold.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from miro_cy._kernels import select
from miro_cy.native import build_mode


class Level(NamedTuple):
    dot: str  # int8 dot products, or their first half
    register: str  # the widest
    vectors: int  # in a row of a panel of 16 outputs
    rows: int  # most that an integer tile takes
    panels: bool  # whether integer tiles of up to four rows take two panels


LEVELS = {
    "v4_vnni": Level("vpdpbusd", "zmm", 1, 8, True),
    "v4": Level("vpmaddubsw", "zmm", 1, 8, True),
    "v3": Level("vpmaddubsw", "ymm", 2, 4, False),
}
FORMATS = ("nibbles", "nibbles_min", "bytes", "plane")
OPENED = {"v4_vnni": [f"open_{fmt}_{rows}x2" for fmt in FORMATS[:3] for rows in range(1, 5)]}
TILES = {  # name -> rows times panels, of the tiles that int_rows and int_panels choose
    name: {f"{fmt}_{rows}": rows for fmt in FORMATS for rows in range(1, level.rows + 1)}
    | {f"{fmt}_{rows}x2": 2 * rows for fmt in FORMATS[:3] for rows in range(1, 5) if level.panels}
    | {tile: 2 * int(tile[-3]) for tile in OPENED.get(name, [])}
    for name, level in LEVELS.items()
}
#: The compiler that the numbers below are of.
MEASURED = "GCC: (Debian 12."
#: Loads and stores of whole vector registers on the stack in a tile's innermost loop, a block of 32 k, where there are
#: any. AVX2 has registers for the sums of a half, not for the scaled ones beside them.
SPILLS = {
    "v4_vnni": {"nibbles_3x2": 2, "nibbles_4x2": 6, "nibbles_min_4x2": 6, "open_nibbles_4x2": 2},
    "v4": {"nibbles_4x2": 14, "nibbles_min_4x2": 13, "bytes_4x2": 4},
    "v3": {
        **{f"{fmt}_2": 6 for fmt in FORMATS},
        "nibbles_3": 22,
        "nibbles_min_3": 22,
        "bytes_3": 20,
        "plane_3": 32,
        "nibbles_4": 36,
        "nibbles_min_4": 36,
        "bytes_4": 34,
        "plane_4": 10,
    },
}
#: The same, most of an innermost loop of the float tiles: on v3, 1 row by 4 panels and 3 rows by 2 need 17 registers.
FLOAT_SPILLS = {"v4_amx": 0, "v4_vnni": 0, "v4": 0, "v3": 4}
#: Functions that open weights in float16 vectors and multiply them in tile registers -> whether table lookups do it.
OPENING = {"tile_nibbles": True, "tile_nibbles_min": True, "tile_bytes": False, "tile_plane": False}
#: One that multiplies by what is open. Tile products of each: a block by two panels, for one tile of rows and for two.
OPENED_TILES = "tile_opened"
TILE_PRODUCTS = [2, 4]
PAIRS = 16  # vectors of weights that a block of a panel is opened into

FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
JUMP = re.compile(r"^j\w+ +([0-9a-f]+) <")
SCALAR = re.compile(r"^(imul|v?mulss|vfn?m(add|sub)\d+ss|v?pmulld|v?pmullw) ")
FMA = re.compile(r"^vfmadd\d+ps ")
HALF_PRODUCT = re.compile(r"^(vmul|vfmadd\d+)ph .*%zmm")
VECTOR_STORE = re.compile(r"^vmov\w+ +%[xyz]mm\d+,.*\(")

Body = list[tuple[int, str]]


def module_path(level: str) -> Path:
    if not shutil.which("objdump"):
        pytest.skip("no objdump (Debian: binutils)")
    if build_mode() != "release":
        pytest.skip(f"the {build_mode()} build is not optimised for speed")
    spec = find_spec(f"miro_cy._kernels.isa.{level}")
    if spec is None or spec.origin is None or not spec.origin.endswith(".so"):
        pytest.skip(f"the kernels were not compiled for {level}")
    return Path(spec.origin)


@functools.cache
def functions(path: Path, level: str) -> dict[str, Body]:
    """Name without the module's prefix and the compiler's suffix -> (address, instruction)s; clones are joined."""
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True)
    found: dict[str, Body] = {}
    body: Body = []
    for line in listing.stdout.splitlines():
        if start := FUNCTION.match(line):
            name = start[1].split(f"_isa_{len(level)}{level}_".replace("_isa_", "_3isa_"))[-1].split(".")[0]
            body = found.setdefault(name, [])
        elif "\t" in line:
            address, instruction = line.split("\t", 1)
            body.append((int(address.strip(" :"), 16), instruction.split("#")[0].strip()))
    return found


def innermost_loops(body: Body) -> list[list[str]]:
    """Instructions of every loop that holds no other: what lies between a backward jump and its target."""
    addresses = {address for address, _ in body}
    loops = []
    for address, instruction in body:
        jump = JUMP.match(instruction)
        if jump and int(jump[1], 16) <= address and int(jump[1], 16) in addresses:
            loops.append((int(jump[1], 16), address))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[text for address, text in body if first <= address <= last] for first, last in inner]


def stack_accesses(loop: list[str], body: Body, register: str) -> int:
    """Whole vector registers stored to the stack or loaded from it; a broadcast from there is a scalar's."""
    bases = "rsp|rbp" if any(text == "mov    %rsp,%rbp" for _, text in body) else "rsp"
    slot = re.compile(rf"\(%({bases})\)")
    return sum(bool(slot.search(text)) and f"%{register}" in text and "broadcast" not in text for text in loop)


def register_of(level: str) -> str:
    return "ymm" if level == "v3" else "zmm"


def dot_loops(body: Body, level: Level) -> list[list[str]]:
    return [loop for loop in innermost_loops(body) if any(text.startswith(level.dot) for text in loop)]


def check_int_tile(body: Body, level: Level, outputs: int) -> None:
    """The inner loops multiply whole vectors of bytes and nothing else, as many as the tile has outputs."""
    loops = dot_loops(body, level)
    assert loops, f"no loop with {level.dot}"
    for loop in loops:
        dots = [text for text in loop if text.startswith(level.dot)]
        assert all(f"%{level.register}" in text for text in dots)
        assert len(dots) % (outputs * level.vectors) == 0
        assert not [text for text in loop if SCALAR.match(text)]
    fused = [text for _, text in body if FMA.match(text) and f"%{level.register}" in text]
    assert len(fused) >= 2 * outputs * level.vectors, "scales are not multiplied in whole vectors"


def check_opening_tile(body: Body, lookups: bool) -> None:
    """The innermost loop opens a block of one or two panels in whole vectors of float16, for products of tiles."""
    assert sum(text.startswith("tdpbf16ps") for _, text in body) == sum(TILE_PRODUCTS)
    loops = [loop for loop in innermost_loops(body) if sum(bool(HALF_PRODUCT.match(text)) for text in loop) >= PAIRS]
    assert loops, "no loop of float16 products"
    for loop in loops:
        stores = sum(bool(VECTOR_STORE.match(text)) and "%zmm" in text for text in loop)
        assert stores in (PAIRS, 2 * PAIRS)
        assert sum(text.startswith("vpermb") for text in loop) >= (stores if lookups else 1)
        assert not [text for text in loop if text.startswith("vpermw")], "takes both vector ports"
        assert not [text for text in loop if re.match(r"v(mul|fmadd\d+)s[hs] ", text)]


def check_opened_tile(body: Body) -> None:
    """Each loop is loads and products of tiles, and nothing goes through a vector."""
    loops = [[text for text in loop if text.startswith("tdpbf16ps")] for loop in innermost_loops(body)]
    assert sorted(len(loop) for loop in loops if loop) == TILE_PRODUCTS
    assert not [text for _, text in body if re.search(r"%[xyz]mm", text)]


def float_loops(path: Path, name: str) -> list[tuple[list[str], Body]]:
    """Innermost loops of fused multiply-adds of the matmul's and the attention's tiles, each with its function."""
    return [
        (loop, body)
        for function, body in functions(path, name).items()
        if function.startswith(("float_panels_", "kv_rows"))
        for loop in innermost_loops(body)
        if any(FMA.match(text) for text in loop)
    ]


def skip_other_compilers(path: Path) -> None:
    comment = subprocess.run(["objdump", "-s", "-j", ".comment", path], capture_output=True, text=True, check=False)
    text = "".join(line[-16:] for line in comment.stdout.splitlines()[4:])
    if MEASURED not in text:
        pytest.skip(f"spills were counted with another compiler ({MEASURED}...), not with {text.strip('.')}")


@pytest.mark.parametrize("name", LEVELS)
def test_integer_tiles_multiply_vectors_of_bytes(name):
    found, level = functions(module_path(name), name), LEVELS[name]
    for tile, outputs in TILES[name].items():
        assert tile in found, f"no function {tile}"
        check_int_tile(found[tile], level, outputs)


@pytest.mark.parametrize("name", FLOAT_SPILLS)
def test_float_tiles_fuse_whole_vectors(name):
    path, register = module_path(name), register_of(name)
    sizes = []
    for loop, _ in float_loops(path, name):
        fused = [text for text in loop if FMA.match(text) and f"%{register}" in text]
        assert not [text for text in loop if SCALAR.match(text)]
        sizes.append(len(fused))
    # the largest tiles (6 rows by 4 panels, or 6 rows of two vectors): of the matmul for float32, float16 and bfloat16,
    # of attention for the three kinds of cache
    assert sizes.count(24 if register == "zmm" else 12) >= 6, sizes


@pytest.mark.parametrize("name", LEVELS)
def test_integer_tiles_spill_no_more_than_known(name):
    path, level = module_path(name), LEVELS[name]
    skip_other_compilers(path)
    found = functions(path, name)
    spills = {
        tile: max(stack_accesses(loop, found[tile], level.register) for loop in dot_loops(found[tile], level))
        for tile in TILES[name]
    }
    assert {tile: n for tile, n in spills.items() if n > SPILLS[name].get(tile, 0)} == {}


@pytest.mark.parametrize("name", FLOAT_SPILLS)
def test_float_tiles_spill_no_more_than_known(name):
    path = module_path(name)
    skip_other_compilers(path)
    spills = [stack_accesses(loop, body, register_of(name)) for loop, body in float_loops(path, name)]
    assert max(spills) <= FLOAT_SPILLS[name]


@pytest.mark.parametrize("tile", OPENING)
def test_weights_are_opened_in_vectors_and_multiplied_in_tiles(tile):
    found = functions(module_path(select.TILES), select.TILES)
    assert tile in found, f"no function {tile}"
    check_opening_tile(found[tile], OPENING[tile])


def test_open_weights_go_from_memory_into_tiles():
    check_opened_tile(functions(module_path(select.TILES), select.TILES)[OPENED_TILES])


def test_tile_registers_cost_no_spills():
    path = module_path(select.TILES)
    skip_other_compilers(path)
    found = functions(path, select.TILES)
    spills = {
        tile: stack_accesses([text for _, text in found[tile]], found[tile], "zmm") for tile in [*OPENING, OPENED_TILES]
    }
    assert not any(spills.values()), spills


def test_other_matmuls_are_not_taken_for_tiles():
    body = functions(module_path("v4_vnni"), "v4_vnni")["nibbles_4"]
    with pytest.raises(AssertionError):
        check_opening_tile(body, lookups=True)
    with pytest.raises(AssertionError):
        check_opened_tile(body)
    amx = functions(module_path(select.TILES), select.TILES)
    with pytest.raises(AssertionError, match="no loop of float16 products"):
        check_opening_tile(amx[OPENED_TILES], lookups=True)
    with pytest.raises(AssertionError):
        check_opened_tile(amx["tile_nibbles"])


def test_scalar_loops_would_be_noticed():
    """The generic build has the same tiles without these instructions."""
    path = module_path("generic")
    body = functions(path, "generic")["nibbles_4"]
    for level in LEVELS.values():
        with pytest.raises(AssertionError, match="no loop with"):
            check_int_tile(body, level, 4)


def test_spills_would_be_noticed():
    """A tile of eight rows, which v3 does not use, has more accumulators than there are registers."""
    path = module_path("v3")
    body = functions(path, "v3")["bytes_8"]
    assert max(stack_accesses(loop, body, "ymm") for loop in dot_loops(body, LEVELS["v3"])) > 0
