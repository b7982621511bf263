"""The pool that distributed tests share: results in order, a fresh group each time, the guilty rank's traceback."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import JobFailed


def total(value: int) -> float:
    x = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def number() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def one_raises(guilty: int) -> None:
    if dist.get_rank() == guilty:
        raise RuntimeError("the guilty one")
    dist.barrier()


def one_dies(guilty: int) -> None:
    if dist.get_rank() == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_sleeps(guilty: int) -> None:
    if dist.get_rank() == guilty:
        time.sleep(60)


def test_ranks_sum_and_answer_in_order_and_are_reused(ranks):
    assert ranks.run(total, 10, world=2) == [21.0, 21.0]
    first, again = ranks.run(number, world=2), ranks.run(number, world=2)
    assert [rank for rank, _ in first] == [0, 1] and first == again


def test_one_rank_is_a_world_too(ranks):
    assert ranks.run(total, 5, world=1) == [5.0]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("job", "named"), [(one_raises, "rank 1 of 2:.*guilty one"), (one_dies, "rank 1 of 2:.*exit code -9")]
)
def test_failure_is_raised_with_the_guilty_ranks_words_and_the_pool_goes_on(ranks, job, named):
    with pytest.raises(JobFailed, match=f"(?s){named}"):
        ranks.run(job, 1, world=2)
    assert ranks.run(total, 0, world=2) == [1.0, 1.0]


@pytest.mark.deep
def test_hanging_rank_is_named(ranks):
    ranks.run(total, 0, world=2)  # this module is loaded by now, whatever else the machine does
    with pytest.raises(JobFailed, match=r"ranks \[1\] did not answer within 3"):
        ranks.run(one_sleeps, 1, world=2, timeout=3.0)


def test_more_ranks_than_the_pool_holds(ranks):
    with pytest.raises(ValueError, match="world=99"):
        ranks.run(total, 0, world=99)
