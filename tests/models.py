"""Tiny Kimi-Linear models whose random weights keep every activation of order one.

Transformers 4.57 has no Kimi-Linear. There tests that need the model skip where they ask for it, with that reason;
those that need its config alone have one of the same keys.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

try:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM
except ImportError:
    KimiLinearForCausalLM = torch.nn.Module

    class KimiLinearConfig(PretrainedConfig):
        model_type = "kimi_linear"


HAS_KIMI_LINEAR = KimiLinearForCausalLM is not torch.nn.Module
NO_KIMI_LINEAR = "this transformers has no Kimi-Linear"

KDA, MLA = "linear_attention", "full_attention"

_SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "layer_types": [KDA, KDA, KDA, MLA, KDA, MLA],
    "mlp_layer_types": ["dense", *["sparse"] * 5],
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def tiny_config(**overrides: Any) -> KimiLinearConfig:
    """Config of 6 blocks (KDA KDA KDA MLA KDA MLA; dense MLP in block 0, mixtures after).

    ``overrides`` are attributes of the config; a name that it lacks is an error, since transformers
    would keep it silently. Who changes ``num_hidden_layers`` gives ``layer_types`` and
    ``mlp_layer_types`` too, and who changes ``num_attention_heads`` gets as many key-value heads.
    """
    known = {*_SIZES, *KimiLinearConfig().__dict__, *KimiLinearConfig.attribute_map}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise TypeError(f"KimiLinearConfig has no {', '.join(unknown)}.")
    sizes = {**_SIZES, **overrides}
    sizes["num_key_value_heads"] = overrides.get("num_key_value_heads", sizes["num_attention_heads"])
    return KimiLinearConfig(**sizes)


def tiny_model(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    experts: str = "eager",
    **overrides: Any,
) -> KimiLinearForCausalLM:
    """Model of ``tiny_config(**overrides)`` in eval mode, its weights a function of ``seed`` and the config.

    Args:
        seed: Seed of the weights; the global random state is left as it was.
        dtype: Dtype of the weights, but for those the model keeps in float32, as after loading.
        attention: ``sdpa`` or ``eager``.
        experts: ``eager``, ``batched_mm`` or ``grouped_mm``.
        overrides: Attributes of the config.
    """
    return build_model(tiny_config(**overrides), seed=seed, dtype=dtype, attention=attention, experts=experts)


def build_model(
    config: KimiLinearConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    experts: str = "eager",
) -> KimiLinearForCausalLM:
    """As ``tiny_model``, of a config already made."""
    need_kimi_linear()
    with torch.random.fork_rng(devices=[]):
        model = KimiLinearForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_random_weight(name, tensor, generator))
    _cast(model, dtype)
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    return model.requires_grad_(False).eval()


def need_kimi_linear() -> None:
    """Skips the test (or the fixture's tests, or the file) where transformers has no Kimi-Linear."""
    if not HAS_KIMI_LINEAR:
        pytest.skip(NO_KIMI_LINEAR, allow_module_level=True)


def save_config(folder: Path, config: KimiLinearConfig | None = None) -> Path:
    """Write ``config.json`` alone, as much as a plan needs; returns ``folder``."""
    (tiny_config() if config is None else config).save_pretrained(folder)
    return folder


def save_model(folder: Path, model: KimiLinearForCausalLM | None = None) -> Path:
    """Write config and weights, as ``from_pretrained`` loads them; returns ``folder``."""
    (tiny_model() if model is None else model).save_pretrained(folder)
    return folder


def _random_weight(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Float32 weights of ``tensor``'s shape that keep activations of order one."""
    shape = tensor.shape
    normal = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    kind = name.split(".")[-2]
    if name.endswith("A_log"):  # the model's own initialisation, as fla's: decay rates in [1, 16]
        return torch.log(1 + 15 * uniform)
    if name.endswith("dt_bias"):  # inverse softplus of steps in [1e-3, 1e-1]
        step = torch.exp(math.log(1e-3) + uniform * math.log(1e2))
        return step + torch.log(-torch.expm1(-step))
    if name.endswith("e_score_correction_bias"):  # wide enough to change which experts win
        return 0.2 * normal
    if kind.endswith("norm") or kind == "o_norm":
        return 1 + 0.2 * normal
    if kind == "embed_tokens":  # the padding row too, so that a leak of padding is seen
        return normal
    if name.endswith("bias"):
        return 0.2 * normal
    if kind == "conv1d":
        return normal / math.sqrt(shape[-1])
    gain = 2.0 if name.endswith(("down_proj", "down_proj.weight")) else 1.0  # SiLU halves what it passes
    return gain * normal / math.sqrt(shape[-1])


def _cast(model: KimiLinearForCausalLM, dtype: torch.dtype) -> None:
    """Cast what ``from_pretrained(dtype=…)`` casts: at 16 bits, all but the router and the decay's bias."""
    sixteen_bits = dtype in (torch.bfloat16, torch.float16)
    kept = tuple(f".{name}" for name in model._keep_in_fp32_modules_strict) if sixteen_bits else ()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not f".{module_name}.{name}".endswith(kept):
                parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
