"""Fixtures that several floors share: a run small enough to train in a second."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import settings

from data.config import DataConfig
from models.config import ModelConfig
from tests.ranks.pool import RankPool
from training.config import Config, OptimConfig, RunConfig, WandbConfig, WandbMode

# a shared machine stalls now and then: a property that took long is no failure
settings.register_profile("house", deadline=None)
settings.load_profile("house")


# tensors this small lose more to waking threads than they gain: up to a hundredfold on shared cores
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks for `ranks.run(job, *arguments, world=4)`, shared by the whole suite; see tests/ranks/pool.py."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def traceable() -> Iterator[None]:
    """For torch.compile: jaxtyping's wrappers, which cannot be traced through, step aside; no graph of another test."""
    torch.compiler.reset()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.compiler.reset()


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """`make_config(run={"steps": 5}, data={...}, ...)`: a Config of a two-layer model on 80 short documents."""
    corpus = tmp_path / "corpus.jsonl"
    texts = ["to be or not " * (1 + n % 5) + "x" * (n % 23) for n in range(80)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(**changes: dict) -> Config:
        config = Config(
            model=ModelConfig(
                vocab_size=258, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, max_positions=256,
                norm_eps=1e-5, tied_embeddings=True, rope_theta=10000.0,
            ),
            data=DataConfig(source="files", paths=[str(corpus)], seq_len=96, rows=4, eval_rows=2, eval_fraction=0.1),
            optim=OptimConfig(lr=1e-2, warmup_steps=2),
            run=RunConfig(steps=6, dir=str(tmp_path / "run"), eval_every=0, save_every=0, device="cpu"),
            wandb=WandbConfig(mode=WandbMode.disabled),
        )  # fmt: skip
        for section, values in changes.items():
            setattr(config, section, dataclasses.replace(getattr(config, section), **values))
        return config

    return make
