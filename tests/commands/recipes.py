"""mergekit recipes over the models `base`, `a`, `b` and `c`, by what they show."""

from pathlib import Path

import torch

from mergekit_lab.commands.prepare import prepare
from mergekit_lab.commands.recipes import read_recipe
from mergekit_lab.merging import merge_tensors

MODELS = "models: [{model: a, parameters: %s}, {model: b, parameters: %s}]\nbase_model: base\ndtype: float32\n"
W = ("{weight: 0.5}", "{weight: 0.8}")
D = ("{weight: 0.5, density: 0.3}", "{weight: 0.8, density: 0.3}")

EXACT = {
    "linear": "merge_method: linear\ndtype: float32\n"
    "models: [{model: base, parameters: {weight: 1}}, {model: a, parameters: {weight: 0.5}},"
    " {model: b, parameters: {weight: [0, 1]}}]\n",
    "linear that is not normalized": "merge_method: linear\ndtype: float32\nparameters: {normalize: false}\n"
    "models: [{model: a, parameters: {weight: 0.7}}, {model: b, parameters: {weight: 0.6}}]\n",
    "task arithmetic": "merge_method: task_arithmetic\nparameters: {lambda: 0.7}\n" + MODELS % W,
    "task arithmetic, normalized": "merge_method: task_arithmetic\nparameters: {normalize: true}\n"
    + MODELS % W,
    "ties": "merge_method: ties\nparameters: {int8_mask: true}\n" + MODELS % D,
    "ties, not normalized": "merge_method: ties\nparameters: {normalize: false, lambda: 0.5}\n" + MODELS % D,
    "ties with densities of their own": "merge_method: ties\n"
    + MODELS % ("{weight: 1, density: 0.2}", "{weight: 0.5, density: 0.6}"),
    "ties from nothing to everything": "merge_method: ties\n"
    + MODELS % ("{weight: 1, density: [0, 0.5, 1]}", "{weight: 0.5, density: [0, 0.5, 1]}"),
    "ties, rescaled": "merge_method: ties\nparameters: {rescale: true}\n" + MODELS % D,
    "ties with gradients and filters": "merge_method: ties\n"
    + MODELS
    % (
        "{weight: [0.1, 1.0, 0.3], density: [{filter: mlp, value: [0.2, 0.9]}, {value: 0.5}]}",
        "{weight: [{filter: self_attn, value: 0.25}, {filter: '*', value: [1, 0.5]}], density: 0.4}",
    ),
    "ties by parameters of the whole": "merge_method: ties\nbase_model: base\ndtype: float32\n"
    "parameters: {weight: 0.9, density: [0.2, 0.8]}\nmodels: [{model: base}, {model: a}, {model: b}, {model: "
    "c}]\n",
    "breadcrumbs": "merge_method: breadcrumbs\nparameters: {gamma: 0.05}\n" + MODELS % D,
    "breadcrumbs with ties": "merge_method: breadcrumbs_ties\nparameters: {gamma: [0.01, 0.1]}\n" + MODELS % D,
    "slerp": "merge_method: slerp\nbase_model: base\ndtype: float32\nmodels: [{model: base}, {model: a}]\n"
    "parameters: {t: [{filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}, {filter: mlp, value: [1, 0]}, {value: "
    "0.5}]}\n",
    "slices": "merge_method: slerp\nbase_model: base\ndtype: float32\nslices:\n"
    "- sources: [{model: base, layer_range: [0, 2]}, {model: a, layer_range: [0, 2]}]\n  parameters: {t: [0.1, "
    "0.6]}\n"
    "- sources: [{model: base, layer_range: [2, 4]}, {model: a, layer_range: [2, 4]}]\nparameters: {t: 0.5}\n",
    "model stock": "merge_method: model_stock\nbase_model: base\ndtype: float32\n"
    "models: [{model: a}, {model: b}, {model: c}]\n",
    "model stock by filters": "merge_method: model_stock\nbase_model: base\ndtype: float32\n"
    "models: [{model: a}, {model: b}]\nparameters: {filter_wise: true}\n",
    "nuslerp of task vectors": "merge_method: nuslerp\nparameters: {nuslerp_flatten: false}\n" + MODELS % W,
    "nuslerp": "merge_method: nuslerp\nparameters: {nuslerp_flatten: false, nuslerp_row_wise: true}\n"
    "dtype: float32\nmodels: [{model: a, parameters: {weight: 0.5}}, {model: b, parameters: {weight: 0.8}}]\n",
    "multislerp": "merge_method: multislerp\n" + MODELS % W,
    "multislerp without a base": "merge_method: multislerp\ndtype: float32\nparameters: {weight: [0.2, 1]}\n"
    "models: [{model: a}, {model: b}, {model: c}]\n",
    "karcher": "merge_method: karcher\ndtype: float32\nmodels: [{model: a}, {model: b}, {model: c}]\n"
    "parameters: {max_iter: 5, tol: 1.0e-5}\n",
    "sce": "merge_method: sce\nparameters: {select_topk: 0.4}\n" + MODELS % ("{}", "{}"),
    "sce from nothing to everything": "merge_method: sce\nparameters: {select_topk: [0, 1]}\n"
    + MODELS % ("{}", "{}"),
    "ram": "merge_method: ram\nparameters: {epsilon: 1.0e-2}\n" + MODELS % ("{}", "{}"),
    "ramplus_tl": "merge_method: ramplus_tl\nparameters: {epsilon: 1.0e-2, r: 0.3, alpha: 0.5}\n"
    + MODELS % ("{}", "{}"),
    "nearswap": "merge_method: nearswap\nbase_model: base\ndtype: float32\n"
    "models: [{model: base}, {model: a}]\nparameters: {t: [0.001, 0.02]}\n",
    "arcee_fusion": "merge_method: arcee_fusion\nbase_model: base\ndtype: float32\n"
    "models: [{model: base}, {model: a}]\n",
    "passthrough of one model, scaled": "merge_method: passthrough\ndtype: float32\n"
    "models: [{model: a, parameters: {scale: [{filter: down_proj, value: 0.5}, "
    "{filter: o_proj, value: [0, 1]}]}}]\n",
    "depth up-scaling": "merge_method: passthrough\ndtype: float32\nslices:\n"
    "- sources: [{model: a, layer_range: [0, 3]}]\n- sources: [{model: a, layer_range: [1, 4]}]\n",
    "layers of three models, interleaved, one twice": "merge_method: passthrough\ndtype: float32\nslices:\n"
    "- sources: [{model: a, layer_range: [0, 2]}]\n- sources: [{model: b, layer_range: [1, 3]}]\n"
    "- sources: [{model: b, layer_range: [2, 3], parameters: {scale: [{filter: layers.2.mlp.down_proj, "
    "value: 0}]}}]\n"
    "- sources: [{model: c, layer_range: [3, 4]}]\n",
    "fewer layers": "merge_method: ties\nbase_model: base\ndtype: float32\nparameters: {density: 0.4}\n"
    "slices:\n- sources: [{model: base, layer_range: [0, 1]}, {model: a, layer_range: [0, 1], "
    "parameters: {weight: 1}}]\n"
    "- sources: [{model: base, layer_range: [2, 4]}, {model: a, layer_range: [2, 4], "
    "parameters: {weight: [1, 0]}}]\n",
    "other layers of other models": "merge_method: linear\ndtype: float32\nslices:\n"
    "- sources: [{model: a, layer_range: [0, 2], parameters: {weight: 1}}]\n"
    "- sources: [{model: a, layer_range: [1, 4], parameters: {weight: 0.5}}, {model: b, layer_range: [0, 3],"
    " parameters: {weight: [0.5, 2]}}]\n"
    "- sources: [{model: c, layer_range: [3, 4], parameters: {weight: 1}}]\n",
    "slerp of slices with bases of their own": "merge_method: slerp\nbase_model: a\ndtype: float32\n"
    "parameters: {t: [0.2, 0.9]}\nslices:\n"
    "- sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [2, 4]}]\n"
    "- sources: [{model: c, layer_range: [1, 4]}, {model: b, layer_range: [1, 4]}]\n  base_model: b\n",
    "dare of density 1": "merge_method: dare_ties\n" + MODELS % W,
    "della of density 1": "merge_method: della\n" + MODELS % W,
    "della of density 0": "merge_method: della\n" + MODELS % ("{weight: 1, density: 0}", "{weight: 0.5}"),
}
"""Nothing random: equal numbers."""

