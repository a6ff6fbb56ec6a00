"""Text encoders with a frozen head, against the same written out for one text at a time."""

import json
import logging

import pytest
import torch
from composing import compose_config
from language import Colors, make_byte_tokenizer
from torch.nn import functional

from mergekit_lab import InputError
from mergekit_lab.backbones import TextEncoder
from mergekit_lab.backbones.rows import round_up
from mergekit_lab.curvature import diagonal_fisher
from mergekit_lab.evaluation import score
from mergekit_lab.programs import start
from mergekit_lab.reporting import read_records
from mergekit_lab.schema.run import check
from mergekit_lab.tasks import TextFile, WordProblems


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random BERT as transformers writes it."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=260, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=128, pad_token_id=259, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model_folder = tmp_path_factory.mktemp("bert")
    model = BertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(model_folder)
    make_byte_tokenizer().save_pretrained(model_folder)
    return model_folder


def embed_alone(model, text):
    """The embedding of one text, straight from transformers."""
    ids = torch.tensor([make_byte_tokenizer()(text).input_ids])
    with torch.no_grad():
        return functional.normalize(model(input_ids=ids).last_hidden_state[0].mean(dim=0), dim=0)


def test_a_head_is_the_normalized_mean_embedding_of_each_choices_training_texts(folder) -> None:
    objective = TextEncoder(source=str(folder), temperature=7.0, head_samples=20).make_objective(Colors())
    model, samples = TextEncoder(source=str(folder)).make_model(), Colors().load_samples("train")
    for index, choice in enumerate(Colors().choices):
        texts = [p for p, a in list(zip(samples.prompts, samples.answers, strict=True))[:20] if a == choice]
        mean = torch.stack([embed_alone(model, text) for text in texts]).sum(dim=0)
        torch.testing.assert_close(objective.head[index], 7 * functional.normalize(mean, dim=0))


def test_a_zero_shot_head_is_the_normalized_mean_of_a_choices_name_in_templates(folder) -> None:
    task = Colors(templates=("{}", "it is {} here"))
    backbone = TextEncoder(source=str(folder), head="zero_shot", temperature=7.0)
    objective, model = backbone.make_objective(task), backbone.make_model()
    for index, choice in enumerate(task.choices):
        mean = (embed_alone(model, choice) + embed_alone(model, f"it is {choice} here")) / 2
        torch.testing.assert_close(objective.head[index], 7 * functional.normalize(mean, dim=0))
    other = Colors()
    assert backbone.describe_learning(task) != backbone.describe_learning(other)
    assert TextEncoder(source=str(folder)).describe_learning(task) == TextEncoder(
        source=str(folder)
    ).describe_learning(other)


def test_padding_to_few_shapes_leaves_the_loss_and_wants_no_dropout(folder) -> None:
    backbone = TextEncoder(source=str(folder), dropout=0.0)
    objective, model = backbone.make_objective(Colors()), backbone.make_model().train()
    batch = objective.make_batch("train", torch.tensor([0, 1, 2]))
    fixed = objective.fix_shape(batch)
    assert objective.fixes_shapes
    assert (
        fixed["input_ids"].shape == fixed["attention_mask"].shape == (3, round_up(batch["input_ids"].shape[1]))
    )
    torch.testing.assert_close(objective.compute_loss(model, fixed), objective.compute_loss(model, batch))
    dropping = TextEncoder(source=str(folder), dropout=0.5)
    assert not dropping.make_objective(Colors()).fixes_shapes
    model = dropping.make_model().train()
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}


def test_answers_and_losses_are_those_of_one_text_at_a_time_for_any_batch_size(folder) -> None:
    backbone = TextEncoder(source=str(folder))
    objective, model = backbone.make_objective(Colors()), backbone.make_model()
    samples, choices = Colors().load_samples("test"), Colors().choices
    logits = torch.stack([objective.head @ embed_alone(model, text) for text in samples.prompts])
    wanted = [choices[i] for i in logits.argmax(dim=1).tolist()]
    for size in (1, 7, 512):
        scores = score(model, objective, "test", batch_size=size, with_loss=True)
        assert scores.predictions == wanted
        labels = torch.tensor([choices.index(a) for a in samples.answers])
        assert scores.loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-4)
    assert scores.metrics.keys() == {"accuracy", "lenient_accuracy"}


def test_training_reaches_every_weight_but_those_of_the_pooler(folder) -> None:
    backbone = TextEncoder(source=str(folder))
    objective, model = backbone.make_objective(Colors()), backbone.make_model()
    objective.compute_loss(model, objective.make_batch("train", torch.arange(6))).backward()
    still = {n for n, p in model.named_parameters() if p.grad is None}
    assert still == {"pooler.dense.weight", "pooler.dense.bias"}
    assert model.state_dict().keys() > still


