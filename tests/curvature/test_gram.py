"""A layer's Gram is the mean of x xᵀ over everything that entered it."""

import pytest
import torch
from curvature.models import CASES, draw_noise
from torch import nn
from transformers.pytorch_utils import Conv1D

from mergekit_lab import InputError
from mergekit_lab.curvature import input_grams
from mergekit_lab.merging import RegMean, merge_state_dicts


def record_entering(model: nn.Module, run) -> dict[str, torch.Tensor]:
    """Rows that entered every linear module, by hooks."""
    rows: dict[str, list[torch.Tensor]] = {}

    def keep(name):
        return lambda module, args: rows.setdefault(name, []).append(args[0].flatten(0, -2).double())

    linear = [(n, m) for n, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)]
    handles = [m.register_forward_pre_hook(keep(n)) for n, m in linear]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in rows.items()}


@pytest.mark.parametrize("name", ["Llama", "T5", "BERT", "GPT-2"])
def test_every_linear_module_has_the_gram_of_its_inputs(name: str) -> None:
    case = CASES[name]()
    batches = [case.batch, {k: v[:2] for k, v in case.batch.items()}]
    rows = record_entering(case.model, lambda: [case.model(**b) for b in batches])
    grams = input_grams(case.model, batches)
    tied = {n for n, _ in case.model.named_modules()} - {
        n.rpartition(".")[0] for n, _ in case.model.named_parameters()
    }
    assert {*rows} - tied == {*grams} & {*rows}
    for key in {*grams} & {*rows}:
        torch.testing.assert_close(
            grams[key].double(), rows[key].T @ rows[key] / len(rows[key]), rtol=1e-4, atol=1e-6
        )


def test_the_projections_inside_torchs_attention_have_theirs() -> None:
    case = CASES["open_clip ViT"]()
    model, (images, _) = case.model, case.batch
    block = model.visual.transformer.resblocks[0]
    seen = []
    handle = block.ln_1.register_forward_hook(lambda m, a, out: seen.append(out.flatten(0, -2)))
    grams = input_grams(model, [(images, None)])
    handle.remove()
    key = "visual.transformer.resblocks.0.attn"
    assert {f"{key}.in_proj", f"{key}.out_proj", key.replace("attn", "mlp.c_fc")} <= grams.keys()
    torch.testing.assert_close(grams[f"{key}.in_proj"], seen[0].T @ seen[0] / len(seen[0]))
    before = block.attn.out_proj.weight.clone()
    block.attn.out_proj.weight.data.zero_()
    assert torch.equal(input_grams(model, [(images, None)])[f"{key}.out_proj"], grams[f"{key}.out_proj"])
    block.attn.out_proj.weight.data.copy_(before)


def test_batches_are_weighed_by_their_rows() -> None:
    layer = nn.Sequential(nn.Linear(4, 2))
    x = draw_noise(7, 3, 4)
    whole = input_grams(layer, [(x, None)])["0"]
    parts = input_grams(layer, [(x[:5], None), (x[5:], None)])["0"]
    torch.testing.assert_close(parts, whole)
    assert layer.training


class Queried(nn.Module):
    """A learned vector goes through a layer without the samples; the other layer is called by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(draw_noise(4))
        self.inner = nn.Linear(4, 4)
        self.outer = Conv1D(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(self.query)
        return torch.addmm(self.outer.bias, mat1=x, mat2=self.outer.weight)


def test_a_vector_is_one_row_and_keywords_are_understood() -> None:
    model, x = Queried(), draw_noise(7, 4)
    grams = input_grams(model, [(x, None)])
    torch.testing.assert_close(grams["inner"], torch.outer(model.query, model.query).detach())
    rows = (x + model.inner(model.query)).detach()
    torch.testing.assert_close(grams["outer"], rows.T @ rows / 7)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(InputError, match="no linear layer"):
        input_grams(nn.ReLU(), [(draw_noise(2, 3), None)])
    with pytest.raises(InputError, match="no linear layer"):
        input_grams(nn.Linear(3, 2), [])


def test_regmean_with_them_gives_the_least_squares_weights_of_attention_too() -> None:
    """The merged in-projection is the one nearest to each expert's outputs on that expert's inputs."""
    experts, grams, rows = {}, {}, {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).double()
        rows[str(seed)] = draw_noise(20, 3, 6).double() @ torch.randn(6, 6).double()
        experts[str(seed)] = model.state_dict()
        grams[str(seed)] = input_grams(model, [(rows[str(seed)], None)])
    base = {name: torch.zeros_like(value) for name, value in experts["1"].items()}
    name = "self_attn.in_proj_weight"
    merged = merge_state_dicts(base, experts, RegMean(), statistics={"gram": grams}, include=[name])
    x = torch.cat([r.flatten(0, 1) for r in rows.values()])
    y = torch.cat([r.flatten(0, 1) @ experts[e][name].T for e, r in rows.items()])
    torch.testing.assert_close(merged[name], torch.linalg.lstsq(x, y).solution.T, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_norms_have_the_mean_squares_of_what_they_multiply(name: str) -> None:
    case = CASES[name]()
    norms = {n: m for n, m in case.model.named_modules() if type(m).__name__.endswith("Norm")}
    outputs: dict[str, torch.Tensor] = {}
    for key, module in norms.items():
        module.register_forward_hook(lambda m, a, out, key=key: outputs.update({key: out.flatten(0, -2)}))
    grams = input_grams(case.model, [case.batch])
    assert norms.keys() <= grams.keys()
    for key, module in norms.items():
        plain = (outputs[key] - getattr(module, "bias", torch.zeros(()))) / module.weight
        torch.testing.assert_close(grams[key], plain.square().mean(dim=0), rtol=1e-3, atol=1e-5)
