"""Plans broken in their messages, their results and their precision; see `broken.py`."""

import dataclasses

from parallel.plan.ir import Add, Attend, AttendBackward, Copy, Free, MakeStats, Merge, Message, Post, Step, Wait
from parallel.plan.plan import Plan
from tests.parallel.proof.drafts import BACKWARD, FORWARD, HEADS, KEYS, ONE, ZERO, Broken, Draft, ring, tokens, twice

# computing, and what comes of it


def _another_stats() -> Draft:
    return ring().spare(BACKWARD, 0, "other", "stats", tokens=tokens((0, 2)), capacity=2)


def _turned_dout() -> Plan:
    """A helper keeps what it is sent in another order than attention asks for."""
    draft = Draft("distflash", 3, (9,))
    for name in ("grad_out1.2", "stats1.2"):
        draft.buffer(BACKWARD, 0, name, tokens=tokens((7, 9), (6, 7)))
    return draft.plan()


def _stats_of_a_temporary() -> Plan:
    return ring().spare(BACKWARD, 0, "part", "acc").step(BACKWARD, 0, MakeStats, partial="part").plan()


def _result_of_other_heads() -> Plan:
    draft = ring().spare(FORWARD, 0, "acc2", "acc", heads=(0, 3), role="saved")
    draft.program(FORWARD, 0).results["out"] = "acc2"
    return draft.plan()


def _padding_not_written() -> Plan:
    """Rank 1's last token is padding: nobody sees it, and its row of `out` would hold whatever lay there."""
    draft = Draft("ulysses", 2, (7,), row_length=8)
    return draft.step(FORWARD, 1, Copy, 2, tokens=tokens((4, 7))).plan()


def _without(direction: str, rank: int, kind: type, number: int = 0) -> Plan:
    draft = ring()
    draft.drop(direction, rank, kind, number)
    return draft.plan()


def _no_sink(**new: object) -> Plan:
    """The rank's partial result is no accumulator, and one without tokens or heads is."""
    draft = ring()
    for direction in (FORWARD, BACKWARD):
        draft.spare(direction, 0, "other", "acc", role="accumulator", **new).buffer(direction, 0, "acc", role="saved")
    return draft.plan()


def _sink_twice() -> Plan:
    """What the accumulator begins with is copied and merged into it again."""
    draft = ring().spare(FORWARD, 0, "copied", "acc")
    first = draft.at(FORWARD, 0, Attend)
    steps = (Copy("acc", "copied", ZERO, HEADS), Merge("copied", "acc"), Free("copied"))
    return draft.add(FORWARD, 0, *steps, at=first).plan()


def _no_sink_rows() -> Plan:
    return _no_sink(tokens=tokens())


def _merged_into_itself() -> Plan:
    return ring().add(FORWARD, 0, Merge("acc", "acc"), at=0).plan()


def _added_to_itself() -> Plan:
    draft = ring()
    at = draft.at(BACKWARD, 0, AttendBackward)
    return draft.add(BACKWARD, 0, Add("grad_q", "grad_q", ZERO, HEADS), at=at).plan()


def _copied_stats() -> Plan:
    draft = ring().spare(BACKWARD, 0, "stats2", "stats")
    at = draft.at(BACKWARD, 0, MakeStats) + 1
    return draft.add(BACKWARD, 0, Copy("stats", "stats2", ZERO, HEADS), at=at).plan()


def _token_of_two_ranks() -> Plan:
    draft = ring()
    placement = dataclasses.replace(draft.base.placement, units=(ZERO, ZERO))
    draft.base = dataclasses.replace(draft.base, placement=placement)
    return draft.plan()


