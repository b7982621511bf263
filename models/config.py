"""The description of a decoder: one dataclass for the Llama, Qwen and GPT-2 families.

It is a structured config for OmegaConf (plain types and enums only). Sizes have no defaults: the presets in
`conf/model/` give them, each with its source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kernels.mask_spec import UNBOUNDED, MaskSpec

# The largest of each size: no model comes near, and a file or a command that says more is wrong. Heads are as wide as
# `kernels.attention.checks.MAX_HEAD_DIM`.
LARGEST = {
    "vocab_size": 1 << 24, "layers": 10_000, "hidden": 1 << 20, "heads": 1 << 14, "kv_heads": 1 << 14, "head_dim": 256,
    "ffn": 1 << 23, "max_positions": 1 << 40,
}  # fmt: skip


class Positions(Enum):
    """How a token's position enters: rotated queries and keys (RoFormer, section 3.2), or a learned table (GPT-2)."""

    rotary = "rotary"
    learned = "learned"


class Norm(Enum):
    """RMSNorm (Zhang and Sennrich 2019, equation 4) or LayerNorm."""

    rms = "rms"
    layer = "layer"


class Mlp(Enum):
    """`gated`: down(act(gate(x)) * up(x)) (Shazeer 2020, equation 6); `plain`: down(act(up(x)))."""

    gated = "gated"
    plain = "plain"


class Activation(Enum):
    """The MLP's nonlinearity; `gelu_tanh` is the tanh approximation that GPT-2 uses."""

    silu = "silu"
    gelu_tanh = "gelu_tanh"


@dataclass
class ModelConfig:
    """Shapes and switches of a decoder. Call `validate()` before use; `Decoder` does.

    Sizes have no defaults: presets give them. What `window`, `chunk`, `prefix` and `first` mean is in
    `kernels.mask_spec`.
    """

    vocab_size: int  # ids of the embedding table and of the head
    layers: int  # blocks of attention and MLP
    hidden: int  # width of the residual stream
    heads: int  # query heads
    kv_heads: int  # key and value heads; divides heads
    head_dim: int  # width of a head; need not be hidden / heads
    ffn: int  # width of the MLP's inner layer
    max_positions: int  # the longest document; with learned positions also the size of their table
    norm_eps: float  # added to the variance in every norm
    tied_embeddings: bool  # whether the head is the embedding table
    positions: Positions = Positions.rotary  # rotary: queries and keys are rotated; learned: a table, as in GPT-2
    rope_theta: float | None = None  # base of rotary wavelengths; no default, as a wrong one goes unnoticed
    rope_factor: float | None = None  # stretches long rotary wavelengths by the Llama 3.1 rule; null: no stretching
    rope_original_positions: int | None = None  # the length that rope_factor stretches from
    norm: Norm = Norm.rms  # RMSNorm or LayerNorm
    mlp: Mlp = Mlp.gated  # gated: down(act(gate(x)) * up(x)); plain: down(act(up(x)))
    activation: Activation = Activation.silu  # the MLP's nonlinearity
    bias: bool = False  # every linear layer but the language-model head (GPT-2)
    qkv_bias: bool = False  # queries, keys and values only (Qwen2.5)
    qk_norm: bool = False  # RMSNorm of each query and key head before rotation (Qwen3)
    window: list[int | None] | None = None  # attention window of each layer, null for none; repeated over the layers
    chunk: list[int | None] | None = None  # attention chunk of each layer, null for none; repeated over the layers
    prefix: int | None = None  # the first tokens of a document, which see each other and are not predicted
    first: int | None = None  # the first keys of a document, seen from everywhere beside a window or a chunk
    softcap: float | None = None  # attention logits become softcap * tanh(logits / softcap)
    sink: bool = False  # a learned logit for each head that joins the softmax and carries no value
    softmax_scale: float | None = None  # factor on attention logits; null: head_dim ** -0.5
    init_std: float = 0.02  # standard deviation of the initial weights
    recompute: bool = False  # activation checkpointing around attention, never of attention itself
    attention: str = "auto"  # the kernels' backend: auto, triton, torch or reference
    compile: bool = False  # torch.compile of each layer's parts before and after attention
    path: str | None = None  # folder of the Hugging Face checkpoint to start from; null: random weights
    content_hash: str | None = None  # tells the checkpoint's weights from others; found at start

    def validate(self) -> None:
        """Raises ValueError, with the numbers, if no decoder can be built from these values."""
        sizes = ("vocab_size", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "max_positions")
        for name in sizes:
            if not 1 <= getattr(self, name) <= LARGEST[name]:
                why = ", the widest head that attention takes" if name == "head_dim" else ""
                raise ValueError(f"model.{name}={getattr(self, name)} must lie in 1 to {LARGEST[name]}{why}; lower it")
        for name in ("norm_eps", "init_std", "softcap", "softmax_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"model.{name}={value} must be a positive number")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}; "
                f"every key head serves the same number of query heads"
            )
        self._validate_positions()
        self._validate_masks()
        if (self.path is None) != (self.content_hash is None):
            raise ValueError(
                f"model.path={self.path} and model.content_hash={self.content_hash} belong together; model=hf with "
                f"model.path=DIR finds the hash, so leave it out"
            )

    def _validate_positions(self) -> None:
        if self.positions is Positions.learned:
            for name in ("rope_theta", "rope_factor", "rope_original_positions"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"model.{name}={getattr(self, name)} has no use with learned positions; "
                        f"set it to null or model.positions=rotary"
                    )
            return
        if self.rope_theta is None or not 1 < self.rope_theta < float("inf"):
            raise ValueError(
                f"model.rope_theta={self.rope_theta} must be above 1 with rotary positions; take the base that the "
                f"model family uses (10000, 500000, 1000000) or set model.positions=learned"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim} is odd, but rotary positions rotate pairs of channels; "
                f"use {self.head_dim + 1} or model.positions=learned"
            )
        factor, original = self.rope_factor, self.rope_original_positions
        if (factor is None) != (original is None):
            raise ValueError(
                f"model.rope_factor={factor} and model.rope_original_positions={original} belong together; "
                f"set both or neither"
            )
        if factor is not None and original is not None and (not 1 <= factor < float("inf") or original < 1):
            raise ValueError(
                f"model.rope_factor={factor} and model.rope_original_positions={original} must both be at least 1"
            )

    def _validate_masks(self) -> None:
        """Raise ValueError for lists that the layers do not repeat, and for masks that are none, naming the key."""
        try:  # what all layers share, first: no layer is to blame for it
            MaskSpec(prefix=self.prefix)
            MaskSpec(window=UNBOUNDED - 1, first=self.first)
        except ValueError as error:
            raise ValueError(f"model.{error}") from None
        for key in ("window", "chunk"):
            values = getattr(self, key)
            if values is not None and (isinstance(values, str) or not isinstance(values, Sequence)):
                raise ValueError(
                    f"model.{key}={values!r} must be a list, an entry for each layer, repeated: model.{key}=[{values}]"
                )
            if values is not None and (len(values) == 0 or self.layers % len(values)):
                raise ValueError(
                    f"model.{key} lists {len(values)} layers, which does not divide model.layers={self.layers}; "
                    f"the list is repeated over the layers, so give a length that divides {self.layers}, or null"
                )
        windows, chunks = self._repeated(self.window), self._repeated(self.chunk)
        if self.first is not None and not any(windows) and not any(chunks):
            raise ValueError(
                f"model.first={self.first} keeps a document's first keys beside a window or a chunk, and no layer has "
                f"one; set model.window or model.chunk, or leave model.first out"
            )
        for layer in range(self.layers):
            try:
                self._mask(windows[layer], chunks[layer])
            except ValueError as error:
                raise ValueError(f"layer {layer}: model.{error}") from None

    def _repeated(self, values: list[int | None] | None) -> list[int | None]:
        return [None] * self.layers if values is None else list(values) * (self.layers // len(values))

    def _mask(self, window: int | None, chunk: int | None) -> MaskSpec:
        first = self.first if window is not None or chunk is not None else None
        return MaskSpec(True, window, chunk, self.prefix, first)

    def layer_masks(self) -> list[MaskSpec]:
        """The attention mask of each layer inside a document; `len(...) == layers`."""
        options = list(zip(self._repeated(self.window), self._repeated(self.chunk)))
        made = {one: self._mask(*one) for one in set(options)}
        return [made[one] for one in options]

    def layer_windows(self) -> list[int | None]:
        """The attention window of each layer, in tokens; `len(...) == layers`."""
        return self._repeated(self.window)

    def scale(self) -> float:
        """The factor on attention logits: `softmax_scale`, or head_dim ** -0.5."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def check_lengths(self, longest: int) -> None:
        """Refuses a batch whose longest document, in tokens, passes `max_positions`; needs no look at the device.

        Raises ValueError with both numbers.
        """
        if longest > self.max_positions:
            raise ValueError(
                f"a document of {longest} tokens needs positions up to {longest - 1}, but "
                f"model.max_positions={self.max_positions}; split documents at {self.max_positions} tokens or set "
                f"model.max_positions={longest}"
            )
