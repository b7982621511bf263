"""Tables of docs/ that are read off presets and code: models, codecs, the tiles of a kernel."""

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from omegaconf import OmegaConf

from kernels.codec.api import decode, encode
from kernels.mask_spec import MaskSpec
from models.config import ModelConfig
from models.flops import parameter_count
from parallel.plan.codec import CODECS, codec_named
from training.pages.mask_figure import seen
from training.pages.style import SMALL
from training.screen import CONF, config_groups
from training.show.plan_style import FADED, FEW, entitle, new_figure

TILED, TILE = (44, 20, 64), 8  # tokens of documents; queries and keys of a tile
KINDS = ("no pair", "some pairs", "all pairs")


def model_config(name: str) -> ModelConfig:
    """The preset `name` of conf/model."""
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    found = OmegaConf.to_object(merged)
    assert isinstance(found, ModelConfig)
    return found


def model_table() -> str:
    """Markdown: the shape of every preset but `hf`, and its parameters in closed form."""
    lines = ["| preset | parameters | layers | hidden | heads / key heads | head dim | longest document |"]
    lines.append("|---|---|---|---|---|---|---|")
    presets = {name: model_config(name) for name in config_groups()["model"] if name != "hf"}
    for name, config in presets.items():
        total = parameter_count(config).total
        shown = (
            f"{total / 1e9:.2f}B" if total >= 1e9 else f"{total / 1e6:.1f}M" if total < 1e8 else f"{total / 1e6:.0f}M"
        )
        heads = f"{config.heads} / {config.kv_heads}"
        lines.append(
            f"| `{name}` | {shown} | {config.layers} | {config.hidden} | {heads} | {config.head_dim} | "
            f"{config.max_positions:,} |"
        )
    return "\n".join(lines)


def codec_table() -> str:
    """Markdown: bytes a value of each codec's wire and the relative L2 error of drawn values, against bf16's own."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    lines = ["| codec | bytes a value | relative L2 error |", "|---|---|---|"]
    for name in CODECS:
        codec = codec_named(name)
        if codec is None:
            error = float((x.bfloat16().float() - x).norm() / x.norm())
            lines.append(f"| `{name}` (bf16 as it is) | 2 | {error:.4f} |")
            continue
        error = float((decode(encode(x, codec), codec, x.shape, x.dtype) - x).norm() / x.norm())
        lines.append(f"| `{name}` | {codec.wire_bytes(x.shape) / x.numel():.4f} | {error:.4f} |")
    return "\n".join(lines)


def tile_kinds(mask: MaskSpec) -> np.ndarray:
    """int [tiles, tiles]: 0, 1 or 2 for a tile of TILE x TILE pairs of which none, some or all are allowed."""
    pairs = seen(mask, TILED) > 0
    n = len(pairs) // TILE
    share = pairs.reshape(n, TILE, n, TILE).mean((1, 3))
    return (share > 0).astype(int) + (share == 1)


def draw_tiles() -> Figure:
    """The tiles of a kernel over three documents, under two masks."""
    figure = new_figure(8.2, 4.7)
    entitle(figure, f"documents of {', '.join(map(str, TILED))} tokens in tiles of {TILE} x {TILE}")
    colours = (FADED, FEW[1], FEW[0])
    for at, mask in zip(figure.subplots(1, 2, squeeze=False)[0], (MaskSpec(), MaskSpec(window=24))):
        kinds, start = tile_kinds(mask), 0
        for (row, column), kind in np.ndenumerate(kinds):
            at.add_patch(Rectangle((column * TILE, row * TILE), TILE, TILE, facecolor=colours[kind], edgecolor="white"))
        for length in TILED:
            at.add_patch(Rectangle((start, start), length, length, fill=False, edgecolor="#333333", linewidth=0.9))
            start += length
        counts = ", ".join(f"{int((kinds == kind).sum())} with {KINDS[kind]}" for kind in (2, 1, 0))
        at.set_title(f"{mask}\n{counts}", fontsize=SMALL)
        at.set_xlim(-1, start + 1)
        at.set_ylim(start + 1, -1)
        at.set_aspect("equal")
        at.set_axis_off()
    labels = ("skipped: no pair is allowed", "masked: some are", "full: all are, no mask arithmetic")
    handles = [Patch(facecolor=colour, label=label) for colour, label in zip(colours, labels)]
    handles.append(Patch(facecolor="none", edgecolor="#333333", label="a document"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    return figure
