import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from models.loss import _accumulate, check_labels, chunked_cross_entropy, cross_entropy_backward_op, cross_entropy_op


def plain(hidden, weight, labels, softcap=None):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels.long(), reduction="none")


def draw(T, V, h, ignored=0.3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (2 * torch.randn(n, h, generator=generator, dtype=torch.float64) for n in (T, V))
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[torch.rand(T, generator=generator) < ignored] = -100
    upstream = torch.randn(T, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, upstream


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(0, 13),
    V=st.integers(1, 19),
    h=st.integers(1, 7),
    chunk=st.integers(1, 15),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    softcap=st.sampled_from([None, 1.7]),
    int32=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_equals_cross_entropy_in_fp64(T, V, h, chunk, ignored, softcap, int32, seed):
    hidden, weight, labels, upstream = draw(T, V, h, ignored, seed)
    nll = chunked_cross_entropy(hidden, weight, labels.int() if int32 else labels, chunk, softcap)
    want = plain(hidden, weight, labels, softcap)
    torch.testing.assert_close(nll, want, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(nll, (hidden, weight), upstream)
    for a, b in zip(got, torch.autograd.grad(want, (hidden, weight), upstream)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_equals_cross_entropy_in_fp32():
    hidden, weight, labels, upstream = draw(129, 301, 33, dtype=torch.float32)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = plain(exact_hidden, exact_weight, labels)
    exact_grads = torch.autograd.grad(exact, (exact_hidden, exact_weight), upstream)

    def errors(nll):
        assert nll.dtype == torch.float32
        grads = torch.autograd.grad(nll, (hidden, weight), upstream.float())
        return [(a.double() - b).abs().max().item() for a, b in zip((nll, *grads), (exact, *exact_grads))]

    ours, torchs = errors(chunked_cross_entropy(hidden, weight, labels, 17)), errors(plain(hidden, weight, labels))
    assert all(a <= 2 * b for a, b in zip(ours, torchs)), (ours, torchs)


def test_ignored_rows_are_never_read():
    """NaN in rows without a label reaches neither loss nor gradient."""
    hidden, weight, labels, _ = draw(12, 9, 5)
    poisoned = hidden.detach().clone()
    poisoned[labels == -100] = float("nan")
    poisoned.requires_grad_()
    assert bool(poisoned.isnan().any())
    nll, want = (chunked_cross_entropy(x, weight, labels, 5) for x in (poisoned, hidden))
    assert torch.equal(nll, want)
    got = torch.autograd.grad(nll.sum(), (poisoned, weight))
    for a, b in zip(got, torch.autograd.grad(want.sum(), (hidden, weight))):
        assert torch.equal(a, b)
    assert not bool(got[0][labels == -100].any())


@pytest.mark.parametrize("T", [0, 7])
def test_no_labels_give_zeros(T):
    hidden, weight, _, _ = draw(T, 9, 5)
    nll = chunked_cross_entropy(hidden, weight, torch.full((T,), -100))
    nll.sum().backward()
    assert nll.shape == (T,) and not bool(nll.any())
    assert hidden.grad.shape == hidden.shape and not bool(hidden.grad.any())
    assert weight.grad.shape == weight.shape and not bool(weight.grad.any())


def test_values_do_not_need_gradients():
    hidden, weight, labels, _ = draw(8, 11, 3)
    want = plain(hidden, weight, labels)
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, labels), want, rtol=0, atol=1e-12)
    for frozen in (0, 1):
        inputs = [x.detach().requires_grad_(i != frozen) for i, x in enumerate((hidden, weight))]
        nll = chunked_cross_entropy(*inputs, labels)
        torch.testing.assert_close(nll, want, rtol=0, atol=1e-12)
        nll.sum().backward()
        wanted = torch.autograd.grad(plain(hidden, weight, labels).sum(), (hidden, weight))[1 - frozen]
        torch.testing.assert_close(inputs[1 - frozen].grad, wanted, rtol=0, atol=1e-12)
        assert inputs[frozen].grad is None


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("softcap", [None, 1.7])
def test_the_operator_of_a_compilers_graph_is_the_same_loss(ignored, softcap):
    """What torch.compile sees: shapes without numbers, gradients, and none where none is wanted."""
    hidden, weight, labels, upstream = draw(9, 11, 3, ignored)
    options = (4, softcap, torch.float64, 1 << 20)
    opcheck(cross_entropy_op, (hidden, weight, labels, *options))
    nll, lse = cross_entropy_op(hidden, weight, labels, *options)
    want = plain(hidden, weight, labels, softcap)
    torch.testing.assert_close(nll, want, rtol=1e-12, atol=1e-12)
    assert lse.shape == labels.shape and not lse[int((labels >= 0).sum()) :].any()
    both = torch.autograd.grad(want, (hidden, weight), upstream, retain_graph=True)
    for a, b in zip(torch.autograd.grad(nll, (hidden, weight), upstream), both):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    given = tuple(x.detach() for x in (upstream, hidden, weight, labels, lse))
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        opcheck(cross_entropy_backward_op, (*given, *options, *wanted))
        found = cross_entropy_backward_op(*given, *options, *wanted)
        for grad, right, want in zip(found, both, wanted):
            torch.testing.assert_close(grad, right if want else right.new_empty(0), rtol=1e-12, atol=1e-12)
    for frozen in (0, 1):
        inputs = [x.detach().requires_grad_(i != frozen) for i, x in enumerate((hidden, weight))]
        cross_entropy_op(*inputs, labels, *options)[0].backward(upstream)
        assert inputs[frozen].grad is None
        torch.testing.assert_close(inputs[1 - frozen].grad, both[1 - frozen], rtol=1e-12, atol=1e-12)


def test_the_least_settings_are_good_ones():
    hidden, weight, labels, _ = draw(5, 7, 3)
    for settings_ in ({"chunk": 1}, {"budget_bytes": 1}):
        found = chunked_cross_entropy(hidden, weight, labels, **settings_)
        torch.testing.assert_close(found, plain(hidden, weight, labels), rtol=1e-12, atol=1e-12)


def test_autocast_rounds_operands_and_nothing_else():
    hidden, weight, labels, upstream = draw(40, 23, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        nll = chunked_cross_entropy(hidden, weight, labels, 7)
    want = plain(hidden.bfloat16().float(), weight.bfloat16().float(), labels)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, want, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(nll, (hidden, weight), upstream.float())
    for a, b in zip(got, torch.autograd.grad(want, (hidden, weight), upstream.float())):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.01 * b.norm()


def test_the_weight_s_gradient_is_summed_in_fp32():
    """A thousand chunks of one row cost a bf16 weight no more than its one final rounding."""
    hidden, weight, labels, _ = draw(1000, 5, 4, 0.0, dtype=torch.bfloat16)
    grads = [
        torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, chunk).sum(), weight)[0]
        for chunk in (1, 1000)
    ]
    assert grads[0].dtype == torch.bfloat16
    torch.testing.assert_close(grads[0], grads[1], rtol=2**-7, atol=0)


@pytest.mark.parametrize("budget", [1, 4 * 6 * 3, 4 * 6 * 4, 1 << 20])
def test_narrow_operands_are_summed_by_slices_of_the_vocabulary(budget):
    """As a GPU does with bf16 and an fp32 sum; here fp32 into fp64, in slices of one, three, four words, and of all."""
    draw_ = torch.Generator().manual_seed(0)
    d_logits, states, base = (torch.randn(size, generator=draw_) for size in ((5, 10), (5, 6), (10, 6)))
    total = base.double()
    _accumulate(total, d_logits, states, budget)
    torch.testing.assert_close(total, base.double() + (d_logits.T @ states).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("label", [9, -1, -101, 2**31 - 1])
def test_a_label_outside_the_vocabulary_is_refused(label):
    hidden, weight, labels, _ = draw(6, 9, 2)
    labels[4] = label
    with pytest.raises(ValueError, match=rf"label {label} at row 4.*vocabulary of 9"):
        chunked_cross_entropy(hidden, weight, labels)
    with pytest.raises(ValueError, match=f"label {label}"):
        check_labels(labels, 9)


@pytest.mark.parametrize("bad", [dict(chunk=0), dict(budget_bytes=0), dict(softcap=0.0), dict(softcap=float("nan"))])
def test_bad_settings_are_refused(bad):
    hidden, weight, labels, _ = draw(6, 9, 2)
    with pytest.raises(ValueError, match=r"0|nan"):
        chunked_cross_entropy(hidden, weight, labels, **bad)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation returns, in `phase`."""

    def __init__(self):
        super().__init__()
        self.bytes, self.phase = {"forward": 0, "backward": 0}, "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.bytes[self.phase] = max(self.bytes[self.phase], x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_stay_within_the_budget(autocast):
    """4096 tokens x 50,000 words in fp32 are 819 MB; no tensor passes a third of 48 MiB, of which three may live."""
    hidden, weight, labels, _ = draw(4096, 50_000, 4, 0.0, dtype=torch.float32)
    with Largest() as largest, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        nll = chunked_cross_entropy(hidden, weight, labels, budget_bytes=48 * 2**20)
        largest.phase = "backward"
        nll.sum().backward()
    for phase in ("forward", "backward"):
        assert 0.9 * 16 * 2**20 < largest.bytes[phase] <= 16 * 2**20, phase


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_gpu_agrees_with_the_cpu(autocast):
    hidden, weight, labels, upstream = draw(257, 1003, 64, dtype=torch.float32)
    results = []
    for device in ("cpu", "cuda"):
        x, w = (t.detach().to(device).requires_grad_() for t in (hidden, weight))
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            nll = chunked_cross_entropy(x, w, labels.to(device), 50, budget_bytes=2**16)
        grads = torch.autograd.grad(nll, (x, w), upstream.float().to(device))
        results.append([t.cpu() for t in (nll.detach(), *grads)])
    for got, want in zip(results[1], results[0]):
        assert (got - want).norm() < (1e-3 if autocast else 1e-5) * want.norm()