STAGES = {
    "an intermediate as base and as model": "name: first\nmerge_method: linear\ndtype: float32\n"
    "models: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n---\n"
    "name: second\nmerge_method: slerp\nbase_model: first\ndtype: float32\nmodels: [{model: c}]\n"
    "parameters: {t: 0.5}\n---\n"
    "merge_method: ties\nbase_model: base\ndtype: float32\nmodels:\n"
    "- {model: second, parameters: {weight: 0.5, density: 0.6}}\n"
    "- {model: first, parameters: {weight: 0.3, density: 0.8}}\n",
    "the result stands first": "merge_method: passthrough\ndtype: float32\nslices:\n"
    "- sources: [{model: deep, layer_range: [0, 6]}]\n- sources: [{model: a, layer_range: [0, 1]}]\n---\n"
    "name: deep\nmerge_method: passthrough\ndtype: float32\nslices:\n"
    "- sources: [{model: b, layer_range: [0, 4]}]\n- sources: [{model: c, layer_range: [2, 4]}]\n",
}
"""Documents that use each other's results."""

RANDOM = {
    "dare_linear": "merge_method: dare_linear\n" + MODELS % D,
    "dare_linear without rescaling": "merge_method: dare_linear\nparameters: {rescale: false}\n" + MODELS % D,
    "dare_ties": "merge_method: dare_ties\n" + MODELS % D,
    "della": "merge_method: della\nparameters: {epsilon: 0.1}\n" + MODELS % D,
    "della_linear": "merge_method: della_linear\nparameters: {epsilon: 0.1}\n" + MODELS % D,
}
"""Equal in distribution."""

