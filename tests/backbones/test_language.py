"""Language models read and learn text tasks: losses, rows and prompts, adapters, and what is refused."""

import json
import logging

import pytest
import torch
from language import Colors, compute_loss, make_byte_tokenizer, make_tiny_backbone
from torch.nn import functional

from mergekit_lab import InputError
from mergekit_lab.backbones import LanguageModel, Linearized, LoRA
from mergekit_lab.backbones.language import load_tokenizer
from mergekit_lab.tasks import TextFile


@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_a_batchs_loss_is_the_sum_over_its_samples_answer_tokens_whatever_the_padding(
    folders, architecture, loss_on
) -> None:
    if architecture == "t5" and loss_on == "all":
        return
    backbone = make_tiny_backbone(folders[architecture], architecture, loss_on=loss_on)
    objective, index = backbone.make_objective(Colors()), torch.tensor([3, 0, 2, 7])
    batch = objective.make_batch("train", index)
    with torch.no_grad():
        loss = objective.compute_loss(backbone.make_model(), batch)
    samples, whole = Colors().load_samples("train"), loss_on == "all"
    wanted = sum(
        compute_loss(backbone, architecture, samples.prompts[i], samples.answers[i], whole) for i in index
    )
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    answers = sum(len(samples.answers[i]) + 1 for i in index)
    rest = sum(len(f"{samples.prompts[i]}") + 2 for i in index) if loss_on == "all" else 0
    assert int(objective.count_items(batch)) == answers + rest


def test_a_linearized_seq2seq_model_is_scored_and_learns_by_one_expansion_of_both_halves(folders) -> None:
    """Hidden states of an expanded encoder in an expanded decoder would be no expansion of the model."""
    backbone = make_tiny_backbone(folders["t5"], "t5")
    objective, model = backbone.make_objective(Colors()), Linearized().make_trainable(backbone.make_model())
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=draw))
    samples, tok = Colors().load_samples("train"), load_tokenizer(backbone.source)

    def compute_likelihood(prompt, answer):
        target = torch.tensor([*tok(answer, add_special_tokens=False).input_ids, 256])
        read = torch.cat([torch.tensor([259]), target[:-1]])
        logits = model(input_ids=prompt[None], decoder_input_ids=read[None]).logits[0]
        return logits.log_softmax(-1)[torch.arange(len(target)), target].sum()

    prompts, choices = objective.encode("train").prompts[:3], Colors().choices
    with torch.no_grad():
        scores = objective.score_choices(model, prompts)
        loss = objective.compute_loss(model, objective.make_batch("train", torch.arange(3)))
        wanted = torch.stack([torch.stack([compute_likelihood(p, c) for c in choices]) for p in prompts])
        wanted_loss = -sum(compute_likelihood(p, a) for p, a in zip(prompts, samples.answers, strict=False))
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-4, atol=1e-4)


def test_what_is_too_long_is_cut_inside_the_template_and_counted(folders, caplog) -> None:
    caplog.set_level(logging.INFO)
    text = []
    for cut in ("start", "end"):
        objective = make_tiny_backbone(folders["llama"], "llama", max_length=30, cut=cut).make_objective(
            Colors()
        )
        encoded = objective.encode("train")
        assert max(encoded.lengths) <= 30
        assert objective.encode("train").truncated == (12, 0)
        text.append(load_tokenizer(str(folders["llama"])).decode(max(encoded.prompts, key=len)))
        assert text[-1].startswith("<|user|>")
        assert text[-1].endswith("<|end|><|assistant|>")
    prompts = Colors().load_samples("train").prompts
    assert any(p.endswith(text[0][8:-20]) and p != text[0][8:-20] for p in prompts)
    assert any(p.startswith(text[1][8:-20]) and p != text[1][8:-20] for p in prompts)
    assert "12 of 24 prompts" in caplog.text
    objective = make_tiny_backbone(folders["t5"], "t5", max_length=8).make_objective(Colors())
    assert max(map(len, objective.encode("train").prompts)) == 8
    assert objective.encode("train").truncated[1] == 4  # "no idea" and its end are eight tokens


def make_task(folder, rows):
    """A task whose three parts are these rows."""
    for part in ("train", "validation", "test"):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TextFile(name="lines", source=str(folder))


def test_prompts_that_show_a_model_nothing_are_refused_before_any_loss(folders, tmp_path) -> None:
    """Nothing stands before an answer's first token then, but a padding token in larger batches."""
    task = make_task(tmp_path, [{"prompt": "red?", "answer": "yes"}, {"prompt": "", "answer": "no"}])
    plain = make_tiny_backbone(folders["llama"], "llama", prompt="plain").make_objective(task)
    with pytest.raises(InputError, match=r"prompt 2 of.*backbone.prompt=chat"):
        plain.make_batch("train", torch.arange(2))
    assert (
        len(make_tiny_backbone(folders["llama"], "llama").make_objective(task).encode("train").prompts[1]) == 3
    )


