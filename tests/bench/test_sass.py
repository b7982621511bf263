"""The NVIDIA reader on hand-written lines: shapes, classes, bytes, and what is in flight when."""

import pytest

from bench.kernels import sass
from bench.kernels.listing import Function, Loop, innermost_loops


def read(*lines: str) -> Function:
    """Lines as nvdisasm prints them, without the addresses; `L:` stands for a label."""
    text = [
        f".L_x_{line[:-1]}:" if line.endswith(":") else f"        /*{16 * n:04x}*/                   {line} ;"
        for n, line in enumerate(lines)
    ]
    return sass.parse("\n".join(text))[""]


def whole(function: Function) -> Loop:
    return Loop(0, tuple(range(len(function.instructions))))


def test_sections_are_functions():
    text = '\t.section\t.text.one,"ax",@progbits\none:\n /*0000*/ EXIT ;\n\t.section\t.text.two,"ax"\n /*0000*/ NOP ;'
    functions = sass.parse(text)
    assert {name: [x.opcode for x in f.instructions] for name, f in functions.items()} == {
        "one": ["EXIT"],
        "two": ["NOP"],
    }


@pytest.mark.parametrize(
    "line, unit",
    [
        ("HMMA.16816.F32.BF16 R44, R52, R36, RZ", "tensor"),
        ("HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88", "tensor"),
        ("UTCHMMA gdesc[UR10], gdesc[UR16], tmem[UR7], tmem[UR50], idesc[UR51], !UPT", "tensor"),
        ("MUFU.EX2 R4, R5", "exp"),
        ("FFMA.FTZ R4, R5, R6, R7", "fp"),
        ("F2FP.BF16.F32.PACK_AB R4, R5, R6", "fp"),
        ("ISETP.GE.AND P0, PT, R1, R2, PT", "integer"),
        ("UIADD3 UR4, UR5, 0x10, URZ", "integer"),
        ("LDSM.16.M88.4 R4, [R5]", "shared"),
        ("LDTM.x64 R4, tmem[UR32]", "shared"),
        ("LDGSTS.E.BYPASS.128 [R5], [R6.64]", "global"),
        ("UTMALDG.2D [UR8], [UR4]", "global"),
        ("STL [R1], R4", "spill"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "sync"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "sync"),
        ("BRA `(.L_x_1)", "branch"),
    ],
)
def test_every_instruction_has_a_class(line: str, unit: str):
    assert read(line).instructions[0].unit == unit


def test_guards_and_jumps():
    function = read("1:", "@!P3 BRA `(.L_x_1)", "BRA `(.L_x_1)", "BRA.U UP0, `(.L_x_1)", "@P0 EXIT", "EXIT")
    assert [(x.guard, x.jumps, x.falls) for x in function.instructions] == [
        ("!P3", ".L_x_1", True),
        ("", ".L_x_1", False),
        ("", ".L_x_1", True),
        ("P0", None, True),
        ("", None, False),
    ]


@pytest.mark.parametrize(
    "line, warps, flops, operands",
    [
        ("HMMA.16816.F32.BF16 R44, R52, R36, RZ", 8, 8 * 2 * 16 * 8 * 16, 0),
        ("HMMA.1688.F32.TF32 R44, R52, R36, RZ", 4, 4 * 2 * 16 * 8 * 8, 0),
        # both operands in shared memory: 64 x 16 and 128 x 16 of two bytes, for each of two warpgroups
        ("HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], R88", 8, 2 * 2 * 64 * 128 * 16, 2 * 32 * (64 + 128)),
        ("HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR8].tnspB, R24, gsb0", 4, 2 * 64 * 128 * 16, 32 * 128),
        ("QGMMA.64x256x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24", 4, 2 * 64 * 256 * 32, 32 * (64 + 256)),
    ],
)
def test_the_shape_is_in_the_mnemonic(line: str, warps: int, flops: int, operands: int):
    function = read(line)
    assert sass.flops(function, whole(function), warps) == flops
    assert sass.shared_bytes(function, whole(function), warps) == (0, operands)


@pytest.mark.parametrize(
    "descriptor, first, flops, operands",
    [
        (0x8100490, "gdesc[UR28]", 2 * 128 * 64 * 16, 32 * (64 + 128)),
        (0x8210490, "tmem[UR34]", 2 * 128 * 128 * 16, 32 * 128),
    ],
)
def test_a_fifth_generation_shape_is_in_its_descriptor(descriptor: int, first: str, flops: int, operands: int):
    function = read(
        "UMOV UR27, 0x4",
        f"UMOV UR27, {descriptor:#x}",
        "UMOV UR2, 0x0",
        f"UTCHMMA {first}, gdesc[UR18], tmem[UR8], tmem[UR26], idesc[UR27], UPT",
    )
    assert sass.flops(function, whole(function), 8) == flops  # one thread issues it for the whole block
    assert sass.shared_bytes(function, whole(function), 8) == (0, operands)
    unknown = read("R2UR UR27, R4", "UTCHMMA gdesc[UR28], gdesc[UR18], tmem[UR8], tmem[UR26], idesc[UR27], UPT")
    assert sass.flops(unknown, whole(unknown), 8) is None