RESULTS: Broken = {
    "no sink": (r"a sink would join query 0 0 times", _no_sink_rows),
    "no sink in any head": (r"a sink would join query 0 0 times", lambda: _no_sink(heads=(0, 0))),
    "a sink twice": ("a sink would join query 0 2 times", _sink_twice),
    "merged into itself": ("acc is added to itself", _merged_into_itself),
    "added to itself": ("grad_q is added to itself", _added_to_itself),
    "stats copied": ("stats holds stats, which stay as they were made", _copied_stats),
    "a token of two ranks": ("the placement gives token 0 to 2 ranks", _token_of_two_ranks),
    "queries out of order": (
        "attention needs queries in the sequence's order",
        lambda: ring().step(FORWARD, 0, Attend, q_tokens=tokens((6, 8), (0, 2))).plan(),
    ),
    "keys out of order": (
        "attention needs keys in the sequence's order",
        lambda: ring().step(FORWARD, 0, Attend, k_tokens=tokens((6, 8), (0, 2))).plan(),
    ),
    "keys out of order, backward": (
        "attention needs keys in the sequence's order",
        lambda: ring().step(BACKWARD, 0, AttendBackward, k_tokens=tokens((6, 8), (0, 2))).plan(),
    ),
    "keys in two pieces": (
        "do not lie in one piece in kv, where",
        lambda: ring().step(FORWARD, 0, Attend, k_tokens=tokens((0, 1), (6, 7))).plan(),
    ),
    "queries in two pieces": (
        "do not lie in one piece in q, where",
        lambda: ring().step(FORWARD, 0, Attend, q_tokens=tokens((0, 1), (6, 7))).plan(),
    ),
    "dout and stats in two pieces": ("do not lie in one piece in grad_out1.2, where", _turned_dout),
    "dout and stats that differ": (
        "grad_out and other hold different tokens or heads",
        lambda: _another_stats().step(BACKWARD, 0, AttendBackward, stats="other").plan(),
    ),
    "stats with too little room": (
        "stats of acc need a dout and room for the same tokens and heads",
        lambda: _another_stats().step(BACKWARD, 0, MakeStats, into="other").plan(),
    ),
    "stats of what is not finished": ("stats of part, which is not what forward finished", _stats_of_a_temporary),
    "a result of other heads": (r"acc2 covers .* x \(0, 3\), not .* x \(0, 4\)", _result_of_other_heads),
    "a result not written everywhere": ("out is not written everywhere", _padding_not_written),
    "a lost block": ("out: head 0: queries .* meet key 2 0 times", lambda: _without(FORWARD, 0, Attend, 1)),
    "a doubled block": ("out: head 0: queries .* meet key 2 2 times", lambda: twice(FORWARD, 0, Attend, 1)),
    "a lost head": ("out: head 3: queries .* times", lambda: ring().step(FORWARD, 0, Attend, heads=(0, 3)).plan()),
    "a lost dq": (
        "grad_q: head 0: queries .* meet key 2 0 times",
        lambda: _without(BACKWARD, 0, AttendBackward, 1),
    ),
    "a gradient added twice": (
        "grad_kv: head 0: keys .* meet query 2 2 times",
        lambda: twice(BACKWARD, 0, Add),
    ),
    "a gradient never added": ("grad_kv: head 0: keys .* meet query 2 0 times", lambda: _without(BACKWARD, 0, Add)),
}


# messages


def _later_batches(order: tuple[tuple[Step, ...], ...], *spares: int) -> Plan:
    """Steps added to each rank's forward program, which send kv of rank 0 or 1 for nothing."""
    draft = ring(len(order))
    for rank, steps in enumerate(order):
        draft.add(FORWARD, rank, *steps)
    for rank in spares:
        at = 1 if rank == 0 else 0
        kv = draft.program(FORWARD, at).buffers["kv"]
        for number in (7, 8, 9):
            draft.spare(FORWARD, rank, f"spare{number}", "kv", tokens=kv.tokens)
    return draft.plan()


def _kv(peer: int, rank: int, number: int, send: bool, ranks: int = 2) -> Post:
    """Batch `number`: rank 0's or 1's keys to or from `peer`."""
    owner = rank if send else peer
    held = ring(ranks).base.placement.sets[owner]
    message = Message(peer, "kv", "kv" if send else f"spare{number}", held, KEYS)
    return Post(number, "cp", (message,) if send else (), () if send else (message,))


