"""The writer leaves out what is empty, on both sides alike, and writes the rest as it is told."""

import pytest

from parallel.plan.ir import Add, Attend, AttendBackward, Buffer, Copy, Free, MakeStats, Merge, Message, Post, Wait
from parallel.plan.tokens import EMPTY, TokenSet
from parallel.plan.writer import Writer

SOME, HEADS = TokenSet.of((0, 4)), (0, 2)


def writer() -> Writer:
    w = Writer(3)
    w.buffer("full", "grad_q", SOME, HEADS)
    w.buffer("no tokens", "grad_q", EMPTY, HEADS)
    w.buffer("no heads", "grad_q", SOME, (1, 1))
    return w


def test_buffers_are_declared_once():
    w = writer()
    assert w.program.rank == 3
    assert w.program.buffers["full"] == Buffer("grad_q", SOME, HEADS, False, "temporary", 4)
    assert w.buffer("more", "kv", SOME, HEADS, exact=True, role="saved", capacity=9) == "more"
    assert w.program.buffers["more"] == Buffer("kv", SOME, HEADS, True, "saved", 9)
    assert w.program.buffers[w.buffer("none", "kv", SOME, HEADS, capacity=0)].capacity == 0
    with pytest.raises(AssertionError, match="buffer full is declared twice"):
        w.buffer("full", "q", SOME, HEADS)


def test_messages_that_hold_nothing_are_left_out():
    w = writer()
    some, tokenless, headless = (
        Message(1, "grad_q", "full", tokens, heads) for tokens, heads in ((SOME, HEADS), (EMPTY, HEADS), (SOME, (1, 1)))
    )
    assert w.post(0, "cp", [tokenless, headless], [headless, tokenless]) is None and w.program.steps == []
    assert w.post(1, "cp", [tokenless, some], [headless]) == Wait(1, "cp")
    assert w.post(2, "cp", [], [some, some]) == Wait(2, "cp")
    assert w.program.steps == [Post(1, "cp", (some,), ()), Post(2, "cp", (), (some, some))]
    w.wait(None, Wait(2, "cp"), None, Wait(1, "cp"))
    assert w.program.steps[2:] == [Wait(2, "cp"), Wait(1, "cp")]


def test_steps_that_do_nothing_are_left_out():
    w = writer()
    for q_tokens, k_tokens, heads in ((EMPTY, SOME, HEADS), (SOME, EMPTY, HEADS), (SOME, SOME, (1, 1))):
        w.attend("q", "kv", "acc", q_tokens, k_tokens, heads)
        w.attend_backward("q", "kv", "do", "st", "dq", "dkv", q_tokens, k_tokens, heads)
    for name in ("no tokens", "no heads"):
        w.stats(name, "do", "st")
        w.merge(name, "acc")
        w.add(name, "full")
        w.free(name)
    w.add("full", "more", EMPTY)
    w.copy("full", "more", EMPTY, HEADS)
    w.copy("full", "more", SOME, (0, 0))
    assert w.program.steps == []


def test_steps_are_written_as_told():
    w, part = writer(), TokenSet.of((1, 3))
    w.attend("q", "kv", "acc", SOME, part, HEADS)
    w.attend_backward("q", "kv", "do", "st", "dq", "dkv", SOME, part, HEADS)
    w.stats("full", "do", "st")
    w.merge("full", "acc")
    w.add("full", "into")
    w.add("full", "into", part)
    w.copy("full", "into", part, (0, 1))
    w.free("full", "no heads")
    assert w.program.steps == [
        Attend("q", "kv", "acc", SOME, part, HEADS),
        AttendBackward("q", "kv", "do", "st", "dq", "dkv", SOME, part, HEADS),
        MakeStats("full", "do", "st"),
        Merge("full", "acc"),
        Add("full", "into", SOME, HEADS),
        Add("full", "into", part, HEADS),
        Copy("full", "into", part, (0, 1)),
        Free("full"),
    ]
    w.result("out", "acc")
    assert w.program.results == {"out": "acc"}
