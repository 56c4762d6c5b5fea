"""The plan of configs/kimi-k3.yaml: from the release's config alone, without torch, as docs/kimi-k3.md prints it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kimicap.config import load_settings

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/kimi-k3.yaml"
RELEASE = ROOT / "tests/data/kimi-k3-config.json"
PLANNED = """
import json, sys
from pathlib import Path
from kimicap.config import load_settings
from kimicap.prepare import prepare
settings = load_settings(Path(sys.argv[1]), json.loads(sys.argv[2]))
prepared = prepare(settings)
print(json.dumps({
    "family": prepared.architecture.family.name,
    "layers": prepared.architecture.layers,
    "arrays": {value.array.path: [value.array.shape, value.array.nbytes] for value in prepared.plan.values},
    "dtypes": {value.array.path: value.array.dtype for value in prepared.plan.values},
    "nbytes": prepared.plan.nbytes,
    "loaded": sorted({"torch", "transformers"} & set(sys.modules)),
}))
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The plan over as many full windows of bytes, since the corpus is not at hand."""
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    wanted = load_settings(CONFIG, {})
    text = json.dumps({"text": "x" * (wanted.seq_len * wanted.limit)})
    rows.write_text(text)
    other = {"dataset": str(rows), "tokenizer": "bytes", "streaming": False, "subset": None}
    command = [sys.executable, "-c", PLANNED, str(CONFIG), json.dumps(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_needs_the_config_alone(planned):
    assert (planned["family"], planned["layers"], planned["loaded"]) == ("kimi_k3", 93, [])


def test_sizes_are_those_of_the_release(planned):
    shapes = {path: shape for path, (shape, _) in planned["arrays"].items()}
    assert shapes["mlp/router_logits"] == [9, 200, 4096, 896]
    assert shapes["mlp/expert_indices"] == [92, 200, 4096, 16]
    assert shapes["layers/attention_mix_weights"] == [93, 200, 4096, 9]
    assert shapes["layers/layer_output"] == [8, 200, 4096, 7168]
    assert shapes["linear_attn/states"] == [3, 200, 4, 96, 128, 128]
    assert shapes["linear_attn/decays"] == [3, 200, 4096, 4, 128]
    assert shapes["self_attn/attention_probabilities"] == [24, 200, 96, 1, 4096]
    assert planned["dtypes"]["mlp/expert_indices"] == "int16"


def test_the_documentation_prints_this_plan(planned):
    text = (ROOT / "docs/kimi-k3.md").read_text()
    for path, (shape, nbytes) in planned["arrays"].items():
        row = f"| `{path}` | {' x '.join(map(str, shape))} | {nbytes / 1e9:.3g} GB |"
        assert row in text, row
    assert f"{planned['nbytes'] / 1e9:.3g} GB" in text


def test_the_shipped_config_is_the_releases():
    shipped = json.loads((ROOT / "configs/kimi-k3-model/config.json").read_text())
    release = json.loads(RELEASE.read_text())
    text = shipped.pop("text_config")
    assert shipped.items() <= release.items()
    assert text.items() <= release["text_config"].items()
