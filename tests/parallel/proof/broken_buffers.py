"""Plans broken in what they say of their buffers, and in how steps use them; see `broken.py`."""

from parallel.plan.ir import Add, Attend, AttendBackward, Copy, Free, MakeStats, Merge, Message, Post, Wait
from parallel.plan.plan import Plan
from tests.parallel.proof.drafts import BACKWARD, FORWARD, KEYS, ONE, ZERO, Broken, Draft, ring, tokens

# what a program says of its buffers


def _result(**results: str) -> Plan:
    draft = ring()
    draft.program(FORWARD, 0).results = results
    return draft.plan()


def _result_in_a_spare() -> Plan:
    draft = ring().spare(FORWARD, 0, "acc2", "acc")
    draft.program(FORWARD, 0).results = {"out": "acc2"}
    return draft.plan()


def _spare_saved(kind: str) -> Plan:
    draft = ring()
    for direction in (FORWARD, BACKWARD):
        draft.spare(direction, 0, "spare", kind, role="saved")
    return draft.plan()


def _partly_written() -> Plan:
    draft = ring()
    for direction in (FORWARD, BACKWARD):
        draft.spare(direction, 0, "spare", "kv", role="saved")
    return draft.add(FORWARD, 0, Copy("kv", "spare", tokens((0, 2)), KEYS)).plan()


def _accumulators(**roles: str) -> Plan:
    """Backward's other than forward's, or another number of them."""
    draft = ring()
    for direction, role in roles.items():
        draft.buffer(direction, 0, "acc", role=role)
    return draft.plan()


def _swapped() -> Plan:
    """Forward's accumulator is backward's saved buffer, and the other way round."""
    draft = ring().spare(FORWARD, 0, "acc2", "acc", role="saved").spare(BACKWARD, 0, "acc2", "acc", role="accumulator")
    return draft.buffer(BACKWARD, 0, "acc", role="saved").plan()


DECLARED: Broken = {
    "no accumulator": ("0 buffers are accumulators", lambda: _accumulators(forward="saved", backward="saved")),
    "two accumulators": (
        "2 buffers are accumulators; one is, for a sink joins it once",
        lambda: ring().spare(FORWARD, 0, "acc2", "acc", role="accumulator").plan(),
    ),
    "an accumulator of gradients": (
        "grad_q holds grad_q, and an accumulator holds partial results",
        lambda: ring().buffer(BACKWARD, 0, "grad_q", role="accumulator").plan(),
    ),
    "an accumulator in one direction": (
        "acc is an accumulator in one direction and not in the other",
        lambda: _swapped(),
    ),
    "a result nobody asked for": (
        "more is no result of forward; it has out",
        lambda: _result(out="acc", more="nothing"),
    ),
    "no result": ("no buffer is named as the result out", lambda: _result()),
    "result of a wrong kind": ("q is a buffer of q and cannot be the result out", lambda: _result(out="q")),
    "result in a temporary": (
        "the result out lies in acc2, which is no result or saved buffer but temporary",
        lambda: _result_in_a_spare(),
    ),
    "gradient in a temporary": (
        "the result grad_kv lies in grad_kv, which is no result",
        lambda: ring().buffer(BACKWARD, 1, "grad_kv", role="temporary").plan(),
    ),
    "heads the model has not": (
        r"acc holds heads \(0, 5\), and the model has 4",
        lambda: ring().buffer(FORWARD, 0, "acc", heads=(0, 5)).plan(),
    ),
    "key heads the model has not": (
        r"kv1 holds heads \(0, 3\), and the model has 2",
        lambda: ring().buffer(FORWARD, 0, "kv1", heads=(0, 3)).plan(),
    ),
    "heads below zero": (
        r"kv1 holds heads \(-1, 2\)",
        lambda: ring().buffer(FORWARD, 0, "kv1", heads=(-1, 2)).plan(),
    ),
    "heads turned round": (
        r"kv1 holds heads \(2, 1\)",
        lambda: ring().buffer(FORWARD, 0, "kv1", heads=(2, 1)).plan(),
    ),
    "too little reserved": (
        "kv1 reserves 3 tokens and holds 4",
        lambda: ring().buffer(FORWARD, 0, "kv1", capacity=3).plan(),
    ),
    "a token twice": (
        "kv1 holds a token twice",
        lambda: ring().buffer(FORWARD, 0, "kv1", tokens=tokens((2, 6), (3, 4)), capacity=5).plan(),
    ),
    "rounded partial result": (
        "acc holds log-sum-exps, which are never rounded",
        lambda: ring().buffer(FORWARD, 0, "acc", exact=False).plan(),
    ),
    "rounded stats": (
        "stats holds log-sum-exps, which are never rounded",
        lambda: ring().buffer(BACKWARD, 0, "stats", exact=False).plan(),
    ),
    "an input out of nowhere": (
        "kv1 is said to be an input, and forward is given q and kv",
        lambda: ring().buffer(FORWARD, 0, "kv1", role="input").plan(),
    ),
    "an input of another kind": (
        "grad_out is said to be an input, and backward is given grad_out",
        lambda: ring().buffer(BACKWARD, 0, "grad_out", kind="q").plan(),
    ),
    "an input of others' tokens": (
        "input kv holds .*0:8; 8 tokens.*, and the rank has",
        lambda: ring().buffer(FORWARD, 0, "kv", tokens=tokens((0, 8)), capacity=8).plan(),
    ),
    "an input of some heads": (
        r"input kv holds .* x heads \(0, 1\), and the rank has",
        lambda: ring().buffer(FORWARD, 0, "kv", heads=(0, 1)).plan(),
    ),
    "saved by nobody": (
        "kv9 is not among what forward keeps",
        lambda: ring().spare(BACKWARD, 0, "kv9", "kv1", role="saved").plan(),
    ),
    "saved though forward frees it": (
        "kv1 is not among what forward keeps",
        lambda: ring().buffer(BACKWARD, 0, "kv1", role="saved").plan(),
    ),
    "saved with other heads": (
        "forward leaves another acc than backward reads",
        lambda: ring().buffer(BACKWARD, 0, "acc", heads=(0, 3)).plan(),
    ),
    "saved and never written": ("forward does not write all of spare", lambda: _spare_saved("kv")),
    "saved and written in part": ("forward does not write all of spare", lambda: _partly_written()),
    "saved before it is finished": (
        "spare is not finished when forward leaves it: .* 0 times",
        lambda: _spare_saved("acc"),
    ),
}


