import pytest
import torch

from kernels.mask_spec import MaskSpec
from models.attend import AttentionContext, local_attend


def test_equal_masks_are_made_once_and_an_unknown_one_is_refused():
    window, causal = MaskSpec(window=4), MaskSpec()
    attend = local_attend([0, 3], [3, 8], 8, [window, causal, window, causal], backend="reference")
    assert list(attend.masks) == [window, causal]
    x = torch.randn(8, 2, 4)
    with pytest.raises(ValueError, match=r"layer 1 has the mask \(causal, window 7\).*causal, window 4; causal"):
        attend(x, x, x, AttentionContext(1, MaskSpec(window=7), 0.5, None, None))


def test_an_unknown_backend_is_refused_by_name():
    x = torch.randn(3, 1, 4)
    with pytest.raises(ValueError, match="abacus"):
        local_attend([0], [3], 3, [MaskSpec()], backend="abacus")(
            x, x, x, AttentionContext(0, MaskSpec(), 0.5, None, None)
        )


def test_context_reaches_the_kernel():
    """Scale, cap and sink against a softmax written out, on two documents with a window of 2."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 5, 1, 3, generator=generator, dtype=torch.float64)
    sink = torch.tensor([0.4], dtype=torch.float64)
    attend = local_attend([0, 2], [2, 5], 5, [MaskSpec(window=2)], backend="reference")
    out = attend(q, k, v, AttentionContext(0, MaskSpec(window=2), 0.9, 1.3, sink))
    for i, seen in enumerate([[0], [0, 1], [2], [2, 3], [3, 4]]):
        logits = 1.3 * torch.tanh(0.9 * (k[seen, 0] @ q[i, 0]) / 1.3)
        weights = logits.exp() / (logits.exp().sum() + sink.exp())
        torch.testing.assert_close(out[i, 0], weights @ v[seen, 0], rtol=0, atol=1e-12)