CHATS = {
    "chatml_model": ("<|im_start|>", "<|im_end|>", "<|special|>"),
    "llama3_model": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|special|>"),
}
"""Models that have tokens of their own, beside those of `base`."""
_TWO_CHATS = (
    "models: [{model: chatml_model, parameters: {weight: 0.3}}, {model: llama3_model, parameters: {weight: 1}}]"
)
TOKENIZERS = {
    "a token and padding": """
merge_method: task_arithmetic
base_model: chatml_model
models: [{model: base, parameters: {weight: 0.3}}]
tokenizer:
  source: "base"
  tokens:
    <|im_end|>: {source: chatml_model, force: false}
  pad_to_multiple_of: 16
""",
    "every kind of source": f"""
merge_method: task_arithmetic
base_model: base
{_TWO_CHATS}
tokenizer:
  source: union
  tokens:
    <|im_start|>:
      source: "chatml_model"
    <|special|>:
      source: "llama3_model"
      force: true
    <|renamed_token|>:
      source:
        kind: "model_token"
        model: "chatml_model"
        token: "<|im_end|>"
    <|numbered|>: {{source: {{kind: model_token, model: base, token_id: 4}}}}
    t3: {{source: {{kind: model_token, model: llama3_model, token: t4}}, force: true}}
    <|unused|>:
      source:
        kind: "zero"
""",
    "two prompt formats": f"""
merge_method: linear
{_TWO_CHATS}
tokenizer:
  source: union
  tokens:
    <|im_start|>:
      source: "chatml_model"
    <|im_end|>:
      source: "chatml_model"
    <|start_header_id|>:
      source: "llama3_model"
      force: true
    <|end_header_id|>:
      source: "llama3_model"
      force: true
    <|eot_id|>:
      source: "llama3_model"
      force: true
""",
    "only a union": f"""
merge_method: ties
base_model: base
{_TWO_CHATS}
tokenizer_source: union
""",
}
"""The blocks of mergekit's page on tokenizers, and one without exceptions."""

START = "merge_method: ties\nbase_model: base\n"

TWO = "models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]\n"
"""A recipe's beginning, and two models."""


def merge_here(text: str, seed: int = 0) -> dict[str, torch.Tensor]:
    Path("recipe.yml").write_text(text)
    recipe = read_recipe(Path("recipe.yml"), seed)
    prepared = prepare(recipe.base, recipe.experts, recipe.make_method, dtype=recipe.dtype, device="cpu")
    return dict(merge_tensors(prepared.base, prepared.experts, prepared.method, dtype=prepared.dtype))
