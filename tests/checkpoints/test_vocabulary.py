"""Vocabularies that differ are never cut in silence, and rows find their tokens."""

import pytest
import torch
from checkpoints.models import make_llama, save, tune, write_tensors_of

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints.tokens import read_tokens
from mergekit_lab.checkpoints.vocabulary import reconcile
from mergekit_lab.checkpoints.vocabulary_rows import Reconciled, TokenPlan, TokenSource

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folders(tmp_path):
    """A base of 36 tokens, an expert with two more at the end, one with another order and one of its own."""
    base = save(make_llama(), tmp_path / "base")
    tokens = [f"t{n}" for n in range(38)]
    longer = write_tensors_of(tune(make_llama(vocabulary=38), 1), tmp_path / "longer", tokens)
    order = [f"t{n}" for n in reversed(range(36))] + ["own"]
    mixed = write_tensors_of(tune(make_llama(vocabulary=37), 2), tmp_path / "mixed", order)
    return base, longer, mixed


def open_folders(*folders):
    return [open_checkpoint(folder, folder.name) for folder in folders]


def test_a_difference_is_an_error_with_the_choices_spelled_out(folders) -> None:
    base, longer, mixed = open_folders(*folders)
    with pytest.raises(InputError) as caught:
        reconcile(base, [longer, mixed])
    message = str(caught.value)
    sizes = ("'longer' has 38 rows (36 in the base)", "t36, t37", "'mixed' has 37", "matched by their string")
    for text in (*sizes, "embeddings=intersect", "embeddings=pad", "embeddings=base"):
        assert text in message
    with pytest.raises(InputError, match="did you mean 'intersect'"):
        reconcile(base, [longer], "intersec")


def test_intersect_keeps_the_bases_tokens_and_matches_by_string(folders) -> None:
    base, longer, mixed = open_folders(*folders)
    same = reconcile(base, [longer, mixed], "intersect")
    assert same.rows is None
    for name in (EMBED, HEAD):
        assert torch.equal(same.base[name], base[name])
        assert torch.equal(same.experts[0][name], longer[name][:36])
        assert torch.equal(same.experts[1][name], mixed[name][:36].flip(0))
        assert same.experts[0].specs[name].shape == (36, 16)
    other = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(same.experts[0][other], longer[other])


def test_a_token_that_an_expert_lacks_has_no_task_vector_there(folders) -> None:
    base, longer, _ = open_folders(*folders)
    same = reconcile(longer, [base], "intersect")
    assert torch.equal(same.experts[0][EMBED][:36], base[EMBED])
    assert torch.equal(same.experts[0][EMBED][36:], longer[EMBED][36:])


def test_pad_takes_the_tokenizer_that_knows_every_token(folders) -> None:
    base, longer, _ = open_folders(*folders)
    same = reconcile(base, [longer], "pad")
    assert same.rows == 38
    assert same.tokenizer == longer.folder
    assert torch.equal(same.base[EMBED][:36], base[EMBED])
    assert torch.equal(same.base[EMBED][36:], longer[EMBED][36:])
    assert torch.equal(same.experts[0][EMBED], longer[EMBED])


def test_a_plan_says_where_rows_come_from_that_a_model_lacks(folders) -> None:
    base, longer, mixed = open_folders(*folders)
    tokens = {
        "t36": TokenSource(2, "own"),
        "t1": TokenSource(1, forced=True),
        "t2": TokenSource(0, 7, forced=True),
        "new": TokenSource(None),
    }
    same = reconcile(base, [longer, mixed], "pad", plan=TokenPlan(tokens, multiple=8))
    assert same.rows == 40
    assert [(entry["content"], entry["id"]) for entry in same.added[:3]] == [
        ("t36", 36),
        ("t37", 37),
        ("own", 38),
    ]
    for name in (EMBED, HEAD):
        ours = [checkpoint[name] for checkpoint in (same.base, *same.experts)]
        every = zip(ours, (base, longer, mixed), (range(36), range(36), reversed(range(36))), strict=True)
        for values, model, rows in every:
            own = model[name][list(rows)]
            assert torch.equal(values[0], own[0])
            assert torch.equal(values[3:36], own[3:36])
            assert torch.equal(values[1], longer[name][1])
            assert torch.equal(values[2], base[name][7])
            assert torch.equal(values[37], longer[name][37])
            assert torch.equal(values[38], mixed[name][36])
            assert not values[39].any()
        assert torch.equal(ours[1][36], longer[name][36])
        assert torch.equal(ours[0][36], mixed[name][36])


