"""Layers with chunks and prefixes, packed, against transformers' own layers on each document alone."""

import dataclasses

import numpy as np
import pytest
import torch

from kernels.mask_spec import MaskSpec
from models.attend import local_attend
from models.decoder import Decoder
from models.hf.config import read_config
from models.hf.files import open_folder
from models.hf.weights import read_weights
from tests.checkpoints import save
from tests.masks import seen_inside

LENGTHS = [29, 1, 8, 17]


def chunked(size: int, length: int) -> np.ndarray:
    """[length, length]: what transformers' mask of Llama 4's local layers allows in one row without padding."""
    from transformers.masking_utils import chunked_causal_mask_function

    rule = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
    at = torch.arange(length)
    return rule(torch.tensor(0), torch.tensor(0), at[:, None], at[None, :]).numpy()


def theirs_layer_by_layer(model, tokens: torch.Tensor, masks: list[np.ndarray]) -> torch.Tensor:
    """Logits of one document, each layer of transformers' model under a mask of its own."""
    hooks = []
    for layer, seen in zip(model.model.layers, masks, strict=True):
        bias = torch.zeros(1, 1, *seen.shape).masked_fill(~torch.from_numpy(seen), torch.finfo(torch.float32).min)

        def replace(module, args, kwargs, bias=bias):
            return args, {**kwargs, "attention_mask": bias}

        hooks.append(layer.self_attn.register_forward_pre_hook(replace, with_kwargs=True))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("size", [1, 8, 16])
def test_our_chunks_are_transformers_chunks(size: int):
    for length in LENGTHS:
        assert (seen_inside(MaskSpec(chunk=size), length) == chunked(size, length)).all()


OPTIONS = [dict(chunk=[8, None]), dict(chunk=[None, 5]), dict(prefix=6, chunk=[8, None])]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_documents_equal_transformers_on_each_alone(tmp_path, options: dict):
    model = save("llama", tmp_path)
    config = dataclasses.replace(read_config(open_folder(tmp_path).config)[1], **options)
    decoder = Decoder(config)
    read_weights(decoder, tmp_path)
    tokens = torch.randint(0, 300, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    stops = np.cumsum(LENGTHS).tolist()
    starts = [stop - length for stop, length in zip(stops, LENGTHS)]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    attend = local_attend(starts, stops, stops[-1], config.layer_masks())
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens, positions, attend))
    alone = []
    for part in tokens.split(LENGTHS):
        n = len(part)
        if config.prefix is None:
            masks = [chunked(mask.chunk or n, n) for mask in config.layer_masks()]
        else:
            masks = [seen_inside(mask, n) for mask in config.layer_masks()]
        alone.append(theirs_layer_by_layer(model, part, masks))
    torch.testing.assert_close(ours, torch.cat(alone), atol=1e-4, rtol=0)
    plain = Decoder(dataclasses.replace(config, chunk=None, prefix=None))  # the mask is seen in what comes out
    read_weights(plain, tmp_path)
    with torch.no_grad():
        other = plain.logits(
            plain(tokens, positions, local_attend(starts, stops, stops[-1], plain.config.layer_masks()))
        )
    assert (ours - other).abs().max() > 0.1