# buffers while steps run


def _unwritten() -> Plan:
    return ring().spare(FORWARD, 0, "kv9", "kv1").step(FORWARD, 0, Attend, 1, kv="kv9").plan()


def _sum_over_a_sum() -> Plan:
    draft = ring().message(BACKWARD, 0, "recvs", 1, buffer="grad_kv")
    draft.drop(BACKWARD, 0, Add)
    return draft.plan()


def _written_while_received() -> Plan:
    draft = ring()
    return draft.add(BACKWARD, 0, Add("grad_kv", "home", ZERO, KEYS), at=draft.at(BACKWARD, 0, Wait, 1)).plan()


def _received_twice_at_once() -> Plan:
    draft = ring()
    at = draft.at(FORWARD, 0, Post)
    post = draft.steps(FORWARD, 0)[at]
    assert isinstance(post, Post)
    draft.steps(FORWARD, 0)[at] = post._replace(recvs=post.recvs * 2)
    return draft.plan()


def _never_freed() -> Plan:
    draft = ring()
    draft.drop(FORWARD, 0, Free)
    return draft.plan()


def _received_and_never_freed() -> Plan:
    """Its only use is that it is received."""
    draft = ring()
    draft.spare(FORWARD, 0, "spare", "kv1")
    _extra(draft, 5, 1, 0, Message(0, "kv", "kv", ONE, KEYS), "spare")
    return draft.plan()


def _extra(draft: Draft, batch: int, sender: int, receiver: int, message: Message, into: str) -> None:
    """One more message forward, in a batch of its own at the end of both programs."""
    back = message._replace(peer=sender, buffer=into)
    draft.add(FORWARD, sender, Post(batch, "cp", (message,), ()), Wait(batch, "cp"))
    draft.add(FORWARD, receiver, Post(batch, "cp", (), (back,)), Wait(batch, "cp"))


