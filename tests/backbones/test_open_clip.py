"""open_clip image towers and heads: names, gradients, normalization, QuickGELU, offline messages."""

import shutil
import socket
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip import pretrained
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, normalize

import mergekit_lab.backbones.open_clip as room
from mergekit_lab.backbones import Classifier, OpenClip
from mergekit_lab.backbones.clip_weights import ClipWeights
from mergekit_lab.errors import InputError
from mergekit_lab.tasks import Digits

ASSET = Path(room.__file__).parents[1] / "assets" / "glyph_clip.safetensors"
SMALL = OpenClip("glyph-clip", None)
SHIPPED = OpenClip("glyph-clip", "asset:glyph_clip")


@pytest.fixture
def images():
    return torch.randint(0, 256, (3, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_tensors_are_named_as_in_open_clips_whole_model():
    whole = room.make_whole_model(SHIPPED.key).state_dict()
    tower = SHIPPED.make_model().state_dict()
    assert set(tower) == {name for name in whole if name.startswith("visual.")}
    assert all(torch.equal(tower[name], whole[name]) for name in tower)


def test_every_copy_is_fresh_float32_and_trainable_to_the_last_parameter(images):
    first, second = SHIPPED.make_model(), SHIPPED.make_model()
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0))
    (first(images) @ weight).sum().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in first.parameters())
    assert all(p.grad.abs().max() > 0 for p in first.parameters())
    with torch.no_grad():
        first.visual.proj.zero_()
    assert second.visual.proj.abs().max() > 0


def test_features_are_what_open_clip_gives_for_the_same_normalized_picture(images):
    model = room.make_whole_model(SHIPPED.key)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (model.visual.image_mean, model.visual.image_std))
    with torch.no_grad():
        expected = model.encode_image((images / 255 - mean) / std, normalize=True)
        torch.testing.assert_close(SHIPPED.make_model()(images), expected)


def test_bytes_and_floats_of_the_same_picture_agree(images):
    encoder = SHIPPED.make_model()
    assert torch.equal(encoder(images), encoder(images.float() / 255))


def test_another_size_is_resized(images):
    encoder = SHIPPED.make_model()
    large = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert encoder(large).shape == (3, 64)
    with torch.no_grad():
        near = torch.cosine_similarity(encoder(large), encoder(images)).min()
        far = torch.cosine_similarity(encoder(images[:1]), encoder(images[1:2])).max()
    assert near > far


def test_a_head_is_the_normalized_mean_of_normalized_prompts_times_the_temperature():
    classes, templates = ("alpha", "beta"), ("greek small letter {}", "a picture of the greek small letter {}")
    model, tokenizer = room.make_whole_model(SHIPPED.key), open_clip.get_tokenizer("glyph_clip")
    head = SHIPPED.make_zero_shot_head(classes, templates)
    for row, name in zip(head, classes, strict=True):
        with torch.no_grad():
            texts = normalize(model.encode_text(tokenizer([t.format(name) for t in templates])), dim=-1)
            torch.testing.assert_close(row, normalize(texts.mean(0), dim=-1) * model.logit_scale.exp())
    assert not head.requires_grad


def test_a_head_refuses_templates_without_a_place_for_the_class():
    with pytest.raises(InputError, match=r"at fault: \['a letter'\]"):
        SMALL.make_zero_shot_head(("alpha",), ("a letter",))


def test_a_head_refuses_prompts_that_are_cut_before_the_class_name():
    with pytest.raises(InputError, match=r"'alpha'.*'beta'.*glyph-clip,.*only 16"):
        SMALL.make_zero_shot_head(
            ("alpha", "beta"), ("one two three four five six seven eight nine ten " * 2 + "{}",)
        )


def test_a_classifier_keeps_its_head_out_of_checkpoints_and_out_of_training():
    model = Classifier(SMALL.make_model(), torch.randn(5, 64))
    assert all(name.startswith("encoder.visual.") for name in model.state_dict())
    assert not [name for name, _ in model.named_parameters() if "head" in name]


def test_per_sample_gradients_are_those_of_one_sample_at_a_time(images):
    """In evaluation mode, where attention would otherwise take a kernel without a derivative."""
    model = Classifier(SHIPPED.make_model(), torch.randn(5, 64, generator=torch.Generator().manual_seed(0)))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    rest = dict(model.named_buffers())
    labels = torch.tensor([0, 3, 4])

    def compute_loss(weights, image, label):
        return cross_entropy(functional_call(model, (weights, rest), (image[None],)), label[None])

    with sdpa_kernel(SDPBackend.MATH):
        gradients = vmap(grad(compute_loss), in_dims=(None, 0, 0))(weights, images.float() / 255, labels)
    for i in range(3):
        model.zero_grad()
        cross_entropy(model(images[i : i + 1]), labels[i : i + 1]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad, rtol=1e-3, atol=1e-5)


