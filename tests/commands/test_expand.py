"""A spectral merge stored as factors: what comes back is the dense merge, or some experts' shares of it."""

import json
import shutil

import pytest
import torch
from checkpoints.models import (
    OPEN_CLIP,
    VOCABULARY,
    make_llama,
    open_clip_model,
    save_three,
    tune,
    write_tokenizer,
)
from composing import compose_config

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.merging import TIES, TSVM, EpiMer, TaskArithmetic
from mergekit_lab.programs import start

METHODS = {
    "tsvm": TSVM(coefficient=0.7),
    "tsvm at rank 2, weighted": TSVM(rank=2, weights=[0.5, 1.5]),
    "epimer": EpiMer(rank=3, coefficient=1.3, weights=[1.0, 3.0]),
}


def make_fishers(model, count: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            n: torch.rand(t.shape, generator=generator)
            for n, t in model.state_dict().items()
            if t.is_floating_point()
        }
        for _ in range(count)
    ]


def merge_both(base, experts, method, tmp_path, **options):
    """The same merge dense and in factors."""
    side = make_fishers(open_clip_model()) if isinstance(method, EpiMer) else None
    return [
        mergekit_lab.merge(
            base, experts, tmp_path / name, method, fishers=side, device="cpu", format=name, **options
        )
        for name in ("dense", "low_rank")
    ]


def are_equal(first, second) -> bool:
    a, b = open_checkpoint(first), open_checkpoint(second)
    return dict(a.specs) == dict(b.specs) and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_factors_expand_to_the_dense_merge_bit_for_bit(method, dtype, tmp_path) -> None:
    base = open_clip_model().state_dict()
    experts = [tune(open_clip_model(), seed).state_dict() for seed in (1, 2)]
    dense, factors = merge_both(base, experts, method, tmp_path, dtype=dtype)
    assert are_equal(dense, mergekit_lab.expand(factors, base, tmp_path / "expanded"))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)], ids=str)
def test_a_tensor_without_entries_has_factors_too(shape, tmp_path) -> None:
    base = {"w": torch.ones(4, 4), "empty": torch.zeros(shape)}
    experts = [{"w": torch.ones(4, 4) + t * torch.eye(4), "empty": torch.zeros(shape)} for t in (1, 2)]
    for number, method in enumerate((TSVM(), EpiMer(rank=1))):
        options = {"fishers": [base, base]} if isinstance(method, EpiMer) else {}
        dense, factors = (
            mergekit_lab.merge(
                base, experts, tmp_path / f"{name}{number}", method, device="cpu", format=name, **options
            )
            for name in ("dense", "low_rank")
        )
        assert are_equal(dense, mergekit_lab.expand(factors, base, tmp_path / f"expanded{number}"))


