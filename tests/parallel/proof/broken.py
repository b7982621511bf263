"""A plan broken by hand for each sentence that `verify` can say: name -> (what it says, how the plan is broken).

Most begin from zigzag_ring on two ranks over one document of 8 tokens; rank 0 holds 0:2 and 6:8, rank 1 holds 2:6.
Forward, a rank posts (0), attends its own keys (1), waits (2), attends kv1 (3), frees it (4). Backward: stats (0), post
(1), own block (2), wait (3), block of kv1 into grad_kv1 (4), free (5), post grad_kv1 home (6), wait (7), add home (8),
free (9, 10, 11). docs/proof.md lists the names under the rules.
"""

from tests.parallel.proof.broken_buffers import DECLARED, MEMORY
from tests.parallel.proof.broken_messages import MESSAGES, RESULTS, ROUNDING
from tests.parallel.proof.drafts import Broken

BROKEN: dict[str, Broken] = {
    "What a program says of its buffers": DECLARED,
    "Buffers while steps run": MEMORY,
    "Attention and results": RESULTS,
    "Messages": MESSAGES,
    "Rounding": ROUNDING,
}
