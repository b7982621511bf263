"""Compiled layers and whole compiled decoders give what eager ones give, and documents make no new graphs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from models.attend import local_attend
from models.decoder import Decoder
from models.loss import cross_entropy_backward_op, cross_entropy_op

ROOT = Path(__file__).parents[2]


def run(decoder: Decoder, batch: tuple, valid: int = 16, autocast: bool = False) -> list[torch.Tensor]:
    """The loss of a batch as `packed` makes it, and the gradient of each parameter."""
    starts, stops, tokens, positions, labels = batch
    attend = local_attend(starts, stops, tokens.shape[0], decoder.config.layer_masks())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = decoder.loss(tokens, positions, labels, attend, valid)
    return [loss.detach(), *torch.autograd.grad(loss, list(decoder.parameters()))]


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize(
    ("options", "autocast"),
    [({}, False), (dict(window=[3, 7, None, 1], softcap=2.5, sink=True, qk_norm=True, recompute=True), True)],
)
def test_compiled_layers_share_two_graphs_for_all_documents(tiny, packed, options, autocast):
    eager, compiled = Decoder(tiny(**options)), Decoder(tiny(**options))
    graphs = CompileCounterWithBackend("aot_eager")
    compiled.compile_layers(graphs)
    for lengths in ([5, 9, 2], [16], [1, 1, 14], [8, 8]):
        got, want = (run(decoder, packed(lengths), autocast=autocast) for decoder in (compiled, eager))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=2e-2 if autocast else 1e-4, atol=1e-3 if autocast else 1e-6)
    assert graphs.frame_count == 2  # before and after attention, of four layers alike


@pytest.mark.deep
@pytest.mark.usefixtures("traceable")
def test_other_lengths_and_evaluation_make_few_more_graphs(tiny, packed):
    decoder = Decoder(tiny(window=[3, 7, None, 1]))
    graphs = CompileCounterWithBackend("aot_eager")
    decoder.compile_layers(graphs)
    for lengths in ([5, 9, 2], [7, 13], [1], [33, 2]):
        run(decoder, packed(lengths))
        starts, stops, tokens, positions, _ = packed(lengths)
        with torch.no_grad():
            decoder(tokens, positions, local_attend(starts, stops, sum(lengths), decoder.config.layer_masks()))
    assert graphs.frame_count <= 12  # two parts, with and without gradients, for one length, a single token, and any


@pytest.mark.deep
@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("options", [{}, dict(window=[3, None], softcap=2.5, sink=True, recompute=True)])
def test_inductor_s_gradients_are_eager_s_to_rounding(tiny, packed, options):
    eager, compiled = Decoder(tiny(**options)), Decoder(tiny(**options))
    compiled.compile_layers()
    for got, want in zip(*(run(decoder, packed([5, 9, 2])) for decoder in (compiled, eager))):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("traceable")
def test_opcheck_loss():
    hidden, weight = torch.randn(9, 6).requires_grad_(), torch.randn(11, 6).requires_grad_()
    labels = torch.randint(0, 11, (9,))
    labels[[2, 8]] = -100
    options = (4, 3.0, torch.float32, 2**20)
    opcheck(cross_entropy_op, (hidden, weight, labels, *options))
    hidden, weight = hidden.detach(), weight.detach()
    nll, lse = cross_entropy_op(hidden, weight, labels, *options)
    for wanted in ((True, True), (True, False)):
        arguments = (torch.randn_like(nll), hidden, weight, labels, lse, *options, *wanted)
        opcheck(cross_entropy_backward_op, arguments)


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_whole_decoders(deep):
    """The tests of whole_graph.py, in a process without jaxtyping's wrappers."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    done = subprocess.run(
        [*command, "tests/models/whole_graph.py", "-m", "deep" if deep else "not deep"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
