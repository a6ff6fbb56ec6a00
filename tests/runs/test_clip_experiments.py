"""Every CLIP experiment composes and instantiates, from repositories as on the hub, with a tiny CLIP.

One runs where it is put together from anything that no earlier one had.
"""

import csv
from functools import cache
from pathlib import Path

import open_clip
import pytest
from composing import compose_config, find_pieces
from hub_repos import write_repository
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from mergekit_lab import InputError, reporting
from mergekit_lab.backbones import OpenClip, to_transformers
from mergekit_lab.merging import TIES
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.programs import start
from mergekit_lab.reporting.paper_tables import read_published
from mergekit_lab.reporting.published import Beside, set_beside
from mergekit_lab.reporting.run_files import read_run
from mergekit_lab.runs import published
from mergekit_lab.runs.graph import list_nodes
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.check import build
from mergekit_lab.schema.run import check, with_chosen_merger
from mergekit_lab.tasks import HubImages

TASKS = [file.stem for file in sorted((find_conf_dir() / "task" / "clip").glob("*.yaml"))]
ARCHITECTURE = "tiny-clip"
EXPERIMENTS = [
    file.stem
    for file in sorted((find_conf_dir() / "experiment").glob("*.yaml"))
    if file.stem.startswith(("vit_", "clip_", "saft_", "mergopt_", "epimer_")) and "_figure" not in file.stem
]
FOLDER = Path(reporting.published.__file__).parents[1] / "assets" / "published"
OPTIMIZERS = [file.stem for file in (find_conf_dir() / "optimizer").glob("*.yaml")]
FIGURES = [file.stem for file in sorted((find_conf_dir() / "experiment").glob("*_figure*.yaml"))]
FULLY = {
    "clip_public_experts": [],
    "epimer_table7": ["merger=epimer", "merger.rank=4", "merger.coefficient=0.5", "merger.normalize=none"],
}
"""Run to the report; of the others the shared stages are the same, and what they add is composed and built."""
RAN: set[str] = set()
"""What experiments were put together from that ran in this process."""


@pytest.fixture(scope="module", autouse=True)
def tiny_clip():
    config = {
        "embed_dim": 16,
        "quick_gelu": True,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
    }
    open_clip.factory._MODEL_CONFIGS[ARCHITECTURE] = config
    yield
    del open_clip.factory._MODEL_CONFIGS[ARCHITECTURE]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """`data/<task>` as repositories, `experts/<task>` as transformers saves them."""
    root = tmp_path_factory.mktemp("hub")
    (root / "names.txt").write_text("dark\nlight\n")
    cfg, _ = compose_config(["suite=clip20", "+task/clip@suite.tasks.emnist_digits=emnist_digits"])
    for seed, (name, node) in enumerate(cfg.suite.tasks.items()):
        task = build({**node, "class_names": f"{root}/names.txt"}, HubImages)
        assert isinstance(task, HubImages)
        write_repository(task, root / "data" / name, seed, {"train": 20, "test": 4})
        state = OpenClip(ARCHITECTURE, None, seed=100 + seed).make_model().state_dict()
        renamed = {n: t for n, t in to_transformers(state).items() if not n.startswith("visual_projection")}
        (root / "experts" / name).mkdir(parents=True)
        save_file(renamed, root / "experts" / name / "model.safetensors", {"format": "pt"})
    return root


def list_tiny_overrides(hub: Path, store: Path) -> list[str]:
    """One step of two pictures on a CPU."""
    return [
        f"data_root={hub}/data",
        f"store.root={store}",
        *(f"backbone.architecture={ARCHITECTURE}", "backbone.weights=null", "backbone.precision=float32"),
        *("progress=false", "device=cpu", "trainer.accelerator=cpu", "training.precision=32-true"),
        *("training.steps=1", "training.warmup_steps=0", "training.batch_size=2", "training.accumulate=1"),
        *(
            "training.validations=1",
            "curvature.samples=2",
            "curvature.fraction=null",
            "search.coefficients=[0.5,1.0]",
            "search.fields=null",
        ),
    ]


def shrink(cfg, hub: Path) -> None:
    """Two classes a task, so that no expert scores 0; experts from the folder; few iterations."""
    for task in cfg.suite.tasks.values():
        task.class_names, task.validation_share = f"{hub}/names.txt", 0.3
    if cfg.experts:
        cfg.experts = f"{hub}/experts"
    if "wudi" in cfg.mergers:
        cfg.mergers.wudi.steps = 2


@cache
def read_option(group: str, option: str) -> DictConfig:
    return OmegaConf.load(find_conf_dir() / group / f"{option}.yaml")


def get_swept(cfg) -> dict[str, str]:
    return dict(cfg.hydra.sweeper.get("params") or {})


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_clip_experiment_says_its_command_and_its_first_job_can_run(
    name: str, hub: Path, module_store: Path, tmp_path: Path
) -> None:
    cfg, choices = compose_config([f"+experiment={name}", *list_tiny_overrides(hub, module_store)])
    sweep = get_swept(HydraConfig.instance().cfg)
    first = {key: values.split(",")[0] for key, values in sweep.items()}
    if first:
        jobs = [f"{key}={value}" for key, value in first.items() if not key.startswith("training.")]
        cfg, choices = compose_config([f"+experiment={name}", *list_tiny_overrides(hub, module_store), *jobs])
    shrink(cfg, hub)
    check(cfg)
    cells = {
        axis: sweep.get(axis, choices[axis]).split(",") for axis in ("backbone", "finetuning", "optimizer")
    }
    for axis, options in cells.items():
        assert all((find_conf_dir() / axis / f"{option}.yaml").is_file() for option in options)
    for table in cfg.published:
        rows = read_published(table)
        assert any(all(getattr(row, axis) in options for axis, options in cells.items()) for row in rows)
    cfg.stage = [stage for stage in cfg.stage if stage != "report"]
    cfg.suite.tasks = dict(list(cfg.suite.tasks.items())[:2])
    if name in FULLY or find_pieces(cfg) <= RAN:
        assert len({node.key for node in list_nodes(Run(cfg, tmp_path, choices))}) > len(cfg.suite.tasks)
    else:
        RAN.update(find_pieces(cfg))
        start(cfg, tmp_path, choices, [])


