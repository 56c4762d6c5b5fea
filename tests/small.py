"""A dataset and a model so small that a whole capture of ten blocks takes a fraction of a second.

The model is transformers' own Kimi-Linear, or the stand-in for its remote code where transformers has none.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch

from tests.models import HAS_KIMI_LINEAR, KDA, MLA, save_config, tiny_config, tiny_model
from tests.standins import modeling_kimi
from tests.standins.build import add_code, remote_config, remote_model

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": [KDA, MLA],
    "mlp_layer_types": ["dense", "sparse"],
    "num_local_experts": 4,
}
OWN_CODE_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}
ROWS, BLOCK = 20, 2


def model() -> torch.nn.Module:
    """The model whose config the settings name."""
    return tiny_model(**SIZES) if HAS_KIMI_LINEAR else remote_model(**OWN_CODE_SIZES)


def settings(folder: Path, *, rows: int = ROWS, **more: Any) -> dict[str, Any]:
    """Settings of a capture of ``rows`` rows of 1 to 24 tokens; writes the dataset and the model's config."""
    draw = random.Random(7)
    texts = [{"text": "x" * draw.randint(1, 24)} for _ in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
    if HAS_KIMI_LINEAR:
        save_config(folder / "model", tiny_config(**SIZES))
    else:
        remote_config(**OWN_CODE_SIZES).save_pretrained(folder / "model")
        add_code(folder / "model", modeling_kimi.KimiLinearForCausalLM)
    return {
        "model": str(folder / "model"),
        "random_weights": True,
        "trust_remote_code": not HAS_KIMI_LINEAR,
        "dataset": str(folder / "rows.jsonl"),
        "tokenizer": "bytes",
        "values": ["residuals,states@every:8,router_logits,expert_indices,attention_keys"],
        "block_sequences": BLOCK,
        **more,
    }
