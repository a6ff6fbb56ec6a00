"""Language models choose and decode as transformers itself would, one prompt at a time."""

import json
from types import SimpleNamespace

import pytest
import torch
from language import Colors, compute_loss, make_tiny_backbone
from torch import nn
from torch.nn import functional

from mergekit_lab import InputError
from mergekit_lab.backbones import Linearized, LoRA, text
from mergekit_lab.backbones.encoding import Encoding, Reading
from mergekit_lab.backbones.language import load_tokenizer
from mergekit_lab.evaluation import score


def test_choice_scores_are_the_log_likelihoods_of_each_choice_after_its_prompt(folders, architecture) -> None:
    backbone = make_tiny_backbone(folders[architecture], architecture)
    objective, samples = backbone.make_objective(Colors()), Colors().load_samples("test")
    prompts = objective.encode("test").prompts[:5]
    with torch.no_grad():
        scores = objective.score_choices(backbone.make_model(), prompts)
    for row, prompt in zip(scores, samples.prompts, strict=False):
        for value, choice in zip(row, Colors().choices, strict=True):
            torch.testing.assert_close(
                value, -compute_loss(backbone, architecture, prompt, choice), rtol=1e-4, atol=1e-4
            )


def test_the_likeliest_choice_is_the_answer_for_any_batch_size(folders, architecture) -> None:
    backbone = make_tiny_backbone(folders[architecture], architecture)
    objective, model = backbone.make_objective(Colors()), backbone.make_model()
    scores = [score(model, objective, "test", batch_size=size) for size in (1, 7, 512)]
    assert scores[0].predictions == scores[1].predictions == scores[2].predictions
    correct = [
        p == a for p, a in zip(scores[0].predictions, Colors().load_samples("test").answers, strict=True)
    ]
    assert scores[0].value == sum(correct) / len(correct)


def test_generated_answers_are_those_of_one_prompt_at_a_time_without_a_cache(folders, architecture) -> None:
    """The folder's own generation settings sample at a temperature: answers are greedy all the same."""
    backbone = make_tiny_backbone(folders[architecture], architecture, answering="generate")
    objective, model, tok = (
        backbone.make_objective(Colors()),
        backbone.make_model(),
        load_tokenizer(str(folders[architecture])),
    )
    predictions = score(model, objective, "test", batch_size=7).predictions
    for index, prompt in enumerate(objective.encode("test").prompts[:6]):
        row = prompt[None]
        generated = [259] if architecture == "t5" else []
        for _ in range(5):
            with torch.no_grad():
                if architecture == "t5":
                    logits = model(input_ids=row, decoder_input_ids=torch.tensor([generated])).logits
                else:
                    logits = model(torch.cat([row, torch.tensor([generated], dtype=torch.int64)], dim=1)).logits
            generated.append(int(logits[0, -1].argmax()))
            if generated[-1] == 256:
                break
        assert predictions[index] == tok.decode(generated, skip_special_tokens=True)


