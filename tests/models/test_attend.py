import pytest
import torch

from models.attend import AttentionContext, local_attend


def test_equal_windows_share_a_mask_and_an_unknown_one_is_refused():
    attend = local_attend([0, 3], [3, 8], 8, [4, None, 4, None], backend="reference")
    assert list(attend.masks) == [4, None]
    x = torch.randn(8, 2, 4)
    with pytest.raises(ValueError, match=r"layer 1 has window 7.*\[4, None\]"):
        attend(x, x, x, AttentionContext(1, 7, 0.5, None, None))


def test_an_unknown_backend_is_refused_by_name():
    x = torch.randn(3, 1, 4)
    with pytest.raises(ValueError, match="abacus"):
        local_attend([0], [3], 3, [None], backend="abacus")(x, x, x, AttentionContext(0, None, 0.5, None, None))


def test_context_reaches_the_kernel():
    """Scale, cap and sink against a softmax written out, on two documents with a window of 2."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 5, 1, 3, generator=generator, dtype=torch.float64)
    sink = torch.tensor([0.4], dtype=torch.float64)
    attend = local_attend([0, 2], [2, 5], 5, [2], backend="reference")
    out = attend(q, k, v, AttentionContext(0, 2, 0.9, 1.3, sink))
    for i, seen in enumerate([[0], [0, 1], [2], [2, 3], [3, 4]]):
        logits = 1.3 * torch.tanh(0.9 * (k[seen, 0] @ q[i, 0]) / 1.3)
        weights = logits.exp() / (logits.exp().sum() + sink.exp())
        torch.testing.assert_close(out[i, 0], weights @ v[seen, 0], rtol=0, atol=1e-12)
