"""The built-in schema against values.md's tables, a person's own file over it, and every kind of problem."""

import textwrap
from dataclasses import FrozenInstanceError

import pytest
import yaml

from kimicap.errors import UsageError
from kimicap.schema import BUILT_IN, load_schema
from kimicap.schema_check import problems_of

SCHEMA = load_schema()

# values.md's Kimi-Linear tables, typed by hand.
TABLES = {
    "model": {
        "logits": "position vocab",
        "token_embeddings": "position hidden",
        "final_norm_output": "position hidden",
        "lm_head_output": "position vocab",
        "next_token_probs": "vocab",
        "input_ids": "position",
        "attention_mask": "position",
    },
    "layers": {
        "layer_input": "position hidden",
        "attention_norm_output": "position hidden",
        "layer_mid": "position hidden",
        "mlp_norm_output": "position hidden",
        "mlp_input": "position hidden",
        "layer_output": "position hidden",
    },
    "linear_attn": {
        "attention_queries": "position head key_dim",
        "attention_keys": "position head key_dim",
        "attention_values": "position head value_dim",
        "decays": "position head key_dim",
        "betas": "position head",
        "state_input": "head key_dim value_dim",
        "state_output": "head key_dim value_dim",
        "states": "position head key_dim value_dim",  # its axis is called states_position in the arrays
        "attention_head_outputs": "position head value_dim",
        "gate_logits": "position head value_dim",
        "attention_premix": "position head value_dim",
        "attention_output": "position hidden",
    },
    "self_attn": {
        "attention_queries": "head position qk_dim",
        "attention_keys": "head position qk_dim",
        "attention_values": "head position v_dim",
        "kv_latent": "position latent",
        "attention_scores": "head query key",
        "attention_probabilities": "head query key",
        "attention_head_outputs": "position head v_dim",
        "attention_premix": "position premix",
        "attention_output": "position hidden",
    },
    "mlp": {
        "mlp_activation": "position neuron",
        "mlp_neurons": "position neuron",
        "shared_mlp_activation": "position shared_neuron",  # narrower than a dense MLP's, so an axis of its own
        "shared_mlp_neurons": "position shared_neuron",
        "mlp_output": "position hidden",
        "router_logits": "position expert",
        "expert_indices": "position slot",
        "expert_weights": "position slot",
        "expert_outputs": "position slot hidden",
        "routed_output": "position hidden",
        "shared_expert_output": "position hidden",
    },
}
FLOAT32 = """linear_attn.decays linear_attn.state_input linear_attn.state_output linear_attn.states
    self_attn.attention_scores self_attn.attention_probabilities mlp.router_logits mlp.expert_weights
    model.next_token_probs"""


@pytest.mark.parametrize("host", TABLES)
def test_every_value_of_the_tables_is_there_with_its_layout(host):
    found = {name: " ".join(SCHEMA.values[f"{host}.{name}"].layout) for name in TABLES[host]}
    assert found == TABLES[host]


def test_every_value_of_the_tables_has_a_site_in_kimi_linear():
    family = SCHEMA.families["kimi_linear"]
    without = [
        f"{host}.{name}"
        for host, rows in TABLES.items()
        for name in rows
        if not family.sites_of(SCHEMA.values[f"{host}.{name}"])
    ]
    assert without == []


def test_dtypes_that_must_not_be_rounded():
    assert {SCHEMA.values[key].dtype for key in FLOAT32.split()} == {"float32"}
    assert SCHEMA.values["mlp.expert_indices"].dtype == "index"
    assert SCHEMA.values["layers.layer_output"].dtype == "computed"


def test_short_names_and_descriptions():
    assert SCHEMA.short_names["residuals"] == "layers.layer_output"
    assert SCHEMA.short_names["patterns"] == "self_attn.attention_probabilities"
    for value in SCHEMA.values.values():
        assert value.about.endswith("."), value.key
        assert "\n" not in value.about
        assert set(value.layout) <= set(SCHEMA.dimensions)


def test_rows_are_frozen():
    with pytest.raises(FrozenInstanceError):
        SCHEMA.values["layers.layer_output"].dtype = "float32"


def test_how_sites_are_named():
    sites = SCHEMA.families["kimi_linear"].sites
    assert str(sites["block"]["layer_input"]) == "block . argument hidden_states"
    assert str(sites["block"]["attention_norm_output"]) == "block input_layernorm output"
    assert str(sites["kda"]["decays"]) == "kda delta_rule argument g"
    assert str(sites["kda"]["attention_head_outputs"]) == "kda delta_rule output 0"
    assert str(sites["model"]["input_ids"]) == "batch input_ids"
    assert str(sites["model"]["next_token_probs"]) == "next_token_probs(logits)"


def own(tmp_path, text):
    file = tmp_path / "my.yaml"
    file.write_text(textwrap.dedent(text))
    return file