MEMORY: Broken = {
    "not declared": (
        "buffer nowhere is not declared",
        lambda: ring().step(FORWARD, 0, Attend, q="nowhere").plan(),
    ),
    "attention into no partial": (
        "q is a buffer of q, and partial belongs there",
        lambda: ring().step(FORWARD, 0, Attend, into="q").plan(),
    ),
    "attention over no keys": (
        "q is a buffer of q, and kv belongs there",
        lambda: ring().step(FORWARD, 0, Attend, kv="q").plan(),
    ),
    "attention of no queries": (
        "kv is a buffer of kv, and q belongs there",
        lambda: ring().step(FORWARD, 0, Attend, q="kv", heads=(0, 2)).plan(),
    ),
    "dq into a dk": (
        "grad_kv is a buffer of grad_kv, and grad_q belongs there",
        lambda: ring().step(BACKWARD, 0, AttendBackward, into_q="grad_kv").plan(),
    ),
    "dk into a dq": (
        "grad_q is a buffer of grad_q, and grad_kv belongs there",
        lambda: ring().step(BACKWARD, 0, AttendBackward, into_kv="grad_q").plan(),
    ),
    "no dout": (
        "q is a buffer of q, and grad_out belongs there",
        lambda: ring().step(BACKWARD, 0, AttendBackward, grad_out="q").plan(),
    ),
    "no stats": (
        "q is a buffer of q, and stats belongs there",
        lambda: ring().step(BACKWARD, 0, AttendBackward, stats="q").plan(),
    ),
    "stats of no partial": (
        "q is a buffer of q, and partial belongs there",
        lambda: ring().step(BACKWARD, 0, MakeStats, partial="q").plan(),
    ),
    "stats into a gradient": (
        "grad_q is a buffer of grad_q, and stats belongs there",
        lambda: ring().step(BACKWARD, 0, MakeStats, into="grad_q").plan(),
    ),
    "stats without dout": (
        "q is a buffer of q, and grad_out belongs there",
        lambda: ring().step(BACKWARD, 0, MakeStats, grad_out="q").plan(),
    ),
    "an added value that is no gradient": (
        "kv is a buffer of kv, and grad_q or grad_kv belongs there",
        lambda: ring().step(BACKWARD, 0, Add, source="kv").plan(),
    ),
    "a dk added to a dq": (
        "grad_q is a buffer of grad_q, and grad_kv belongs there",
        lambda: ring().step(BACKWARD, 0, Add, into="grad_q").plan(),
    ),
    "a merged value that is no partial": (
        "q is a buffer of q, and partial belongs there",
        lambda: ring().add(FORWARD, 0, Merge("q", "acc")).plan(),
    ),
    "merged into no partial": (
        "q is a buffer of q, and partial belongs there",
        lambda: ring().add(FORWARD, 0, Merge("acc", "q")).plan(),
    ),
    "received as another kind": (
        "acc is a buffer of partial, and kv belongs there",
        lambda: ring().message(FORWARD, 0, "recvs", buffer="acc").plan(),
    ),
    "read after it was freed": (
        "kv1 is read after it was freed",
        lambda: ring().move(FORWARD, 0, 4, 3).plan(),
    ),
    "read while it is received": (
        "kv1 is read while it is received",
        lambda: ring().move(FORWARD, 0, 3, 2).plan(),
    ),
    "stats before dout has arrived": (
        "grad_out.heads is read while it is received",
        lambda: Draft("ulysses").move(BACKWARD, 0, 3, 1).plan(),
    ),
    "read before it is written": ("kv9 is read where nothing was written", _unwritten),
    "written after it was freed": (
        "grad_kv1 is written after it was freed",
        lambda: ring().move(BACKWARD, 0, 10, 4).plan(),
    ),
    "written while it is sent": (
        "grad_kv1 is written while a batch sends it",
        lambda: ring().move(BACKWARD, 0, 4, 6).move(BACKWARD, 0, 4, 7).plan(),
    ),
    "written while it is received": ("home is written while a batch receives it", _written_while_received),
    "received twice at once": ("kv1 is written while a batch receives it", _received_twice_at_once),
    "an input written": (
        "kv is an input and must not be written",
        lambda: ring().add(FORWARD, 0, Copy("kv", "kv", ZERO, KEYS)).plan(),
    ),
    "what forward left written": (
        "kv is an input and must not be written",
        lambda: ring().add(BACKWARD, 0, Copy("kv", "kv", ZERO, KEYS)).plan(),
    ),
    "a sum overwritten": ("grad_kv already holds a sum there, which would be lost", _sum_over_a_sum),
    "an input freed": ("q is freed and is no temporary", lambda: ring().step(FORWARD, 0, Free, buffer="q").plan()),
    "a result freed": (
        "grad_q is freed and is no temporary",
        lambda: ring().step(BACKWARD, 0, Free, buffer="grad_q").plan(),
    ),
    "freed twice": ("kv1 is freed twice", lambda: ring().add(FORWARD, 0, Free("kv1")).plan()),
    "freed while it is sent": (
        "grad_kv1 is freed while a batch sends it",
        lambda: ring().move(BACKWARD, 0, 10, 7).plan(),
    ),
    "freed while it is received": (
        "home is freed while a batch receives it",
        lambda: ring().move(BACKWARD, 0, 9, 7).plan(),
    ),
    "never freed": ("temporary buffer kv1 is never freed", _never_freed),
    "received and never freed": ("temporary buffer spare is never freed", _received_and_never_freed),
    "no heads": ("nothing is read or written of q", lambda: ring().step(FORWARD, 0, Attend, heads=(2, 2)).plan()),
    "no tokens": (
        "nothing is read or written of kv",
        lambda: ring().step(FORWARD, 0, Attend, k_tokens=tokens()).plan(),
    ),
    "tokens named twice": (
        "a token of home is named twice",
        lambda: ring().step(BACKWARD, 0, Add, tokens=tokens((0, 2), (6, 8), (0, 2), (6, 8))).plan(),
    ),
    "tokens it does not hold": (
        r"kv does not hold .*0:3.* x heads \(0, 2\)",
        lambda: ring().step(FORWARD, 0, Attend, k_tokens=tokens((0, 3))).plan(),
    ),
    "heads above those it holds": (
        r"q does not hold .* x heads \(0, 5\)",
        lambda: ring().step(FORWARD, 0, Attend, heads=(0, 5)).plan(),
    ),
    "written beyond what it holds": (
        r"acc does not hold .* x heads \(0, 4\)",
        lambda: ring().buffer(FORWARD, 0, "acc", heads=(0, 3)).plan(),
    ),
    "heads below those it holds": (
        r"kv1 does not hold .* x heads \(0, 2\)",
        lambda: ring().buffer(FORWARD, 0, "kv1", heads=(1, 2)).plan(),
    ),
}
