"""How queries meet keys. `EXCHANGES` lists what runs across groups, and all_to_all, which spans all of cp."""

from parallel.exchange.all_gather import ALL_GATHER
from parallel.exchange.all_to_all import ALL_TO_ALL
from parallel.exchange.helper import HELPER
from parallel.exchange.lane import Exchange
from parallel.exchange.ring import RING

EXCHANGES: dict[str, Exchange] = {
    "all_gather": ALL_GATHER,
    "ring": RING,
    "all_to_all": ALL_TO_ALL,
    "helper": HELPER,
}
INNER_EXCHANGES = ("all_to_all", "ring")
