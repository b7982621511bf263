"""A decoder as one graph. test_compile.py runs this without jaxtyping's wrappers, which dynamo cannot trace."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from models.attend import local_attend
from models.decoder import Decoder

BATCHES = [[5, 9, 2], [16], [1, 1, 14], [8, 8], [3, 13]]
OPTIONS = {
    "plain": {},
    "everything": dict(window=[3, None], softcap=2.5, sink=True, qk_norm=True, recompute=True),
    "gpt2": dict(positions="learned", rope_theta=None, norm="layer", mlp="plain", bias=True),
}


pytestmark = pytest.mark.usefixtures("traceable")


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ("everything", torch.float32),
        *(
            pytest.param(options, precision, marks=pytest.mark.deep)
            for options, precision in (
                ("everything", torch.bfloat16),
                ("plain", torch.float32),
                ("gpt2", torch.float32),
            )
        ),
    ],
)
def test_a_decoder_and_its_loss_are_one_graph_whatever_the_documents(tiny, packed, options, precision):
    config = tiny(**{"layers": 2} | OPTIONS[options])
    decoder = Decoder(config)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decoder.loss, fullgraph=True, backend=graphs)
    for lengths in BATCHES * 2:
        starts, stops, tokens, positions, labels = packed(lengths)
        attend = local_attend(starts, stops, 16, config.layer_masks())
        found = []
        for loss in (compiled, decoder.loss):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16):
                value = loss(tokens, positions, labels, attend, 16)
            found.append((value, *torch.autograd.grad(value, list(decoder.parameters()))))
        assert all(torch.equal(a, b) for a, b in zip(*found))
    assert graphs.frame_count == 1


@pytest.mark.deep
def test_another_count_or_length_costs_at_most_a_graph_each(tiny, packed):
    decoder = Decoder(tiny(layers=2))
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decoder.loss, fullgraph=True, backend=graphs)
    for lengths in [[5, 9, 2], [16], [8, 8], [7, 13], [3, 20, 9], [11, 6]]:
        starts, stops, tokens, positions, labels = packed(lengths)
        attend = local_attend(starts, stops, sum(lengths), [None, None])
        valid = sum(lengths) - len(lengths)
        assert torch.equal(
            compiled(tokens, positions, labels, attend, valid), decoder.loss(tokens, positions, labels, attend, valid)
        )
    assert graphs.frame_count <= 3


@pytest.mark.deep
def test_refusals_of_the_loss_come_when_it_runs(tiny, packed):
    decoder = Decoder(tiny(layers=2))
    compiled = torch.compile(decoder.loss, fullgraph=True, backend="aot_eager")
    starts, stops, tokens, positions, labels = packed([5, 11])
    labels[3] = 37
    with pytest.raises(ValueError, match="label 37 at row 3 is outside the vocabulary"):
        compiled(tokens, positions, labels, local_attend(starts, stops, 16, [None]), 14)