def test_padding_is_the_mean_of_the_other_rows_and_a_row_that_two_have_their_mean(folders) -> None:
    base, longer, _ = open_folders(*folders)
    for plan, wanted in (
        (TokenPlan(multiple=16), [longer[EMBED][36], longer[EMBED][36]]),
        (TokenPlan({"t36": TokenSource(0, "t3", True)}, 16, based=False), [base[EMBED][3]] * 2),
    ):
        same = reconcile(base, [longer, longer], "pad", plan=plan)
        assert same.rows == 48
        for values in (same.base[EMBED], same.experts[1][EMBED]):
            torch.testing.assert_close(values[38:], values[:38].mean(0).expand(10, 16))
            torch.testing.assert_close(values[36:38], torch.stack([wanted[0], longer[EMBED][37]]))
    fisher = open_checkpoint({EMBED: torch.ones(38, 16)})
    assert same.side(0, fisher)[EMBED].sum(1).tolist() == [16.0] * 36 + [0.0, 16.0] + [0.0] * 10


@pytest.mark.parametrize(
    ("tokens", "choice", "message"),
    [
        ({"x": TokenSource(1)}, "pad", "'longer'.*'x'"),
        ({"x": TokenSource(0, 36)}, "pad", "'base'.*36,.*'x'"),
        ({"x": TokenSource(None)}, "base", "embeddings=base"),
    ],
)
def test_a_plan_that_cannot_be_kept_is_refused(folders, tokens, choice, message) -> None:
    base, longer, _ = open_folders(*folders)
    with pytest.raises(InputError, match=message):
        reconcile(base, [longer], choice, plan=TokenPlan(tokens))


def test_a_plan_needs_an_embedding_and_readable_tokenizers(folders) -> None:
    base, longer, _ = open_folders(*folders)
    plan = TokenPlan(multiple=8)
    (longer.folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="the tokenizer of longer"):
        reconcile(base, [longer], "pad", plan=plan)
    alone = open_checkpoint({"layers.0.w": torch.zeros(3, 3)})
    with pytest.raises(InputError, match="share no embedding of"):
        reconcile(alone, [alone], "pad", plan=plan)


def test_new_tokens_need_a_tokenizer_without_gaps(folders) -> None:
    base, longer, _ = open_folders(*folders)
    file = base.folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"t3": 3,', ""))
    with pytest.raises(InputError, match=r"get new tokens \(x\)"):
        reconcile(base, [longer], "intersect", plan=TokenPlan({"x": TokenSource(None)}))


def test_pad_without_such_a_tokenizer_asks_for_one(folders) -> None:
    base, longer, mixed = open_folders(*folders)
    with pytest.raises(InputError, match="all 39 tokens"):
        reconcile(base, [longer, mixed], "pad")
    same = reconcile(base, [longer, mixed], "pad", mixed.folder)
    assert same.rows == 37
    assert "(t0, t1, t10, t11" in same.notes[-1]
    for position, token in ((0, 35), (35, 0)):
        assert torch.equal(same.base[EMBED][position], base[EMBED][token])
        assert torch.equal(same.experts[0][EMBED][position], longer[EMBED][token])
    assert torch.equal(same.experts[1][EMBED], mixed[EMBED])
    for checkpoint in (same.base, *same.experts):
        assert torch.equal(checkpoint[EMBED][36], mixed[EMBED][36])


def test_pad_refuses_a_tokenizer_with_tokens_that_no_model_has(folders, tmp_path) -> None:
    base, longer, _ = open_folders(*folders)
    write_tensors_of(make_llama(vocabulary=37), tmp_path / "alien", [f"t{n}" for n in range(36)] + ["alien"])
    with pytest.raises(InputError, match=r"for 1 tokens.*\(alien\)"):
        reconcile(base, [longer], "pad", tmp_path / "alien")


def test_base_leaves_the_vocabulary_out_of_the_merge(folders) -> None:
    base, longer, mixed = open_folders(*folders)
    same = reconcile(base, [longer, mixed], "base")
    assert set(same.exclude) == {EMBED, HEAD}
    for expert in same.experts:
        assert torch.equal(expert[EMBED], base[EMBED])


def test_without_tokenizers_rows_are_matched_by_number_and_the_message_says_so() -> None:
    states = [open_checkpoint(make_llama(vocabulary=v, seed=v).state_dict(), str(v)) for v in (36, 40)]
    with pytest.raises(InputError, match="their row, as tokenizer"):
        reconcile(states[0], [states[1]])
    same = reconcile(states[0], [states[1]], "pad")
    assert same.rows == 40
    assert torch.equal(same.base[EMBED][36:], states[1][EMBED][36:])


def test_a_vocabulary_that_is_not_merged_may_differ(folders, tmp_path) -> None:
    base, longer, _ = open_folders(*folders)
    turned = with_tokens(tmp_path / "turned", [f"t{n}" for n in (1, 0, *range(2, 36))])
    same = reconcile(base, [longer, turned], is_merged=lambda name: ".layers." in name)
    assert same == Reconciled(base, (longer, turned))
    with pytest.raises(InputError, match="the vocabularies differ in"):
        reconcile(base, [longer], is_merged=lambda name: name != HEAD)


