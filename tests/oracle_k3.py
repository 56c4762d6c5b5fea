"""Every value of a Kimi-K3 model, or of Kimi-Linear by its checkpoint's own code, for one sequence from its weights.

Written from the formulas, as `tests.oracle` is, whose arithmetic it uses where the two are the same. Padding,
caches and batches do not exist here.

Shape suffixes: T positions, D hidden, H heads, K key width, V value width, E experts, S slots a token,
G groups of blocks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracle import (
    LATENT_EPS,
    Values,
    Weights,
    causal_convolution,
    delta_rule,
    rms_norm,
    sigmoid,
    silu,
    softmax,
    softplus,
)


def reference(model: Any, input_ids: Sequence[int]) -> Values:
    """Values of ``input_ids`` run alone, in float64.

    Args:
        model: A stand-in, whole or its text model; its config and ``state_dict()`` are read, nothing is called.
        input_ids: T token ids, at least one.

    Returns:
        ``{"host.value": {block: tensor}}`` as `tests.oracle.reference` has it. A ``source`` axis holds the G
        stored sums and then the running sum.
    """
    model = getattr(model, "language_model", model)
    return _Reading(model).all_of(input_ids)


class _Reading:
    def __init__(self, model: Any):
        self.config, self.state, self.values = model.config, model.state_dict(), Values()
        self.residuals = hasattr(self.config, "attn_res_block_size")

    def weights(self, prefix: str) -> Weights:
        return lambda name: self.state[f"{prefix}.{name}"].detach().to("cpu", torch.float64)

    def record(self, host: str, layer: int | None, **found: Tensor) -> None:
        for name, tensor in found.items():
            self.values.setdefault(f"{host}.{name}", {})[layer] = tensor

    def all_of(self, input_ids: Sequence[int]) -> Values:
        top = self.weights("model")
        ids = torch.tensor(list(input_ids), dtype=torch.long)
        stream = top("embed_tokens.weight")[ids]
        self.record("model", None, input_ids=ids, attention_mask=torch.ones_like(ids), token_embeddings=stream)
        stored: list[Tensor] = []
        for layer in range(self.config.num_hidden_layers):
            block = self.residual_block if self.residuals else self.plain_block
            stream = block(layer, stream, stored)
        if self.residuals:
            self.record("model", None, final_running_sum=stream, stored_sums=torch.stack([*stored, stream], 1))
            stream, weights = self.mix(stored, stream, top, "output_attn_res")
            self.record("model", None, output_mix=stream, output_mix_weights=weights)
        normed = rms_norm(stream, top("norm.weight"), self.config.rms_norm_eps)
        logits = normed @ self.weights("lm_head")("weight").T
        self.record(
            "model",
            None,
            final_norm_output=normed,
            lm_head_output=logits,
            logits=logits,
            next_token_probs=softmax(logits[-1]),
        )
        return self.values

    def plain_block(self, layer: int, stream: Tensor, stored: list[Tensor]) -> Tensor:
        """A pre-norm block as in any transformer."""
        middle = stream + self.mixer(layer, self.normed(layer, "input_layernorm", stream))
        mlp_input = self.normed(layer, "post_attention_layernorm", middle)
        leaving = middle + self.mlp(layer, mlp_input)
        self.record("layers", layer, layer_input=stream, layer_mid=middle, layer_output=leaving)
        self.record("layers", layer, mlp_norm_output=mlp_input, mlp_input=mlp_input)
        return leaving

    def residual_block(self, layer: int, stream: Tensor, stored: list[Tensor]) -> Tensor:
        """A block of Kimi-K3: both norms read a mix of the stored sums and the running sum."""
        weights = self.weights(f"model.layers.{layer}")
        attention_mix, attention_weights = self.mix(stored, stream, weights, "self_attention_res")
        starts = layer % self.config.attn_res_block_size == 0
        if starts:
            stored.append(stream)
        attended = self.mixer(layer, self.normed(layer, "input_layernorm", attention_mix))
        middle = attended if starts else stream + attended
        mlp_mix, mlp_weights = self.mix(stored, middle, weights, "mlp_res")
        mlp_input = self.normed(layer, "post_attention_layernorm", mlp_mix)
        leaving = middle + self.mlp(layer, mlp_input)
        self.record("layers", layer, layer_input=stream, layer_mid=middle, layer_output=leaving)
        self.record("layers", layer, mlp_norm_output=mlp_input, mlp_input=mlp_input)
        self.record("layers", layer, attention_mix=attention_mix, attention_mix_weights=attention_weights)
        self.record("layers", layer, mlp_mix=mlp_mix, mlp_mix_weights=mlp_weights)
        return leaving

    def normed(self, layer: int, name: str, x: Tensor) -> Tensor:
        normed = rms_norm(x, self.weights(f"model.layers.{layer}")(f"{name}.weight"), self.config.rms_norm_eps)
        if name == "input_layernorm":
            self.record("layers", layer, attention_norm_output=normed)
        return normed

    def mix(self, stored: list[Tensor], running: Tensor, weights: Weights, name: str) -> tuple[Tensor, Tensor]:
        """Attention residuals: the mix ``[T, D]`` and its weights over G stored sums and the running one."""
        sources = torch.stack([*stored, running], 1)
        query = weights(f"{name}_proj.weight")[0]
        keys = rms_norm(sources, weights(f"{name}_norm.weight"), self.config.rms_norm_eps)
        over = softmax(keys @ query)
        groups = math.ceil(self.config.num_hidden_layers / self.config.attn_res_block_size)
        spread = torch.full((len(running), groups + 1), torch.nan, dtype=over.dtype)
        spread[:, : len(stored)], spread[:, -1] = over[:, :-1], over[:, -1]
        return (over[..., None] * sources).sum(1), spread

    def mixer(self, layer: int, x_TD: Tensor) -> Tensor:
        weights = self.weights(f"model.layers.{layer}.self_attn")
        linear = layer + 1 in self.config.linear_attn_config["kda_layers"]
        found = (linear_attention if linear else latent_attention)(self.config, weights, x_TD)
        self.record("linear_attn" if linear else "self_attn", layer, **found)
        return found["attention_output"]

    def mlp(self, layer: int, x_TD: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}"
        if layer < self.config.first_k_dense_replace:
            found = gated_mlp(self.config, self.weights(f"{prefix}.mlp"), x_TD)
        else:
            found = mixture(self.config, self.weights(f"{prefix}.block_sparse_moe"), x_TD)
        self.record("mlp", layer, **found)
        return found["mlp_output"]


def linear_attention(config: Any, weights: Weights, x_TD: Tensor) -> dict[str, Tensor]:
    """Kimi Delta Attention; with a lower bound the decay is a scaled sigmoid, else a softplus."""
    linear = config.linear_attn_config
    heads, width, bound = linear["num_heads"], linear["head_dim"], linear.get("gate_lower_bound")

    def convolved(name: str) -> Tensor:
        projected = x_TD @ weights(f"{name}_proj.weight").T
        return silu(causal_convolution(projected, weights(f"{name}_conv1d.weight")[:, 0])).reshape(-1, heads, width)

    queries, keys, held = (convolved(name) for name in "qkv")
    raw = x_TD @ weights("f_a_proj.weight").T @ weights("f_b_proj.weight").T + weights("dt_bias")
    rates = weights("A_log").flatten()[:heads].reshape(heads, 1).exp()
    raw = raw.reshape(-1, heads, width)
    decays = -rates * softplus(raw) if bound is None else bound * sigmoid(rates * raw)
    betas = sigmoid(x_TD @ weights("b_proj.weight").T)
    states, read = delta_rule(queries, keys, held, decays, betas)
    if linear.get("use_full_rank_gate"):
        gate = x_TD @ weights("g_proj.weight").T
    else:
        gate = x_TD @ weights("g_a_proj.weight").T @ weights("g_b_proj.weight").T
    gate = gate.reshape(-1, heads, width)
    premix = rms_norm(read, weights("o_norm.weight"), config.rms_norm_eps) * sigmoid(gate)
    return {
        "attention_queries": queries,
        "attention_keys": keys,
        "attention_values": held,
        "decays": decays,
        "betas": betas,
        "states": states,
        "state_output": states[-1],
        "attention_head_outputs": read,
        "gate_logits": gate,
        "attention_premix": premix,
        "attention_output": premix.flatten(1) @ weights("o_proj.weight").T,
    }


def latent_attention(config: Any, weights: Weights, x_TD: Tensor) -> dict[str, Tensor]:
    """Multi-head latent attention without rotary; Kimi-K3's has a rank for queries and an output gate."""
    heads, length = config.num_attention_heads, len(x_TD)
    found: dict[str, Tensor] = {}
    if config.q_lora_rank is None:
        flat = x_TD @ weights("q_proj.weight").T
    else:
        latent = rms_norm(x_TD @ weights("q_a_proj.weight").T, weights("q_a_layernorm.weight"), LATENT_EPS)
        found["query_latent"] = latent
        flat = latent @ weights("q_b_proj.weight").T
    queries = flat.reshape(length, heads, -1).transpose(0, 1)
    compressed = x_TD @ weights("kv_a_proj_with_mqa.weight").T
    kv_latent, shared = compressed.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=1)
    kv_latent = rms_norm(kv_latent, weights("kv_a_layernorm.weight"), LATENT_EPS)
    expanded = (kv_latent @ weights("kv_b_proj.weight").T).reshape(length, heads, -1).transpose(0, 1)
    own, held = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=2)
    keys = torch.cat([own, shared.expand(heads, -1, -1)], dim=2)
    scores = torch.einsum("hqc,hkc->hqk", queries, keys) / math.sqrt(queries.shape[-1])
    later = torch.arange(length)[None, :] > torch.arange(length)[:, None]
    scores = scores.masked_fill(later, -torch.inf)
    pattern = softmax(scores)
    read = torch.einsum("hqk,hkv->qhv", pattern, held)
    premix = read.flatten(1)
    if config.q_lora_rank is not None:
        found["output_gate"] = sigmoid(x_TD @ weights("g_proj.weight").T)
        premix = premix * found["output_gate"]
    return {
        **found,
        "attention_queries": queries,
        "attention_keys": keys,
        "attention_values": held,
        "kv_latent": kv_latent,
        "attention_scores": scores,
        "attention_probabilities": pattern,
        "attention_head_outputs": read,
        "attention_premix": premix,
        "attention_output": premix @ weights("o_proj.weight").T,
    }


