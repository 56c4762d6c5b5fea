"""A stand-in for Kimi-K3 whose experts are packed to four bits, as in the release, loaded as transformers loads it."""

import json
from pathlib import Path

import pytest
import xarray
from safetensors import safe_open

from kimicap.config import load_settings
from kimicap.prepare import prepare
from kimicap.run import run
from tests.compare import assert_close
from tests.oracle_k3 import reference
from tests.standins.build import k3_model, save_quantised

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
pytestmark = [pytest.mark.filterwarnings("ignore")]

RELEASE = json.loads((Path(__file__).parent / "data/kimi-k3-config.json").read_text())
QUANTISATION = RELEASE["text_config"]["quantization_config"]
VALUES = {
    "layer_output": "layers",
    "attention_mix_weights": "layers",
    "states@all": "linear_attn",
    "router_logits": "mlp",
    "routed_input": "mlp",
    "expert_outputs": "mlp",
    "routed_latent": "mlp",
    "patterns": "self_attn",
}


@pytest.mark.parametrize("generate", [0, 2])
def test_every_value_is_that_of_the_unpacked_weights(tmp_path, generate):
    model = k3_model(routed_expert_hidden_size=32)
    folder = save_quantised(tmp_path / "checkpoint", model, QUANTISATION)
    with safe_open(folder / "model.safetensors", "pt") as file:
        packed = [name for name in file.keys() if name.endswith("weight_packed")]
    assert sum("experts" in name for name in packed) == 5 * 8 * 3
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": "kimi " * n}) for n in (1, 3)))
    given = {"model": str(folder), "dataset": str(data), "tokenizer": "bytes", "values": list(VALUES),
             "out": str(tmp_path / "out.zarr"), "trust_remote_code": True, "device": "cpu", "dtype": "float32",
             "generate": generate}  # fmt: skip
    list(run(prepare(load_settings(None, given))))
    tree = xarray.open_datatree(tmp_path / "out.zarr", engine="zarr")
    for row in range(2):
        length = int(tree["length"][row])
        expected = reference(model, tree["input_ids"][row, :length].values.tolist())
        for value, host in VALUES.items():
            name = {"patterns": "attention_probabilities"}.get(value, value.partition("@")[0])
            array = tree[f"{host}/{name}"]
            for at, block in enumerate(array.layer.values.tolist()):
                wanted = expected[f"{host}.{name}"][block]
                found = array.isel(layer=at, sequence=row).values[tuple(map(slice, wanted.shape))]
                assert_close(found, wanted, rel=2e-4, name=name, layer=block)
