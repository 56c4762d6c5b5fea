"""Stand-ins with random weights that keep activations of order one, in memory or as folders to load."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.standins import modeling_kimi
from tests.standins.configuration_kimi import KimiLinearConfig as RemoteConfig
from tests.standins.configuration_kimi_k3 import KimiK3Config
from tests.standins.configuration_kimi_k3 import KimiLinearConfig as K3TextConfig
from tests.standins.modeling_kimi_k3 import KimiK3ForConditionalGeneration
from tests.standins.modeling_kimi_linear import KimiLinearForCausalLM

HERE = Path(__file__).parent
_MAPS = {
    "KimiK3ForConditionalGeneration": ("configuration_kimi_k3.KimiK3Config", "modeling_kimi_k3"),
    "KimiLinearForCausalLM": ("configuration_kimi_k3.KimiLinearConfig", "modeling_kimi_linear"),
}
_REMOTE = ("configuration_kimi.KimiLinearConfig", "modeling_kimi")


def k3_config(**overrides: Any) -> K3TextConfig:
    """6 blocks in groups of 2: KDA KDA MLA KDA KDA MLA, dense MLP in block 0; ``A_log`` longer than the heads."""
    linear = {
        "kda_layers": [1, 2, 4, 5],
        "full_attn_layers": [3, 6],
        "head_dim": 16,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "A_log_length": 5,
    }
    sizes = {"num_hidden_layers": 6, "attn_res_block_size": 2, "linear_attn_config": linear, **overrides}
    return K3TextConfig(**sizes)


def k3_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, *, alone: bool = False, attention: str = "eager", **sizes: Any
) -> torch.nn.Module:
    """The stand-in for Kimi-K3, whole or (``alone``) its text model, of ``k3_config(**sizes)``."""
    text = k3_config(**sizes)
    with torch.random.fork_rng(devices=[]):
        model = KimiLinearForCausalLM(text) if alone else KimiK3ForConditionalGeneration(KimiK3Config(text))
    return _finished(model, seed, dtype, attention)


def remote_config(**overrides: Any) -> RemoteConfig:
    """5 blocks: KDA KDA MLA KDA MLA, dense MLP in block 0."""
    linear = {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
        "head_dim": 16,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    }
    return RemoteConfig(**{"linear_attn_config": linear, **overrides})


def remote_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, *, attention: str = "eager", **sizes: Any
) -> torch.nn.Module:
    """The stand-in for Kimi-Linear's remote code, of ``remote_config(**sizes)``."""
    config = remote_config(**sizes)
    with torch.random.fork_rng(devices=[]):
        model = modeling_kimi.KimiLinearForCausalLM(config)
    return _finished(model, seed, dtype, attention)


def save_with_code(folder: Path, model: torch.nn.Module) -> Path:
    """Weights, config and modelling files, as a checkpoint with its own code has them; returns ``folder``."""
    model.save_pretrained(folder)
    return add_code(folder, type(model))


def add_code(folder: Path, found: type) -> Path:
    """Adds the code of a model's class to a folder that has its config; returns ``folder``."""
    name = found.__name__
    config, code = _REMOTE if found.__module__.endswith("modeling_kimi") else _MAPS[name]
    for path in HERE.glob("*.py"):
        if path.name not in ("build.py", "__init__.py"):
            shutil.copy(path, folder / path.name)
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    tree["auto_map"] = {"AutoConfig": config, "AutoModelForCausalLM": f"{code}.{name}"}
    path.write_text(json.dumps(tree))
    return folder


def save_quantised(folder: Path, model: torch.nn.Module, quantisation: dict[str, Any]) -> Path:
    """As `save_with_code`, with the linear layers that ``quantisation`` does not ignore packed by compressed-tensors.

    The weights of ``model`` become what the packed ones stand for: groups of 32 of 4-bit floats with a power of two.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    packed = copy.deepcopy(model)
    config = QuantizationConfig.model_validate({**quantisation, "quantization_status": "initialized"})
    apply_quantization_config(packed, config, run_compressed=False)
    for name, module in packed.named_modules():
        if hasattr(module, "quantization_scheme"):
            scale, weight = _four_bits(module.weight)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            model.get_submodule(name).weight.data = weight
            module.weight.data = weight.clone()
    ModelCompressor(quantization_config=config).compress_model(packed)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in packed.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    add_code(folder, type(model))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantisation}))
    return folder


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two ``[row, group]``, and ``weight`` rounded to the nearest of MXFP4's numbers times these."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat([-levels.flip(0), levels])
    groups = weight.detach().float().unflatten(1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1) / 6)))
    nearest = (groups[..., None] / scale[..., None, None] - levels).abs().argmin(-1)
    return scale, (levels[nearest] * scale[..., None]).flatten(1).to(weight.dtype)


def _finished(model: torch.nn.Module, seed: int, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_random_weight(name, tensor, generator))
    model = model.to(dtype)
    model.config._attn_implementation = attention
    return model.requires_grad_(False).eval()


def _random_weight(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape = tensor.shape
    normal = torch.randn(shape, generator=generator)
    kind = name.split(".")[-2]
    if name.endswith("A_log"):
        return torch.log(1 + 3 * torch.rand(shape, generator=generator))
    if name.endswith("dt_bias"):
        return normal - 2
    if name.endswith("e_score_correction_bias"):  # wide enough to change which experts win
        return 0.2 * normal
    if kind.endswith("norm"):
        return 1 + 0.2 * normal
    if kind == "embed_tokens":  # the padding row too, so that a leak of padding is seen
        return normal
    if kind.endswith("res_proj"):
        return 3 * normal / math.sqrt(shape[-1])
    gain = 2.0 if kind in ("down_proj", "w2") else 1.0  # the activation halves what it passes
    return gain * normal / math.sqrt(shape[-1])
