"""The oracle agrees with transformers on models and batches of any shape."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import oracle, properties
from tests.compare import assert_close
from tests.models import build_model, need_kimi_linear

need_kimi_linear()

REL = 3e-5


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=properties.configs(),
    attention=properties.attentions(),
    experts=properties.experts(),
    batch=properties.batches(most=3),
    seed=st.integers(0, 99),
)
def test_any_model_of_the_strategies_runs_and_agrees_with_the_oracle(config, attention, experts, batch, seed):
    model = build_model(config, seed=seed, attention=attention, experts=experts)
    longest = max(map(len, batch))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in batch])  # left padding
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
    flags = {"use_cache": properties.cacheable(config)}
    with torch.inference_mode():
        logits = model(ids, attention_mask=mask, **flags).logits
    for i, row in enumerate(batch):
        expected = oracle.reference(model, row)["model.logits"][None]
        assert_close(logits[i, longest - len(row) :], expected, rel=REL, name=f"logits of sequence {i}")
