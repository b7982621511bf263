"""The tensors of Hugging Face checkpoints beside the decoder's parameters: one literal table an architecture.

The tables are read in both directions, to load and to write. A row says which tensor of theirs holds which parameters
of ours; a parameter that a configuration lacks (a bias, a norm of keys) drops out of its row with it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from models.config import ModelConfig
from models.hf.files import CheckpointError, CheckpointFolder, StoredTensor, shorten
from models.parameters import parameter_shapes

LAYER = "{i}"  # in a row: every layer's number
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # that weights may be stored in, and their bytes a value


@dataclass(frozen=True)
class Row:
    """`theirs` holds `ours` stacked along dim 0, transposed where linear layers are stored [in, out]."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Architecture:
    """How an architecture stores its weights.

    Attributes:
        model_class: the class in transformers, as config.json names it.
        prefix: in front of all names but the head's; checkpoints of the bare model lack it.
        ignored: names of stored constants that are no weights.
    """

    model_class: str
    prefix: str
    rows: tuple[Row, ...]
    ignored: str


def _same(*names: str) -> tuple[Row, ...]:
    return tuple(Row(f"model.{name}", (name,)) for name in names)


LLAMA = (
    *_same("embed_tokens.weight"),
    *_same(
        "layers.{i}.input_layernorm.weight",
        "layers.{i}.self_attn.q_proj.weight",
        "layers.{i}.self_attn.q_proj.bias",
        "layers.{i}.self_attn.k_proj.weight",
        "layers.{i}.self_attn.k_proj.bias",
        "layers.{i}.self_attn.v_proj.weight",
        "layers.{i}.self_attn.v_proj.bias",
        "layers.{i}.self_attn.o_proj.weight",
        "layers.{i}.self_attn.o_proj.bias",
        "layers.{i}.self_attn.q_norm.weight",
        "layers.{i}.self_attn.k_norm.weight",
        "layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.mlp.gate_proj.weight",
        "layers.{i}.mlp.gate_proj.bias",
        "layers.{i}.mlp.up_proj.weight",
        "layers.{i}.mlp.up_proj.bias",
        "layers.{i}.mlp.down_proj.weight",
        "layers.{i}.mlp.down_proj.bias",
    ),
    *_same("norm.weight"),
    Row("lm_head.weight", ("lm_head.weight",)),
)

_QKV = tuple(f"layers.{LAYER}.self_attn.{kind}_proj" for kind in "qkv")
GPT2 = (
    Row("transformer.wte.weight", ("embed_tokens.weight",)),
    Row("transformer.wpe.weight", ("embed_positions.weight",)),
    Row("transformer.h.{i}.ln_1.weight", ("layers.{i}.input_layernorm.weight",)),
    Row("transformer.h.{i}.ln_1.bias", ("layers.{i}.input_layernorm.bias",)),
    Row("transformer.h.{i}.attn.c_attn.weight", tuple(f"{name}.weight" for name in _QKV), transposed=True),
    Row("transformer.h.{i}.attn.c_attn.bias", tuple(f"{name}.bias" for name in _QKV)),
    Row("transformer.h.{i}.attn.c_proj.weight", ("layers.{i}.self_attn.o_proj.weight",), transposed=True),
    Row("transformer.h.{i}.attn.c_proj.bias", ("layers.{i}.self_attn.o_proj.bias",)),
    Row("transformer.h.{i}.ln_2.weight", ("layers.{i}.post_attention_layernorm.weight",)),
    Row("transformer.h.{i}.ln_2.bias", ("layers.{i}.post_attention_layernorm.bias",)),
    Row("transformer.h.{i}.mlp.c_fc.weight", ("layers.{i}.mlp.up_proj.weight",), transposed=True),
    Row("transformer.h.{i}.mlp.c_fc.bias", ("layers.{i}.mlp.up_proj.bias",)),
    Row("transformer.h.{i}.mlp.c_proj.weight", ("layers.{i}.mlp.down_proj.weight",), transposed=True),
    Row("transformer.h.{i}.mlp.c_proj.bias", ("layers.{i}.mlp.down_proj.bias",)),
    Row("transformer.ln_f.weight", ("norm.weight",)),
    Row("transformer.ln_f.bias", ("norm.bias",)),
    Row("lm_head.weight", ("lm_head.weight",)),
)

