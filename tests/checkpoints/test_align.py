"""Names that differ without a difference in values are made the base's; the rest is left alone."""

import json

import pytest
import torch
from checkpoints.models import (
    make_bert,
    make_gemma3,
    make_gpt2,
    make_llama,
    make_mixtral,
    make_qwen2_vl,
    make_t5,
    make_t5_1_1,
    save,
    save_siglip,
    tune,
)
from safetensors.torch import load_file, save_file

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import align, tied_weights

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_all_names(model, folder):
    """As programs write it that do not know about ties: every name of the state dict."""
    save(model, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({n: t.clone() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make", [lambda: make_llama(tied=True), make_t5, make_bert])
def test_ties_are_found_in_files_that_write_every_name(make, tmp_path) -> None:
    once = open_checkpoint(save(make(), tmp_path / "once"))
    twice = open_checkpoint(with_all_names(make(), tmp_path / "twice"))
    tied = twice.find_ties()
    assert once.find_ties() == {}
    assert set(twice) - set(once) == set(tied)
    assert set(tied.values()) <= set(once)


def test_an_untied_model_with_equal_values_is_not_tied(tmp_path) -> None:
    model = make_llama()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    assert open_checkpoint(save(model, tmp_path / "m")).find_ties() == {}


def test_second_names_are_left_out_or_added_as_the_base_has_them(tmp_path) -> None:
    once = open_checkpoint(save(make_llama(tied=True), tmp_path / "once"))
    twice = open_checkpoint(with_all_names(tune(make_llama(tied=True), 1), tmp_path / "twice"), "twice")
    lines = []
    assert set(align(once, twice, say=lines.append)) == set(once)
    assert lines == [f"twice: {HEAD} is {EMBED}, tied as in the base"]
    longer = align(twice, once)
    assert set(longer) == set(twice)
    assert torch.equal(longer[HEAD], once[EMBED])
    assert longer.find_ties() == {HEAD: EMBED}


def test_an_expert_that_unties_is_refused(tmp_path) -> None:
    base = open_checkpoint(save(make_llama(tied=True), tmp_path / "base"))
    expert = open_checkpoint(save(tune(make_llama(), 1), tmp_path / "expert"), "cars")
    with pytest.raises(InputError, match=r"'cars'.*lm_head\.weight.*model\.embed_tokens"):
        align(base, expert)


PREFIXES = [
    "module.",
    "model.",
    "net.backbone.",
    "base_model.model.",
    "_orig_mod.",
    "module._orig_mod.",
    "model.module.",
]
SMALL = {"model.w": torch.randn(3), "head.b": torch.randn(2), "head.c": torch.randn(2)}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_of_every_name_is_left_out_or_added(prefix: str) -> None:
    plain, longer = SMALL, {prefix + n: t for n, t in SMALL.items()}
    for base, expert in ((plain, longer), (longer, plain)):
        lines = []
        aligned = align(open_checkpoint(base), open_checkpoint(expert, "x"), say=lines.append)
        assert aligned.keys() == base.keys()
        assert all(torch.equal(aligned[n], t) for n, t in base.items())
        assert prefix in lines[0] or "are spelled as in the base" in lines[0]


def test_only_as_much_of_a_prefix_is_left_out_as_the_base_lacks() -> None:
    """A tied model has no `lm_head`, so that every name starts with the base's own `model.` too."""
    base = {"model.embed.weight": torch.randn(3, 2), "model.norm.weight": torch.randn(2)}
    aligned = align(
        open_checkpoint(base), open_checkpoint({f"base_model.model.{n}": t for n, t in base.items()})
    )
    assert aligned.keys() == base.keys()


def test_wrappers_within_names_and_older_spellings_are_no_difference() -> None:
    base = {
        "bert.0.LayerNorm.weight": torch.randn(2),
        "bert.0.LayerNorm.bias": torch.randn(2),
        "bert.w": torch.randn(1),
    }
    older = {
        "bert.0.LayerNorm.gamma": base["bert.0.LayerNorm.weight"],
        "bert.0._orig_mod.LayerNorm.beta": base["bert.0.LayerNorm.bias"],
        "bert.w": base["bert.w"],
    }
    for one, other in ((base, older), (older, base)):
        aligned = align(open_checkpoint(one), open_checkpoint(other))
        assert aligned.keys() == one.keys()
        assert all(torch.equal(aligned[n], t) for n, t in one.items())


def test_names_that_do_not_fit_are_left_alone() -> None:
    base = open_checkpoint({"a.w": torch.zeros(1), "a.v": torch.zeros(1)})
    other = open_checkpoint({"b.w": torch.zeros(1), "b.v": torch.zeros(1)})
    assert align(base, other) is other
    twice = open_checkpoint({"a.LayerNorm.gamma": torch.zeros(1), "a.LayerNorm.weight": torch.zeros(1)})
    assert align(base, twice) is twice


COMPUTED = {
    "h.0.attn.bias": torch.ones(1, 1, 4, 4).tril().bool(),
    "h.0.attn.masked_bias": torch.tensor(-1e4),
    "embeddings.position_ids": torch.arange(4)[None],
    "rotary_emb.inv_freq": torch.rand(3),
}


def test_buffers_that_a_model_computes_may_be_here_and_lack_there() -> None:
    kept = {"h.0.attn.c_attn.bias": torch.randn(3), "other.attn.bias": torch.randn(4)}
    plain, full = open_checkpoint(kept, "plain"), open_checkpoint(kept | COMPUTED, "full")
    lines = []
    assert align(plain, full, say=lines.append).keys() == kept.keys()
    aligned = align(full, plain, say=lines.append)
    assert aligned.keys() == full.keys()
    assert all(torch.equal(aligned[n], t) for n, t in COMPUTED.items())
    assert "model computes are left" in lines[0]
    assert "model computes are taken" in lines[1]
    longer = open_checkpoint(kept | COMPUTED | {"embeddings.position_ids": torch.arange(9)[None]})
    assert torch.equal(align(full, longer)["embeddings.position_ids"], COMPUTED["embeddings.position_ids"])


def without_the_flag(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_silent_configuration_ties_as_its_model_type_does(tmp_path) -> None:
    for name, make, tied in (
        ("gpt2", make_gpt2, {HEAD: "transformer.wte.weight"}),
        ("bert", make_bert, {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}),
        ("llama", lambda: make_llama(tied=True), {}),
    ):
        ties = open_checkpoint(without_the_flag(with_all_names(make(), tmp_path / name))).find_ties()
        assert tied.items() <= ties.items()
        assert bool(ties) == bool(tied)


def test_model_types_that_are_said_to_tie_do_so_in_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type in tied_weights._TIED_UNLESS_SAID:
        assert CONFIG_MAPPING[model_type]().tie_word_embeddings is True, model_type


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.decoder.embed_tokens", "proj_out"),
        ("electra.embeddings.word_embeddings", "generator_lm_head"),
        ("distilbert.embeddings.word_embeddings", "vocab_projector"),
        ("model.embeddings.tok_embeddings", "decoder"),
        ("roberta_prelayernorm.embeddings.word_embeddings", "lm_head.decoder"),
        ("biogpt.embed_tokens", "output_projection"),
        ("transformer.word_embedding", "lm_loss"),
        ("transformer.embeddings", "pred_layer.proj"),
        ("gpt_neox.embed_in", "embed_out"),
        ("transformer.wte", "lm_head"),
        ("tok_embeddings", "output"),
    ],
)
def test_heads_are_known_by_what_models_call_them(embedding: str, head: str) -> None:
    specs = open_checkpoint(
        {f"{n}.weight": torch.zeros(9, 4) for n in (head, embedding, "norm", "h.0.q")}
    ).specs
    assert tied_weights.find_tied_groups(specs, 9, True) == [[f"{embedding}.weight", f"{head}.weight"]]


def test_t5_1_1_shares_its_embeddings_and_has_a_head_of_its_own(tmp_path) -> None:
    """With the configuration of transformers 5 (tied, but scale_decoder_outputs is false) and of 4."""
    for number, flags in enumerate(({}, {"tie_word_embeddings": False, "scale_decoder_outputs": None})):
        base = with_all_names(make_t5_1_1(), tmp_path / f"base-{number}")
        config = json.loads((base / "config.json").read_text()) | flags
        (base / "config.json").write_text(json.dumps(config))
        twice = open_checkpoint(base)
        assert twice.find_ties() == {
            f"{part}.embed_tokens.weight": "shared.weight" for part in ("decoder", "encoder")
        }
        once = open_checkpoint(save(tune(make_t5_1_1(), 1), tmp_path / f"once-{number}"), "cars")
        assert not {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} & once.keys()
        longer = align(twice, once)
        assert longer.keys() == twice.keys()
        assert torch.equal(longer["decoder.embed_tokens.weight"], once["shared.weight"])
        assert align(once, twice).keys() == once.keys()
        assert torch.equal(align(once, twice)[HEAD], twice[HEAD])


@pytest.mark.parametrize("stacked", ["base", "expert"])
def test_layouts_of_a_mixture_are_recognized_by_names_without_a_configuration(stacked: str, tmp_path) -> None:
    model = make_mixtral()
    model.save_pretrained(tmp_path / "pieces")
    model.save_pretrained(tmp_path / "stacks", save_original_format=False)
    layouts = ("stacks", "pieces") if stacked == "base" else ("pieces", "stacks")
    base, expert = (open_checkpoint(load_file(tmp_path / name / "model.safetensors")) for name in layouts)
    same = align(base, expert)
    assert same.keys() == base.keys()
    assert all(torch.equal(same[name], base[name]) for name in base)


@pytest.mark.parametrize("make", [make_gemma3, make_qwen2_vl, make_mixtral])
def test_names_and_stacks_in_memory_are_those_of_the_files_of_that_model(make, tmp_path) -> None:
    """A folder and a state dict of one model, each as base and as expert: matrices an expert, and stacks."""
    make().save_pretrained(tmp_path / "base")
    tune(make(), 1).save_pretrained(tmp_path / "expert")
    files = {name: load_file(tmp_path / name / "model.safetensors") for name in ("base", "expert")}
    states = {"base": make().state_dict(), "expert": tune(make(), 1).state_dict()}
    stored = align(open_checkpoint(tmp_path / "base"), open_checkpoint(states["expert"], "memory"))
    memory = align(open_checkpoint(states["base"]), open_checkpoint(tmp_path / "expert"))
    assert files["base"].keys() != states["base"].keys()
    for checkpoint, wanted in ((stored, files["expert"]), (memory, states["expert"])):
        assert set(checkpoint) == set(wanted)
        for name, value in wanted.items():
            assert checkpoint.specs[name].shape == value.shape
            assert torch.equal(checkpoint[name], value)


def test_a_tower_is_found_in_the_whole_model_by_its_class_or_not_at_all(tmp_path) -> None:
    import transformers

    base = save_siglip(tmp_path / "base")
    whole = load_file(base / "model.safetensors")
    for class_name, tower in (("SiglipVisionModel", "vision_model."), ("SiglipTextModel", "text_model.")):
        part = getattr(transformers, class_name).from_pretrained(base)
        part.save_pretrained(tmp_path / class_name)
        for source in (tmp_path / class_name, part.state_dict()):  # all names of a tower are not the other's
            aligned = align(open_checkpoint(base), open_checkpoint(source))
            assert len(aligned) == len(part.state_dict())
            assert all(
                name.startswith(tower) and torch.equal(value, whole[name]) for name, value in aligned.items()
            )
    layers = {n: t for n, t in part.state_dict().items() if n.startswith("encoder.")}
    with pytest.raises(InputError, match=r"\(text_model\., vision_model\.\)"):
        align(open_checkpoint(base), open_checkpoint(layers))
