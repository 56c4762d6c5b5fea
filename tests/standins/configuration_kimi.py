"""Config of the stand-in for Kimi-Linear's remote code, with the keys of the release's config.json."""

from typing import Any

from transformers import PretrainedConfig


class KimiLinearConfig(PretrainedConfig):
    """Sizes of a Kimi-Linear model."""

    model_type = "kimi_linear"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 384,
        hidden_size: int = 64,
        intermediate_size: int = 96,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        linear_attn_config: dict[str, Any] | None = None,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = 32,
        qk_nope_head_dim: int = 16,
        qk_rope_head_dim: int = 8,
        v_head_dim: int = 16,
        num_experts: int = 8,
        num_experts_per_token: int = 2,
        num_shared_experts: int = 1,
        moe_intermediate_size: int = 32,
        moe_layer_freq: int = 1,
        moe_renormalize: bool = True,
        routed_scaling_factor: float = 2.446,
        first_k_dense_replace: int = 1,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-5,
        use_cache: bool = True,
        pad_token_id: int | None = 0,
        eos_token_id: int | None = 1,
        bos_token_id: int | None = 2,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.linear_attn_config = linear_attn_config
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.num_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.num_shared_experts = num_shared_experts
        self.moe_intermediate_size = moe_intermediate_size
        self.moe_layer_freq = moe_layer_freq
        self.moe_renormalize = moe_renormalize
        self.routed_scaling_factor = routed_scaling_factor
        self.first_k_dense_replace = first_k_dense_replace
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            bos_token_id=bos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def is_kda(self, layer: int) -> bool:
        """Whether the block (0-based) has a KDA mixer."""
        return layer + 1 in self.linear_attn_config["kda_layers"]
