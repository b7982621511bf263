"""The one rule of who sees whom, for ints, arrays and tensors, against the same said pair by pair."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import mask_spec
from kernels.mask import document_masks, position_masks
from kernels.mask_spec import UNBOUNDED, Band, BandPiece, MaskSpec
from parallel.plan.layout import PackedLayout
from tests.masks import allowed, every_mask, seen_inside

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [0, 1, 2, 5, 13]
MASKS = every_mask({"window": [1, 2, 5, 40], "chunk": [1, 3, 4], "prefix": [1, 2, 6, 50], "first": [1, 2, 4]})


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_bands_are_the_mask(mask: MaskSpec):
    """Disjoint, never decreasing, the same for ints, arrays and tensors."""
    for length in LENGTHS:
        at, total = np.arange(length), 0
        seen = seen_inside(mask, length)
        found = np.zeros(seen.shape, int)
        for band in mask.bands:
            low, high = band.keys(at, length)
            assert (np.diff(low) >= 0).all() and (np.diff(high) >= 0).all() and (low <= high).all()
            assert all((x.numpy() == y).all() for x, y in zip(band.keys(torch.from_numpy(at), length), (low, high)))
            assert [band.keys(p, length) for p in range(length)] == list(zip(low.tolist(), high.tolist()))
            for p in range(length):
                found[p, low[p] : high[p]] += 1
            total += sum(piece.pairs(length) for piece in band.pieces)
        assert (found == seen).all() and total == mask.pairs(length) == seen.sum()


@pytest.mark.parametrize("mask", MASKS[::5], ids=str)
def test_interval_masks_are_the_mask(mask: MaskSpec):
    """In packed documents, whole and between any two choices of tokens; empty documents among them."""
    layout = PackedLayout.from_lengths([7, 1, 12, 3], [2, 2], 16)
    starts, stops, seen = layout.starts.tolist(), layout.stops.tolist(), allowed(mask, layout)
    rng = np.random.default_rng(0)
    end = layout.total_tokens
    whole = document_masks(mask, [*starts, end], [*stops, end], end)
    some = [np.sort(rng.choice(layout.total_tokens, n, replace=False)) for n in (11, 19)]
    parts = position_masks(mask, *(torch.from_numpy(x) for x in some), starts, stops)
    for masks, wanted in ((whole, seen), (parts, seen[np.ix_(*some)])):
        assert len(masks) == len(mask.bands)
        found = np.zeros(wanted.shape, int)
        for band in masks:
            for i, (low, high) in enumerate(zip(band.k_start.tolist(), band.k_end.tolist())):
                found[i, low:high] += 1
            backwards = np.zeros(wanted.shape, int)
            for j, (low, high) in enumerate(zip(band.q_start.tolist(), band.q_end.tolist())):
                backwards[low:high, j] += 1
            assert (backwards.sum(), band.pairs()) == (sum((band.k_end - band.k_start).tolist()),) * 2
        assert (found == wanted).all()


def test_pairs_of_long_documents_are_counted_at_once():
    """2**33 tokens: nothing walks through them, and nothing wraps."""
    n = 2**33
    assert MaskSpec().pairs(n) == n * (n + 1) // 2 and MaskSpec(causal=False).pairs(n) == n * n > 2**64
    assert MaskSpec(window=4).pairs(n) == 4 * n - 6
    assert MaskSpec(chunk=2**13).pairs(n) == 2**20 * MaskSpec().pairs(2**13)
    assert MaskSpec(window=4, first=3).pairs(n) == 4 * n - 6 + 3 * (n - 4) - 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window=0), "window=0 hides a query's own position; use at least 1"),
        (dict(chunk=0), "chunk=0 must be at least 1"),
        (dict(prefix=-3), "prefix=-3 must be at least 1"),
        (dict(window=4, first=True), "first=True must be at least 1"),
        (dict(window=UNBOUNDED), "window=1099511627776 is longer than any sequence; leave window out, or use below"),
        (dict(window=4, chunk=8), "window=4 and chunk=8 do not go together"),
        (dict(causal=False, prefix=4), "prefix=4 needs a causal mask"),
        (dict(first=4), "first=4 adds nothing where a query sees its whole past"),
        (dict(first=4, prefix=9), "first=4 adds nothing"),
        (dict(chunk=4, first=5), "first=5 reaches beyond the first chunk=4; use at most 4"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        MaskSpec(**options)


def test_other_types_of_numbers():
    """In a process of its own, which checks no annotations and loads nothing but Python."""
    code = """
import sys
from kernels.mask_spec import MaskSpec
for options in (dict(window=2.5), dict(chunk='4'), dict(prefix=[1]), dict(causal=3), dict(causal=None)):
    try:
        MaskSpec(**options)
    except ValueError as error:
        print(error)
print([name for name in ("torch", "numpy") if name in sys.modules])
import numpy
mask = MaskSpec(window=numpy.int64(4))
print(mask == MaskSpec(window=4), hash(mask) == hash(MaskSpec(window=4)), type(mask.window).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "window=2.5 is no whole number; give tokens, or leave window out (null)",
        "chunk='4' is no whole number; give tokens, or leave chunk out (null)",
        "prefix=[1] is no whole number; give tokens, or leave prefix out (null)",
        "causal=3 must be True or False; a window is MaskSpec(window=...)",
        "causal=None must be True or False; a window is MaskSpec(window=...)",
        "[]",
        "True True int",
    ]


def test_a_mask_in_words():
    assert str(MaskSpec(False, 4096, first=4)) == "full, window 4,096, first 4"


def test_pieces_out_of_order_are_refused():
    for pieces in (
        (),
        (BandPiece(q_stop=4),),
        (BandPiece(q_stop=4), BandPiece(q_start=5)),
        (BandPiece(q_start=4), BandPiece(q_stop=4)),
    ):
        with pytest.raises(ValueError, match="follow one another"):
            Band(pieces)


def test_the_table_of_the_docstring_is_what_is_refused():
    """Every cell of the table, by trying it."""
    sizes = {"window": 8, "chunk": 8, "prefix": 4, "first": 4}
    rows = re.findall(r"^\| (causal|full|window|chunk|prefix)\b[^|]*\|(.*)\|$", mask_spec.__doc__ or "", re.M)
    columns = ["alone", "window", "chunk", "prefix", "first"]
    assert [name for name, _ in rows] == ["causal", "full", "window", "chunk", "prefix"]
    for name, cells in rows:
        for column, cell in zip(columns, (cell.strip() for cell in cells.split("|")), strict=True):
            if not cell:
                continue
            options = {key: sizes[key] for key in (name, column) if key in sizes}
            tried = {**options, "causal": name != "full"}
            if cell.startswith("needs"):
                with pytest.raises(ValueError):
                    MaskSpec(**tried)
                MaskSpec(**tried, window=8)
                MaskSpec(**tried, chunk=8)
            elif cell.startswith("no"):
                with pytest.raises(ValueError):
                    MaskSpec(**tried)
            elif cell == "yes, where first is allowed":
                MaskSpec(**tried, window=8)
            elif cell == "first <= chunk":
                MaskSpec(**tried)
                with pytest.raises(ValueError):
                    MaskSpec(**{**tried, "first": 9})
            else:
                assert cell in ("yes", "causal")
                MaskSpec(**tried)
                if cell == "causal":
                    with pytest.raises(ValueError):
                        MaskSpec(**{**tried, "causal": False})
