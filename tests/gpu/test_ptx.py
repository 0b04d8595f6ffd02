"""What runs FlashInfer's kernels on the host does what the PTX ISA says of its instructions."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gpu.ptx.lanes import Launch, MemoryFault, Ranges
from gpu.ptx.program import Program
from gpu.ptx.text import parse

LANES = 32
REGISTERS = """
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .f32 %f<16>; .reg .b64 %a<8>;
.reg .f64 %d<4>;
"""
# Each lane's own places: %a1 is where it reads numbers of four bytes, %a2 where it writes.
OWN = """
mov.u32 %r0, %tid.x;
ld.param.u64 %a0, [in]; mad.wide.u32 %a1, %r0, 4, %a0;
ld.param.u64 %a0, [out]; mad.wide.u32 %a2, %r0, 4, %a0;
"""


def program(body: str, *, shared: str = "") -> Program:
    text = f"""
    .version 9.0
    .target sm_90a
    {shared}
    .visible .entry tested(.param .u64 in, .param .u64 out)
    {{
    {REGISTERS} {OWN} {body}
    ret;
    }}
    """
    return Program(parse(text)["tested"])


def run(
    body: str,
    given: np.ndarray,
    *,
    out: int = LANES,
    threads: int = LANES,
    blocks: int = 1,
    shared: str = "",
    shared_bytes: int = 0,
) -> np.ndarray:
    """Run a body over ``given``; return what it wrote, ``[out]`` uint32, all ones where nothing."""
    given = np.ascontiguousarray(given)
    found = np.full(out, 0xFFFFFFFF, np.uint32)
    arguments = np.array([given.ctypes.data, found.ctypes.data], np.uint64)
    launch = Launch((blocks, 1, 1), (threads, 1, 1), arguments.tobytes(), shared_bytes)
    starts = np.sort(arguments)
    sizes = {given.ctypes.data: given.nbytes, found.ctypes.data: found.nbytes}
    ends = np.array([int(start) + sizes[int(start)] for start in starts], np.uint64)
    program(body, shared=shared).run(launch, Ranges(starts, ends))
    return found


def words(*values: int) -> np.ndarray:
    """Return numbers as they are written in 32 bits, repeated for all lanes."""
    return np.resize(np.array([value % (1 << 32) for value in values], np.uint32), LANES)


EDGES = (0, 1, 2, 3, 7, 31, 32, 33, 255, 65535, 65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, -1)


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


BINARY: dict[str, Callable[[int, int], int]] = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.s32": lambda a, b: max(signed(a), signed(b)),
    "div.u32": lambda a, b: a // b if b else -1,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b,
}


@pytest.mark.parametrize("name", BINARY)
def test_whole_numbers(name: str) -> None:
    body = f"ld.global.u32 %r1, [%a1]; ld.global.u32 %r2, [%a1+128]; {name} %r3, %r1, %r2;"
    for first in EDGES:
        left, right = words(first), words(*EDGES)
        found = run(body + "st.global.u32 [%a2], %r3;", np.concatenate((left, right)))
        expected = [BINARY[name](int(a), int(b)) for a, b in zip(left, right, strict=True)]
        assert found.tolist() == words(*expected).tolist()


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("bfi.b32 %r3, %r1, 0xAAAAAAAA, 4, 8;", 0xAAAAA78A),
        ("bfi.b32 %r3, %r1, 0, 0, 32;", 0x12345678),
        ("not.b32 %r3, %r1;", 0xEDCBA987),
        ("neg.s32 %r3, %r1;", 0xEDCBA988),
        ("mad.lo.s32 %r3, %r1, 16, 5;", 0x23456785),
        ("mov.b32 {%h0, %h1}, %r1; mov.b32 %r3, {%h1, %h0};", 0x56781234),
        ("cvt.u64.u32 %a3, %r1; shl.b64 %a3, %a3, 4; cvt.u32.u64 %r3, %a3;", 0x23456780),
        ("setp.lt.s32 %p1, %r1, -1; selp.b32 %r3, 1, 2, %p1;", 2),
        ("setp.lt.u32 %p1, %r1, -1; selp.b32 %r3, 1, 2, %p1;", 1),
        (
            "setp.ne.b32 %p1, %r1, 0; not.pred %p2, %p1; or.pred %p1, %p1, %p2;"
            "selp.u32 %r3, 1, 2, %p1;",
            1,
        ),
        ("mov.u32 %r3, 9; setp.eq.s32 %p1, %r1, 0; @!%p1 mov.u32 %r3, 4; @%p1 mov.u32 %r3, 5;", 4),
        ("{ .reg .pred p; setp.eq.s32 p, 0, 0; selp.u32 %r3, 7, 8, p; }", 7),
    ],
)
def test_bits_and_predicates(text: str, result: int) -> None:
    body = f"ld.global.u32 %r1, [%a1]; {text} st.global.u32 [%a2], %r3;"
    assert run(body, words(0x12345678)).tolist() == [result] * LANES


def floats(values: np.ndarray) -> np.ndarray:
    return np.resize(np.asarray(values, np.float32), LANES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add.ftz.f32 %f3, %f1, 0f3F800000;", lambda x: x + np.float32(1)),
        ("mul.f32 %f3, %f1, %f1;", lambda x: x * x),
        ("neg.f32 %f3, %f1;", lambda x: -x),
        ("max.ftz.f32 %f3, %f1, 0fFF800000;", lambda x: x),
        ("ex2.approx.ftz.f32 %f3, %f1;", np.exp2),
        ("rcp.approx.ftz.f32 %f3, %f1;", lambda x: 1 / x),
        ("div.approx.ftz.f32 %f3, 0f3F800000, %f1;", lambda x: 1 / x),
        ("fma.rn.ftz.f32 %f3, %f1, %f1, %f1;", lambda x: x * x.astype(float) + x),
        ("tanh.approx.f32 %f3, %f1;", np.tanh),
        (
            "cvt.ftz.f64.f32 %d1, %f1; mul.f64 %d1, %d1, 0d4008000000000000;"
            "cvt.rn.ftz.f32.f64 %f3, %d1;",
            lambda x: x * np.float32(3),
        ),
    ],
)
def test_fractions(name: str, expected: Callable[[np.ndarray], np.ndarray]) -> None:
    given = floats([-7.25, -1, -0.5, 0.3, 1, 1.5, 2.5, 100.125])
    body = f"ld.global.f32 %f1, [%a1]; {name} st.global.f32 [%a2], %f3;"
    found = run(body, given).view(np.float32)
    assert found.tolist() == expected(given).astype(np.float32).tolist()


def test_numbers_too_small_for_full_precision_are_flushed_where_it_is_said() -> None:
    given = floats([1e-40])
    for name, flushed in (("add.ftz.f32", True), ("add.f32", False)):
        body = f"ld.global.f32 %f1, [%a1]; {name} %f3, %f1, 0f00000000; st.global.f32 [%a2], %f3;"
        assert (run(body, given).view(np.float32) == 0).all() == flushed


def test_what_is_no_number_compares_as_it_is_said() -> None:
    given = floats([math.nan, 1.0])
    for name, expected in (("eq", [0, 1]), ("neu", [1, 0]), ("lt", [0, 0]), ("geu", [1, 1])):
        body = f"""ld.global.f32 %f1, [%a1]; setp.{name}.f32 %p1, %f1, 0f3F800000;
        selp.u32 %r3, 1, 0, %p1; st.global.u32 [%a2], %r3;"""
        assert run(body, given)[:2].tolist() == expected


def test_bfloat16_is_rounded_as_pytorch_rounds() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, (LANES,), dtype=np.uint32)
    given = bits.view(np.float32)
    body = """ld.global.f32 %f1, [%a1]; cvt.rn.bf16x2.f32 %r3, 0f3F800000, %f1;
    st.global.u32 [%a2], %r3;"""
    expected = torch.from_numpy(given).to(torch.bfloat16).view(torch.int16).numpy()
    known = ~np.isnan(given)
    assert (run(body, given) & 0xFFFF)[known].tolist() == expected.view(np.uint16)[known].tolist()
    assert (run(body, given) >> 16 == 0x3F80).all()


def test_lanes_that_part_meet_again() -> None:
    """Each adds up its own number of times; those that did not are counted by a barrier."""
    body = """
    mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r5, shared_words;
    LOOP:
    setp.ge.u32 %p1, %r2, %r0; @%p1 bra DONE;
    add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1; bra LOOP;
    DONE:
    shl.b32 %r3, %r0, 2; add.u32 %r4, %r5, %r3; st.shared.u32 [%r4], %r1;
    bar.sync 0;
    xor.b32 %r3, %r3, 4; add.u32 %r4, %r5, %r3; ld.shared.u32 %r6, [%r4];
    st.global.u32 [%a2], %r6;
    """
    shared = ".shared .align 4 .b8 shared_words[256];"
    found = run(body, words(0), threads=64, out=64, shared=shared)
    assert found.tolist() == [(lane ^ 1) * ((lane ^ 1) - 1) // 2 for lane in range(64)]


def test_a_barrier_that_some_never_reach_is_an_error() -> None:
    body = "setp.lt.u32 %p1, %r0, 5; @%p1 bra AWAY; bar.sync 0; bra END; AWAY: bar.sync 0; END:"
    with pytest.raises(AssertionError, match="a thread is missing"):
        run(body, words(0))


def test_blocks_have_memory_of_their_own() -> None:
    body = """
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, dynamic; st.shared.u32 [%r2], %r1; bar.sync 0;
    ld.shared.u32 %r3, [%r2]; mov.u32 %r4, %ntid.x; mul.lo.u32 %r5, %r1, %r4;
    mad.wide.u32 %a2, %r5, 4, %a2; mov.u32 %r6, %nctaid.x; mad.lo.u32 %r3, %r3, 100, %r6;
    st.global.u32 [%a2], %r3;
    """
    shared = ".extern .shared .align 16 .b8 dynamic[];"
    found = run(body, words(0), out=20 * LANES, blocks=20, shared=shared, shared_bytes=4)
    assert found.reshape(20, LANES).tolist() == [[100 * b + 20] * LANES for b in range(20)]


@pytest.mark.parametrize("mask", [1, 4, 31, 33])
def test_lanes_exchange_numbers(mask: int) -> None:
    body = f"shfl.sync.bfly.b32 %r3, %r0, {mask}, 31, -1; st.global.u32 [%a2], %r3;"
    assert run(body, words(0)).tolist() == [lane ^ mask % 32 for lane in range(LANES)]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_products_of_matrices(kind: str) -> None:
    """Where an element is, in PTX ISA 9.0, section 9.7.15.5.8."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(shape, generator=generator) for shape in ((16, 16), (16, 8), (16, 8)))
    a, b = a.to(dtype), b.to(dtype)
    given = np.zeros((10, LANES), np.uint32)
    for lane in range(LANES):
        group, thread = lane // 4, lane % 4
        own_a = [
            a[group + 8 * (i % 4 >= 2), 2 * thread + i % 2 + 8 * (i >= 4)].view(torch.int16)
            for i in range(8)
        ]
        own_b = [b[2 * thread + i % 2 + 8 * (i >= 2), group].view(torch.int16) for i in range(4)]
        halves = np.array([int(x) for x in own_a + own_b], np.int16)
        given[:6, lane] = halves.view(np.uint32)
        own_c = [c[group + 8 * (i >= 2), 2 * thread + i % 2] for i in range(4)]
        given[6:, lane] = np.array(own_c, np.float32).view(np.uint32)
    loads = "".join(f"ld.global.u32 %r{i + 1}, [%a1+{128 * i}];" for i in range(6))
    loads += "".join(f"ld.global.f32 %f{i}, [%a1+{128 * (6 + i)}];" for i in range(4))
    body = f"""{loads}
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
    {{%f4, %f5, %f6, %f7}},{{%r1, %r2, %r3, %r4}},{{%r5, %r6}},{{%f0, %f1, %f2, %f3}};
    """.replace("f32\n", "f32 ")
    body += "".join(f"st.global.f32 [%a2+{128 * i}], %f{4 + i};" for i in range(4))
    found = run(body, given, out=4 * LANES).view(np.float32).reshape(4, LANES)
    expected = (a.double() @ b.double() + c).float()
    for lane in range(LANES):
        for i in range(4):
            place = lane // 4 + 8 * (i >= 2), lane % 4 * 2 + i % 2
            assert found[i, lane] == pytest.approx(float(expected[place]), rel=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_in_shared_memory(transposed: bool) -> None:
    """Four matrices go out by rows and come back, turned where that is asked for."""
    trans = ".trans" if transposed else ""
    body = f"""
    mov.u32 %r1, tiles; shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r1;
    ld.global.u32 %r3, [%a1]; ld.global.u32 %r4, [%a1+128]; ld.global.u32 %r5, [%a1+256];
    ld.global.u32 %r6, [%a1+384];
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {{%r3, %r4, %r5, %r6}};
    ldmatrix.sync.aligned{trans}.m8n8.x4.shared.b16 {{%r7, %r8, %r9, %r10}}, [%r2];
    """ + "".join(f"st.global.u32 [%a2+{128 * i}], %r{7 + i};" for i in range(4))
    given = np.random.default_rng(1).integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    found = run(
        body,
        given.view(np.uint32),
        out=4 * LANES,
        shared=".shared .align 16 .b8 tiles[512];",
    )
    expected = given.transpose(0, 2, 1) if transposed else given
    assert found.view(np.uint16).reshape(4, 8, 8).tolist() == expected.tolist()


def test_copies_fill_up_with_zeros() -> None:
    body = """
    mov.u32 %r1, copied; shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r1;
    ld.param.u64 %a0, [in]; and.b32 %r3, %r0, 1; shl.b32 %r3, %r3, 3;
    cp.async.cg.shared.global.L2::128B [%r2], [%a0], 16, %r3;
    ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r2];
    add.u32 %r4, %r4, %r5; add.u32 %r6, %r6, %r7; add.u32 %r4, %r4, %r6;
    st.global.u32 [%a2], %r4;
    """
    shared = ".shared .align 16 .b8 copied[512];"
    assert run(body, words(1, 2, 3, 4), shared=shared).tolist() == [0, 3] * 16


def test_copies_of_lanes_that_take_part() -> None:
    """What nobody wrote is no number, and all ones."""
    body = """
    mov.u32 %r1, copied; shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r1;
    ld.param.u64 %a0, [in]; and.b32 %r3, %r0, 1; setp.ne.b32 %p1, %r3, 0;
    @%p1 cp.async.cg.shared.global.L2::128B [%r2], [%a0], 16;
    cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r2];
    st.global.u32 [%a2], %r7;
    """
    shared = ".shared .align 16 .b8 copied[512];"
    assert run(body, words(1, 2, 3, 4), shared=shared).tolist() == [0xFFFFFFFF, 4] * 16


def test_shared_memory_is_laid_out_as_it_is_declared() -> None:
    body = """
    mov.u32 %r1, one; mov.u32 %r2, two; mov.u32 %r3, three; mov.u32 %r4, four;
    st.shared.u32 [%r1], %r2; st.global.u32 [%a2], %r1; st.global.u32 [%a2+128], %r2;
    st.global.u32 [%a2+256], %r3; st.global.u32 [%a2+384], %r4;
    """
    shared = """.shared .align 4 .u32 one; .shared .align 8 .b8 unused[64];
    .extern .shared .align 128 .b8 four[]; .shared .align 4 .u32 two;
    .shared .align 16 .f32 three;"""
    found = run(body, words(0), out=4 * LANES, shared=shared).reshape(4, LANES)[:, 0]
    assert found.tolist() == [0, 4, 16, 128]


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("ld.global.u32 %r1, [%a1+4];", "which are no one's"),
        ("add.u64 %a2, %a2, 128; st.global.u32 [%a2], %r0;", "which are no one's"),
        ("mov.u32 %r1, 60; st.shared.v2.u32 [%r1], {%r0, %r0};", "beyond 64 bytes"),
        ("mov.u32 %r1, 0; st.shared.u32 [%r1+-4], %r0;", "beyond 64 bytes"),
        ("ld.global.u32 %r1, [%a1+-4];", "which are no one's"),
        ("mov.u32 %r1, 2; st.shared.u32 [%r1], %r0;", "no multiple"),
    ],
)
def test_memory_of_others_is_not_touched(body: str, match: str) -> None:
    with pytest.raises(MemoryFault, match=match):
        run(body, words(0), shared=".extern .shared .align 16 .b8 dynamic[];", shared_bytes=64)


