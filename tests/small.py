"""A dataset and a model so small that a whole capture of ten blocks takes a fraction of a second."""

import json
import random
from pathlib import Path
from typing import Any

from tests.models import KDA, MLA, save_config, tiny_config

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": [KDA, MLA],
    "mlp_layer_types": ["dense", "sparse"],
    "num_local_experts": 4,
}
ROWS, BLOCK = 20, 2


def settings(folder: Path, *, rows: int = ROWS, **more: Any) -> dict[str, Any]:
    """Settings of a capture of ``rows`` rows of 1 to 24 tokens; writes the dataset and the model's config."""
    draw = random.Random(7)
    texts = [{"text": "x" * draw.randint(1, 24)} for _ in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
    save_config(folder / "model", tiny_config(**SIZES))
    return {
        "model": str(folder / "model"),
        "random_weights": True,
        "dataset": str(folder / "rows.jsonl"),
        "tokenizer": "bytes",
        "values": ["residuals,states@every:8,router_logits,expert_indices,attention_keys"],
        "block_sequences": BLOCK,
        **more,
    }
