"""What runs FlashInfer's kernels on the host does what the PTX ISA says of its instructions."""

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
def test_whole_numbers(name):
    body = f"ld.global.u32 %r1, [%a1]; ld.global.u32 %r2, [%a1+128]; {name} %r3, %r1, %r2;"
    for first in EDGES:
        left, right = words(first), words(*EDGES)
        found = run(body + "st.global.u32 [%a2], %r3;", np.concatenate((left, right)))
        expected = [BINARY[name](int(a), int(b)) for a, b in zip(left, right, strict=True)]
        assert found.tolist() == words(*expected).tolist()


def test_bfloat16_is_rounded_as_pytorch_rounds():
    bits = np.random.default_rng(0).integers(0, 1 << 32, (LANES,), dtype=np.uint32)
    given = bits.view(np.float32)
    body = """ld.global.f32 %f1, [%a1]; cvt.rn.bf16x2.f32 %r3, 0f3F800000, %f1;
    st.global.u32 [%a2], %r3;"""
    expected = torch.from_numpy(given).to(torch.bfloat16).view(torch.int16).numpy()
    known = ~np.isnan(given)
    assert (run(body, given) & 0xFFFF)[known].tolist() == expected.view(np.uint16)[known].tolist()
    assert (run(body, given) >> 16 == 0x3F80).all()


def test_lanes_that_part_meet_again():
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


def test_a_barrier_that_some_never_reach_is_an_error():
    body = "setp.lt.u32 %p1, %r0, 5; @%p1 bra AWAY; bar.sync 0; bra END; AWAY: bar.sync 0; END:"
    with pytest.raises(AssertionError, match="a thread is missing"):
        run(body, words(0))


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
def test_memory_of_others_is_not_touched(body, match):
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
def test_what_is_not_known_is_an_error(text):
    with pytest.raises(NotImplementedError):
        run(f"{text};", words(0))