@pytest.mark.parametrize(
    "text",
    [
        "sad.u32 %r1, %r2, %r3, %r0",
        "cvt.sat.f32.f64 %f1, %d1",
        "cvt.rz.bf16.f32 %h1, %f1",
        "cvt.rni.s32.f32 %r1, %f1",
        "max.NaN.f32 %f1, %f2, %f3",
        "add.sat.s32 %r1, %r2, %r3",
        "shr.s32 %r1, %r2, 1",
        "shfl.sync.bfly.b32 %r1, %r2, 1, 0x1c1f, -1",
        "setp.eq.and.s32 %p1, %r1, %r2, %p2",
        "bar.sync 0, 32",
        "cp.async.cg.shared.global [%r1], [%a1], 8",
        "cp.async.cg.shared.global [%r1], [%a1], 16, %p1",
        "st.volatile.global.u32 [%a1], %r1",
        "mov.u32 %r1, %clock",
        "A: B: A: add.s32 %r1, %r2, %r3",
    ],
)
def test_what_is_not_known_is_an_error(text: str) -> None:
    with pytest.raises(NotImplementedError):
        run(f"{text};", words(0))


def test_notes_of_compilers_are_no_instructions() -> None:
    body = """
    .loc 1 2 3
    mov.u32 %r3, 7;
    .pragma "nounroll";
    st.global.u32 [%a2], %r3;  // and so are these
    """
    assert run(body, words(0)).tolist() == [7] * LANES
