"""Hypothesis strategies: models of any shape that transformers accepts, and batches for them.

Every model builds within some tens of milliseconds. What transformers 5.24 cannot run is left out: fewer
key-value heads than heads, a group of one expert, and (``cacheable``) a cache without an MLA block.
"""

from typing import Any

from hypothesis import strategies as st

from tests.models import KDA, MLA, KimiLinearConfig, need_kimi_linear, tiny_config

VOCABULARY = 97  # no multiple of a chunk or a shard
LONGEST = 40

MIXERS = {"mixed": [KDA, MLA], "kda": [KDA], "mla": [MLA]}
MLPS = {"mixed": ["dense", "sparse"], "dense": ["dense"], "sparse": ["sparse"]}


@st.composite
def configs(
    draw: st.DrawFn,
    *,
    mixers: tuple[str, ...] = ("mixed", "kda", "mla"),
    mlps: tuple[str, ...] = ("mixed", "dense", "sparse"),
    most_blocks: int = 6,
) -> KimiLinearConfig:
    """Small configs; "mixed" draws each block's kind alone, so it may come out as one kind too.

    Sizes that other axes might be confused with are drawn apart: head widths differ from numbers of
    heads, value widths of MLA from its key widths.
    """
    need_kimi_linear()
    blocks = draw(st.integers(1, most_blocks))
    kinds = st.sampled_from(MIXERS[draw(st.sampled_from(mixers))])
    mlp_kinds = st.sampled_from(MLPS[draw(st.sampled_from(mlps))])
    return tiny_config(
        vocab_size=VOCABULARY,
        hidden_size=draw(st.sampled_from([16, 24, 40])),
        intermediate_size=draw(st.sampled_from([20, 36])),
        num_hidden_layers=blocks,
        layer_types=draw(st.lists(kinds, min_size=blocks, max_size=blocks)),
        mlp_layer_types=draw(st.lists(mlp_kinds, min_size=blocks, max_size=blocks)),
        **draw(_kda_sizes()),
        **draw(_mla_sizes()),
        **draw(_expert_sizes()),
    )


@st.composite
def _kda_sizes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "linear_num_heads": draw(st.integers(1, 4)),
        "linear_head_dim": draw(st.sampled_from([8, 12, 16])),
        "linear_conv_kernel_dim": draw(st.integers(2, 4)),
    }


@st.composite
def _mla_sizes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "num_attention_heads": draw(st.integers(1, 4)),
        "qk_nope_head_dim": draw(st.sampled_from([8, 12])),
        "qk_rope_head_dim": draw(st.sampled_from([4, 6])),
        "v_head_dim": draw(st.sampled_from([8, 10])),
        "kv_lora_rank": draw(st.sampled_from([9, 16])),
        "q_lora_rank": draw(st.sampled_from([None, 11])),
    }


@st.composite
def _expert_sizes(draw: st.DrawFn) -> dict[str, Any]:
    experts = draw(st.integers(2, 9))
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(experts, 5))),
        "n_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.sampled_from([4, 12])),
    }


def cacheable(config: KimiLinearConfig) -> bool:
    """Whether the model runs with a cache, and so can decode: transformers needs an MLA block for it."""
    return MLA in config.layer_types


def lengths(longest: int = LONGEST) -> st.SearchStrategy[int]:
    """Tokens of one sequence, from a single one."""
    return st.integers(1, longest)


@st.composite
def sequences(draw: st.DrawFn, longest: int = LONGEST) -> list[int]:
    """Token ids of one sequence; padding, end and beginning (0, 1, 2) may stand anywhere in it."""
    length = draw(lengths(longest))
    seed = draw(st.integers(0, 2**16))  # one number shrinks and draws faster than every id
    return [(seed * 7919 + i * i * 31 + i * seed) % VOCABULARY for i in range(length)]


def batches(most: int = 5, longest: int = LONGEST) -> st.SearchStrategy[list[list[int]]]:
    """Sequences of mixed lengths, to be padded into one batch or more."""
    return st.lists(sequences(longest), min_size=1, max_size=most)


def attentions() -> st.SearchStrategy[str]:
    """Attention implementations that run on a CPU."""
    return st.sampled_from(["sdpa", "eager"])


def experts() -> st.SearchStrategy[str]:
    """Experts implementations that run on a CPU."""
    return st.sampled_from(["eager", "batched_mm", "grouped_mm"])
