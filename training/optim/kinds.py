"""The optimisers that `optim.name` chooses: what each is, and which keys it reads. The configuration and the docs go by
this table; what builds one is in `training/optim/build.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerKind:
    """One optimiser.

    Attributes:
        what: the optimiser and its source in a line.
        keys: the keys of `optim` that not all optimisers read; those that do not read a key refuse it.
        sharded: whether it updates weights that are sharded over ranks.
    """

    what: str
    keys: tuple[str, ...] = ()
    sharded: bool = True


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind("AdamW (arXiv 1711.05101)", ("betas", "eps")),
    "muon": OptimizerKind(
        "Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for embeddings, head, norms, biases and sinks",
        ("betas", "eps", "momentum", "adjust_lr", "adamw_lr", "adamw_weight_decay"),
    ),
    "adafactor": OptimizerKind(
        "Adafactor (arXiv 1804.04235), whose second moments of a matrix are a row and a column",
        ("beta2_decay", "clip_update"),
        sharded=False,  # its norms of rows and columns are no sums over shards
    ),
}