def test_side_inputs_follow_their_experts_and_know_nothing_of_rows_they_lack(folders) -> None:
    base, longer, mixed = open_folders(*folders)
    fisher = open_checkpoint({EMBED: torch.rand(37, 16), "other": torch.rand(3)})
    same = reconcile(base, [longer, mixed], "intersect")
    assert torch.equal(same.side(1, fisher)[EMBED], fisher[EMBED][:36].flip(0))
    assert torch.equal(same.side(1, fisher)["other"], fisher["other"])
    padded = reconcile(base, [longer], "pad")
    assert torch.equal(
        padded.side(0, open_checkpoint({EMBED: torch.ones(38, 16)}))[EMBED][36:], torch.zeros(2, 16)
    )
    left = reconcile(base, [longer, mixed], "base")
    assert not left.side(1, fisher)[EMBED].any()


def with_tokens(folder, tokens, seed=1):
    """A model of 36 rows with these tokens, and perhaps some that it has no rows for."""
    return open_checkpoint(write_tensors_of(tune(make_llama(), seed), folder, tokens), folder.name)


def test_as_many_rows_with_other_tokens_are_refused_without_a_choice(folders, tmp_path) -> None:
    base, _, _ = open_folders(*folders)
    chat = with_tokens(tmp_path / "chat", [f"t{n}" for n in range(35)] + ["<chat>"])
    turned = with_tokens(tmp_path / "turned", [f"t{n}" for n in (1, 0, *range(2, 36))])
    for other, message in (
        (chat, r"tokens: 1 only there \(<chat>\), 1 only in the base \(t35\)"),
        (turned, r"2 in other rows \(t0, t1\)"),
    ):
        with pytest.raises(InputError, match=rf"{message}(.|\n)*embeddings=intersect"):
            reconcile(base, [other])
        assert reconcile(base, [other], "base").exclude == (EMBED, HEAD)
    assert reconcile(base, [base]).notes == ()
    wide = write_tensors_of(make_llama(vocabulary=40), tmp_path / "wide", [f"t{n}" for n in range(36)])
    with pytest.raises(InputError, match=r"'wide' has 40 rows \(36.*base\)\n"):
        reconcile(base, [open_checkpoint(wide, "wide")])


def test_as_many_rows_with_other_tokens_are_matched_by_token(folders, tmp_path) -> None:
    base, _, _ = open_folders(*folders)
    turned = with_tokens(tmp_path / "turned", [f"t{n}" for n in (1, 0, *range(2, 36))])
    for choice in ("intersect", "pad"):
        same = reconcile(base, [turned], choice)
        for name in (EMBED, HEAD):
            assert torch.equal(same.experts[0][name], turned[name][[1, 0, *range(2, 36)]])
            assert torch.equal(same.base[name], base[name])


def test_tokens_in_the_same_spare_rows_are_kept_apart(tmp_path) -> None:
    words = [f"t{n}" for n in range(34)]
    base = with_tokens(tmp_path / "base", words, 0)
    think = with_tokens(tmp_path / "think", [*words, "<think>", "</think>"], 1)
    tool = with_tokens(tmp_path / "tool", [*words, "<tool>", "</tool>"], 2)
    with pytest.raises(InputError, match="<tool>"):
        reconcile(base, [think, tool])
    same = reconcile(base, [think, tool], "pad", think.folder)
    for checkpoint in (same.base, *same.experts):
        assert torch.equal(checkpoint[HEAD][34:], think[HEAD][34:])
    with pytest.raises(InputError, match=r"2 only.*\(</think>, <think>\)"):
        reconcile(base, [think])
    (note,) = reconcile(think, [base]).notes
    assert "2 only in the base (</think>, <think>)" in note


def test_tokens_without_a_row_do_not_count(folders, tmp_path) -> None:
    base, longer, _ = open_folders(*folders)
    unused = with_tokens(tmp_path / "unused", [f"t{n}" for n in range(36)] + ["<u0>", "<u1>", "<u2>"])
    same = reconcile(base, [longer, unused], "pad")
    assert same.rows == 38
    assert same.tokenizer == longer.folder
    assert reconcile(base, [unused], "pad").rows is None
    assert reconcile(base, [unused]).notes == ()


def test_a_tokenizer_that_is_not_read_here_is_noted_where_it_differs(folders) -> None:
    base, longer, mixed = open_folders(*folders)
    for checkpoint, content in ((base, b"a"), (longer, b"b"), (mixed, b"a")):
        (checkpoint.folder / "tokenizer.json").unlink()
        (checkpoint.folder / "tokenizer.model").write_bytes(content)
    notes = reconcile(base, [longer, mixed], "pad").notes
    assert [note for note in notes if "tokens are not compared" in note] == [
        note for note in notes if note.startswith("warning: the tokenizer of 'longer'")
    ]


