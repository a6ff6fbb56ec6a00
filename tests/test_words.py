"""One word for one thing: what the glossary of docs/architecture.md says, as far as a program can tell."""

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mergekit_lab"
NODES = [(f.name, node) for f in sorted(PACKAGE.rglob("*.py")) for node in ast.walk(ast.parse(f.read_text()))]
VAGUE = {"found", "given", "place", "places", "said", "told"}
PARTICIPLE = re.compile(r"_*(?!embed|need|seed)([a-z]+ed|found|given|kept|made|met|said|sent|shown|told)$")


def test_no_variable_has_a_name_that_fits_any_value() -> None:
    names = {
        (file, getattr(n, "id", getattr(n, "arg", "")))
        for file, n in NODES
        if isinstance(n, ast.Name | ast.arg)
    }
    assert {(file, name) for file, name in names if name in VAGUE} == set()


def test_no_function_is_named_by_a_participle() -> None:
    functions = {(f, n.name) for f, n in NODES if isinstance(n, ast.FunctionDef) and not n.decorator_list}
    assert {(f, name) for f, name in functions if PARTICIPLE.match(name)} == set()


def test_no_two_classes_share_a_name() -> None:
    classes = Counter(n.name.strip("_") for _, n in NODES if isinstance(n, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []
