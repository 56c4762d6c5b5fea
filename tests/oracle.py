"""Every value of a Kimi-Linear model for one sequence, from its weights alone.

Written from the formulas, without a call into transformers' modelling code, so that it can judge both
a capture and that code. Everything runs in float64 unless asked otherwise, the recurrence always.

Shape suffixes: T positions, D hidden, H heads, K key width, V value width, E experts, S slots a token.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Values = dict[str, dict[int | None, Tensor]]
Weights = Callable[[str], Tensor]

LATENT_EPS = 1e-6  # the norms inside MLA take the default, not the config's rms_norm_eps


def reference(model: Any, input_ids: Sequence[int], dtype: torch.dtype = torch.float64) -> Values:
    """Values of ``input_ids`` run alone, at batch one, without padding or cache.

    Args:
        model: A ``KimiLinearForCausalLM``; its config and ``state_dict()`` are read, nothing is called.
        input_ids: T token ids, at least one.
        dtype: float64 or float32, of the arithmetic and of every float value returned.

    Returns:
        ``{"host.value": {block: tensor}}``, laid out as the values' table says without ``layer`` and
        ``sequence``; block None for ``model.*``. ``linear_attn.states`` holds all T positions, so the
        state entering token t is entry t - 1. Slots are sorted by score, best first.
    """
    state = model.state_dict()
    config = model.config
    if config.hidden_act != "silu":
        raise ValueError(f"The oracle knows silu alone, the model has {config.hidden_act}.")
    values: Values = {}

    def weights_under(prefix: str) -> Weights:
        return lambda name: state[f"{prefix}.{name}"].detach().to("cpu", dtype)

    def record(host: str, layer: int | None, found: dict[str, Tensor]) -> None:
        for name, tensor in found.items():
            values.setdefault(f"{host}.{name}", {})[layer] = tensor

    ids = torch.tensor(list(input_ids), dtype=torch.long)
    embeddings = weights_under("model")("embed_tokens.weight")[ids]
    stream = embeddings
    for layer in range(config.num_hidden_layers):
        stream = _block(config, weights_under(f"model.layers.{layer}"), layer, stream, record)
    normed = rms_norm(stream, weights_under("model")("norm.weight"), config.rms_norm_eps)
    logits = normed @ state["lm_head.weight"].detach().to("cpu", dtype).T
    record(
        "model",
        None,
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_embeddings": embeddings,
            "final_norm_output": normed,
            "lm_head_output": logits,
            "logits": logits,
            "next_token_probs": softmax(logits[-1]),
        },
    )
    return values


def _block(
    config: Any,
    weights: Weights,
    layer: int,
    stream: Tensor,
    record: Callable[[str, int | None, dict[str, Tensor]], None],
) -> Tensor:
    """One block: norm, mixer, add; norm, MLP, add. Returns the stream leaving it, ``[T, D]``."""
    normed = rms_norm(stream, weights("input_layernorm.weight"), config.rms_norm_eps)
    linear = config.layer_types[layer] == "linear_attention"
    mixer = (linear_attention if linear else latent_attention)(config, _under(weights, "self_attn"), normed)
    middle = stream + mixer["attention_output"]
    mlp_input = rms_norm(middle, weights("post_attention_layernorm.weight"), config.rms_norm_eps)
    sparse = config.mlp_layer_types[layer] == "sparse"
    mlp = (mixture if sparse else dense_mlp)(config, _under(weights, "mlp"), mlp_input)
    leaving = middle + mlp["mlp_output"]
    record("linear_attn" if linear else "self_attn", layer, mixer)
    record("mlp", layer, mlp)
    record(
        "layers",
        layer,
        {
            "layer_input": stream,
            "attention_norm_output": normed,
            "layer_mid": middle,
            "mlp_norm_output": mlp_input,
            "mlp_input": mlp_input,
            "layer_output": leaving,
        },
    )
    return leaving


def linear_attention(config: Any, weights: Weights, x_TD: Tensor) -> dict[str, Tensor]:
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692) and all its inner values."""
    heads, width = config.linear_num_heads, config.linear_head_dim
    projected = [x_TD @ weights(f"{name}_proj.weight").T for name in "qkv"]
    kernel = weights("conv1d.weight")[:, 0]
    mixed = silu(causal_convolution(torch.cat(projected, dim=1), kernel))
    queries, keys, held = (part.reshape(-1, heads, width) for part in mixed.split(heads * width, dim=1))

    raw = x_TD @ weights("forget_gate.f_a_proj.weight").T @ weights("forget_gate.f_b_proj.weight").T
    step = softplus(raw + weights("forget_gate.dt_bias")).reshape(-1, heads, width)
    decays = -weights("forget_gate.A_log").reshape(heads, 1).exp() * step
    betas = sigmoid(x_TD @ weights("b_proj.weight").T)
    states, read = delta_rule(queries, keys, held, decays, betas)

    gate = (x_TD @ weights("g_a_proj.weight").T @ weights("g_b_proj.weight").T).reshape(-1, heads, width)
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


