"""Drawn document lengths against the figures that each mix states."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.sources.mixes import MIXES, draw_lengths, sample_length

CONTEXT = 131_072


@lru_cache
def drawn(mix: str, count: int = 60_000) -> np.ndarray:
    return np.array([sample_length(mix, 3, i, CONTEXT) for i in range(count)])


@pytest.mark.parametrize(
    ("mix", "mean", "median", "tolerance"),
    [
        ("web", 625, 400, 0.03),
        ("code", 5000, 2000, 0.05),
        ("wlb", 3962, 3227, 0.04),
        ("prolong", 3052, 1913, 0.04),
        ("one_giant", (131072 + 64 * 2048) / 65, 2048, 0.001),
    ],
)
def test_mean_and_median_are_those_stated(mix: str, mean: float, median: float, tolerance: float) -> None:
    lengths = drawn(mix)
    assert abs(lengths.mean() / mean - 1) < tolerance
    assert abs(np.median(lengths) / median - 1) < tolerance


@pytest.mark.parametrize(
    ("mix", "over", "share"), [("wlb", 32768, 0.170), ("wlb", 65536, 0.128), ("prolong", 32768, 0.049)]
)
def test_long_documents_hold_the_stated_share_of_tokens(mix: str, over: int, share: float) -> None:
    lengths = drawn(mix)
    assert abs(lengths[lengths > over].sum() / lengths.sum() - share) < 0.03


@pytest.mark.parametrize(("mix", "low", "high"), [("wlb", 1, 124_913), ("prolong", 575, 340_149), ("web", 1, 131_072)])
def test_lengths_stay_inside_the_stated_range(mix: str, low: int, high: int) -> None:
    lengths = drawn(mix)
    assert low <= lengths.min() and lengths.max() <= high


def test_quantiles_of_the_tables_come_back() -> None:
    lengths = drawn("wlb")
    for quantile, value in ((10, 646), (50, 3227), (90, 5784), (96, 6173)):
        assert abs(np.percentile(lengths, quantile) / value - 1) < 0.05


def test_long_sft_is_nine_tenths_short_with_the_mode_at_1024_to_1536() -> None:
    lengths = drawn("long_sft")
    long = lengths >= 16_385
    # A tenth is uniform from 8k to 64k, and 6/7 of that lies above 16k.
    assert abs(long.mean() - 0.1 * (65536 - 16384) / (65536 - 8192)) < 0.005
    bins = np.histogram(lengths, np.arange(0, 4097, 512))[0]
    assert bins.argmax() == 2
    assert abs(bins[2] / len(lengths) - 0.9 * 620 / 2185) < 0.01


@pytest.mark.parametrize("mix", MIXES)
@given(tokens=st.integers(0, 300_000), seed=st.integers(0, 99))
def test_drawn_lengths_sum_exactly(mix: str, tokens: int, seed: int) -> None:
    lengths = draw_lengths(mix, tokens, seed)
    assert sum(lengths) == tokens
    assert all(n >= 1 for n in lengths)
    assert lengths == draw_lengths(mix, tokens, seed)


def test_only_the_last_length_is_cut() -> None:
    short, long = draw_lengths("web", 10_000, 5), draw_lengths("web", 20_000, 5)
    assert long[: len(short) - 1] == short[:-1]
    assert long[len(short) - 1] >= short[-1]


def test_one_giant_keeps_its_proportion() -> None:
    assert draw_lengths("one_giant", 262_144, 0) == [131_072] + [2048] * 64
    assert draw_lengths("one_giant", 4096, 1) == [2048] + [32] * 64
    odd = draw_lengths("one_giant", 1001, 0)
    assert odd[0] == 500 and len(odd) == 65 and max(odd[1:]) - min(odd[1:]) <= 1
    assert [sample_length("one_giant", 0, i, 2048) for i in (0, 1, 64, 65)] == [2048, 32, 32, 2048]


def test_code_is_capped_at_the_context() -> None:
    assert max(sample_length("code", 0, i, 4096) for i in range(2000)) == 4096
    assert max(draw_lengths("code", 10**6, 0, context=3000)) <= 3000


def test_seeds_and_mixes_draw_different_lengths() -> None:
    assert draw_lengths("web", 50_000, 0) != draw_lengths("web", 50_000, 1)
    assert draw_lengths("wlb", 50_000, 0) != draw_lengths("prolong", 50_000, 0)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mix 'books' is unknown; choose one of web"):
        draw_lengths("books", 10, 0)
    with pytest.raises(ValueError, match="tokens=-1"):
        draw_lengths("web", -1, 0)
