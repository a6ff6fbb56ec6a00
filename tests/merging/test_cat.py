"""CAT Merging equals the paper's formulas, written out with the layers' inputs themselves."""

import torch
from merging.conftest import measure_error

from mergekit_lab.merging import CAT, merge_state_dicts

C, PENALTY = 2, 0.4


def trim(deltas: list[torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum of what is left of `T_i` `[in, out]`, for inputs `X_k` `[rows, in]`."""
    bases = []
    for k, x in enumerate(inputs):
        conflict = 0
        for i, delta in enumerate(deltas):
            if i != k:
                conflict = conflict + delta.T @ (x.T @ x - PENALTY * inputs[i].T @ inputs[i]) @ delta
        u, s, v = torch.linalg.svd(conflict)
        signs = (u * v.T).sum(dim=0)  # of eigenvalues
        order = (s * signs).argsort(descending=True)[:C]
        bases.append(u[:, [n for n in order if signs[n] > 0]])
    total = 0
    for i, delta in enumerate(deltas):
        kept = delta
        for k, basis in enumerate(bases):
            if k != i:
                kept = kept - kept @ basis @ basis.T
        total = total + kept
    return total


def mask(deltas: list[torch.Tensor], score) -> torch.Tensor:
    kept = [delta.clone() for delta in deltas]
    for k in range(len(deltas)):
        conflict = sum(score(k, i) * deltas[i] ** 2 for i in range(len(deltas)) if i != k)
        for index in conflict.argsort(descending=True)[:C].tolist():
            for i in range(len(deltas)):
                if i != k and conflict[index] > 0:
                    kept[i][index] = 0
    return sum(kept)


def test_equals_the_papers_formulas() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    base = {
        "fc.weight": draw(6, 5),
        "up.weight": draw(14, 5),
        "fc.bias": draw(6),
        "ln.weight": draw(5),
        "emb.table": draw(7, 5),
    }
    deltas = [{n: 0.1 * draw(*v.shape) for n, v in base.items()} for _ in range(3)]
    inputs = [draw(40, 5) * draw(5) for _ in range(3)]
    norms = [draw(40, 5) * draw(5) for _ in range(3)]
    squares = [z.square().mean(dim=0) for z in norms]
    grams = [
        dict.fromkeys(("fc", "up"), x.T @ x / 40) | {"ln": square}
        for x, square in zip(inputs, squares, strict=True)
    ]
    experts = [{n: v + delta[n] for n, v in base.items()} for delta in deltas]
    merged = merge_state_dicts(base, experts, CAT(rank=C, penalty=PENALTY, coefficient=0.5), grams=grams)

    wanted = {
        "fc.weight": trim([d["fc.weight"].T for d in deltas], inputs).T,
        "up.weight": trim([d["up.weight"].T for d in deltas], inputs).T,
        "fc.bias": mask([d["fc.bias"] for d in deltas], lambda k, i: 1.0),
        "ln.weight": mask([d["ln.weight"] for d in deltas], lambda k, i: squares[k] - PENALTY * squares[i]),
        "emb.table": sum(d["emb.table"] for d in deltas),
    }
    for name, delta in wanted.items():
        assert measure_error(merged[name] - base[name], 0.5 * delta) <= 1e-10, name
        plain = sum(d[name] for d in deltas)
        assert name == "emb.table" or measure_error(delta, plain) > 0.1, name