TELLS_THE_DATE = (
    "{%- if strftime_now is defined %}{%- set day = strftime_now('%d %b %Y') %}{%- endif %}"
    "<|user|>Today: {{ day }}. {{ messages[0]['content'] | trim }}<|end|><|assistant|>"
)


def test_a_prompt_is_what_the_template_makes_of_it_but_for_the_date_which_stands_still(
    folders, tmp_path, monkeypatch
) -> None:
    task = make_task(tmp_path, [{"prompt": " is red warm?\n", "answer": "no"}])
    backbone, tok = make_tiny_backbone(folders["llama"], "llama"), load_tokenizer(str(folders["llama"]))
    shown = lambda: tok.decode(backbone.make_objective(task).encode("train").prompts[0])  # noqa: E731
    assert shown() == "<|user|> is red warm?\n<|end|><|assistant|>"
    monkeypatch.setattr(tok, "chat_template", TELLS_THE_DATE)
    assert shown() == "<|user|>Today: 26 Jul 2024. is red warm?<|end|><|assistant|>"
    for odd, complaint in (
        (TELLS_THE_DATE.replace("'%d %b %Y'", "messages[0]['role']"), "shows the time"),
        (
            TELLS_THE_DATE.replace("trim", "replace('\u2003', '', 1)"),
            "does not keep a user's message unchanged",
        ),
    ):
        monkeypatch.setattr(tok, "chat_template", odd)
        with pytest.raises(InputError, match=complaint):
            backbone.make_objective(task)


def test_a_limit_below_the_templates_own_tokens_is_refused(folders, tmp_path, monkeypatch) -> None:
    task = make_task(tmp_path, [{"prompt": "is red warm?", "answer": "it is not"}])
    tiny = make_tiny_backbone(folders["llama"], "llama", max_length=8)
    assert len(tiny.make_objective(task).encode("test").prompts[0]) == 4  # one of the prompt's own
    template = load_tokenizer(str(folders["llama"])).chat_template
    longer = template.replace("<|assistant|>", "<|assistant|>you")
    monkeypatch.setattr(load_tokenizer(str(folders["llama"])), "chat_template", longer)
    with pytest.raises(InputError, match=r"max_length=8 leaves 4 tokens.*takes 6"):
        tiny.make_objective(task).encode("test")


def test_rows_longer_than_a_models_positions_are_refused(folders, architecture, tmp_path) -> None:
    task = make_task(tmp_path, [{"prompt": "red " * 200, "answer": "yes"}])
    objective = make_tiny_backbone(folders[architecture], architecture, max_length=1024).make_objective(task)
    if architecture == "t5":  # whose positions are relative
        assert len(objective.encode("train").prompts[0]) == 800
        return
    with pytest.raises(InputError, match=r"to 835 tokens,.*has 512 positions"):
        objective.encode("train")


def test_checkpointing_computes_blocks_again_and_leaves_loss_and_gradient_as_they_are(
    folders, architecture
) -> None:
    passes = []
    for checkpointing in (False, True):
        backbone = make_tiny_backbone(folders[architecture], architecture, checkpointing=checkpointing)
        objective, model = backbone.make_objective(Colors()), backbone.make_model().train()
        entered = []
        for module in model.modules():
            if type(module).__name__ in ("LlamaMLP", "Qwen2MLP", "T5LayerFF"):
                module.register_forward_pre_hook(lambda *_, seen=entered: seen.append(1))
        loss = objective.compute_loss(model, objective.make_batch("train", torch.arange(4)))
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        passes.append((loss.detach(), gradient, len(entered)))
    (loss, gradient, count), (loss_again, gradient_again, count_again) = passes
    torch.testing.assert_close(loss_again, loss)
    torch.testing.assert_close(gradient_again, gradient)
    assert count_again == 2 * count


def test_a_tied_weight_has_one_name_and_loads_under_it(folders, architecture) -> None:
    backbone = make_tiny_backbone(folders[architecture], architecture)
    model, other = backbone.make_model(), backbone.make_model()
    state = {n: t + 1 for n, t in model.state_dict().items()}
    assert len({t.data_ptr() for t in model.state_dict().values()}) == len(model.state_dict())
    assert ("lm_head.weight" in state) == (architecture != "llama")
    other.load_state_dict(state)
    assert torch.equal(
        other.get_output_embeddings().weight,
        state.get("lm_head.weight", state.get("model.embed_tokens.weight")),
    )
    stored = {name for f in folders[architecture].glob("*.safetensors") for name in _read_names(f)}
    assert state.keys() == stored


def _read_names(file):
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