def test_an_own_file_adds_a_value(tmp_path):
    schema = load_schema(
        own(
            tmp_path,
            """
            values:
              layers:
                norm_copy: {layout: [position, hidden], dtype: computed, about: The same once more.}
            families:
              kimi_linear:
                sites:
                  block:
                    norm_copy: {output: input_layernorm, axes: [batch, position, hidden]}
            """,
        )
    )
    value = schema.values["layers.norm_copy"]
    assert value.layout == ("position", "hidden")
    assert [site.output for site in schema.families["kimi_linear"].sites_of(value)] == ["input_layernorm"]
    assert set(schema.values) == {*SCHEMA.values, "layers.norm_copy"}
    assert schema.families["kimi_linear"].sites["kda"] == SCHEMA.families["kimi_linear"].sites["kda"]


def test_an_own_file_replaces_a_site_as_a_whole(tmp_path):
    schema = load_schema(
        own(
            tmp_path,
            """
            families:
              kimi_linear:
                sites:
                  block:
                    layer_input: {output: input_layernorm, axes: [batch, position, hidden]}
            """,
        )
    )
    site = schema.families["kimi_linear"].sites["block"]["layer_input"]
    assert (site.output, site.input, site.argument) == ("input_layernorm", None, None)


def test_an_own_file_adds_a_family_and_its_anchors_hold(tmp_path):
    schema = load_schema(
        own(
            tmp_path,
            """
            families:
              other:
                about: Another model.
                match: {class: Other, module: other.code, model_type: other, code: modeling_other}
                trunk: model
                head: [logits]
                layers: [n_layers, depth]
                sizes: {hidden: width, vocab: words}
                parts:
                  block: {host: layers, module: "layers.{layer}", class: Block, blocks: "True"}
                sites:
                  block:
                    layer_input: &stream {output: ., axes: [batch, position, hidden]}
                    layer_output: *stream
            """,
        )
    )
    family = schema.families["other"]
    assert family.layers == ("n_layers", "depth")
    assert [match.code for match in family.matches] == ["modeling_other"]
    assert family.parts["block"].blocks == ("True",)
    assert family.sites["block"]["layer_output"].output == "."
    assert schema.families["kimi_linear"] == SCHEMA.families["kimi_linear"]