def _deadlock() -> Plan:
    """Each rank finishes first the batch that the other posts last."""
    zero = (_kv(1, 0, 7, True), Wait(7, "cp"), _kv(1, 0, 8, False), Wait(8, "cp"), Free("spare8"))
    one = (_kv(0, 1, 8, True), Wait(8, "cp"), _kv(0, 1, 7, False), Wait(7, "cp"), Free("spare7"))
    return _later_batches((zero, one), 0, 1)


def _out_of_order() -> Plan:
    """Rank 0 finishes batch 8 before 7, and rank 1 posts 7 only when rank 0 is past 8."""
    first, second, third = (_kv(peer, 0, number, True, 3) for peer, number in ((1, 7), (2, 8), (1, 9)))
    zero = (first, second, Wait(8, "cp"), third, Wait(7, "cp"), Wait(9, "cp"))
    later, last = (_kv(0, 1, number, False, 3) for number in (9, 7))
    one = (later, Wait(9, "cp"), last, Wait(7, "cp"), Free("spare7"), Free("spare9"))
    two = (_kv(0, 2, 8, False, 3), Wait(8, "cp"), Free("spare8"))
    return _later_batches((zero, one, two), 1, 2)


def _posted_in_another_order() -> Plan:
    """A transport gives the first message that is sent to the first receive that was posted."""
    zero = (_kv(1, 0, 7, True), _kv(1, 0, 8, True), Wait(7, "cp"), Wait(8, "cp"))
    one = (_kv(0, 1, 8, False), _kv(0, 1, 7, False), Wait(8, "cp"), Wait(7, "cp"), Free("spare7"), Free("spare8"))
    return _later_batches((zero, one), 1)


def _never_waited() -> Plan:
    zero = (_kv(1, 0, 7, True),)
    return _later_batches((zero, (_kv(0, 1, 7, False), Wait(7, "cp"), Free("spare7"))), 1)


def _swapped_programs() -> Plan:
    draft = ring()
    draft.programs[FORWARD].reverse()
    return draft.plan()


def _some_ranks() -> Plan:
    return dataclasses.replace(ring().plan(), forward=(ring().base.forward[0], None))


def _unneeded() -> Plan:
    plan = Draft("zigzag_ring", 2, (4, 4)).plan()
    return dataclasses.replace(plan, sends_only_needed=True)


def _unneeded_queries() -> Plan:
    """A helper is sent queries and never attends them."""
    draft = Draft("distflash", 3, (9,))
    draft.drop(FORWARD, 0, Attend, 1)
    return draft.plan()


def _two_messages_and_one() -> Plan:
    draft = ring()
    post = draft.steps(FORWARD, 0)[0]
    assert isinstance(post, Post)
    draft.steps(FORWARD, 0)[0] = post._replace(sends=post.sends * 2)
    return draft.plan()


def _to_a_rank_that_receives_nothing() -> Plan:
    """Rank 2 takes part in batch 0, with ranks 1 and 3."""
    draft = ring(4)
    post = draft.steps(FORWARD, 0)[0]
    assert isinstance(post, Post)
    draft.steps(FORWARD, 0)[0] = post._replace(sends=(*post.sends, post.sends[0]._replace(peer=2)))
    return draft.plan()


def _turned_messages() -> Plan:
    """Two messages that are received in another order than they are sent in."""
    draft = Draft("ulysses")
    post = draft.steps(FORWARD, 0)[0]
    assert isinstance(post, Post)
    draft.steps(FORWARD, 0)[0] = post._replace(sends=post.sends[::-1])
    return draft.plan()


def _first_message(**new: object) -> Plan:
    return ring().message(FORWARD, 0, "sends", **new).plan()


def _sent_too_early() -> Plan:
    """A gradient goes home before it is computed; its buffer is written once it has left."""
    return ring().move(BACKWARD, 0, 6, 4).move(BACKWARD, 0, 7, 5).plan()


