"""Which sums may be rounded to the model's dtype on their way: shares that are complete, and nothing else.

What a rank adds to a token's gradient comes of all blocks that it computes for it. Rounded when that share is complete,
or when the sum over all ranks is, an error does not grow with the number of ranks; a sum that is rounded while more is
added to it, here or on the next rank, does. So a message, a copy or a buffer may round only

- a rank's whole share: every block that this rank computes, in this direction, for those tokens x heads; or
- the whole sum: every allowed pair of those tokens x heads.

`partial` results never travel rounded, since their log-sum-exp would be; `out` leaves a partial result only to become
a result, where coverage proves that it was whole.
"""

from parallel.plan.ir import Attend, AttendBackward, Heads, Kind
from parallel.plan.plan import Plan
from parallel.plan.tokens import TokenSet
from parallel.proof.coverage import Block, coverage_fault, covered, restrict
from parallel.proof.memory import Held, keeps_sums


class Contributions:
    """What each rank computes in one direction, and so when its share of a sum is complete."""

    def __init__(self, plan: Plan, direction: str) -> None:
        self.plan = plan
        self.computed: list[list[Block]] = [
            [
                Block(step.q_tokens, step.k_tokens, step.heads, program.rank, at)
                for at, step in enumerate(program.steps)
                if isinstance(step, Attend | AttendBackward)
            ]
            for program in plan.programs(direction)
        ]

    def rounding_fault(
        self, source: tuple[Kind, bool], into: tuple[Kind, bool], tokens: TokenSet, heads: Heads, blocks: list[Held]
    ) -> str | None:
        """Why tokens x heads that hold `blocks` must not go from one (kind, exact) into another, or None."""
        if into[0] == "out" or not keeps_sums(*source) or keeps_sums(*into) or not blocks:
            return None
        ranks = sorted({block.rank for block, *_ in blocks})
        missing = self._missing(ranks[0], source[0], tokens, heads, blocks) if len(ranks) == 1 else None
        if len(ranks) == 1 and missing is None:
            return None
        of_queries = source[0] != "grad_kv"
        if coverage_fault(self.plan.sight, tokens, heads, blocks, of_queries, self.plan.shape.group) is None:
            return None
        if missing is None:
            return f"a sum over ranks {', '.join(map(str, ranks))} to which others add"
        return f"a part of what rank {ranks[0]} computes, which adds to it in step {missing}"

    def _missing(self, rank: int, kind: Kind, tokens: TokenSet, heads: Heads, blocks: list[Held]) -> int | None:
        """A step of `rank` whose result for tokens x heads is not among `blocks`."""
        for block in self.computed[rank]:
            if kind == "grad_kv":
                whole = (block, block.k_tokens, self.plan.shape.key_heads(block.heads))
            else:
                whole = (block, block.q_tokens, block.heads)
            held = [(part, some) for other, part, some in blocks if other.step == block.step]
            for _, wanted, of in restrict([whole], tokens, heads):
                if not covered(wanted, of, held):
                    return block.step
        return None