def test_mapping_over_stacked_weights_gives_gradients(images):
    encoder = SMALL.make_model()
    stacked = {k: torch.stack([v, v]).detach().requires_grad_() for k, v in encoder.state_dict().items()}
    with sdpa_kernel(SDPBackend.MATH):
        features = vmap(lambda w: functional_call(encoder, w, (images.float() / 255,)))(stacked)
    (features * torch.arange(64)).sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in stacked.values())


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    towers = [OpenClip("glyph-clip", None, seed).make_model().state_dict() for seed in (1, 2, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(towers[0]["visual.proj"], towers[2]["visual.proj"])
    assert not torch.equal(towers[0]["visual.proj"], towers[1]["visual.proj"])


@pytest.mark.parametrize(("name", "quick"), [("ViT-B-32", True), ("ViT-B-32-quickgelu", True)])
def test_openai_weights_are_quick_gelu_under_either_name(name, quick):
    assert OpenClip(name, "openai").uses_quick_gelu() is quick


def test_other_weights_keep_the_architectures_activation():
    assert not OpenClip("ViT-B-32", "laion2b_s34b_b79k").uses_quick_gelu()
    assert OpenClip("ViT-B-32-quickgelu", None).uses_quick_gelu()


def test_a_tag_trained_with_quick_gelu_builds_a_model_that_has_it(monkeypatch, images):
    activations = {}
    monkeypatch.setitem(
        pretrained._PRETRAINED, "glyph_clip", {"openai": {"quick_gelu": True, "hf_hub": "x/y/"}}
    )
    monkeypatch.setattr(ClipWeights, "download", lambda *_: ASSET)
    for weights in ("openai", "asset:glyph_clip"):
        encoder = OpenClip("glyph-clip", weights).make_model()
        activations[weights] = {type(m).__name__ for m in encoder.modules() if "GELU" in type(m).__name__}
    assert activations == {"openai": {"QuickGELU"}, "asset:glyph_clip": {"GELU"}}


def test_identity_follows_the_content_of_the_weights_and_not_their_path(tmp_path):
    copies = [shutil.copy(ASSET, tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    first, second = (OpenClip("glyph-clip", str(copy)) for copy in copies)
    assert first.identify() == second.identify()
    assert str(tmp_path) not in str(first.identify())
    assert first.identify()["sha256"] == SHIPPED.identify()["sha256"]
    assert OpenClip("glyph-clip", None, 1).identify() != OpenClip("glyph-clip", None, 2).identify()


def test_a_local_file_loads_by_the_same_lines_as_the_shipped_weights(tmp_path):
    torch.save(room.make_whole_model(SHIPPED.key).state_dict(), tmp_path / "whole.pt")
    local = OpenClip("glyph-clip", str(tmp_path / "whole.pt")).make_model().state_dict()
    shipped = SHIPPED.make_model().state_dict()
    assert all(torch.equal(local[name], shipped[name]) for name in shipped)


def test_a_file_that_does_not_fit_is_named(tmp_path):
    torch.save({"visual.proj": torch.zeros(2)}, tmp_path / "part.pt")
    with pytest.raises(InputError, match=r"part\.pt.*glyph-clip"):
        OpenClip("glyph-clip", str(tmp_path / "part.pt")).make_model()


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (OpenClip("ViT-B32", None), "'ViT-B32'.*'ViT-B-32'"),
        (OpenClip("ViT-B-32", "opena"), "'opena',.*open_clip"),
        (
            OpenClip("ViT-B-32-quickgelu", "laion2b_s34b_b79k"),
            "backbone.architecture=ViT-B-32",
        ),
        (OpenClip("ViT-B-32", "laion2b_s32b_b82k"), "open_clip.*ViT-L-14$"),
        (
            OpenClip("glyph-clip", "asset:glyph"),
            "'asset:glyph'.*'asset:glyph_clip'",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(backbone, message):
    with pytest.raises(InputError, match=message):
        backbone.make_model()


def test_without_a_network_the_message_comes_at_once_and_says_the_way_out(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError("Network is explain_unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match=r"'openai'.*ViT-B-32"):
        OpenClip("ViT-B-32", "openai").make_model()


def test_shipped_weights_read_handwritten_digits_far_above_chance_without_training():
    task = Digits()
    samples = task.load_samples("test")
    model = Classifier(SHIPPED.make_model(), SHIPPED.make_zero_shot_head(task.classes, task.templates))
    with torch.no_grad():
        accuracy = (model(samples.images).argmax(1) == samples.labels).float().mean()
    assert accuracy > 0.4