MESSAGES: Broken = {
    "some ranks only": ("the plan holds 1 of 2 ranks", _some_ranks),
    "a program in another's place": ("forward: the program in place 0 is rank 1's", _swapped_programs),
    "ranks wait for each other": ("never completes: ranks wait for each other", _deadlock),
    "batches out of order": ("never completes: ranks wait for each other", _out_of_order),
    "batches posted in another order": (
        r"rank \d posts batch \d in another order of those that the two share",
        _posted_in_another_order,
    ),
    "a batch never waited for": (r"batch \('cp', 7\) is never waited for", _never_waited),
    "a batch that a peer never posts": (
        "rank 1 never posts batch 77 on cp",
        lambda: ring().step(FORWARD, 0, Post, batch=77).step(FORWARD, 0, Wait, batch=77).plan(),
    ),
    "a batch on another communicator": (
        "rank 1 never posts batch 0 on cp_outer",
        lambda: ring().step(FORWARD, 0, Post, comm="cp_outer").step(FORWARD, 0, Wait, comm="cp_outer").plan(),
    ),
    "a communicator that is not there": (
        "communicator dp is not there",
        lambda: ring().step(FORWARD, 0, Post, comm="dp").plan(),
    ),
    "a batch posted twice": ("batch 0 is posted twice on cp", lambda: twice(FORWARD, 0, Post)),
    "a batch of nothing": ("batch 9 holds no message", lambda: ring().add(FORWARD, 0, Post(9, "cp", (), ())).plan()),
    "a wait for nothing": ("batch 77 on cp was not posted", lambda: ring().step(FORWARD, 0, Wait, batch=77).plan()),
    "a second wait": ("batch 0 on cp was waited for before", lambda: twice(FORWARD, 0, Wait)),
    "a rank that is not there": ("a message to or from rank 2 of 2", lambda: _first_message(peer=2)),
    "a rank below zero": ("a message to or from rank -1 of 2", lambda: _first_message(peer=-1)),
    "a message to itself": ("a message to or from itself", lambda: _first_message(peer=0)),
    "received from itself": (
        "a message to or from itself",
        lambda: ring().message(FORWARD, 0, "recvs", peer=0).plan(),
    ),
    "a message without tokens": ("an empty message to or from rank 1", lambda: _first_message(tokens=tokens())),
    "a message without heads": ("an empty message to or from rank 1", lambda: _first_message(heads=(1, 1))),
    "a kind that the buffer does not hold": ("kv holds no q to send", lambda: _first_message(kind="q")),
    "more messages than are received": (
        "rank 0 sends rank 1 in batch 0 2 messages, and 1 are received",
        _two_messages_and_one,
    ),
    "a message that nobody receives": (
        "rank 0 sends rank 2 in batch 0 1 messages, and 0 are received",
        _to_a_rank_that_receives_nothing,
    ),
    "messages in another order": ("rank 0 sends rank 1 in batch -1 kv, and q is received", _turned_messages),
    "other tokens": (
        "sends rank 1 in batch 0 kv of .*0:2.*, and .*0:2, 6:8.* is received",
        lambda: _first_message(tokens=tokens((0, 2))),
    ),
    "other heads": (r"kv of heads \(0, 1\), and heads \(0, 2\) are received", lambda: _first_message(heads=(0, 1))),
    "another precision": (
        "rank 0 sends rank 1 in batch 2 grad_kv with exact=False, and it is received with True",
        lambda: ring().message(BACKWARD, 0, "sends", 1, exact=False).plan(),
    ),
    "keys that nothing needs": ("kv from rank . holds tokens that nothing here needs", _unneeded),
    "queries that nothing needs": ("q from rank 2 holds tokens that nothing here needs", _unneeded_queries),
    "what is sent is changed later": (
        "grad_kv: head 0: keys .* 0 times",
        _sent_too_early,
    ),
}


# rounding

GRADS = ("grad_q", "grad_kv")


def _all_rounded(name: str, ranks: int, lengths: tuple[int, ...] = (16,), **more: object) -> Plan:
    """Every message of a sum travels in the model's dtype."""
    draft = Draft(name, ranks, lengths, **more)
    return draft.every_message(BACKWARD, GRADS, exact=False).plan()