def activated(config: Any, gate: Tensor) -> Tensor:
    """What the activation makes of the gate: SiLU, or SiTU's ``b tanh(g / b) sigmoid(g)``."""
    beta = getattr(config, "activation_situ_beta", None)
    return silu(gate) if beta is None else beta * (gate / beta).tanh() * sigmoid(gate)


def neurons_of(config: Any, gate: Tensor, up: Tensor) -> Tensor:
    """The activation times the up projection, which SiTU bounds too."""
    bound = getattr(config, "activation_situ_linear_beta", None)
    return activated(config, gate) * (up if bound is None else bound * (up / bound).tanh())


def gated_mlp(config: Any, weights: Weights, x_TD: Tensor) -> dict[str, Tensor]:
    """A dense MLP or the shared expert."""
    gate, up = x_TD @ weights("gate_proj.weight").T, x_TD @ weights("up_proj.weight").T
    neurons = neurons_of(config, gate, up)
    return {
        "mlp_activation": activated(config, gate),
        "mlp_neurons": neurons,
        "mlp_output": neurons @ weights("down_proj.weight").T,
    }


def mixture(config: Any, weights: Weights, x_TD: Tensor) -> dict[str, Tensor]:
    """Routed experts, in a latent width where there is one, and the shared expert beside them."""
    latent = hasattr(config, "routed_expert_hidden_size")
    logits_TE = x_TD @ weights("gate.weight").T
    gates = sigmoid(logits_TE)
    scores = gates + weights("gate.e_score_correction_bias")
    indices = scores.argsort(dim=1, descending=True)[:, : config.num_experts_per_token]
    chosen = gates.gather(1, indices)
    chosen = chosen / chosen.sum(1, keepdim=True) * config.routed_scaling_factor
    read = x_TD @ weights("routed_expert_down_proj.weight").T if latent else x_TD
    outputs = torch.zeros(*indices.shape, read.shape[1], dtype=x_TD.dtype)
    for t, slots in enumerate(indices.tolist()):
        for slot, number in enumerate(slots):
            expert = f"experts.{number}"
            gate, up = weights(f"{expert}.w1.weight") @ read[t], weights(f"{expert}.w3.weight") @ read[t]
            outputs[t, slot] = chosen[t, slot] * (weights(f"{expert}.w2.weight") @ neurons_of(config, gate, up))
    summed = routed = outputs.sum(1)
    shared = gated_mlp(config, lambda name: weights(f"shared_experts.{name}"), x_TD)
    found = {
        "router_logits": logits_TE,
        "expert_indices": indices,
        "expert_weights": chosen,
        "expert_outputs": outputs,
        "shared_expert_output": shared["mlp_output"],
        "shared_mlp_activation": shared["mlp_activation"],
        "shared_mlp_neurons": shared["mlp_neurons"],
    }
    if latent:
        normed = rms_norm(summed, weights("routed_expert_norm.weight"), config.rms_norm_eps)
        routed = normed @ weights("routed_expert_up_proj.weight").T
        found |= {"routed_input": read, "routed_latent": summed}
    return {**found, "routed_output": routed, "mlp_output": routed + shared["mlp_output"]}
