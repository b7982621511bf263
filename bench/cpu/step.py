"""A whole training step on CPU: with the masked attention, eager and compiled, and with SDPA under a dense mask."""

from __future__ import annotations

import time
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor

from bench.cpu.attention import dense_bias, document_lengths, headed
from bench.table import Report
from models.attend import Attend, AttentionContext, local_attend
from models.config import ModelConfig
from models.decoder import Decoder

PRESET = Path(__file__).resolve().parents[2] / "conf" / "model" / "tiny.yaml"


class DenseAttention:
    """SDPA with an additive [T, T] mask made once a batch; key heads repeated, as the operator wants equal counts."""

    def __init__(self, lengths: list[int]) -> None:
        self.bias = dense_bias(lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttentionContext) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(headed(q), headed(k), headed(v), self.bias, scale=ctx.softmax_scale)
        return out[0].transpose(0, 1)


def masked(lengths: list[int], config: ModelConfig) -> Attend:
    """This project's attention for the same documents."""
    edges = list(accumulate(lengths, initial=0))
    return local_attend(edges[:-1], edges[1:], edges[-1], config.layer_masks(), backend="torch")


def step_section(report: Report, sizes: list[int], repeats: int, seed: int) -> None:
    """A row for each mix and size: forward, loss, backward and AdamW of the tiny preset, masks included."""
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(PRESET))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ModelConfig)
    report.note(
        "\nTraining step of the tiny preset, ms: masks, forward, loss, backward, AdamW. dense: the same model, SDPA "
        "with an additive mask [T, T]. compiled: ours with model.compile=true, once its graphs are made."
    )
    for tokens in sizes:
        for mix in ("web", "code", "stdlib"):
            lengths = document_lengths(mix, tokens, seed)
            seconds = _time_steps(config, lengths, repeats, seed)
            ours, compiled, dense = (median(seconds[name]) for name in ("ours", "compiled", "dense"))
            times = {"ours_ms": ours * 1e3, "compiled_ms": compiled * 1e3, "dense_ms": dense * 1e3}
            rates = {"tokens_per_s": tokens / ours, "x_compiled": compiled / ours, "x_dense": dense / ours}
            report.row({"step": mix, "tokens": tokens, **times, **rates})


def _time_steps(config: ModelConfig, lengths: list[int], repeats: int, seed: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    labels = tokens.roll(-1)
    labels[torch.tensor(lengths).cumsum(0) - 1] = -100
    models = {name: Decoder(config, seed=seed) for name in ("ours", "compiled", "dense")}
    models["compiled"].compile_layers()
    optimizers = {name: torch.optim.AdamW(m.parameters(), fused=True) for name, m in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeats + 1):
        for name, model in models.items():
            start = time.perf_counter()
            attend = DenseAttention(lengths) if name == "dense" else masked(lengths, config)
            loss = model.loss(tokens, positions, labels, attend, valid_tokens=int((labels >= 0).sum()))
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(loss.item())
    for name, tolerance in (("dense", 1e-3), ("compiled", 1e-5)):
        found, wanted = torch.tensor(losses[name]), torch.tensor(losses["ours"])
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    return {name: times[1:] for name, times in seconds.items()}  # the first pays for warming up
