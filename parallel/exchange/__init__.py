"""How queries meet keys. `EXCHANGES` lists what runs across groups, and all_to_all, which spans all of cp."""

from parallel.exchange.all_gather import ALL_GATHER, COMPACT_ALL_GATHER
from parallel.exchange.all_to_all import ALL_TO_ALL
from parallel.exchange.helper import HELPER
from parallel.exchange.lane import Exchange
from parallel.exchange.ring import RING
from parallel.exchange.sequence_aware import SEQUENCE_AWARE

EXCHANGES: dict[str, Exchange] = {
    "all_gather": ALL_GATHER,
    "ring": RING,
    "all_to_all": ALL_TO_ALL,
    "helper": HELPER,
    "sequence_aware": SEQUENCE_AWARE,
    "compact_all_gather": COMPACT_ALL_GATHER,
}
INNER_EXCHANGES = ("all_to_all", "ring")
