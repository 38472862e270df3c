"""The models: a small Llama in plain torch, stored with the names Hugging Face uses.

`Shape.mask` makes it a masked-diffusion model: the same blocks, attention in both directions, and the
logits at a position are about the token at that position instead of the one after it.

transformers' own class would train as well, but slower on two cores; `test_hf_equality.py` checks
that both read the same file the same way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes `config.json` states."""

    vocab: int
    hidden: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 352
    theta: float = 500000.0
    positions: int = 4096
    epsilon: float = 1e-5
    mask: int | None = None     # the token that stands for an unknown one; None: causal

    def config(self) -> dict[str, object]:
        """The Hugging Face configuration of this shape."""
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} if self.mask is None else {
            "architectures": ["KvlmDiffusion"], "model_type": "kvlm_diffusion", "attention": "bidirectional",
            "mask_token_id": self.mask}
        return {
            **kind, "torch_dtype": "float32",
            "vocab_size": self.vocab, "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.ffn, "hidden_act": "silu", "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta, "max_position_embeddings": self.positions, "tie_word_embeddings": True,
            "attention_bias": False, "mlp_bias": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }

    @classmethod
    def from_config(cls, config: dict) -> "Shape":
        return cls(vocab=config["vocab_size"], hidden=config["hidden_size"], layers=config["num_hidden_layers"],
                   heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
                   head_dim=config["head_dim"], ffn=config["intermediate_size"], theta=config["rope_theta"],
                   positions=config["max_position_embeddings"], epsilon=config["rms_norm_eps"],
                   mask=config.get("mask_token_id"))


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention: dimension i turns with i + head_dim / 2."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, value = (proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
                       for proj in (self.q_proj, self.k_proj, self.v_proj))
        group = self.shape.heads // self.shape.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), k, value.repeat_interleave(group, 1),
                                               is_causal=self.shape.mask is None)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.ffn)
        self.up_proj = linear(shape.hidden, shape.ffn)
        self.down_proj = linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Attribute names make the state dict equal Hugging Face's, less the prefix `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        # Written as in transformers: at far positions the last bit of a frequency shows in the logits.
        inverse = 1.0 / (shape.theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
        angle = torch.outer(torch.arange(shape.positions).float(), inverse)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def initialise(self) -> None:
        """Small normal weights; those that write to the residual stream start even smaller."""
        for name, weight in self.named_parameters():
            if "embed" in name:
                nn.init.normal_(weight, std=0.1)
            elif weight.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=(0.3 if writes else 0.7) * weight.shape[1] ** -0.5)

    def hidden(self, ids: Tensor) -> Tensor:
        """The normalised last hidden states."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.hidden(ids), self.embed_tokens.weight)

    def save(self, folder: Path) -> None:
        """Writes `config.json` and `model.safetensors`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.shape.config(), indent=2) + "\n")
        tensors = {f"model.{name}": t.detach().float().contiguous() for name, t in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: Path) -> "Llama":
        """Inverse of `save`."""
        model = cls(Shape.from_config(json.loads((folder / "config.json").read_text())))
        tensors = load_file(folder / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
        return model