@pytest.mark.parametrize("loss_on", ["answer", "all"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_packed_rows_have_the_loss_the_items_and_the_gradient_of_samples_apart(
    folders, architecture, loss_on, caplog
) -> None:
    caplog.set_level(logging.INFO)
    index, batches = torch.arange(12), []
    for packing in (False, True):
        backbone = make_tiny_backbone(folders[architecture], architecture, loss_on=loss_on, packing=packing)
        objective, model = backbone.make_objective(Colors()), backbone.make_model()
        batch = objective.make_training_batch(index)
        loss = objective.compute_loss(model, batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        batches.append((loss.detach(), objective.count_items(batch), gradient, len(batch["labels"])))
    (loss, items, gradient, _), (packed_loss, packed_items, packed_gradient, rows) = batches
    torch.testing.assert_close(packed_loss, loss)
    torch.testing.assert_close(packed_gradient, gradient, rtol=1e-4, atol=1e-5)
    assert int(packed_items) == int(items)
    assert rows < 12
    assert objective.packed == (12, rows)
    assert f"12 samples of the first batch in {rows} rows" in caplog.text
    assert objective.make_batch("train", index)["labels"].shape[0] == 12


@pytest.mark.parametrize("name", ["mistral", "mpt", "lfm2", "gpt_neo"])
def test_models_that_do_not_go_by_a_mask_choose_right_and_refuse_packing(name, tmp_path) -> None:
    """A window, positions of their own, layers without attention, attention without torch's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {
        "mistral": shape | {"num_key_value_heads": 2, "sliding_window": 8},
        "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 4},
        "lfm2": shape | {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        "gpt_neo": {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    }[name]
    config = AutoConfig.for_model(name, vocab_size=260, eos_token_id=256, pad_token_id=259, **own)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    backbone = make_tiny_backbone(tmp_path, name)
    model, objective = backbone.make_model(), backbone.make_objective(Colors())
    prompts = objective.encode("test").prompts[:4]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
        scores = objective.score_choices(model, prompts)
        for row, prompt in zip(scores, prompts, strict=True):
            for value, choice in zip(row, objective._choices, strict=True):
                logits = model(torch.cat([prompt, choice])[None]).logits[0, len(prompt) - 1 : -1]
                wanted = -functional.cross_entropy(logits, choice, reduction="sum")
                torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)
        packed = make_tiny_backbone(tmp_path, name, packing=True).make_objective(Colors())
        with pytest.raises(InputError, match="set it to false"):
            packed.compute_loss(model, packed.make_training_batch(torch.arange(12)))


def test_lora_on_a_language_model_learns_and_folds_into_the_bases_names(folders, architecture) -> None:
    backbone = make_tiny_backbone(folders[architecture], architecture)
    lora, objective = LoRA(rank=2), backbone.make_objective(Colors())
    model, batch = (
        lora.make_trainable(backbone.make_model(), seed=0),
        objective.make_batch("train", torch.arange(4)),
    )
    loss = objective.compute_loss(model, batch)
    loss.backward()
    torch.testing.assert_close(loss, objective.compute_loss(backbone.make_model(), batch))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1)
        folded, plain = lora.fold(model), backbone.make_model()
        assert folded.keys() == plain.state_dict().keys()
        plain.load_state_dict(folded)
        torch.testing.assert_close(objective.compute_loss(plain, batch), objective.compute_loss(model, batch))


def test_wrong_settings_and_tasks_are_refused_by_name(folders, tmp_path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    from mergekit_lab.tasks import Digits, WordProblems

    with pytest.raises(InputError, match=r"backbone.prompt is 'caht'.*'chat'"):
        make_tiny_backbone(folders["llama"], "llama", prompt="caht")
    with pytest.raises(InputError, match="a seq2seq model needs"):
        LanguageModel(source="x", kind="seq2seq", prompt="chat")
    with pytest.raises(InputError, match=r"backbone\.packing=false"):
        LanguageModel(source="x", kind="seq2seq", prompt="plain", packing=True)
    with pytest.raises(InputError, match=r"'digits'.*Digits"):
        make_tiny_backbone(folders["llama"], "llama").make_objective(Digits())
    with pytest.raises(InputError, match="task 'stories' has none"):
        make_tiny_backbone(folders["llama"], "llama", answering="choices").check(WordProblems())
    with pytest.raises(InputError, match=r"backbone\.source"):
        LanguageModel(source=None).identify()  # as backbone=hf_causal alone has it
    with pytest.raises(InputError, match="is no model 'nowhere"):
        LanguageModel(source="nowhere at all").make_model()
    with pytest.raises(InputError, match="load as a seq2seq"):
        LanguageModel(source=str(folders["qwen2"]), kind="seq2seq", prompt="plain").make_model()
    config = BertConfig(vocab_size=260, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="backbone=hf_encoder"):
        LanguageModel(source=str(tmp_path)).make_model()


def test_the_identity_follows_the_weights_and_no_path(folders, tmp_path) -> None:
    import shutil

    shutil.copytree(folders["llama"], tmp_path / "copy")
    first, copy = (LanguageModel(source=str(f)).identify() for f in (folders["llama"], tmp_path / "copy"))
    assert first == copy
    assert first["sha256"] != LanguageModel(source=str(folders["qwen2"])).identify()["sha256"]
    (tmp_path / "copy/README.md").write_text("what decides nothing")
    assert LanguageModel(source=str(tmp_path / "copy")).identify() == copy
    for changed in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "copy" / changed).write_text("{}")
        changing = LanguageModel(source=str(tmp_path / "copy")).identify()
        assert changing != copy
        copy = changing
