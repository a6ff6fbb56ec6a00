"""transformers' layout and open_clip's name the same weights: same features, both ways; others are refused."""

import shutil

import open_clip
import pytest
import torch
from torch.nn.functional import normalize

import mergekit_lab.backbones.open_clip as room
from mergekit_lab.backbones import OpenClip, as_image_tower, from_transformers, to_transformers
from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.errors import InputError
from mergekit_lab.tasks import Digits

WIDTH, HEADS, SIDE = 64, 1, 32


@pytest.fixture(scope="module", autouse=True)
def tiny_architecture():
    """open_clip's CLIP with QuickGELU, as OpenAI's, in small."""
    config = {
        "embed_dim": 16,
        "quick_gelu": True,
        "vision_cfg": {"image_size": SIDE, "layers": 2, "width": WIDTH, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2},
    }
    models = open_clip.factory._MODEL_CONFIGS
    models |= {"tiny-layout": config, "tiny-plain": config | {"quick_gelu": False}}
    yield
    del models["tiny-layout"], models["tiny-plain"]


@pytest.fixture(scope="module")
def theirs():
    """transformers' whole CLIP with random weights."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    common = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "projection_dim": 16}
    config = CLIPConfig(
        text_config={**common, "hidden_size": 64, "intermediate_size": 256},
        vision_config={
            **common,
            "hidden_size": WIDTH,
            "intermediate_size": 4 * WIDTH,
            "image_size": SIDE,
            "patch_size": 16,
        },
        projection_dim=16,
    )
    model = CLIPModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (3, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def _normalize(backbone: OpenClip, pixels):
    encoder = backbone.make_model()
    return (pixels / 255 - encoder.mean) / encoder.std


def test_a_folder_of_transformers_gives_the_features_that_transformers_gives(theirs, folder, pixels, caplog):
    ours = OpenClip("tiny-layout", str(folder))
    ours.make_model()
    assert "initialized randomly" not in caplog.text
    with torch.no_grad():
        images = theirs.get_image_features(pixel_values=_normalize(ours, pixels)).pooler_output
        torch.testing.assert_close(ours.make_model()(pixels), normalize(images, dim=-1), atol=1e-5, rtol=0)
        tokens = open_clip.get_tokenizer("ViT-B-32")(["a photo of a cat.", "a dog"])
        texts = theirs.get_text_features(input_ids=tokens).pooler_output
        torch.testing.assert_close(
            room.make_whole_model(ours.key).encode_text(tokens), texts, atol=1e-5, rtol=0
        )


def test_a_folder_that_says_quickgelu_gets_it_under_a_plain_name_too(folder, pixels, tmp_path):
    """Plain GELU on such weights would only make the accuracy worse, without an error."""
    named, plain = OpenClip("tiny-layout", str(folder)), OpenClip("tiny-plain", str(folder))
    assert plain.uses_quick_gelu()
    with torch.no_grad():
        expected = named.make_model()(pixels)
        assert torch.equal(plain.make_model()(pixels), expected)
        shutil.copy(folder / "model.safetensors", tmp_path)
        alone = OpenClip("tiny-plain", str(tmp_path))
        assert not alone.uses_quick_gelu()
        assert alone.identify()["sha256"] == plain.identify()["sha256"]
        assert alone.identify() != plain.identify()
        assert (alone.make_model()(pixels) - expected).abs().max() > 1e-4


def test_a_public_expert_on_the_backbones_projection_gives_the_same_features(theirs, folder, pixels, tmp_path):
    """As published experts are: the vision model alone, saved by transformers, without a projection."""
    from transformers import CLIPVisionModel

    expert = CLIPVisionModel(theirs.config.vision_config).eval()
    for parameter in expert.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    expert.save_pretrained(tmp_path)
    backbone = OpenClip("tiny-layout", str(folder))
    encoder = backbone.make_model()
    encoder.load_state_dict(as_image_tower(open_checkpoint(tmp_path), encoder.state_dict(), "expert"))
    with torch.no_grad():
        pooled = expert(pixel_values=_normalize(backbone, pixels)).pooler_output
        expected = normalize(theirs.visual_projection(pooled), dim=-1)
        torch.testing.assert_close(encoder(pixels), expected, atol=1e-5, rtol=0)


def test_what_is_written_for_transformers_loads_there_and_gives_our_features(folder, pixels, theirs, tmp_path):
    from safetensors.torch import save_file
    from transformers import CLIPVisionModelWithProjection

    backbone = OpenClip("tiny-layout", None, seed=3)
    encoder = backbone.make_model()
    save_file(to_transformers(encoder.state_dict()), tmp_path / "model.safetensors", {"format": "pt"})
    theirs.config.vision_config.save_pretrained(tmp_path)
    model, report = CLIPVisionModelWithProjection.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    with torch.no_grad():
        images = model.eval()(pixel_values=_normalize(backbone, pixels)).image_embeds
        torch.testing.assert_close(encoder(pixels), normalize(images, dim=-1), atol=1e-5, rtol=0)


def test_there_and_back_is_the_same_bits():
    state = room.make_whole_model(OpenClip("tiny-layout", None, seed=1).key).state_dict()
    back = from_transformers(to_transformers(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("prefix", ["", "model.", "image_encoder.model."])
def test_state_dicts_below_a_prefix_are_found(prefix):
    """Task arithmetic's encoders hold the whole model as `model`."""
    whole = room.make_whole_model(OpenClip("tiny-layout", None, seed=1).key).state_dict()
    base = OpenClip("tiny-layout", None).make_model().state_dict()
    tower = as_image_tower({prefix + name: tensor for name, tensor in whole.items()}, base, "cars")
    assert all(torch.equal(tower[name], whole[name]) for name in base)