def test_a_sharded_folder_of_a_tied_model_loads_and_computes_what_the_dense_merge_does(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    base, experts = save_three(lambda: make_llama(tied=True), tmp_path)
    dense, factors = merge_both(base, experts, TSVM(), tmp_path, max_shard_bytes=4000)
    assert (factors / "factors.safetensors.index.json").is_file()
    out = mergekit_lab.expand(factors, base, tmp_path / "out")
    ids = torch.arange(8)[None]
    logits = [AutoModelForCausalLM.from_pretrained(x)(input_ids=ids).logits for x in (dense, out)]
    assert torch.equal(*logits)
    assert "expanded from low-rank factors" in (out / "README.md").read_text()


def test_chosen_tasks_add_their_own_shares_and_all_shares_make_the_whole(tmp_path) -> None:
    base = {n: t.double() for n, t in open_clip_model().state_dict().items() if t.is_floating_point()}
    experts = {
        name: {n: t + 0.02 * torch.randn_like(t) for n, t in base.items()} for name in ("cars", "svhn", "dtd")
    }
    folder = mergekit_lab.merge(base, experts, tmp_path / "f", TSVM(), device="cpu", format="low_rank")

    def load_deltas(**options) -> dict[str, torch.Tensor]:
        out = mergekit_lab.expand(folder, base, tmp_path / "out", overwrite=True, **options)
        model = open_checkpoint(out)
        return {n: model[n] - base[n] for n in base}

    whole, alone = load_deltas(), {task: load_deltas(tasks=[task]) for task in experts}
    for name in base:
        torch.testing.assert_close(sum(share[name] for share in alone.values()), whole[name])
    conv = "visual.conv1.weight"
    torch.testing.assert_close(alone["svhn"][conv], (experts["svhn"][conv] - base[conv]) / 3)
    for name, share in load_deltas(tasks=["cars", "dtd"], coefficient=-2.0).items():
        torch.testing.assert_close(share, -2 * (alone["cars"][name] + alone["dtd"][name]))


def test_at_coefficient_0_the_base_comes_back_bit_for_bit(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    _, factors = merge_both(base, experts, TSVM(), tmp_path)
    assert are_equal(base, mergekit_lab.expand(factors, base, tmp_path / "out", coefficient=0.0))


def test_factors_at_a_small_rank_take_less_room_than_one_model(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(256, 256, generator=generator)}
    experts = [{"w": base["w"] + torch.randn(256, 256, generator=generator)} for _ in range(4)]
    dense, factors = merge_both(base, experts, TSVM(rank=8), tmp_path)
    sizes = [sum(p.stat().st_size for p in folder.glob("*.safetensors")) for folder in (dense, factors)]
    assert sizes[1] < 0.3 * sizes[0]


def test_excluded_tensors_and_integer_buffers_stay_the_base_s(tmp_path) -> None:
    base = {"a": torch.randn(6, 4), "b": torch.randn(6, 4), "steps": torch.tensor(3)}
    experts = [{n: t + 1 if n != "steps" else t for n, t in base.items()} for _ in range(2)]
    dense, factors = merge_both(base, experts, TSVM(), tmp_path, exclude=["b"])
    out = mergekit_lab.expand(factors, base, tmp_path / "out")
    assert are_equal(dense, out)
    assert torch.equal(open_checkpoint(out)["b"], base["b"])


def test_a_folder_of_factors_is_an_expert_like_any_other(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    dense, factors = merge_both(base, experts, TSVM(), tmp_path)
    both = [
        mergekit_lab.merge(base, [each, experts["cars"]], tmp_path / f"m{i}", TaskArithmetic(), device="cpu")
        for i, each in enumerate((dense, factors))
    ]
    assert are_equal(*both)


def test_what_cannot_work_is_refused_by_name(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    with pytest.raises(InputError, match=r"TIES.*low-rank"):
        mergekit_lab.merge(base, experts, tmp_path / "x", TIES(), device="cpu", format="low_rank")
    with pytest.raises(InputError, match=r"format is 'lowrank'.*low_rank"):
        mergekit_lab.merge(base, experts, tmp_path / "x", TSVM(), device="cpu", format="lowrank")
    factors = mergekit_lab.merge(base, experts, tmp_path / "f", TSVM(), device="cpu", format="low_rank")
    with pytest.raises(InputError, match="another base"):
        mergekit_lab.expand(factors, experts["cars"], tmp_path / "x")
    with pytest.raises(InputError, match="no share of"):
        mergekit_lab.expand(factors, base, tmp_path / "x", tasks=["car"])
    with pytest.raises(InputError, match="finite"):
        mergekit_lab.expand(factors, base, tmp_path / "x", coefficient=float("nan"))
    with pytest.raises(InputError, match="expand it"):
        open_checkpoint(factors)
    with pytest.raises(InputError, match="input of this merge"):
        mergekit_lab.expand(factors, base, factors, overwrite=True)
    (factors / "low_rank.json").write_text(json.dumps({"experts": ["a"]}))
    with pytest.raises(InputError, match=r"low_rank\.json"):
        mergekit_lab.expand(factors, base, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_truncated_file_of_factors_is_refused(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    factors = mergekit_lab.merge(base, experts, tmp_path / "f", TSVM(), device="cpu", format="low_rank")
    file = factors / "factors.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="cut short"):
        mergekit_lab.expand(factors, base, tmp_path / "x")


def test_vocabularies_that_grow_have_no_factors(tmp_path) -> None:
    small, large = make_llama(vocabulary=36), make_llama(vocabulary=40)
    base, grown = small.state_dict(), tune(large, 1).state_dict()
    with pytest.raises(InputError, match="vocabulary cannot grow"):
        mergekit_lab.merge(
            base, {"a": grown}, tmp_path / "x", TSVM(), device="cpu", embeddings="pad", format="low_rank"
        )


def test_the_file_written_for_a_merge_of_factors_needs_no_base_to_be_read(tmp_path) -> None:
    state = open_clip_model().state_dict()
    write_tensors(tmp_path / "base.safetensors", state)
    experts = [tune(open_clip_model(), seed).state_dict() for seed in (1, 2)]
    folder = mergekit_lab.merge(
        tmp_path / "base.safetensors", experts, tmp_path / "f", TSVM(), device="cpu", format="low_rank"
    )
    factors = open_checkpoint(folder / "factors.safetensors")
    u, d, v = (factors[f"visual.proj.{part}"] for part in ("u", "coordinates", "v"))
    delta = (u.double() * d.double()) @ v.double().mT
    expanded = open_checkpoint(mergekit_lab.expand(folder, tmp_path / "base.safetensors", tmp_path / "out"))
    torch.testing.assert_close(expanded["visual.proj"], state["visual.proj"] + delta.float())


def test_the_two_commands_make_the_dense_merge(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    inputs = [f"base={base}", f"experts=[{experts['cars']},{experts['svhn']}]", "merger=tsvm", "device=cpu"]
    commands = [
        ["+experiment=merge_checkpoints", *inputs, f"out={tmp_path / 'dense'}"],
        ["+experiment=merge_checkpoints", *inputs, f"out={tmp_path / 'factors'}", "format=low_rank"],
        ["+experiment=expand", f"low_rank={tmp_path / 'factors'}", f"base={base}", f"out={tmp_path / 'out'}"],
    ]
    for overrides in commands:
        cfg, choices = compose_config([*overrides, "progress=false"])
        start(cfg, tmp_path / "run", choices, overrides)
    assert are_equal(tmp_path / "dense", tmp_path / "out")


def test_a_tokenizer_that_was_chosen_comes_back_with_the_expanded_model(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    write_tokenizer(experts["svhn"], [f"t{n}" for n in range(VOCABULARY - 1)])
    for wanted, holder in (("svhn", experts["svhn"]), (None, base)):
        factors = mergekit_lab.merge(
            base, experts, tmp_path / "f", TSVM(), device="cpu", format="low_rank", tokenizer_from=wanted,
            overwrite=True,
        )  # fmt: skip
        out = mergekit_lab.expand(factors, base, tmp_path / "out", overwrite=True)
        assert (out / "tokenizer.json").read_bytes() == (holder / "tokenizer.json").read_bytes()
        assert f"| tokenizer | {wanted or 'base'} |" in (out / "README.md").read_text()


def test_the_model_of_factors_is_for_the_library_of_its_base(tmp_path) -> None:
    import open_clip

    base, expert = tmp_path / "base", {n: t * 1.01 for n, t in open_clip_model().state_dict().items()}
    base.mkdir()
    write_tensors(base / "open_clip_model.safetensors", open_clip_model().state_dict())
    (base / "open_clip_config.json").write_text(json.dumps({"model_cfg": OPEN_CLIP, "preprocess_cfg": {}}))
    dense, factors = merge_both(base, {"cars": expert}, TSVM(), tmp_path)
    out = mergekit_lab.expand(factors, base, tmp_path / "out", max_shard_bytes=1000)
    assert are_equal(dense, out)
    loaded = open_clip.create_model(f"local-dir:{out}").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in open_checkpoint(dense).items())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A base with a matrix and a vector, and what two experts add to it."""
    generator = torch.Generator().manual_seed(0)
    base, *experts = (
        {"a": torch.rand(6, 4, generator=generator), "c": torch.rand(3, generator=generator)} for _ in range(3)
    )
    folder = tmp_path_factory.mktemp("small")
    return base, mergekit_lab.merge(base, experts, folder / "f", TSVM(rank=1), device="cpu", format="low_rank")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "load"), ("dtype", "int8"), ("dtype", ["float32"]),
        ("coefficient", "1"), ("coefficient", float("inf")),
        ("experts", "ab"), ("experts", [1]), ("tied", [1]), ("tied", {"a": 3}), ("base", 3), ("base", {}),
        ("base", {"layout_sha256": "a", "label": "b", "files": [1]}),
    ],
)  # fmt: skip
def test_a_record_that_no_merge_wrote_is_refused(key: str, value, small, tmp_path) -> None:
    base, folder = small
    shutil.copytree(folder, tmp_path / "f")
    record = json.loads((folder / "low_rank.json").read_text())
    (tmp_path / "f/low_rank.json").write_text(json.dumps(record | {key: value}))
    with pytest.raises(InputError, match=rf"damaged, or not a merge's \({key} is .*must be"):
        mergekit_lab.expand(tmp_path / "f", base, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.u": None}, "factors of a do"),
        ({"a.u": torch.ones(3, 2)}, "factors of a do"),
        ({"a.u": torch.ones(6, 2, dtype=torch.int32)}, "factors of a do"),
        ({"a.coordinates": torch.ones(3)}, "factors of a do"),
        ({"c.parts": torch.ones(3, 3)}, "factors of c do"),
        ({"d.u": torch.ones(2, 2)}, r"tensors the base lacks \(d\.u\)"),
        ({"a.v": torch.full((4, 2), torch.nan)}, "a comes out with NaN"),
        ({"c.divisor": torch.tensor(0.0)}, "comes out with NaN"),
    ],
)
def test_factors_that_are_damaged_are_named_and_nothing_is_written(
    change, message: str, small, tmp_path
) -> None:
    base, folder = small
    shutil.copytree(folder, tmp_path / "f")
    factors = dict(open_checkpoint(folder / "factors.safetensors")) | change
    write_tensors(tmp_path / "f/factors.safetensors", {n: t for n, t in factors.items() if t is not None})
    with pytest.raises(InputError, match=message):
        mergekit_lab.expand(tmp_path / "f", base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