def test_other_shapes_than_the_vocabularys_are_left_for_the_merge_to_refuse() -> None:
    base = open_checkpoint({"classifier.weight": torch.zeros(3, 4), "layers.0.w": torch.zeros(3, 3)})
    other = open_checkpoint({"classifier.weight": torch.zeros(5, 4), "layers.0.w": torch.zeros(4, 3)})
    assert reconcile(base, [other], "intersect").experts == (other,)


@pytest.mark.parametrize(
    "name", ["visual.positional_embedding", "encoder.embed_positions.weight", "model.patch_embed.proj.weight"]
)
def test_positions_and_patches_are_no_vocabulary(name: str) -> None:
    base, other = (open_checkpoint({name: torch.zeros(rows, 4), "w": torch.zeros(2)}) for rows in (17, 26))
    assert reconcile(base, [other]).experts == (other,)
    assert reconcile(base, [other], "pad").experts == (other,)


@pytest.mark.parametrize("name", ["head.weight", "output.weight"])
def test_a_head_has_a_row_a_token_only_beside_an_embedding_of_as_many(name: str) -> None:
    def make_checkpoint(rows: int, tokens: int | None):
        state = {name: torch.zeros(rows, 4)}
        return open_checkpoint(
            state if tokens is None else state | {"tok_embeddings.weight": torch.zeros(tokens, 4)}
        )

    for tokens in (None, 7):
        base, other = make_checkpoint(10, tokens), make_checkpoint(12, tokens)
        assert reconcile(base, [other], "pad").experts == (other,)
    with pytest.raises(InputError, match="the vocabularies differ in"):
        reconcile(make_checkpoint(10, 10), [make_checkpoint(12, 12)])
    assert reconcile(make_checkpoint(10, 10), [make_checkpoint(12, 12)], "pad").experts[0].specs[
        name
    ].shape == (12, 4)


def test_a_row_of_vocab_txt_ends_where_its_line_does(tmp_path) -> None:
    (tmp_path / "vocab.txt").write_text("a\n\u2028\n\x85\nb\n", encoding="utf-8")
    assert read_tokens(tmp_path) == {"a": 0, "\u2028": 1, "\x85": 2, "b": 3}


def test_added_tokens_are_read_from_the_settings_too(tmp_path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "added_tokens.json").write_text('{"<b>": 1}')
    settings = '{"added_tokens_decoder": {"1": {"content": "<b>"}, "2": {"content": "<c>"}}}'
    (tmp_path / "tokenizer_config.json").write_text(settings)
    assert read_tokens(tmp_path) == {"a": 0, "<b>": 1, "<c>": 2}


def test_experts_that_contradict_each_other_need_the_bases_tokenizer(folders, tmp_path) -> None:
    base, _, _ = open_folders(*folders)
    turned = with_tokens(tmp_path / "turned", [f"t{n}" for n in (1, 0, *range(2, 36))])
    silent = open_checkpoint(dict(base), "silent")
    for choice in (None, "intersect", "pad"):
        with pytest.raises(InputError, match=r"'turned'.*'t1'.*0"):
            reconcile(silent, [base, turned], choice)
    assert reconcile(silent, [base, turned], "base").experts
    assert reconcile(silent, [turned, silent]).experts == (turned, silent)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ('{"a": -1, "b": 0}', r"impossible rows \('a'\)"),
        ('{"a": 99999999999999999999}', "impossible rows"),
        ('{"a": 1e400}', "cannot be read"),
        ('{"a": null}', "cannot be read"),
        ("[3]", "cannot be read"),
        ('{"a":' * 100_000, "nested too deep"),
        ("{", "is not JSON"),
    ],
)
def test_a_tokenizer_with_rows_that_cannot_be_is_refused(vocabulary: str, message: str, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocabulary}}}}}')
    with pytest.raises(InputError, match=message):
        read_tokens(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_tokenizer_and_a_pointer_is_none(tmp_path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": {"vocab": {"a": 0}}}', encoding="utf-8-sig")
    assert read_tokens(tmp_path) == {"a": 0}
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n")
    with pytest.raises(InputError, match=r"tokenizer.json.*Git LFS"):
        read_tokens(tmp_path)


def test_a_tokenizer_that_knows_no_token_of_the_others_is_no_match(folders, tmp_path) -> None:
    base, _, _ = open_folders(*folders)
    tokens = [f"other{n}" for n in range(38)]
    alien = open_checkpoint(write_tensors_of(make_llama(vocabulary=38), tmp_path / "alien", tokens), "alien")
    with pytest.raises(InputError, match="no token of 'alien'"):
        reconcile(base, [alien], "intersect")
