"""Which view and group a class of tensors should be coded in: a statistics pass over samples, once.

The error that decides is the mean over channels of each channel's own relative L2: in the L2 of a whole tensor a
channel of outliers hides all the others. (TACO, arXiv 2604.24088, names a data-driven reshaping; what it does there is
not public. This one is ours.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.codec import api as fp8
from kernels.codec.wire import Codec

C = TypeVar("C", bound=Codec)


def channel_errors(got: Float[Tensor, "T ..."], want: Float[Tensor, "T ..."]) -> Float[Tensor, " channels"]:
    """Relative L2 error of each channel over its tokens, in float64; channels of zeros are left out."""
    got, want = (x.reshape(x.shape[0], -1).double() for x in (got, want))
    size = want.norm(dim=0)
    return ((got - want).norm(dim=0) / size)[size > 0]


@torch.no_grad()
def rank_codecs(samples: Sequence[Float[Tensor, "T ..."]], codecs: Iterable[C]) -> list[tuple[C, float]]:
    """The codecs with their mean channel error over the samples, the best first; ties keep the order given.

    Give codecs of the same bytes (`parallel.plan.codec.alternatives`), those to prefer first.

    Raises:
        ValueError: no sample or no codec.
    """
    codecs = list(codecs)
    if not samples or not codecs:
        raise ValueError(f"got {len(samples)} samples and {len(codecs)} codecs; give at least one of each")
    ranking = []
    for codec in codecs:
        errors = [channel_errors(fp8.decode(fp8.encode(x, codec), codec, x.shape), x) for x in samples]
        ranking.append((codec, torch.cat(errors).mean().item()))
    return sorted(ranking, key=lambda pair: pair[1])