def test_an_expert_of_another_architecture_is_refused_by_its_tensors(theirs):
    base = OpenClip("glyph-clip", None).make_model().state_dict()
    with pytest.raises(InputError, match=r"svhn lacks \d+ tensors"):
        as_image_tower(theirs.state_dict(), base, "svhn")
    other = OpenClip("tiny-layout", None).make_model().state_dict()
    other["visual.conv1.weight"] = other["visual.conv1.weight"][..., :8]
    with pytest.raises(InputError, match=r"'visual.conv1.weight'.*fine-tuned"):
        as_image_tower(theirs.state_dict(), other, "svhn")


def _save_image_tower(theirs, layout: str, folder):
    """The image tower of a whole model as a folder: in transformers' layouts, or in open_clip's."""
    from transformers import CLIPVisionModel, CLIPVisionModelWithProjection

    if layout == "open_clip":
        whole = from_transformers(theirs.state_dict())
        torch.save({n: t for n, t in whole.items() if n.startswith("visual.")}, folder / "open_clip_model.pt")
        (folder / "open_clip_config.json").write_text('{"model_cfg": {"quick_gelu": true}}')
        return folder
    classes = {
        "CLIPVisionModel": CLIPVisionModel,
        "CLIPVisionModelWithProjection": CLIPVisionModelWithProjection,
    }
    model = classes[layout](theirs.config.vision_config)
    whole, stem = (
        theirs.state_dict(),
        "" if "vision_model.pre_layrnorm.bias" in model.state_dict() else "vision_model.",
    )
    model.load_state_dict({name: whole[stem + name] for name in model.state_dict()})
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", ["CLIPVisionModel", "CLIPVisionModelWithProjection", "open_clip"])
def test_an_image_tower_alone_gives_its_features_and_heads_from_images(layout, theirs, pixels, tmp_path):
    backbone = OpenClip("tiny-plain", str(_save_image_tower(theirs, layout, tmp_path)), head="prototype")
    assert backbone.uses_quick_gelu()
    with torch.no_grad():
        expected = theirs.vision_model(pixel_values=_normalize(backbone, pixels)).pooler_output
        if layout != "CLIPVisionModel":
            expected = theirs.visual_projection(expected)
        torch.testing.assert_close(
            backbone.make_model()(pixels), normalize(expected, dim=-1), atol=1e-5, rtol=0
        )
    task = Digits(train_size=20, validation_size=10, test_size=10)
    head = backbone.make_objective(task).head
    assert head.shape == (10, expected.shape[1])
    torch.testing.assert_close(head.norm(dim=1), torch.full((10,), 100.0))


def test_a_zero_shot_head_for_an_image_tower_alone_is_refused_before_any_work(theirs, tmp_path):
    backbone = OpenClip("tiny-layout", str(_save_image_tower(theirs, "CLIPVisionModel", tmp_path)))
    with pytest.raises(InputError, match=r"backbone.head=prototype.*linear_probe"):
        backbone.check(Digits(train_size=20, validation_size=10, test_size=10))
    with pytest.raises(InputError, match="no text tower"):
        backbone.make_zero_shot_head(("a", "b"), ("{}",))
