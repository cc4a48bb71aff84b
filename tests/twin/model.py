"""A Llama over one sequence at a time, without padding or cache, from its weights by name. Float64.

    hidden = norm(x + attention + mlp);  log-probs = log softmax(head(hidden) / temperature)

Legend: ``S`` tokens of a prompt and its completion, ``H`` width, ``D`` width of an attention head, ``V`` vocabulary.
"""

import math
from dataclasses import dataclass

import torch

HEAD = "lm_head.weight"
ADAPTED = "base_model.model."
"""What PEFT puts in front of a weight's name."""


@dataclass(frozen=True)
class Sizes:
    """What the weights do not say of themselves."""

    layers: int
    heads: int
    key_heads: int
    epsilon: float
    rope_theta: float
    pad: int
    """The padding token, whose embedding is not trained."""


@dataclass(frozen=True)
class Weights:
    """A policy: weights by their base names, and the factors of an adapter by the name of the weight they join."""

    base: dict
    factors_a: dict
    factors_b: dict
    scaling: float

    @classmethod
    def of(cls, named, scaling):
        """From the names of a model, with or without an adapter."""
        base = {}
        factors_a = {}
        factors_b = {}
        for name, tensor in named.items():
            short = name.removeprefix(ADAPTED)
            if ".lora_A." in short:
                factors_a[short.split(".lora_A.")[0] + ".weight"] = tensor
            elif ".lora_B." in short:
                factors_b[short.split(".lora_B.")[0] + ".weight"] = tensor
            else:
                base[short.replace(".base_layer.", ".")] = tensor
        return cls(base, factors_a, factors_b, scaling)

    def merged(self):
        """The weights of the same policy without an adapter: ``W + scaling B A``."""
        merged = dict(self.base)
        for name, a in self.factors_a.items():
            merged[name] = self.base[name] + self.scaling * (self.factors_b[name] @ a)
        return merged

    def linear(self, name, x):
        """``W x``, and with an adapter ``W x + scaling B (A x)``."""
        out = x @ self.base[name].T
        if name in self.factors_a:
            out = out + self.scaling * ((x @ self.factors_a[name].T) @ self.factors_b[name].T)
        return out


def rms_norm(x, weight, epsilon):
    """``w x / sqrt(mean(x^2) + epsilon)``."""
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon)


def rotated(x_SD, theta):
    """Rotary positions: dimensions i and i + D/2 of position s are turned by ``s theta^(-2 i / D)``."""
    length, width = x_SD.shape
    half = width // 2
    first = []
    second = []
    for i in range(half):
        frequency = theta ** (-2.0 * i / width)
        angle = torch.arange(length, dtype=torch.float64) * frequency
        cos = torch.cos(angle)
        sin = torch.sin(angle)
        first.append(x_SD[:, i] * cos - x_SD[:, i + half] * sin)
        second.append(x_SD[:, i + half] * cos + x_SD[:, i] * sin)
    return torch.stack([*first, *second], 1)


def attention(weights, prefix, x_SH, sizes):
    """Causal attention; query heads share the keys and values of their group."""
    query = weights.linear(f"{prefix}.q_proj.weight", x_SH)
    key = weights.linear(f"{prefix}.k_proj.weight", x_SH)
    value = weights.linear(f"{prefix}.v_proj.weight", x_SH)
    width = query.shape[1] // sizes.heads
    length = len(x_SH)
    hidden_from = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    outputs = []
    for head in range(sizes.heads):
        group = head * sizes.key_heads // sizes.heads
        q = rotated(query[:, head * width : (head + 1) * width], sizes.rope_theta)
        k = rotated(key[:, group * width : (group + 1) * width], sizes.rope_theta)
        v = value[:, group * width : (group + 1) * width]
        scores = (q @ k.T / math.sqrt(width)).masked_fill(hidden_from, -math.inf)
        outputs.append(torch.softmax(scores, -1) @ v)
    return weights.linear(f"{prefix}.o_proj.weight", torch.cat(outputs, 1))


def hidden_states(weights, ids, sizes):
    """The last hidden state at each position, ``[S, H]``: what head and value head read."""
    embeddings = weights.base["model.embed_tokens.weight"]
    x = torch.stack([embeddings[token].detach() if token == sizes.pad else embeddings[token] for token in ids])
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        normed = rms_norm(x, weights.base[f"{prefix}.input_layernorm.weight"], sizes.epsilon)
        x = x + attention(weights, f"{prefix}.self_attn", normed, sizes)
        normed = rms_norm(x, weights.base[f"{prefix}.post_attention_layernorm.weight"], sizes.epsilon)
        gate = weights.linear(f"{prefix}.mlp.gate_proj.weight", normed)
        up = weights.linear(f"{prefix}.mlp.up_proj.weight", normed)
        x = x + weights.linear(f"{prefix}.mlp.down_proj.weight", gate * torch.sigmoid(gate) * up)
    return rms_norm(x, weights.base["model.norm.weight"], sizes.epsilon)


class RoundedProduct(torch.autograd.Function):
    """``h W^T`` of factors rounded to bfloat16, summed exactly; so are the two products of its gradient."""

    @staticmethod
    def forward(ctx, hidden, weight):
        hidden = hidden.bfloat16().double()
        weight = weight.bfloat16().double()
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        gradient = gradient.bfloat16().double()
        return gradient @ weight, gradient.T @ hidden


def log_probs(weights, hidden, temperature, *, rounded=False):
    """Next-token log-probs (nats) at the sampling temperature, over the whole vocabulary."""
    head = weights.base[HEAD]
    if rounded:
        logits = RoundedProduct.apply(hidden, head)
    else:
        logits = hidden @ head.T
    return torch.log_softmax(logits / temperature, -1)
