"""Generation settings and chat templates go with their tokenizer, and what is not taken is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints.models import VOCABULARY, make_llama, tune

from mergekit_lab import expand, merge
from mergekit_lab.checkpoints.generation import describe_tokenizer
from mergekit_lab.merging import TSVM, WeightAverage

WORDS = [f"t{n}" for n in range(VOCABULARY)]
TEMPLATE = "{{ messages }}"


def save_folder(path: Path, seed: int, end: int | list[int], template: str | None = None, **more: Any) -> Path:
    """A chat model that ends with this token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model: Any = tune(make_llama(), seed)
    model.config.eos_token_id = end[0] if isinstance(end, list) else end
    model.generation_config.update(eos_token_id=end, **more)
    model.save_pretrained(path)
    raw = Tokenizer(models.WordLevel({word: row for row, word in enumerate(WORDS)}, unk_token="t0"))
    first = end[0] if isinstance(end, list) else end
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="t0", eos_token=WORDS[first])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def chat(tmp_path) -> tuple[Path, dict[str, Path]]:
    expert = save_folder(tmp_path / "e", 1, [35, 34], TEMPLATE, do_sample=True, temperature=0.3)
    return save_folder(tmp_path / "base", 0, 34), {"e": expert}


def read_ends(out: Path) -> tuple[Any, ...]:
    """Where a loaded model ends, its tokenizer ends, and whether that has a template."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(out)
    settings = GenerationConfig.from_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    return settings.eos_token_id, config["eos_token_id"], tokenizer.eos_token_id, tokenizer.chat_template


def read_notes(out: Path) -> str:
    return str(json.loads((out / "mergekit_lab.json").read_text())["notes"])


def test_generation_settings_follow_the_tokenizer(chat, tmp_path) -> None:
    base, experts = chat
    out = merge(base, experts, tmp_path / "out", WeightAverage(), device="cpu", tokenizer_from="e")
    assert read_ends(out) == ([35, 34], [35, 34], 35, TEMPLATE)
    assert "t34 (34), t35 (35)" in read_notes(out)


def test_a_tokenizer_without_generation_settings_brings_its_token_ids(chat, tmp_path) -> None:
    base, experts = chat
    for name in ("config.json", "generation_config.json"):
        (experts["e"] / name).rename(tmp_path / name)
    out = merge(base, experts, tmp_path / "out", WeightAverage(), device="cpu", tokenizer_from="e")
    assert read_ends(out) == (35, 35, 35, TEMPLATE)


def test_what_of_an_expert_is_not_taken_is_said(chat, tmp_path) -> None:
    base, experts = chat
    out = merge(base, experts, tmp_path / "out", WeightAverage(), device="cpu")
    assert read_ends(out) == (34, 34, 34, None)
    notes_text = read_notes(out)
    assert "tokenizer's end token 't35'" in notes_text
    assert "tokenizer_from=e takes" in notes_text
    assert "not taken" not in read_notes(
        merge(base, {"b": base}, tmp_path / "o", WeightAverage(), device="cpu")
    )


def test_a_template_for_tools_alone_is_one(chat) -> None:
    base, experts = chat
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    lines = describe_tokenizer(experts["e"], {"b": base}, experts["e"], "e")
    assert lines[0].startswith("warning: chat template, end tokens")


def test_settings_come_back_with_a_model_that_is_expanded_from_factors(chat, tmp_path) -> None:
    base, experts = chat
    factors = merge(base, experts, tmp_path / "f", TSVM(), device="cpu", tokenizer_from="e", format="low_rank")
    assert read_ends(expand(factors, base, tmp_path / "out"))[0] == [35, 34]
