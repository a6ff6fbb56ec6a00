"""One word for one thing: what the glossary of docs/architecture.md says, as far as a program can tell.

It holds for the package, its tests and the experiments.
"""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NODES = [
    (f"{file.parent.name}/{file.name}", node)
    for folder in ("mergekit_lab", "experiments", "tests")
    for file in sorted((ROOT / folder).rglob("*.py"))
    for node in ast.walk(ast.parse(file.read_text()))
]
VAGUE = {"found", "given", "place", "places", "res", "said", "stuff", "tmp", "told"}
PARTICIPLE = re.compile(r"_*(?!embed|need|seed)([a-z]+ed|found|given|kept|made|met|said|sent|shown|told)$")

VERBS = set(
    re.findall(
        r"\w+",
        """
        abbreviate abort accept adapt add addmm adopt advise aggregate agree align allocate allow analyze answer
        apply are arrange as ascend ask assert assess assign assume attach attempt augment average balance begin
        break bring build bury call can cap capture cast catch center chain change chart check choose chooses
        chunk claim clean clear clip close collect combine commit compare compile complete compose compute
        configure connect convert copy correct correlate count cover crop cut damage declare decode deduplicate
        delete derive describe detach die differentiate digest discard dismiss display distinguish distort
        diverge divide do doubt download draw drop elect embed empty encode end enumerate escape estimate eval
        evaluate evolve exchange execute expand expect explain explore export extract factorize fail fetch fill
        filter find finetune fingerprint finish fit fits fix flatten flip fold follow forget format freeze from
        gather generate get give go group grow guard halve has hash have hold holds hook identify ignore import
        index install instantiate interpolate interrupt is itemize join keep kill label launch lay learn leave
        lift limit linearize link list listen load locate lock log look lose make map mark mask match matmul
        matters may measure meet merge minimize mix move multiply must mutate name narrow need nest normalize
        note number obtain open order orient orthogonalize outlive pack pad parse part pause perturb pick pin
        place plan pool predict prefetch prepare print probe project prune publish push put quote raise rank
        read reads recall receive reconcile record refill refine refuse register relay release remember remove
        rename render renew repack replace replay report require reset resize resolve respell restore rewrite
        round run sample save say scale score seal search seed select send separate serve set settle share shift
        shorten show shrink silence simplify size slice solve sort sparsify spell split spread stack stands
        start stop store stratify stream strengthen strip subtract suggest sum summarize survey swap sweep
        switch sync tabulate take takes tell terminate time title to tokenize track train translate trim
        truncate try tune unify unite unmark unpack untie unwrap update use uses validate vary verify view visit
        wait walk wants warn warp watch weigh whiten widen with without work write yield
        """,
    )
)
"""First words of functions: verbs, questions (`is_x`) and conversions (`to_x`)."""
TERMS = {
    *(
        "chained_grams",
        "cross_task_linearity",
        "diagonal_fisher",
        "first_moment",
        "input_grams",
    ),
    *("squared_first_moment", "svd", "top_eigenvalues", "trace"),
}
"""Quantities of papers, which a function may be named after."""
OF_LIBRARIES = {
    *("backward", "closure", "dim", "forward", "lerp_", "main", "optimizer_state", "optimizer_step"),
    *("optimizer_zero_grad", "persistent_load", "state_dict", "step", "training_step", "val_dataloader"),
    *("validation_step", "zero_grad", "parameters", "emit", "artifact"),
}
NAMED_BY_USERS = {"tasks/metrics.py", "tasks/packaged_texts.py"}
"""A public function in these files is a metric or a corpus, and configurations name it."""
LOOKED_UP = re.compile(r"on_(train|validation|fit|step|save|load)_|stage_|test_|pytest_|handle_|do_[A-Z]")
"""Hooks of Lightning and transformers; stages of a run; tests, and hooks of pytest and of servers."""


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


def test_functions_are_named_by_verbs() -> None:
    functions = {
        (file, n.name)
        for file, n in NODES
        if isinstance(n, ast.FunctionDef)
        and not re.search("property|setter|fixture", "".join(map(ast.unparse, n.decorator_list)))
    }
    known = VERBS | TERMS | OF_LIBRARIES
    nouns = {
        (file, name)
        for file, name in functions
        if not name.startswith("__") and not {name, name.strip("_").split("_")[0]} & known
        if not LOOKED_UP.match(name) and not (file in NAMED_BY_USERS and not name.startswith("_"))
    }
    assert nouns == set(), "begin these with a verb; a new verb goes into VERBS"


def test_no_two_classes_share_a_name() -> None:
    classes = Counter(n.name.strip("_") for _, n in NODES if isinstance(n, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []
