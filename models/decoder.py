"""One decoder for the Llama, Qwen and GPT-2 families, over packed rows.

Single-device code: attention is handed in (`models.attend`), and parallelism wraps the modules from outside. The
number of heads is read from the projections' width, so a module that holds a slice of them works unchanged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.attend import Attend, AttentionContext
from models.config import Activation, Mlp, ModelConfig, Positions
from models.initialise import initialise
from models.loss import chunked_cross_entropy
from models.norm import RMSNorm, make_norm
from models.rotary import angles, frequencies, rotate


class SelfAttention(nn.Module):
    """The two sides of attention: `project` makes q, k, v; `output` takes attention's result."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.bias or config.qkv_bias
        self.q_proj = nn.Linear(config.hidden, query, bias=bias)
        self.k_proj = nn.Linear(config.hidden, key, bias=bias)
        self.v_proj = nn.Linear(config.hidden, key, bias=bias)
        self.o_proj = nn.Linear(query, config.hidden, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.sink else None

    def project(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`x[T, hidden] -> q[T, H, D], k[T, Hkv, D], v[T, Hkv, D]`; rotates if angles are given."""
        q, k, v = (
            rearrange(linear(x), "T (H D) -> T H D", D=self.head_dim)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def output(self, out: Tensor) -> Tensor:
        return self.o_proj(rearrange(out, "T H D -> T (H D)"))


class MLP(nn.Module):
    """`[T, hidden] -> [T, hidden]`, gated or plain."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gated = config.mlp is Mlp.gated
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=config.bias) if gated else None
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=config.bias)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=config.bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self._activate(self.up_proj(x)))
        return self.down_proj(self._activate(self.gate_proj(x)) * self.up_proj(x))

    def _activate(self, x: Tensor) -> Tensor:
        return F.silu(x) if self.activation is Activation.silu else F.gelu(x, approximate="tanh")


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. Under `recompute` only the parts before and after attention run again in backward.

    Attention then holds its q, k, v and result, the layer its input; the work of attention, and any exchange in it,
    is never repeated.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.mask = config.layer_masks()[index]
        self.softmax_scale, self.softcap, self.recompute = config.scale(), config.softcap, config.recompute
        self.input_layernorm = make_norm(config)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config)
        self.compiled: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, attend: Attend) -> Tensor:
        """`x[T, hidden] -> [T, hidden]`; `cos` and `sin` are `[T, D/2]`, or None without rotary positions."""
        context = AttentionContext(self.index, self.mask, self.softmax_scale, self.softcap, self.self_attn.sinks)
        before, after = self.compiled or (self.before, self.after)
        q, k, v = before(x, cos, sin)
        out = attend(q, k, v, context)
        return after(x, out)

    def _run(self, part: Callable[..., Any], *inputs: Tensor | None) -> Any:
        if self.recompute and torch.is_grad_enabled():
            # No part draws random numbers, so their state need not be kept.
            return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
        return part(*inputs)

    def before(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The part before attention: q, k, v."""
        return self._run(self._project, x, cos, sin)

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        """The part after attention: the layer's result."""
        return self._run(self._finish, x, out)

    def _project(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def _finish(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.self_attn.output(out)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole model. Its weights depend on `seed` alone; on the "meta" device none are made until `materialise`.

    Raises ValueError if the config cannot be built.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        config.validate()
        self.config = config
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
            learned = config.positions is Positions.learned
            self.embed_positions = nn.Embedding(config.max_positions, config.hidden) if learned else None
            self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.layers))
            self.norm = make_norm(config)
            tied = config.tied_embeddings
            self.lm_head = None if tied else nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.to(dtype)
        if torch.device(device).type != "meta":
            self.materialise(seed, device)

    def materialise(self, seed: int, device: torch.device | str) -> None:
        """Allocates every parameter on `device` and gives it its initial value."""
        self.to_empty(device=device)
        initialise(self, self.config, seed)

    @property
    def head_weight(self) -> Tensor:
        """The language-model head `[vocab_size, hidden]`: the embedding itself when tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile the layers' parts before and after attention, at their first run; alike layers share their graphs.

        Attention stays outside, so that documents change nothing in a graph, and that strategies, DDP and FSDP2 need
        not be traced. (A decoder with local attention also compiles whole: `torch.compile(decoder, fullgraph=True)`.)
        """
        parts = [  # isolated: another decoder in this process, as in a sweep, neither shares graphs nor counts as more
            torch.compile(  # pyright: ignore[reportCallIssue] its overloads lack the two limits
                part, fullgraph=True, backend=backend, recompile_limit=16, isolate_recompiles=True
            )
            for part in (DecoderLayer.before, DecoderLayer.after)
        ]
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.compiled = partial(parts[0], layer), partial(parts[1], layer)

    def check_lengths(self, longest: int) -> None:
        """Refuses a batch whose longest document passes `max_positions`; see `ModelConfig.check_lengths`."""
        self.config.check_lengths(longest)

    def forward(
        self, tokens: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        """Hidden states after the final norm. `positions` restart at 0 in each document and are data, not inferred.

        Raises ValueError for a learned position outside the table if the positions lie on the CPU; elsewhere that
        would wait for the device, and in a compiler's graph break it, so call `check_lengths` with the layout's longest
        document instead.
        """
        x = self.embed_tokens(tokens)
        cos = sin = None
        if self.embed_positions is not None:
            self._check_positions(positions)
            x = x + self.embed_positions(positions)
        else:
            cos, sin = self._angles(positions, torch.promote_types(x.dtype, torch.float32))
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def token_nll(self, hidden: Float[Tensor, "T hidden"], labels: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Negative log-likelihood of each label in nats, 0 where it is -100; see `chunked_cross_entropy`."""
        return chunked_cross_entropy(hidden, self.head_weight, labels)

    def logits(self, hidden: Float[Tensor, "T hidden"]) -> Float[Tensor, "T V"]:
        """All logits of a few rows, for sampling and checks; training never holds them."""
        return F.linear(hidden, self.head_weight)

    def loss(
        self,
        tokens: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        labels: Int[Tensor, " T"],
        attend: Attend,
        valid_tokens: int,
    ) -> Float[Tensor, ""]:
        """The sum of the row's losses in nats over `valid_tokens`, the number of labelled tokens of the whole step.

        `valid_tokens` counts every rank and micro-batch, so their losses and gradients add up; a row without labels
        gives 0. Raises ValueError if it is below 1.
        """
        if valid_tokens < 1:
            raise ValueError(f"valid_tokens={valid_tokens}: a step needs at least 1 labelled token over all its rows")
        return self.token_nll(self(tokens, positions, attend), labels).sum() / valid_tokens

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        config = self.config
        assert config.rope_theta is not None  # validate() saw to it
        radians = frequencies(config.head_dim, config.rope_theta, config.rope_factor, config.rope_original_positions)
        return angles(positions, radians, dtype)

    def _check_positions(self, positions: Tensor) -> None:
        if positions.device.type != "cpu" or positions.numel() == 0 or torch.compiler.is_compiling():
            return
        low, high = (int(bound) for bound in torch.aminmax(positions))
        if low < 0:
            raise ValueError(f"position {low} is negative; positions count from 0 within each document")
        self.config.check_lengths(high + 1)
