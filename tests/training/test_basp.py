"""BASP is Ulysses, is dp x cp, is one process: the same loss and gradients in fp64, whatever the rows of a batch."""

import pytest
import torch
from torch import Tensor

from data.loader import PackedLoader
from models.decoder import Decoder
from parallel.strategy import load_strategy
from parallel.weights.data_parallel import whole
from tests.ranks.pool import RankPool
from tests.training.start.test_ranks import team_of
from training.config import Config, Precision
from training.share import Share
from training.step import forward_backward


def doubles(config: Config) -> tuple[float, list[Tensor], dict[str, float]]:
    """A job: loss and gradients of a first batch in float64, and this rank's figures."""
    share = Share(Decoder(config.model, seed=0, dtype=torch.float64), team_of(config), config.strategy)
    share.take_figures()
    batch = PackedLoader(config.data, config.model.vocab_size, 0).batch(0)
    found = forward_backward(share.model, batch, 1, Precision.fp32, share)
    grads = [whole(p.grad) for p in share.model.parameters() if p.grad is not None]
    return share.total(found.loss), grads, share.take_figures()


def compare(pool: RankPool, make_config, world: int, rows: int) -> None:
    data = {"source": "synthetic", "paths": [], "seq_len": 48, "rows": rows}
    model = {"heads": 8, "kv_heads": 4, "hidden": 64}
    loss, grads, _ = doubles(make_config(data=data, model=model))
    for name, axes in (("basp", {}), ("ulysses", {}), ("ulysses", {"dp": rows})):
        config = make_config(data=data, model=model, strategy=vars(load_strategy(name, **axes)))
        for rank in pool.run(doubles, config, world=world):
            assert abs(rank[0] - loss) <= 1e-12
            for a, b in zip(grads, rank[1], strict=True):
                assert (a - b).abs().max() <= 1e-12, name


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_four_ranks(ranks: RankPool, make_config, rows: int):
    compare(ranks, make_config, 4, rows)


@pytest.mark.deep
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_eight_ranks(make_config, rows: int):
    pool = RankPool(8)
    try:
        compare(pool, make_config, 8, rows)
    finally:
        pool.close()
