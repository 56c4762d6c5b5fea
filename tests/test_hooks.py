"""The registrar takes everything away again, wherever the forward breaks off."""

import functools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from kimicap.errors import UsageError
from kimicap.forwards import Runner
from kimicap.hooks import Recorder
from tests.capturing import Collector, all_values, architecture, wants
from tests.models import need_kimi_linear, tiny_model

need_kimi_linear()
TOKENS = [np.arange(3, 20, dtype=np.int32)]
FUNCTIONS = (
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "causal_conv1d_fn",
    "eager_attention_forward",
    "ALL_ATTENTION_FUNCTIONS",
)


class Broken(Exception):
    """What the tests break forwards with."""


def traces(model) -> dict[str, object]:
    """All that capturing could leave behind: hooks, the modelling module's functions, the attention registry."""
    modelling = sys.modules[type(model).__module__]
    return {
        "hooks": [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks],
        "functions": {name: getattr(modelling, name) for name in FUNCTIONS},
        "registry": dict(modelling.ALL_ATTENTION_FUNCTIONS._local_mapping),
        "methods": [name for name, m in model.named_modules() if "forward" in vars(m)],
    }


def raise_broken(*_, **__):
    raise Broken


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "place",
    [
        "model.embed_tokens",
        "model.layers.0.self_attn.b_proj",
        "model.layers.1.self_attn.o_norm",
        "model.layers.3.self_attn.kv_a_layernorm",
        "model.layers.3.self_attn.o_proj",
        "model.layers.4.mlp.gate",
        "model.layers.4.mlp.experts",
        "model.layers.5",
        "lm_head",
    ],
)
def test_a_forward_that_breaks_off_leaves_nothing(monkeypatch, attention, place):
    model = tiny_model(attention=attention)
    found = architecture(model)
    wanted = wants(found, all_values(found))
    before = traces(model)
    assert before["hooks"] == before["methods"] == []
    recorder = Recorder(model, found, wanted, Collector(wanted))
    module = model.get_submodule(place)
    with monkeypatch.context() as patch:
        patch.setattr(type(module), "forward", _breaking(module, type(module).forward))
        with pytest.raises(Broken), recorder.attached():
            Runner(model, found, recorder, head=True).prompts(TOKENS)
    assert traces(model) == before
    sink = Collector(wanted)
    again = Recorder(model, found, wanted, sink)
    with again.attached():
        Runner(model, found, again, head=True).prompts(TOKENS)
    assert again.missing() == []
    assert traces(model) == before


def test_a_sink_that_fails_leaves_nothing():
    model = tiny_model()
    found = architecture(model)
    before = traces(model)
    for value in ("residuals", "decays", "patterns", "expert_outputs", "logits"):
        recorder = Recorder(model, found, wants(found, [value]), raise_broken)
        with pytest.raises(Broken), recorder.attached():
            Runner(model, found, recorder, head=True).prompts(TOKENS)
        assert traces(model) == before, value


def test_a_site_that_does_not_fit_leaves_nothing():
    model = tiny_model()
    found = architecture(model)
    before = traces(model)
    sites = {part: dict(rows) for part, rows in found.family.sites.items()}
    sites["mixture"]["router_logits"] = replace(sites["mixture"]["router_logits"], output="router")
    odd = replace(found, family=replace(found.family, sites=sites))
    recorder = Recorder(model, odd, wants(odd, ["residuals", "decays", "router_logits"]), raise_broken)
    with pytest.raises(UsageError, match="no module 'router'"), recorder.attached():
        pass
    assert traces(model) == before


def _breaking(module: torch.nn.Module, forward):
    @functools.wraps(forward)
    def broken(self, *args, **kwargs):
        if self is module:
            raise Broken
        return forward(self, *args, **kwargs)

    return broken