def test_bytes_of_loads_and_stores():
    function = read(
        "LDS R4, [R5]", "LDS.64 R4, [R5]", "STS.128 [R5], R4", "LDS.U16 R4, [R5]", "LDSM.16.MT88.4 R4, [R5]",
        "STSM.16.M88.2 [R5], R4", "LDGSTS.E.BYPASS.128 [R5], [R6.64]", "LDG.E.128 R4, [R6.64]",
    )  # fmt: skip
    assert sass.shared_bytes(function, whole(function), 4)[0] == 4 * (32 * (4 + 8 + 16 + 2 + 16) + 512 + 256)


def flags(function: Function) -> dict[str, bool]:
    """Whether each fp or exp instruction, named by its first register, overlaps a product."""
    (loop,) = innermost_loops(function)
    flying = sass.overlapped(function, loop)
    code = [function.instructions[i] for i in loop.members]
    return {x.operands.split(",")[0]: f for x, f in zip(code, flying) if x.unit in ("exp", "fp")}


def test_hopper_products_fly_until_their_group_is_awaited():
    assert flags(
        read(
            "1:",
            "FADD R1, R2, R3",  # the second group of the iteration before is in flight
            "WARPGROUP.DEPBAR.LE gsb0, 0x0",
            "FADD R4, R2, R3",
            "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0",
            "FADD R5, R2, R3",
            "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24",
            "MUFU.EX2 R6, R3",  # issued, though not yet committed
            "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
            "WARPGROUP.DEPBAR.LE gsb0, 0x1",
            "FADD R7, R2, R3",
            "@P0 BRA `(.L_x_1)",
        )
    ) == {"R1": True, "R4": False, "R5": True, "R6": True, "R7": True}


def test_hopper_products_awaited_at_once_overlap_nothing():
    assert flags(
        read(
            "1:",
            "FADD R1, R2, R3",
            "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0",
            "WARPGROUP.DEPBAR.LE gsb0, 0x0",
            "MUFU.EX2 R6, R3",
            "@P0 BRA `(.L_x_1)",
        )
    ) == {"R1": False, "R6": False}


def test_ampere_products_fly_until_their_first_reader_or_the_end_of_the_pipeline():
    filler = [f"FADD R{100 + n}, R2, R3" for n in range(40)]
    found = flags(
        read(
            "1:",
            "HMMA.16816.F32.BF16 R44, R52, R36, RZ",
            "FADD R1, R2, R3",
            "HMMA.16816.F32.BF16 R44, R52, R36, R44",  # a product reading a product waits for nothing of ours
            "FADD R4, R2, R3",
            "FMUL R5, R45, R3",
            "FADD R6, R2, R3",
            "HMMA.16816.F32.BF16 R48, R52, R36, R48",
            *filler,
            "@P0 BRA `(.L_x_1)",
        )
    )
    assert (found["R1"], found["R4"], found["R5"], found["R6"]) == (True, True, False, False)
    assert [found[f"R{100 + n}"] for n in (0, 30, 31, 39)] == [True, True, False, False]


def test_blackwell_products_fly_until_their_barrier():
    product = "UTCHMMA gdesc[UR28], gdesc[UR18], tmem[UR8], tmem[UR26], idesc[UR27], UPT"
    assert flags(
        read(
            "1:",
            product,
            "UTCBAR [UR36], URZ",
            "FADD R1, R2, R3",
            product,
            "UTCBAR [UR13], URZ",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P5, [UR36], R8",
            "LDTM.x32 R40, tmem[UR10]",
            "FADD R4, R2, R3",  # the second is still in flight
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P5, [UR13], R8",
            "FADD R5, R2, R3",
            "@P0 BRA `(.L_x_1)",
        )
    ) == {"R1": True, "R4": True, "R5": False}


def test_selects_and_comparisons():
    function = read("ISETP.GE.AND P0, PT, R1, R2, PT", "FSEL R1, R2, R3, P0", "SEL R1, R2, R3, P0", "FADD R1, R2, R3")
    assert (sass.selects(function, whole(function)), sass.comparisons(function, whole(function))) == (1, 3)
