"""Configs, models and tokenizers: what is loaded, and what people are told when it cannot be."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from kimicap.config import load_settings
from kimicap.errors import UsageError
from kimicap.models import architecture_of, check_class, load_model, load_tokenizer, model_digest, own_code, versions
from kimicap.schema import load_schema
from kimicap.tokens import ByteTokenizer
from tests.models import need_kimi_linear, save_config, save_model, tiny_config, tiny_model

SCHEMA = load_schema()


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("saved"))


def settings(model, **flags):
    needed = {"dataset": "d", "values": "betas", "out": "o", "device": "cpu"}
    return load_settings(None, {**needed, "model": str(model), **flags})


def loaded(model, **flags):
    found = settings(model, **flags)
    return load_model(found, architecture_of(found, SCHEMA))


def sentence_of(call, *arguments, **flags):
    with pytest.raises(UsageError) as failure:
        call(*arguments, **flags)
    return str(failure.value)


def config_file(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    return folder


def test_an_architecture_from_the_file_alone(saved):
    code = (
        "import sys\n"
        "from kimicap.config import load_settings\n"
        "from kimicap.models import architecture_of\n"
        "from kimicap.schema import load_schema\n"
        f"flags = {{'model': {str(saved)!r}, 'dataset': 'd', 'values': 'betas', 'out': 'o'}}\n"
        "found = architecture_of(load_settings(None, flags), load_schema())\n"
        "print(found.layers, {'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "6 set()"


def test_what_a_config_leaves_out_transformers_fills_in(tmp_path):
    need_kimi_linear()
    config = tiny_config().to_dict()
    del config["moe_intermediate_size"]
    found = architecture_of(settings(config_file(tmp_path, json.dumps(config))), SCHEMA)
    assert found.size("mlp", "shared_neuron") == type(tiny_config())().moe_intermediate_size


def test_configs_that_do_not_do(tmp_path):
    folder = tmp_path / "m"
    assert sentence_of(architecture_of, settings(folder), SCHEMA) == (
        f"The model folder {folder} is not there; check --model."
    )
    folder.mkdir()
    assert sentence_of(architecture_of, settings(folder), SCHEMA) == (
        f"The model folder {folder} holds no config.json; check --model."
    )
    config_file(folder, "{")
    assert sentence_of(architecture_of, settings(folder), SCHEMA).startswith(
        f"{folder / 'config.json'} is not valid JSON ("
    )
    config_file(folder, "[]")
    assert sentence_of(architecture_of, settings(folder), SCHEMA) == (
        f"{folder / 'config.json'} holds no table of settings; mend it."
    )
    config_file(folder, '{"model_type": "llama"}')
    assert sentence_of(architecture_of, settings(folder), SCHEMA).startswith(
        f"The model {folder} has model_type 'llama' in transformers' own code, which no family of the schema covers"
    )
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "is not valid JSON" in sentence_of(architecture_of, settings(folder), SCHEMA)


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"num_hidden_layers": 9}])
def test_a_config_that_contradicts_itself_gets_a_sentence(tmp_path, change):
    folder = config_file(tmp_path, json.dumps({**tiny_config().to_dict(), **change}))

    def plan_and_load():
        loaded(folder, random_weights=True)

    assert str(folder) in sentence_of(plan_and_load)


def test_a_hub_id_that_is_not_at_hand():
    text = sentence_of(architecture_of, settings("nobody/nothing"), SCHEMA)
    assert text.startswith("The model nobody/nothing cannot be loaded: ")
    assert text.endswith(". To mend it, check the name and the connection, or give a local folder.")
    assert "\n" not in text


def test_no_token_gets_into_an_error(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    assert "secret" not in sentence_of(architecture_of, settings("nobody/nothing"), SCHEMA)


def test_a_saved_model_comes_back_ready(saved):
    model = loaded(saved)
    expected = tiny_model().state_dict()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert loaded(saved, dtype="bfloat16").model.embed_tokens.weight.dtype == torch.bfloat16
    assert loaded(saved, attention="eager").config._attn_implementation == "eager"


def test_random_weights_are_a_function_of_the_seed(tmp_path):
    need_kimi_linear()
    folder = save_config(tmp_path)
    torch.manual_seed(5)
    one = loaded(folder, random_weights=True, seed=3).state_dict()
    torch.manual_seed(6)
    same, other = (loaded(folder, random_weights=True, seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    half = loaded(folder, random_weights=True, dtype="bfloat16")
    assert half.model.embed_tokens.weight.dtype == torch.bfloat16


def test_models_that_cannot_be_loaded(tmp_path, saved):
    folder = save_config(tmp_path)
    text = sentence_of(loaded, folder)
    assert text.startswith(f"The model {folder} cannot be loaded: ")
    assert text.endswith("To mend it, check --model, or build it from its config with --random-weights.")
    assert sentence_of(loaded, saved, attention="telepathy").endswith("To mend it, choose another --attention.")
    assert sentence_of(loaded, saved, experts="oracles").endswith("To mend it, choose another --experts.")
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be loaded" in sentence_of(loaded, folder)


def digests(folder, **flags):
    return model_digest(settings(folder, **flags))


def test_a_models_digest_is_of_config_weights_and_code(saved, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    (folder / "modeling_own.py").write_text("")
    ways = ({}, {"random_weights": True}, {"trust_remote_code": True})
    before = [digests(folder, **way) for way in ways]
    assert len(set(before)) == 3
    (folder / "README.md").write_text("x")
    os.utime(folder / "model.safetensors", (1, 1))
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert [digests(moved, **way) for way in ways] == before

    def changes():
        return [digests(folder, **way) != old for way, old in zip(ways, before, strict=True)]

    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert changes() == [True, False, True]
    (folder / "model.safetensors").write_bytes(weights + b"0")
    assert changes() == [True, False, True]
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "modeling_own.py").write_text("pass")
    assert changes() == [False, False, True]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "x", "transformers_version": "9"}))
    (folder / "training_args.bin").write_bytes(b"x")
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert changes() == [False, False, True]
    assert digests(folder, generate=2) != digests(folder)
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert changes() == [True, True, True]


def test_a_folder_that_may_not_be_read_has_no_digest(saved, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", denied)
    assert sentence_of(digests, saved) == f"The model's {saved} cannot be read: Permission denied. Mend it."


def test_a_hub_models_digest_is_its_commit(tmp_path):
    commits = ["1" * 40, "2" * 40]
    cache = tmp_path / "models--some--model"
    for commit in commits:
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
    (cache / "refs").mkdir()
    code = (
        "from pathlib import Path\n"
        "from tests.test_models import digests\n"
        f"for commit in {commits}:\n"
        f"    Path({str(cache)!r}, 'refs/main').write_text(commit)\n"
        "    assert digests('some/model') == commit\n"
        f"    assert digests('some/model', random_weights=True, revision={commits[0]!r}) == {commits[0]!r}\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_transformers_without_the_model_gets_the_version_that_has_it(tmp_path, monkeypatch):
    monkeypatch.delitem(CONFIG_MAPPING._mapping, "kimi_linear", raising=False)
    assert sentence_of(loaded, save_config(tmp_path), random_weights=True).endswith(
        "To mend it, install transformers 5.17 or newer, or give a checkpoint with its own code and "
        "--trust-remote-code."
    )


def test_a_device_map_without_accelerate(saved, monkeypatch):
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: False)
    assert sentence_of(loaded, saved, device_map="auto").endswith(
        "To mend it, install kimicap[offload], or leave out --device-map."
    )


def test_devices_that_are_not_there(saved):
    assert sentence_of(loaded, saved, device="abacus") == (
        "--device 'abacus' is not a device; write cpu, cuda or cuda:N."
    )
    if not torch.cuda.is_available():
        assert sentence_of(loaded, saved, device="cuda:0") == (
            "--device 'cuda:0' is not there: torch sees no GPU; choose another, or cpu."
        )


def test_a_model_of_another_class_is_refused(saved):
    architecture = architecture_of(settings(saved), SCHEMA)
    check_class(tiny_model(), architecture)
    assert sentence_of(check_class, torch.nn.Linear(1, 1), architecture) == (
        "The model is a Linear of torch.nn.modules.linear, where the family kimi_linear expects a "
        "KimiLinearForCausalLM of transformers.models.kimi_linear; the schema does not fit it."
    )


def test_remote_code_is_never_implied():
    config = {"auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"}}
    assert own_code(settings("m"), config) is None
    assert own_code(settings("m", trust_remote_code=True), config) == "modeling_kimi"
    assert own_code(settings("m", trust_remote_code=True), {}) is None


def test_tokenizers(saved):
    assert isinstance(load_tokenizer(settings(saved, tokenizer="bytes")), ByteTokenizer)
    text = sentence_of(load_tokenizer, settings(saved))
    assert text.startswith(f"The tokenizer {saved} cannot be loaded: ")
    assert text.endswith("To mend it, name another with --tokenizer (`bytes` needs no files).")
    assert sentence_of(load_tokenizer, settings(saved, tokenizer="no/such")).startswith("The tokenizer no/such cannot")


def test_versions_name_what_decides_the_values():
    found = versions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]  # or +cu130 in one
    assert set(found) == {"torch", "transformers", "fla-core", "flash-linear-attention"}