def test_a_broken_file_lists_every_problem_at_once_each_with_its_path(tmp_path):
    file = own(
        tmp_path,
        """
        extra: 1
        values:
          mlp:
            one: {layout: [position, expret, position], dtype: float33, about: 3, colour: red}
            two: [a]
          other: 5
        short_names: {logit: model.logit}
        families:
          kimi_linear:
            match: {classs: A, code: 1}
            layers: num_hidden_layers +
            sizes: {hidden: f(x), vocab: 7}
            parts:
              block: {host: layer, module: "model.layers.{layer}", class: C}
              odd: {host: mlp, module: "x.{layer}", class: C}
            calls:
              delta_rule: {attention: true}
              lost: {part: kad}
            sites:
              kad: {}
              block:
                layer_input: {output: a, input: b}
                layer_mid: {input: a, axes: [batch, position, hiden]}
                layer_output: {item: 1}
                unheard: {output: a, axes: [batch*hidden]}
                mlp_input: {output: mlp, keep: 3}
              kda:
                states: {compute: statez, from: {keys: attention_key}}
                betas: {call: delta_rul, argument: beta, result: 0, axes: [batch]}
                decays: {call: delta_rule, axes: [batch]}
                gate_logits: {output: g}
        """,
    )
    with pytest.raises(UsageError) as failure:
        load_schema(file)
    first, *lines = str(failure.value).splitlines()
    # an unknown key at the top stops the rest, which might hang on it
    assert first == f"The schema in {file} has 1 problem(s); mend them:"
    assert lines == ["  extra: unknown key"]

    file.write_text(file.read_text().replace("extra: 1\n", ""))
    with pytest.raises(UsageError) as failure:
        load_schema(file)
    first, *lines = str(failure.value).splitlines()
    family = "families.kimi_linear"
    expected = {
        "values.mlp.one.colour: unknown key",
        "values.mlp.one.about: expected text, found a whole number",
        "values.mlp.one.layout.1: no dimension is called 'expret'; did you mean expert?",
        "values.mlp.one.layout: names a dimension twice",
        "values.mlp.one.dtype: expected one of computed, float32, index, int32, bool, found 'float33'",
        "values.mlp.two: expected a table, found a list",
        "values.other: expected a table of values, found a whole number",
        "short_names.logit: no value is called 'model.logit'; did you mean model.logits",
        f"{family}.match.classs: unknown key; did you mean class?",
        f"{family}.match.code: expected text, found a whole number",
        f"{family}.layers: cannot be read (invalid syntax)",
        f"{family}.sizes.hidden: uses Call, which is not part of this notation",
        f"{family}.sizes.vocab: must be written as text",
        f"{family}.parts.block.host: no host is called 'layer'; did you mean layers?",
        f"{family}.parts.odd.blocks: missing; a part with {{layer}} in its module must say in which blocks it is",
        f"{family}.calls.delta_rule: needs one of `functions`, `method` and `attention: true`",
        f"{family}.calls.lost: needs one of `functions`, `method` and `attention: true`",
        f"{family}.calls.lost.part: no part is called 'kad'; did you mean kda?",
        f"{family}.sites.kad: no part is called 'kad'; did you mean kda?",
        f"{family}.sites.block.layer_input: needs exactly one of input, output, call, compute, module, batch",
        f"{family}.sites.block.layer_mid.argument: missing; which argument of the module is meant is always written",
        f"{family}.sites.block.layer_mid.axes.2: no dimension is called 'hiden'; did you mean hidden?",
        f"{family}.sites.block.layer_output.item: ",
        f"{family}.sites.block.unheard: host 'layer' has no value of this name",
        f"{family}.sites.block.mlp_input.keep: expected text, found a whole number",
        f"{family}.sites.kda.states.compute: no function is called 'statez'; did you mean states?",
        f"{family}.sites.kda.states.from.keys: this part has no site 'attention_key'; did you mean attention_keys",
        f"{family}.sites.kda.betas.call: no call is named 'delta_rul'; did you mean delta_rule?",
        f"{family}.sites.kda.betas: a call site needs one of `argument`, `result` and `whole: true`",
        f"{family}.sites.kda.decays: a call site needs one of `argument`, `result` and `whole: true`",
        f"{family}.sites.kda.gate_logits.axes: missing; the axes as they are at the site are always written",
    }
    found = {problem for problem in expected if any(line.strip().startswith(problem) for line in lines)}
    # layer_output's site is only {item: 1}, laid over the built-in one it would be merged, so it is no problem here
    assert expected - found <= {f"{family}.sites.block.layer_output.item: "}, lines
    assert first == f"The schema in {file} has {len(lines)} problem(s); mend them:"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tree: tree.pop("dimensions"), "dimensions: missing"),
        (lambda tree: tree.update(values=[]), "values: expected a table, found a list"),
        (lambda tree: tree.update(values=None), "values: expected a table, found nothing"),
        (lambda tree: tree["families"].update(x=None), "families.x: expected a table, found nothing"),
        (
            lambda tree: tree["families"]["kimi_linear"].update(layers=None),
            "kimi_linear.layers: expected text or a list",
        ),
        (
            lambda tree: tree["families"]["kimi_linear"]["sites"].update(kda=3),
            "sites.kda: expected a table, found a whole",
        ),
        (lambda tree: tree["families"]["kimi_linear"].update(head=["logit"]), "head.0: "),
        (lambda tree: tree["families"]["kimi_linear"]["sizes"].update(hiden="a"), "sizes.hiden: "),
        (lambda tree: tree["families"]["kimi_linear"]["sizes"].update({"mpl.slot": "a"}), "sizes.mpl.slot: "),
        (lambda tree: tree["values"]["mlp"].update({"a b": tree["values"]["mlp"]["mlp_output"]}), "values.mlp.a b: "),
        (lambda tree: tree["values"]["mlp"]["mlp_output"].update(about=" "), "mlp_output.about: "),
        (
            lambda tree: tree["families"]["kimi_linear"]["sites"]["kda"].update(
                betas={"output": "b", "axes": ["batch"], "keep": "frist"}
            ),
            "kda.betas.keep: expected first or last, found 'frist'",
        ),
        (
            lambda tree: tree["families"]["kimi_linear"]["parts"]["kda"].update(blocks=True),
            "parts.kda.blocks: expected text or a list",
        ),
        (lambda tree: tree["dimensions"].update(x=3), "dimensions.x: expected text, found a whole number"),
        (lambda tree: tree["short_names"].update(betas="linear_attn.betas"), "short_names.betas: "),
    ],
)
def test_one_problem_alone(change, problem):
    tree = yaml.safe_load(BUILT_IN.read_text(encoding="utf-8"))
    change(tree)
    problems = problems_of(tree)
    assert any(problem in line for line in problems), problems


def test_the_built_in_file_has_no_problem():
    assert problems_of(yaml.safe_load(BUILT_IN.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a", "holds no rows; it needs at least `values:` or `families:`."),
        ("", "holds no rows"),
        ("a: [", "is not valid YAML; mend it:"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_files_that_are_no_schema(tmp_path, text, sentence):
    file = own(tmp_path, text)
    with pytest.raises(UsageError) as failure:
        load_schema(file)
    assert str(failure.value).startswith(f"The schema file {file} ")
    assert sentence in str(failure.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"none\.yaml cannot be read \(No such file or directory\); check the path\."):
        load_schema(tmp_path / "none.yaml")
