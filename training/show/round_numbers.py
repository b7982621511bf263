"""The rounds of a program, as the figures of a plan number them."""

from parallel.plan.ir import Attend, AttendBackward, Program, Wait


def round_numbers(program: Program) -> dict[int, int]:
    """The round of each block of attention, by the number of its step: blocks between which a batch was waited for."""
    found: dict[int, int] = {}
    number, waited = -1, True
    for at, step in enumerate(program.steps):
        if isinstance(step, Attend | AttendBackward):
            number += waited
            waited = False
            found[at] = number
        elif isinstance(step, Wait):
            waited = True
    return found