@pytest.mark.parametrize(("name", "job"), FULLY.items())
def test_clip_experiments_run_from_repositories_as_on_the_hub(
    name: str, job: list[str], hub: Path, module_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = published.read_setting
    whole, _ = compose_config([f"+experiment={name}", *job])

    def get_setting(run, key):
        """The experiment's own, where this test makes it smaller."""
        if key == "backbone.weights":
            return "openai"
        return (
            OmegaConf.select(whole, key)
            if key.startswith(("training.", "search.", "curvature."))
            else real(run, key)
        )

    monkeypatch.setattr(published, "read_setting", get_setting)
    cfg, choices = compose_config([f"+experiment={name}", *job, *list_tiny_overrides(hub, module_store)])
    shrink(cfg, hub)
    start(cfg, tmp_path, choices, [])
    beside = read_run(tmp_path).published
    assert any(row.ours is not None for row in beside)
    assert "## Published numbers and ours" in (tmp_path / "summary.md").read_text()


def test_a_tables_experiments_reach_its_rows_and_train_no_others() -> None:
    reached = set()
    for name in ("mergopt_table9", "mergopt_table9_tangent"):
        _, choices = compose_config([f"+experiment={name}"])
        sweep = get_swept(HydraConfig.instance().cfg)
        reached |= {(choices["finetuning"], optimizer) for optimizer in sweep["optimizer"].split(",")}
    assert {(r.finetuning, r.optimizer) for r in read_published("mergopt 9")} == reached


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_composes_with_the_model_that_ships(name: str) -> None:
    lines = (find_conf_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[2] == f"# Command:  python -m mergekit_lab +experiment={name}"
    assert any(line.startswith("# Shipped data:  backbone=glyph_clip suite=glyphs8") for line in lines)
    cfg, choices = compose_config([f"+experiment={name}", "backbone=glyph_clip", "suite=glyphs8"])
    check(cfg)
    assert choices["shipped"] == cfg.shipped
    assert (choices["training"], cfg.training.steps) == ("glyphs", 150)
    assert cfg.experts is None
    pairs = cfg.analysis.get("pairs") or []
    assert {task for pair in pairs for task in pair} <= set(cfg.suite.tasks)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.csv")), ids=lambda file: file.stem)
def test_conditions_ask_for_keys_that_the_options_have(file) -> None:
    """A condition on a key that was renamed away would never hold."""
    lines = (FOLDER.parent / "published_tables.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    rows += csv.DictReader(line for line in file.read_text().splitlines() if not line.startswith("#"))
    for key in {pair.partition("=")[0] for row in rows for pair in (row["when"] or "").split()}:
        group, _, rest = key.removesuffix("?").partition(".")
        label, _, rest = rest.partition(".") if group == "mergers" else (None, None, rest)
        if group == "mergers":
            option = "task_arithmetic" if label == "untuned" else label
            assert OmegaConf.select(read_option("merger", option), rest, default=...) is not ..., key
        elif group == "optimizer":
            assert any(
                rest.split(".")[0] in read_option("optimizer", o) or rest.startswith("base.")
                for o in OPTIMIZERS
            ), key
        elif group in ("search", "training", "curvature"):
            option = {"search": "grid", "training": "trace", "curvature": "as_needed"}[group]
            keys = set(read_option(group, option)) | set(read_option("training", "language"))
            assert rest.split(".")[0] in keys, key


def list_beside(tmp_path: Path, *job: str) -> list[Beside]:
    """The published numbers that stand beside a run, had it been made: each of its own is 1."""
    cfg, choices = compose_config([*job, "backbone.weights=null"])
    setup = Run(cfg, tmp_path, choices)

    def holds(when: str) -> bool:
        return when == "backbone.weights=openai" or published.have_settings(setup, when)

    axes = {axis: choices[axis] for axis in ("backbone", "finetuning", "optimizer")}
    reference = (lambda *_: 1.0, axes, holds, setup.tasks)
    return [each for table in cfg.published for each in set_beside(table, *reference)]


@pytest.mark.parametrize("backbone", ["b32", "b16", "l14"])
def test_public_experts_are_merged_as_their_published_rows_say(backbone: str, tmp_path: Path) -> None:
    rows = [r for r in read_published("fusion_bench 8 tasks") if r.backbone == f"clip_vit_{backbone}"]
    beside = list_beside(tmp_path, "+experiment=clip_public_experts", f"backbone=clip_vit_{backbone}")
    assert len(beside) == len(rows)


@pytest.mark.parametrize(
    "job", [("saft_tableC4", "optimizer=asam"), ("mergopt_table9", "optimizer=mergopt")], ids=lambda job: job[0]
)
def test_a_tables_numbers_stand_beside_its_experiment(job: tuple[str, str], tmp_path: Path) -> None:
    assert any(each.ours is not None for each in list_beside(tmp_path, f"+experiment={job[0]}", job[1]))


@pytest.mark.parametrize(
    ("more", "holds"), [([], True), (["merger.coefficient=0.4"], False), (["merger.preset=mergekit"], False)]
)
def test_a_single_merger_keeps_its_experiments_settings(more: list[str], holds: bool, tmp_path: Path) -> None:
    overrides = ["+experiment=clip_public_experts", "backbone.weights=null", "merger=ties", *more]
    cfg, choices = compose_config(overrides)
    setup = Run(with_chosen_merger(cfg, overrides), tmp_path, choices)
    assert list(setup.mergers) == ["ties"]
    (row,) = (
        r
        for r in read_published("fusion_bench 8 tasks")
        if (r.backbone, r.row, r.column) == ("clip_vit_b32", "ties", "average")
    )
    assert published.have_settings(setup, row.when) is holds


def test_a_single_merger_takes_another_inner_method(tmp_path: Path) -> None:
    inner = ["+merger@merger.inner=ties", "merger.inner.preset=mergekit"]
    cfg, choices = compose_config(overrides := ["+experiment=quickstart", "merger=dare", *inner])
    method = Run(with_chosen_merger(cfg, overrides), tmp_path, choices).mergers["dare"].method
    assert isinstance(method.inner, TIES)
    assert method.inner.preset == "mergekit"


def test_a_single_merger_of_another_experiment_is_its_groups(tmp_path: Path) -> None:
    overrides = ["+experiment=clip_adamw", "merger=breadcrumbs", "merger.density=0.5"]
    cfg, _ = compose_config(overrides)
    assert with_chosen_merger(cfg, overrides) is cfg


def test_searched_fields_are_open_and_checked_before_any_work(tmp_path: Path) -> None:
    def compose_search(fields: str) -> Run:
        more = ["search=halving", "merger=ties", f"store.root={tmp_path}", f"search.fields={fields}"]
        return Run(*compose_config(["backbone=glyph_clip", *more])[:1], tmp_path, {"merger": "ties"})

    assert compose_search("{density: [0.3, 0.2]}").search.list_variants({"density": 0.1}) == [
        {"density": 0.3},
        {"density": 0.2},
    ]
    with pytest.raises(InputError, match=r"search.fields.densty.*'density'"):
        compose_search("{densty: [0.3]}")
    with pytest.raises(InputError, match="density"):
        compose_search("{density: [0.5, 7]}")