def _part_of_a_share() -> Draft:
    """Rank 0 computes the gradient of rank 1's keys in two steps, the second into a buffer of its own."""
    draft = ring().spare(BACKWARD, 0, "late", "grad_kv1")
    at = draft.at(BACKWARD, 0, AttendBackward, 1)
    block = draft.steps(BACKWARD, 0)[at]
    draft.step(BACKWARD, 0, AttendBackward, 1, q_tokens=tokens((0, 2)))
    assert isinstance(block, AttendBackward)
    return draft.add(BACKWARD, 0, block._replace(q_tokens=tokens((6, 8)), into_kv="late"), at=at + 1)


def _part_sent() -> Plan:
    draft = _part_of_a_share().message(BACKWARD, 0, "sends", 1, exact=False)
    return draft.message(BACKWARD, 1, "recvs", 1, exact=False).plan()


def _part_copied() -> Plan:
    draft = _part_of_a_share().spare(BACKWARD, 0, "rounded", "grad_kv1", exact=False)
    return draft.add(BACKWARD, 0, Copy("grad_kv1", "rounded", ONE, KEYS), at=draft.at(BACKWARD, 0, Post, 1)).plan()


def _sum_received_rounded() -> Plan:
    """Sums of several ranks arrive exact, and in a buffer of the model's dtype."""
    draft = ring(4)
    for rank in range(4):
        for name in list(draft.program(BACKWARD, rank).buffers):
            if name.startswith("home"):
                draft.buffer(BACKWARD, rank, name, exact=False)
    return draft.plan()


def _unfinished_dq() -> Plan:
    """A dq is rounded before its last block."""
    draft = Draft("distflash", 3, (9,)).spare(BACKWARD, 2, "rounded", "grad_q", exact=False)
    at = draft.at(BACKWARD, 2, AttendBackward, 1)
    return draft.add(BACKWARD, 2, Copy("grad_q", "rounded", tokens((6, 9)), HEADS), at=at).plan()


def _early_out() -> Plan:
    """Forward, `out` is taken from a partial result that is not whole."""
    draft = ring().spare(FORWARD, 0, "out", "q", kind="out", role="result")
    draft.program(FORWARD, 0).results["out"] = "out"
    return draft.add(FORWARD, 0, Copy("acc", "out", ZERO, HEADS), at=2).plan()


ROUNDING: Broken = {
    "every sum rounded on its way round a ring": (
        r"the message to rank \d would round a sum over ranks \d, \d to which others add",
        lambda: _all_rounded("zigzag_ring", 4),
    ),
    "every sum rounded on two rings": (
        "would round a sum over ranks",
        lambda: _all_rounded("double_ring", 8, (32,), cp_inner=4, Hkv=4),
    ),
    "a part of a share sent rounded": (
        "the message to rank 1 would round a part of what rank 0 computes, which adds to it in step 5",
        _part_sent,
    ),
    "a part of a share copied rounded": (
        "the copy into rounded would round a part of what rank 0 computes",
        _part_copied,
    ),
    "an unfinished dq copied rounded": (
        "the copy into rounded would round a part of what rank 2 computes, which adds to it in step 5",
        _unfinished_dq,
    ),
    "a sum received rounded": (
        r"sends into home would round a sum over ranks \d, \d",
        _sum_received_rounded,
    ),
    "added up in the model's dtype": (
        "grad_kv is summed into and would be rounded each time",
        lambda: ring().buffer(BACKWARD, 0, "grad_kv", exact=False).plan(),
    ),
    "merged log-sum-exps rounded": (
        "a message of partial carries log-sum-exps and must be exact",
        lambda: Draft("distflash", 3, (9,)).every_message(FORWARD, ("partial",), exact=False).plan(),
    ),
    "stats sent rounded": (
        "a message of stats carries log-sum-exps and must be exact",
        lambda: Draft("distflash", 3, (9,)).every_message(BACKWARD, ("stats",), exact=False).plan(),
    ),
    "copied as another kind": (
        "q holds q, which cannot be copied as partial",
        lambda: ring().add(FORWARD, 0, Copy("q", "acc", ZERO, HEADS)).plan(),
    ),
    "a partial out copied as out": ("out: head 0: queries .* meet key . 0 times", _early_out),
}
