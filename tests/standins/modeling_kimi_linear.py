"""Kimi-K3's text model at small size: names, calls and formulas of the checkpoint's own code, none of its text.

Shape suffixes as in kernels: B batch, T tokens, H heads, N = B·T.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_kimi_k3 import KimiLinearConfig
from .fla_like import FusedRMSNormGated, ShortConvolution, chunk_kda, fused_recurrent_kda, pad, unpad


class KimiDynamicCache:
    """Keys and values of MLA blocks, convolution and recurrent states of KDA blocks."""

    is_compileable = False

    def __init__(self, config: KimiLinearConfig):
        layers = config.num_hidden_layers
        self.key_cache: list[Any] = [None] * layers
        self.value_cache: list[Any] = [None] * layers
        self.conv_states: list[Any] = [None] * layers
        self.recurrent_states: list[Any] = [None] * layers
        self.seen = 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Appends along the token axis; returns everything so far."""
        if self.key_cache[layer_idx] is not None:
            keys = torch.cat([self.key_cache[layer_idx], keys], dim=2)
            values = torch.cat([self.value_cache[layer_idx], values], dim=2)
        self.key_cache[layer_idx], self.value_cache[layer_idx] = keys, values
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far, padding included."""
        return self.seen

    def __len__(self) -> int:
        return len(self.key_cache)


class KimiRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class SiTU(nn.Module):
    """``β·tanh(g/β)·sigmoid(g) · (lb·tanh(u/lb))`` in float32."""

    def __init__(self, beta: float, linear_beta: float):
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        g, u = gate.float(), up.float()
        soft = self.beta * torch.tanh(g / self.beta) * torch.sigmoid(g)
        return (soft * (self.linear_beta * torch.tanh(u / self.linear_beta))).to(gate.dtype)


class KimiMLP(nn.Module):
    def __init__(self, config: KimiLinearConfig, intermediate_size: int | None = None):
        super().__init__()
        width, inner = config.hidden_size, intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = SiTU(config.activation_situ_beta, config.activation_situ_linear_beta)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x), self.up_proj(x)))


class KimiBlockSparseMLP(nn.Module):
    """One routed expert, in the latent width."""

    def __init__(self, config: KimiLinearConfig):
        super().__init__()
        width, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
        self.w1 = nn.Linear(width, inner, bias=False)  # gate
        self.w2 = nn.Linear(inner, width, bias=False)  # down
        self.w3 = nn.Linear(width, inner, bias=False)  # up
        self.act_fn = SiTU(config.activation_situ_beta, config.activation_situ_linear_beta)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(hidden_states), self.w3(hidden_states)))


class KimiMoEGate(nn.Module):
    """Chooses the experts; its logits never leave it."""

    def __init__(self, config: KimiLinearConfig):
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.renormalize = config.moe_renormalize
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size) / config.hidden_size**0.5)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        scores = functional.linear(flat.float(), self.weight.float()).sigmoid()
        choice = scores + self.e_score_correction_bias.float()
        topk_idx = choice.topk(self.top_k, dim=-1, sorted=False).indices
        topk_weight = scores.gather(1, topk_idx)
        if self.renormalize:
            topk_weight = topk_weight / (topk_weight.sum(-1, keepdim=True) + 1e-20)
        return topk_idx, topk_weight * self.scaling


class KimiSparseMoeBlock(nn.Module):
    def __init__(self, config: KimiLinearConfig):
        super().__init__()
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiMoEGate(config)
        self.experts = nn.ModuleList([KimiBlockSparseMLP(config) for _ in range(config.num_experts)])
        self.shared_experts = KimiMLP(config, config.moe_intermediate_size * config.num_shared_experts)
        self.routed_expert_down_proj = nn.Linear(width, latent, bias=False)
        self.routed_expert_norm = KimiRMSNorm(latent, eps=config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(latent, width, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        identity, shape = hidden_states, hidden_states.shape
        topk_idx, topk_weight = self.gate(hidden_states)
        latent = self.routed_expert_down_proj(hidden_states.view(-1, shape[-1]))
        y = self.moe_infer(latent, topk_idx, topk_weight)
        y = self.routed_expert_up_proj(self.routed_expert_norm(y)).view(*shape)
        return y + self.shared_experts(identity)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        """Every expert once, on the tokens that chose it."""
        flat = topk_ids.view(-1)
        outputs = x.new_zeros(flat.shape[0], x.shape[1])
        for expert in flat.unique().tolist():
            slots = (flat == expert).nonzero()[:, 0]
            outputs[slots] = self.experts[expert](x[slots // topk_ids.shape[1]])
        weighted = outputs.view(*topk_ids.shape, -1).to(topk_weight.dtype) * topk_weight[..., None]
        return weighted.sum(1).to(x.dtype)


class KimiDeltaAttention(nn.Module):
    def __init__(self, config: KimiLinearConfig, layer_idx: int):
        super().__init__()
        linear = config.linear_attn_config
        self.layer_idx, self.head_dim, self.num_heads = layer_idx, linear["head_dim"], linear["num_heads"]
        self.lower_bound = linear.get("gate_lower_bound")
        width, inner, taps = config.hidden_size, self.head_dim * self.num_heads, linear["short_conv_kernel_size"]
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.q_conv1d = ShortConvolution(hidden_size=inner, kernel_size=taps, activation="silu")
        self.k_conv1d = ShortConvolution(hidden_size=inner, kernel_size=taps, activation="silu")
        self.v_conv1d = ShortConvolution(hidden_size=inner, kernel_size=taps, activation="silu")
        self.A_log = nn.Parameter(torch.zeros(linear.get("A_log_length", self.num_heads)))
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.f_a_proj = nn.Linear(width, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.b_proj = nn.Linear(width, self.num_heads, bias=False)
        self.g_proj = nn.Linear(width, inner, bias=False)
        self.o_norm = FusedRMSNormGated(self.head_dim, eps=config.rms_norm_eps, activation="sigmoid")
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache_params: KimiDynamicCache | None = None,
    ) -> Tensor:
        batch, tokens, _ = hidden_states.shape
        cu_seqlens = indices = None
        if attention_mask is not None:
            assert attention_mask.ndim == 2
            hidden_states, indices, cu_seqlens = unpad(hidden_states, attention_mask[:, -tokens:])
        conv_q = conv_k = conv_v = recurrent_state = None
        if cache_params is not None:
            if cache_params.conv_states[self.layer_idx] is not None:
                conv_q, conv_k, conv_v = cache_params.conv_states[self.layer_idx]
            recurrent_state = cache_params.recurrent_states[self.layer_idx]
        use_cache = cache_params is not None
        q, conv_q = self.q_conv1d(
            x=self.q_proj(hidden_states), cache=conv_q, output_final_state=use_cache, cu_seqlens=cu_seqlens
        )
        k, conv_k = self.k_conv1d(
            x=self.k_proj(hidden_states), cache=conv_k, output_final_state=use_cache, cu_seqlens=cu_seqlens
        )
        v, conv_v = self.v_conv1d(
            x=self.v_proj(hidden_states), cache=conv_v, output_final_state=use_cache, cu_seqlens=cu_seqlens
        )
        g = self.f_b_proj(self.f_a_proj(hidden_states)).unflatten(-1, (self.num_heads, self.head_dim))
        beta = self.b_proj(hidden_states).float()
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in (q, k, v))
        if tokens == 1 and use_cache and recurrent_state is not None:
            o, recurrent_state = fused_recurrent_kda(
                q=q,
                k=k,
                v=v,
                g=g,
                beta=beta,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                initial_state=recurrent_state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=self.lower_bound,
                transpose_state_layout=True,
                cu_seqlens=cu_seqlens,
            )
        else:
            o, recurrent_state = chunk_kda(
                q=q,
                k=k,
                v=v,
                g=g,
                beta=beta,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                initial_state=recurrent_state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=self.lower_bound is not None,
                lower_bound=self.lower_bound,
                transpose_state_layout=True,
                cu_seqlens=cu_seqlens,
            )
        if cache_params is not None:
            cache_params.recurrent_states[self.layer_idx] = recurrent_state
            cache_params.conv_states[self.layer_idx] = (conv_q, conv_k, conv_v)
        gate = self.g_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        o = self.o_proj(self.o_norm(o, gate).flatten(2))
        return o if indices is None else pad(o, indices, batch, tokens)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Read-outs ``[B, T, H, V]`` and the pattern, from ``[B, H, T, width]``."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, :, : key.shape[-2]]
    pattern = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(pattern, value).transpose(1, 2).contiguous(), pattern


class KimiMLAAttention(nn.Module):
    def __init__(self, config: KimiLinearConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.num_heads = config, layer_idx, config.num_attention_heads
        self.nope, self.rope, self.v_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_head_dim, self.kv_lora_rank = self.nope + self.rope, config.kv_lora_rank
        self.scaling, width = self.q_head_dim**-0.5, config.hidden_size
        self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
        self.q_a_layernorm = KimiRMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.q_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, config.kv_lora_rank + self.rope, bias=False)
        self.kv_a_layernorm = KimiRMSNorm(config.kv_lora_rank)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, self.num_heads * (self.nope + self.v_head_dim), bias=False)
        self.g_proj = nn.Linear(width, self.num_heads * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KimiDynamicCache | None = None,
    ) -> Tensor:
        batch, tokens, _ = hidden_states.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = q.view(batch, tokens, self.num_heads, self.q_head_dim).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, tokens, self.num_heads, -1).transpose(1, 2)
        own, value = kv.split([self.nope, self.v_head_dim], dim=-1)
        key = torch.cat([own, shared[:, None].expand(-1, self.num_heads, -1, -1)], dim=-1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        flash = self.config._attn_implementation == "flash_attention_2"
        if flash and self.q_head_dim != self.v_head_dim:
            value = functional.pad(value, [0, self.q_head_dim - self.v_head_dim])
        attention_interface = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, _ = attention_interface(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling)
        if flash and self.q_head_dim != self.v_head_dim:
            output = output[..., : self.v_head_dim]
        output = output.reshape(batch, tokens, -1)
        return self.o_proj(output * torch.sigmoid(self.g_proj(hidden_states)))


def _apply_attn_res(prefix_sum: Tensor, block_residual: Tensor, proj: nn.Linear, norm: KimiRMSNorm) -> Tensor:
    """Average of the stored sums ``[N, n, d]`` and the running sum ``[N, d]`` under a softmax over them."""
    sources = torch.cat([block_residual, prefix_sum[:, None]], dim=1).float()
    normed = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    weights = (normed @ (norm.weight.float() * proj.weight.float().view(-1))).softmax(1)
    return torch.einsum("ns,nsd->nd", weights, sources).to(prefix_sum.dtype)


class KimiDecoderLayer(nn.Module):
    def __init__(self, config: KimiLinearConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, self.group, width, eps = (
            layer_idx, config.attn_res_block_size, config.hidden_size, config.rms_norm_eps,
        )  # fmt: skip
        self.is_linear_attn = config.is_kda(layer_idx)
        self.self_attn = (KimiDeltaAttention if self.is_linear_attn else KimiMLAAttention)(config, layer_idx)
        if layer_idx >= config.first_k_dense_replace and layer_idx % config.moe_layer_freq == 0:
            self.block_sparse_moe = KimiSparseMoeBlock(config)
        else:
            self.mlp = KimiMLP(config)
        self.input_layernorm = KimiRMSNorm(width, eps=eps)
        self.post_attention_layernorm = KimiRMSNorm(width, eps=eps)
        self.self_attention_res_norm = KimiRMSNorm(width, eps=eps)
        self.self_attention_res_proj = nn.Linear(width, 1, bias=False)
        self.mlp_res_norm = KimiRMSNorm(width, eps=eps)
        self.mlp_res_proj = nn.Linear(width, 1, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KimiDynamicCache | None = None,
        cache_position: Tensor | None = None,
        block_residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        shape = hidden_states.shape
        prefix_sum: Tensor | None = hidden_states
        if block_residual.shape[1] > 0:
            hidden_states = _apply_attn_res(
                prefix_sum.view(-1, shape[-1]), block_residual, self.self_attention_res_proj,
                self.self_attention_res_norm,
            ).view(shape)  # fmt: skip
        if self.layer_idx % self.group == 0:
            block_residual = torch.cat([block_residual, prefix_sum.view(-1, 1, shape[-1])], dim=1)
            prefix_sum = None
        hidden_states = self.input_layernorm(hidden_states)
        if self.is_linear_attn:
            attended = self.self_attn(
                hidden_states=hidden_states, attention_mask=attention_mask, cache_params=past_key_values
            )
        else:
            attended = self.self_attn(
                hidden_states=hidden_states, attention_mask=attention_mask, past_key_values=past_key_values
            )
        prefix_sum = attended if prefix_sum is None else prefix_sum + attended
        hidden_states = _apply_attn_res(
            prefix_sum.view(-1, shape[-1]), block_residual, self.mlp_res_proj, self.mlp_res_norm
        ).view(shape)
        hidden_states = self.post_attention_layernorm(hidden_states)
        sparse = hasattr(self, "block_sparse_moe")
        hidden_states = self.block_sparse_moe(hidden_states) if sparse else self.mlp(hidden_states)
        return prefix_sum + hidden_states, block_residual


class KimiPreTrainedModel(PreTrainedModel):
    config_class = KimiLinearConfig
    base_model_prefix = "model"
    _no_split_modules = ["KimiDecoderLayer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_flash_attn_2 = True
    _supports_sdpa = True
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        """Every module draws its own when it is made."""


class KimiLinearModel(KimiPreTrainedModel):
    def __init__(self, config: KimiLinearConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([KimiDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = KimiRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output_attn_res_norm = KimiRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        config._attn_implementation = "flash_attention_2"  # whatever was asked for
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: KimiDynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache_position: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = KimiDynamicCache(self.config)
        batch, tokens, width = hidden_states.shape
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if cache_position is None:
            cache_position = torch.arange(past, past + tokens, device=hidden_states.device)
        causal_mask = _causal_mask(self.config, hidden_states, attention_mask, cache_position)
        linear_mask = attention_mask
        if past > 0 or (attention_mask is not None and bool(attention_mask.all())):
            linear_mask = None
        block_residual = hidden_states.new_zeros(batch * tokens, 0, width)
        for layer in self.layers:
            hidden_states, block_residual = layer(
                hidden_states,
                attention_mask=linear_mask if layer.is_linear_attn else causal_mask,
                past_key_values=past_key_values,
                cache_position=cache_position,
                block_residual=block_residual,
            )
        hidden_states = self._apply_output_attn_res(hidden_states, block_residual)
        hidden_states = self.norm(hidden_states)
        if past_key_values is not None:
            past_key_values.seen += tokens
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def _apply_output_attn_res(self, hidden_states: Tensor, block_residual: Tensor) -> Tensor:
        return _apply_attn_res(
            hidden_states.view(-1, hidden_states.shape[-1]), block_residual, self.output_attn_res_proj,
            self.output_attn_res_norm,
        ).view(hidden_states.shape)  # fmt: skip


def _causal_mask(config: KimiLinearConfig, hidden: Tensor, mask: Tensor | None, cache_position: Tensor) -> Any:
    """What the attention implementation wants: the padding mask under flash attention, else ``[B, 1, T, past + T]``."""
    if config._attn_implementation == "flash_attention_2":
        return None if mask is None or bool(mask.all()) else mask
    total = int(cache_position[-1]) + 1
    allowed = torch.arange(total, device=hidden.device) <= cache_position[:, None]
    allowed = allowed[None, None].expand(len(hidden), 1, -1, -1)
    if mask is not None:
        allowed = allowed & mask[:, None, None].bool()
    return torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(
        ~allowed, torch.finfo(hidden.dtype).min
    )


class KimiLinearForCausalLM(KimiPreTrainedModel, GenerationMixin):
    def __init__(self, config: KimiLinearConfig):
        super().__init__(config)
        self.model = KimiLinearModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> None:
        model_kwargs["past_key_values"] = KimiDynamicCache(self.config)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        return {
            "input_ids": input_ids[:, past:],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "use_cache": True,
        }

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: KimiDynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache_position: Tensor | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache_position=cache_position,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)
