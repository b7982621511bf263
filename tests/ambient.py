"""Another default dtype or device than a fresh process has, for a while: nothing that we make may depend on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# "meta" stands for a GPU: what is made there by mistake has no values
AMBIENTS = ("float64", "bfloat16", "meta")


@contextmanager
def ambient(name: str) -> Iterator[None]:
    """`torch.set_default_dtype` or `torch.set_default_device`, undone at the end."""
    before = torch.get_default_dtype()
    try:
        if name == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, name))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