def delta_rule(
    queries_THK: Tensor,
    keys_THK: Tensor,
    values_THV: Tensor,
    decays_THK: Tensor,
    betas_TH: Tensor,
    state_HKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token in float64.

    ``S <- diag(exp(g)) S``; ``S <- S + beta k (v - S^T k)^T``; ``o = S^T q``, with k and q of unit
    length (1e-6 under the root) and q over the root of its width. ``state_HKV`` is the state before
    the first token, zero if not given.

    Returns:
        States after each token ``[T, H, K, V]`` and read-outs ``[T, H, V]``, in the values' dtype.
    """
    dtype = values_THV.dtype
    q, k, v = queries_THK.double(), keys_THK.double(), values_THV.double()
    decay, beta = decays_THK.double().exp(), betas_TH.double()
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(q.shape[-1])
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    state = torch.zeros(k.shape[1], k.shape[2], v.shape[2]).double() if state_HKV is None else state_HKV.double()
    states, read = [], []
    for t in range(len(k)):
        state = decay[t][:, :, None] * state
        surprise = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + beta[t][:, None, None] * torch.einsum("hk,hv->hkv", k[t], surprise)
        states.append(state)
        read.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(states).to(dtype), torch.stack(read).to(dtype)


def latent_attention(config: Any, weights: Weights, x_TD: Tensor) -> dict[str, Tensor]:
    """Multi-head latent attention without rotary; the last key channels are shared by all heads."""
    heads, shared_width = config.num_attention_heads, config.qk_rope_head_dim
    length = len(x_TD)
    if config.q_lora_rank is None:
        flat_queries = x_TD @ weights("q_proj.weight").T
    else:
        latent = _linear(config, weights, "q_a_proj", x_TD)
        latent = rms_norm(latent, weights("q_a_layernorm.weight"), LATENT_EPS)
        flat_queries = latent @ weights("q_b_proj.weight").T
    queries = flat_queries.reshape(length, heads, -1).transpose(0, 1)

    compressed = _linear(config, weights, "kv_a_proj_with_mqa", x_TD)
    kv_latent, shared = compressed.split([config.kv_lora_rank, shared_width], dim=1)
    kv_latent = rms_norm(kv_latent, weights("kv_a_layernorm.weight"), LATENT_EPS)
    expanded = (kv_latent @ weights("kv_b_proj.weight").T).reshape(length, heads, -1).transpose(0, 1)
    own, held = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=2)
    keys = torch.cat([own, shared.expand(heads, -1, -1)], dim=2)

    scores = torch.einsum("hqc,hkc->hqk", queries, keys) / math.sqrt(queries.shape[-1])
    later = torch.arange(length)[None, :] > torch.arange(length)[:, None]
    scores = scores.masked_fill(later, -torch.inf)
    pattern = softmax(scores)
    read = torch.einsum("hqk,hkv->qhv", pattern, held)
    return {
        "attention_queries": queries,
        "attention_keys": keys,
        "attention_values": held,
        "kv_latent": kv_latent,
        "attention_scores": scores,
        "attention_probabilities": pattern,
        "attention_head_outputs": read,
        "attention_premix": read.flatten(1),
        "attention_output": _linear(config, weights, "o_proj", read.flatten(1)),
    }


def dense_mlp(config: Any, weights: Weights, x_TD: Tensor) -> dict[str, Tensor]:
    """Gated MLP: ``down(silu(gate(x)) * up(x))``."""
    activation = silu(x_TD @ weights("gate_proj.weight").T)
    neurons = activation * (x_TD @ weights("up_proj.weight").T)
    output = neurons @ weights("down_proj.weight").T
    return {"mlp_activation": activation, "mlp_neurons": neurons, "mlp_output": output}


def mixture(config: Any, weights: Weights, x_TD: Tensor) -> dict[str, Tensor]:
    """Routed experts, each slot's expert run on its own, and the shared expert beside them."""
    logits_TE = x_TD @ weights("gate.weight").T
    indices_TS, weights_TS = route(config, logits_TE, weights("gate.e_score_correction_bias"))
    gate_up, down = weights("experts.gate_up_proj"), weights("experts.down_proj")
    outputs = torch.zeros(*indices_TS.shape, x_TD.shape[1], dtype=x_TD.dtype)
    for t, chosen in enumerate(indices_TS.tolist()):
        for slot, expert in enumerate(chosen):
            gate, up = (gate_up[expert] @ x_TD[t]).chunk(2)
            outputs[t, slot] = weights_TS[t, slot] * (down[expert] @ (silu(gate) * up))
    routed = outputs.sum(1)
    shared = dense_mlp(config, _under(weights, "shared_experts"), x_TD)
    return {
        "router_logits": logits_TE,
        "expert_indices": indices_TS,
        "expert_weights": weights_TS,
        "expert_outputs": outputs,
        "routed_output": routed,
        "shared_expert_output": shared["mlp_output"],
        "shared_mlp_activation": shared["mlp_activation"],
        "shared_mlp_neurons": shared["mlp_neurons"],
        "mlp_output": routed + shared["mlp_output"],
    }


def route(config: Any, logits_TE: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Indices ``[T, S]``, best score first, and weights ``[T, S]`` of each token's slots.

    The bias takes part in the choice, not in the weights. Groups of experts compete first, by the sum
    of their two best scores.
    """
    gates = sigmoid(logits_TE)
    scores = gates + bias_E
    groups = config.n_group
    grouped = scores.reshape(len(scores), groups, -1)
    strength = grouped.sort(dim=2, descending=True).values[:, :, :2].sum(2)
    winners = strength.argsort(dim=1, descending=True)[:, : config.topk_group]
    open_groups = torch.zeros_like(strength, dtype=torch.bool).scatter(1, winners, True)
    scores = torch.where(open_groups[:, :, None], grouped, -torch.inf).flatten(1)
    indices = scores.argsort(dim=1, descending=True)[:, : config.num_experts_per_tok]
    chosen = gates.gather(1, indices)
    if config.norm_topk_prob:
        chosen = chosen / chosen.sum(1, keepdim=True)
    return indices, chosen * config.routed_scaling_factor


def causal_convolution(x_TC: Tensor, kernel_CW: Tensor) -> Tensor:
    """Each channel's own filter over the W latest tokens; the kernel's last tap is the present one."""
    length, width = len(x_TC), kernel_CW.shape[1]
    out = torch.zeros_like(x_TC)
    for back in range(min(width, length)):
        out[back:] += x_TC[: length - back] * kernel_CW[:, width - 1 - back]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x²) + eps)`` over the last axis."""
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def softmax(x: Tensor) -> Tensor:
    """Exponentials over their sum, along the last axis."""
    exponentials = (x - x.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return 1 / (1 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))`` without overflow."""
    return x.clamp(min=0) + torch.log1p((-x.abs()).exp())


def _under(weights: Weights, prefix: str) -> Weights:
    return lambda name: weights(f"{prefix}.{name}")


def _linear(config: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Projection whose bias the config decides."""
    out = x @ weights(f"{name}.weight").T
    return out + weights(f"{name}.bias") if config.attention_bias else out