_INV_FREQ = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # old transformers stored the frequencies
_CAUSAL = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"  # the triangle of ones, not a linear layer's bias
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "model.", LLAMA, _INV_FREQ),
    "qwen2": Architecture("Qwen2ForCausalLM", "model.", LLAMA, _INV_FREQ),
    "qwen3": Architecture("Qwen3ForCausalLM", "model.", LLAMA, _INV_FREQ),
    "gpt2": Architecture("GPT2LMHeadModel", "transformer.", GPT2, _CAUSAL),
}


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of theirs, its shape, and the parameters that are stacked in it with their numbers of rows."""

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool


def pieces(architecture: str, config: ModelConfig) -> list[StackedTensor]:
    """The tensors of `config` in an `architecture` of ARCHITECTURES, in the table's order, layer by layer.

    Raises:
        CheckpointError: the architecture has no place for a parameter of the model, which it names.
    """
    shapes = parameter_shapes(config)
    found: list[StackedTensor] = []
    for theirs, ours, transposed in _expanded(ARCHITECTURES[architecture].rows, config.layers):
        if all(name in shapes for name in ours):
            parts = [shapes.pop(name) for name in ours]
            shape = (sum(part[0] for part in parts), *parts[0][1:])
            rows = tuple(part[0] for part in parts)
            found.append(StackedTensor(theirs, shape[::-1] if transposed else shape, ours, rows, transposed))
    if shapes:
        raise CheckpointError(f"{architecture} has no place for {shorten(list(shapes))}.")
    return found


def _expanded(rows: tuple[Row, ...], layers: int) -> list[tuple[str, tuple[str, ...], bool]]:
    """Rows with layers' numbers put in: those before the layers, each layer's, those after."""
    inside = [row for row in rows if LAYER in row.theirs]
    first = rows.index(inside[0])
    every = [(row, 0) for row in rows[:first]]
    every += [(row, index) for index in range(layers) for row in inside]
    every += [(row, 0) for row in rows[first + len(inside) :]]
    return [
        (
            row.theirs.replace(LAYER, str(index)),
            tuple(name.replace(LAYER, str(index)) for name in row.ours),
            row.transposed,
        )
        for row, index in every
    ]


def stored_pieces(folder: CheckpointFolder, architecture: str, config: ModelConfig) -> dict[str, StackedTensor]:
    """The pieces of the model by their names in `folder`, once names, shapes and dtypes are known to be right.

    A tied model may store its head all the same (see `stored_head`); whether it equals the embedding is seen when it is
    read.

    Raises:
        CheckpointError: tensors that are missing, left over, of another shape, or of a dtype that holds no weights.
    """
    known, tensors = ARCHITECTURES[architecture], folder.tensors
    bare = not any(name.startswith(known.prefix) for name in tensors)
    wanted = {(p.theirs.removeprefix(known.prefix) if bare else p.theirs): p for p in pieces(architecture, config)}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        hint = " (or set tie_word_embeddings in its config.json)" if missing == ["lm_head.weight"] else ""
        raise CheckpointError(
            f"{folder.path} lacks {len(missing)} tensors of this {architecture} model: {shorten(missing)}{hint}."
        )
    head = stored_head(folder, config)
    extra = [name for name in tensors if name not in wanted and not re.fullmatch(known.ignored, name)]
    extra = [name for name in extra if head is None or name != "lm_head.weight"]
    if extra:
        raise CheckpointError(
            f"{folder.path} holds {len(extra)} tensors that this {architecture} model has no place for: "
            f"{shorten(sorted(extra))}."
        )
    _check_forms(folder, {**{n: p.shape for n, p in wanted.items()}, **_head_shape(head, config)})
    return wanted


def stored_head(folder: CheckpointFolder, config: ModelConfig) -> StoredTensor | None:
    """The head that a checkpoint of a tied model stores beside the embedding, if it does."""
    return folder.tensors.get("lm_head.weight") if config.tied_embeddings else None


def _head_shape(head: StoredTensor | None, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {"lm_head.weight": (config.vocab_size, config.hidden)} if head else {}


def _check_forms(folder: CheckpointFolder, shapes: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [
        f"{name} is {list(folder.tensors[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if folder.tensors[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(f"{folder.path} disagrees with its config.json: {shorten(wrong)}.")
    coded = [f"{name} ({folder.tensors[name].dtype})" for name in shapes if folder.tensors[name].dtype not in DTYPES]
    if coded:
        raise CheckpointError(
            f"{folder.path} holds weights that are quantised or no numbers with a point: {shorten(coded)}; give a "
            f"checkpoint in {', '.join(DTYPES)}."
        )
