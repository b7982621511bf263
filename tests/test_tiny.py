"""The whole idea on one page: a schedule is data, proved before it runs. Read this first."""

import dataclasses

import pytest
import torch

from data.config import DataConfig
from data.loader import PackedLoader
from kernels.api import IntervalMask, attention, merge
from kernels.mask_spec import MaskSpec
from models.attend import local_attend
from models.config import ModelConfig
from models.decoder import Decoder
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.proof.verify import PlanError, verify
from parallel.runtime.loopback import run_loopback
from parallel.strategy import load_strategy


def test_a_schedule_is_data_that_is_proved_and_then_run():
    # Three documents of 13, 5 and 30 tokens, packed in one row, on four ranks; a query sees its document's past.
    layout = PackedLayout.from_lengths([13, 5, 30])
    strategy = load_strategy("zigzag_ring", dp=1)
    placement = strategy.shard(layout, strategy.mesh(4, heads=4, kv_heads=2))
    assert placement.tokens(0) == ((0, 6, 1), (42, 48, 1))  # rank 0 owns the row's first and last eighth

    # The plan: every step of every rank, forward and backward, as data. No tensor is there yet.
    plan = strategy.plan(placement, AttentionShape(H=4, Hkv=2, D=8, Dv=8, dtype="fp64"), MaskSpec())
    first = plan.forward[0]
    assert [type(step).__name__ for step in first.steps][:4] == ["Post", "Attend", "Wait", "Post"]
    assert plan.work.sum() == sum(n * (n + 1) // 2 for n in (13, 5, 30))  # allowed (query, key) pairs

    # The proof: each pair once, sends match receives, nobody waits for ever. A plan that has lost a step is refused.
    verify(plan)
    lossy = dataclasses.replace(first, steps=first.steps[:1] + first.steps[2:])
    with pytest.raises(PlanError, match=r"rank 0, out: head 0: queries .* meet key 0 0 times"):
        verify(dataclasses.replace(plan, forward=(lossy, *plan.forward[1:])))

    # The run: all ranks in this process, and the whole is attention, gradients too; no byte more than was planned.
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(48, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2, 4))
    ran = run_loopback(plan, q, k, v, dout)
    dense = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*dense, IntervalMask.from_cu_seqlens([0, 13, 18, 48]), backend="reference")
    results = (ran.out, ran.lse, ran.dq, ran.dk, ran.dv)
    for ours, wanted in zip(results, (out, lse, *torch.autograd.grad(out, dense, dout))):
        assert (ours - wanted).abs().max() < 1e-12
    assert sum(ran.recorder.bytes.values()) == sum(sent.sum() for sent in plan.bytes.values())


def test_attention_in_closed_form():
    """Queries of 0 see all their keys alike, so a row's output is the mean of the values that it may see."""
    mask = IntervalMask.from_cu_seqlens([0, 3, 4, 8])  # documents of 3, 1 and 4 tokens, causal
    q, k = torch.zeros(8, 1, 16), torch.ones(8, 1, 16)
    v = torch.arange(8.0)[:, None, None].expand(8, 1, 16).clone().requires_grad_()
    for backend in ("reference", "torch"):
        out, lse = attention(q, k, v, mask, backend=backend)
        assert torch.allclose(out[:, 0, 0], torch.tensor([0, 0.5, 1, 3, 4, 4.5, 5, 5.5]))
        assert torch.allclose(lse[0].exp(), torch.tensor([1.0, 2, 3, 1, 1, 2, 3, 4]))
        (dv,) = torch.autograd.grad(out.sum(), v)
        wanted = torch.tensor([11 / 6, 5 / 6, 1 / 3, 1, 25 / 12, 13 / 12, 7 / 12, 1 / 4])
        assert torch.allclose(dv[:, 0, 0], wanted)


def test_partial_attention_merges_by_log_sum_exp():
    """Attention over two halves of the keys, merged, is attention over all of them: what every schedule rests on."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 2, 8)
    whole = IntervalMask.from_cu_seqlens([0, 6], causal=False)
    half = IntervalMask.from_cu_seqlens([0, 6], [0, 3], causal=False)
    parts = [attention(q, k[at], v[at], half) for at in (slice(0, 3), slice(3, 6))]
    out, lse = merge([o for o, _ in parts], [s for _, s in parts])
    wanted_out, wanted_lse = attention(q, k, v, whole)
    assert torch.allclose(out, wanted_out, atol=1e-6) and torch.allclose(lse, wanted_lse, atol=1e-6)


def test_packed_row_knows_its_documents():
    layout = PackedLayout.from_lengths([3, 2], row_length=6)
    assert layout.positions().tolist() == [0, 1, 2, 0, 1, 0]
    assert layout.pairs() == 6 + 3  # allowed (query, key) pairs: 3 * 4 / 2 + 2 * 3 / 2


def test_a_tiny_model_learns_from_packed_rows():
    config = ModelConfig(
        vocab_size=258, layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32, max_positions=128, norm_eps=1e-5,
        tied_embeddings=True, rope_theta=10000.0,
    )  # fmt: skip
    model = Decoder(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    loader = PackedLoader(DataConfig(seq_len=128, rows=4), config.vocab_size, seed=0)
    for step in range(20):
        batch = loader.batch(step)
        documents = batch.layout
        attend = local_attend(
            documents.starts.tolist(), documents.stops.tolist(), documents.total_tokens, config.layer_masks()
        )
        rows = (batch.tokens.flatten(), batch.positions.flatten(), batch.labels.flatten())
        loss = model.loss(*rows, attend, valid_tokens=batch.label_tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 5.0 and losses[-1] < 4.2