def test_its_fisher_is_that_of_single_samples(folder) -> None:
    backbone = TextEncoder(source=str(folder))
    objective, model = backbone.make_objective(Colors()), backbone.make_model()
    index = torch.arange(4)
    batch = objective.make_batch("train", index)
    fisher = diagonal_fisher(objective.with_head(model), [batch])
    squares = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in index:
        model.zero_grad()
        objective.compute_loss(model, objective.make_batch("train", i[None])).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                squares[name] += p.grad**2 / len(index)
    name = "encoder.layer.0.attention.self.query.weight"
    torch.testing.assert_close(fisher[f"encoder.{name}"], squares[name], rtol=1e-3, atol=1e-7)


def test_long_texts_are_cut_and_counted(folder, caplog) -> None:
    caplog.set_level(logging.INFO)
    objective = TextEncoder(source=str(folder), max_length=26).make_objective(Colors())
    assert max(map(len, objective.tokenize("train"))) == 26
    assert "8 of 24 texts" in caplog.text


def test_the_experiment_with_text_encoders_merges_and_reports(folder, tmp_path) -> None:
    rows = [("the sea is blue", "water"), ("grass grows", "land"), ("fish swim", "water"), ("cows eat", "land")]
    for task in ("one", "two"):
        (tmp_path / task).mkdir()
        lines = "".join(f'{{"prompt": "{t} {i} {task}", "answer": "{a}"}}\n' for i in range(4) for t, a in rows)
        for part in ("train", "validation", "test"):
            (tmp_path / task / f"{part}.jsonl").write_text(lines)
    tasks = {
        task: f"{{_target_: mergekit_lab.tasks.TextFile, name: {task}, source: {tmp_path}/{task}, "
        "choices: [water, land]}"
        for task in ("one", "two")
    }
    cfg, choices = compose_config([
        "+experiment=minilm_text12", f"backbone.source={folder}", "~suite.tasks",
        f"+suite.tasks={{one: {tasks['one']}, two: {tasks['two']}}}",
        "training.steps=2", "training.warmup_steps=0", "training.batch_size=4",
        *(f"~mergers.{name}" for name in ("task_arithmetic", "ties", "dare", "tsvm", "iso_c")),
        "mergers.epimer.coefficient=0.5", "mergers.wudi.coefficient=0.5", "mergers.wudi.steps=2",
        "curvature.samples=2", f"store.root={tmp_path}/store", "progress=false", "device=cpu",
        "trainer.accelerator=cpu",
    ])  # fmt: skip
    check(cfg)
    start(cfg, tmp_path / "run", choices, [])
    assert {r.label for r in read_records(tmp_path / "run/records.jsonl")} == {
        "zero-shot", "experts", "average", "epimer", "wudi",
    }  # fmt: skip
    heads = list((tmp_path / "store/heads").glob("*/head.safetensors"))
    assert len(heads) == 2


def test_what_an_encoder_cannot_do_is_said(folder, tmp_path) -> None:
    with pytest.raises(InputError, match="answers, and task 'stories'"):
        TextEncoder(source=str(folder)).check(WordProblems())
    (tmp_path / "rows").mkdir()
    for part in ("train", "validation", "test"):
        rows = [{"prompt": "red " * 50, "answer": a} for a in ("no", "yes")]
        (tmp_path / "rows" / f"{part}.json").write_text(json.dumps(rows))
    long = TextFile(name="long", source=str(tmp_path / "rows"), choices=("no", "yes"))
    with pytest.raises(InputError, match=r"to 200 tokens,.*has 128"):
        TextEncoder(source=str(folder)).make_objective(long)
    with pytest.raises(InputError, match=r"backbone\.temperature is 0"):
        TextEncoder(source=str(folder), temperature=0)
    with pytest.raises(InputError, match=r"backbone\.dropout is 1.*\[0, 1\)"):
        TextEncoder(source=str(folder), dropout=1)
    with pytest.raises(InputError, match=r"templates need '{}' for"):
        Colors(templates=("a color",))
    with pytest.raises(InputError, match=r"'colors'.*'no"):
        TextEncoder(source=str(folder), head_samples=2).make_objective(Colors())


@pytest.mark.parametrize("model_type", ["roberta", "mpnet"])
def test_positions_that_begin_after_the_padding_s_are_not_counted(tmp_path, model_type) -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(
        model_type, vocab_size=260, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=130, pad_token_id=1,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    make_byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    encoder = TextEncoder(source=str(tmp_path / "model"))
    task = TextFile(name="long", source=str(tmp_path / "rows"), choices=("no", "yes"))
    for length in (128, 129):
        rows = [{"prompt": "a" * length, "answer": a} for a in ("no", "yes")]
        for part in ("train", "validation", "test"):
            (tmp_path / "rows" / f"{part}.json").write_text(json.dumps(rows))
        if length == 128:
            assert encoder.make_objective(task).head.isfinite().all()
    with pytest.raises(InputError, match=r"to 129 tokens,.*has 128"):
        encoder.make_objective(TextFile(name="longer", source=str(tmp_path / "rows"), choices=("no", "yes")))
