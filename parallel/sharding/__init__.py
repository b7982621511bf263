"""Who owns which tokens: `SHARDINGS[name](layout, units, setting) -> one ascending TokenSet for each unit`.

Every sharding deals all tokens of the flat buffer, padding included, and how many a unit gets depends on the total, the
number of units and the unit alone, never on the documents, so shapes are static. `setting` is what the schedule is made
for; only planned shardings look at it.
"""

from collections.abc import Callable

from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.sharding.contiguous import contiguous
from parallel.sharding.per_document import per_document
from parallel.sharding.planner import Setting
from parallel.sharding.striped import striped
from parallel.sharding.whole_document import whole_document
from parallel.sharding.zigzag import zigzag

Sharding = Callable[[PackedLayout, int, Setting], list[TokenSet]]

SHARDINGS: dict[str, Sharding] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
    "per_document": per_document,
    "whole_document": whole_document,
}