def test_a_forward_pass_has_the_rows_whose_logits_fit_of_those_that_it_makes(folders, monkeypatch) -> None:
    """One token's at a time with a cache, those of choices and of the token before, or all of a row."""
    sizes: list[int] = []
    monkeypatch.setattr(text, "_LOGITS", 260 * 240)
    for answering, cached in (("generate", True), ("choices", True), ("generate", False)):
        backbone = make_tiny_backbone(folders["llama"], "llama", answering=answering)
        objective, model = backbone.make_objective(Colors(max_new_tokens=15)), nn.Linear(1, 1)
        if cached:
            model.generate = nn.Identity()
        answered = lambda _, few: sizes.append(len(few)) or torch.zeros(len(few), 3)  # noqa: E731
        monkeypatch.setattr(objective, "_generate", answered)
        monkeypatch.setattr(objective, "score_choices", answered)
        objective.predict(model, "test", torch.arange(24))
    longest = max(map(len, objective.encode("test").prompts))
    choices = sum(len(choice) + 1 for choice in Colors().choices)
    assert sizes[:3] == [24, 240 // (choices + 1), 24 - 240 // (choices + 1)]
    assert sizes[3] == 240 // (longest + 15)


def test_padding_that_sees_nothing_does_not_reach_answers_where_cudnn_makes_it_nan(
    folders, monkeypatch
) -> None:
    """cuDNN's attention, which GPUs prefer, gives NaN to tokens that see nothing, and 0 times NaN is NaN."""
    real = functional.scaled_dot_product_attention

    def as_cudnn(query, key, value, attn_mask=None, **options):
        attended = real(query, key, value, attn_mask=attn_mask, **options)
        if attn_mask is not None and torch.backends.cuda.cudnn_sdp_enabled():
            attended = attended.masked_fill(~attn_mask.any(dim=-1, keepdim=True), torch.nan)
        return attended

    backbone = make_tiny_backbone(folders["llama"], "llama", answering="generate")
    objective, model = backbone.make_objective(Colors()), backbone.make_model()
    wanted = score(model, objective, "test", batch_size=1).predictions
    monkeypatch.setattr(functional, "scaled_dot_product_attention", as_cudnn)
    assert score(model, objective, "test", batch_size=24).predictions == wanted
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert score(model, objective, "test", batch_size=24).predictions != wanted


def test_decoding_ends_at_the_token_that_ends_answers_whatever_the_folder_says(folders, tmp_path) -> None:
    import shutil

    shutil.copytree(folders["llama"], tmp_path / "other")
    file = tmp_path / "other/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [3]}))
    backbone = make_tiny_backbone(tmp_path / "other", "llama", answering="generate")
    model, objective = backbone.make_model(), backbone.make_objective(Colors())
    seen = []
    real = model.generate

    def generate(**options):
        seen.append(options["generation_config"].eos_token_id)
        return real(**options)

    model.generate = generate
    score(model, objective, "test", index=torch.arange(2))
    assert seen == [[3, 256]]


def test_choices_that_a_tokenizer_makes_the_same_are_refused(folders) -> None:
    """As a tokenizer without Chinese makes one unknown token of any Chinese word."""

    class Deaf:
        eos_token_id = 256

        def __call__(self, texts, **_):
            return SimpleNamespace(input_ids=[[7] for _ in texts])

    encoding = Encoding(Deaf(), Reading(prompt="plain"), causal=False, positions=None)
    with pytest.raises(InputError, match="choices 'no' and 'yes'"):
        encoding.encode_choices(Colors())


def test_settings_of_generation_in_a_folder_reach_no_answer_with_adapters_or_without(folders) -> None:
    backbone = make_tiny_backbone(folders["llama"], "llama", answering="generate")
    objective = backbone.make_objective(Colors())
    wanted = score(backbone.make_model(), objective, "test").predictions
    for model in (backbone.make_model(), LoRA(rank=2).make_trainable(backbone.make_model(), seed=0)):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        inner.generation_config.repetition_penalty = 9.0
        inner.generation_config.suppress_tokens = list(range(100))
        assert score(model, objective, "test").predictions == wanted
        assert inner.generation_config.repetition_penalty == 9.0


class Uncached(nn.Module):
    """A language model without transformers' own way to decode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.get_base_model = lambda: model
        self.own = list(model.parameters())[:1]

    def parameters(self, recurse: bool = True):
        return iter(self.own)

    def forward(self, **inputs):
        return self.get_base_model()(**inputs, use_cache=False)


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_decoding_without_a_cache_gives_what_transformers_gives(folders, architecture) -> None:
    backbone = make_tiny_backbone(folders[architecture], architecture, answering="generate")
    objective, model = backbone.make_objective(Colors(max_new_tokens=9)), backbone.make_model()
    index = torch.arange(8)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
        predictions = objective.predict(Uncached(model), "test", index)
        assert predictions == objective.predict(model, "test", index)
    assert len(set(predictions)) > 1


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_a_linearized_language_model_learns_decodes_and_chooses(folders, architecture) -> None:
    index = torch.arange(4)
    for answering in ("choices", "generate"):
        backbone = make_tiny_backbone(folders[architecture], architecture, answering=answering)
        objective, model = backbone.make_objective(Colors()), backbone.make_model()
        tangent = Linearized().make_trainable(backbone.make_model())
        loss = objective.compute_loss(tangent, objective.make_batch("train", index))
        loss.backward()
        torch.testing.assert_close(loss, objective.compute_loss(model, objective.make_batch("train", index)))
        with torch.no_grad():
            assert objective.predict(tangent, "test", index) == objective.predict(model, "test", index)


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_choices_of_a_linearized_model_are_scored_by_the_expansion_of_all_of_it(folders, architecture) -> None:
    """Not by one of the decoder around what the encoder's expansion gives."""
    objective = make_tiny_backbone(folders[architecture], architecture).make_objective(Colors())
    tangent = Linearized().make_trainable(make_tiny_backbone(folders[architecture], architecture).make_model())
    torch.manual_seed(0)
    prompts, choices = objective.encode("test").prompts[:3], objective._choices
    with torch.no_grad():
        for p in tangent.parameters():
            p.add_(0.1 * torch.randn_like(p))
        scores = objective.score_choices(tangent, prompts)
        wanted = torch.zeros_like(scores)
        for i, prompt in enumerate(prompts):
            for j, choice in enumerate(choices):
                if architecture == "t5":
                    logits = tangent(input_ids=prompt[None], labels=choice[None]).logits[0]
                else:
                    logits = tangent(torch.cat([prompt, choice])[None]).logits[0, len(prompt) - 1 : -1]
                wanted[i, j] = logits.log_softmax(1).gather(1, choice[:, None]).sum()
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-4)
