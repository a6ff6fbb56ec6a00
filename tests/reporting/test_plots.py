import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from mergekit_lab.paths import conf_dir
from mergekit_lab.reporting import build_table, charts, drawing, figures, names, plots

CURVE = [
    {"step": 0, "train_loss": 2.0, "val_loss": 2.1, "val_accuracy": 0.1},
    {"step": 10, "train_loss": 1.0},
    {"step": 20, "train_loss": 0.5, "val_loss": 0.7, "val_accuracy": 0.8},
]
SEARCH = [
    {"coefficient": 0.5, "normalized": 0.9, "chosen": True},
    {"coefficient": 0.1, "normalized": 0.7, "chosen": False},
]


@pytest.fixture(scope="module", autouse=True)
def _pictures_of_one_pixel():
    """Pictures are looked at here."""


@pytest.fixture(autouse=True)
def _no_files_for_papers(request, monkeypatch):
    """Only one test looks at these."""
    real = Figure.savefig

    def save(figure, path, **options):
        if Path(path).suffix == ".png" or "svg" in request.node.name:
            real(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", save)


def size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[12:16] == b"IHDR"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(("tasks", "mergers", "optimizers"), [(1, 1, 1), (20, 15, 1), (2, 3, 4), (3, 0, 1)])
def test_every_size_of_study_is_drawn(tmp_path, study, tasks, mergers, optimizers):
    table = build_table(study(tasks, mergers, optimizers))
    heat_maps = plots.draw_heat_maps(table, tmp_path)
    assert len(heat_maps) == optimizers
    assert all(size(path)[0] >= 5 * drawing.DPI for path in heat_maps)
    bars = plots.draw_mergers(table, tmp_path)
    assert [path.name for path in bars] == (["mergers.png"] if mergers else [])
    assert all(size(path)[1] > 40 * mergers for path in bars)


@pytest.mark.parametrize(
    ("tasks", "mergers", "optimizers", "drawn"),
    [(2, 2, 1, []), (3, 0, 1, []), (3, 2, 1, ["radar.png"]), (4, 9, 2, ["radar-1-", "radar-2-"])],
)
def test_a_radar_needs_three_tasks_and_a_merger(tmp_path, study, tasks, mergers, optimizers, drawn):
    found = plots.draw_radars(build_table(study(tasks, mergers, optimizers)), tmp_path)
    assert [path.name[: len(start)] for path, start in zip(found, drawn, strict=True)] == drawn
    assert all(min(size(path)) > 600 for path in found)


def test_missing_cells_and_hostile_names_are_drawn(tmp_path, record):
    records = [
        record(merger="_$x^{$ <b>", task="a"),
        record(merger="m" * 90, task="$\\frac{$", optimizer="../x"),
        record(merger="m" * 90, task="b", expert_value=None, optimizer="../x"),
    ]
    table = build_table(records)
    paths = [
        *plots.draw_heat_maps(table, tmp_path),
        *plots.draw_mergers(table, tmp_path),
        *plots.draw_searches({"": {"_$x^{$": SEARCH}}, table.mergers, tmp_path),
        *plots.draw_training({"$_{": {"_a$": CURVE}}, tmp_path),
    ]
    assert [path.name for path in paths] == [
        "heatmap-1-adamw.png",
        "heatmap-2-x.png",
        "mergers.png",
        "coefficients.png",
        "training.png",
    ]
    assert all(size(path)[0] < 2600 for path in paths)


def test_many_curves_are_spread_over_files_of_a_dozen(tmp_path):
    curves = {f"expert{number}": CURVE for number in range(20)}
    paths = plots.draw_training({"": curves}, tmp_path)
    assert [path.name for path in paths] == ["training-1.png", "training-2.png"]


def test_each_group_has_its_own_curves(tmp_path):
    paths = plots.draw_training({"": {"one": CURVE[1:2]}, "b": {"one": CURVE}}, tmp_path)
    assert [path.name for path in paths] == ["training-1.png", "training-2-b.png"]


def test_nothing_to_show_makes_no_file(tmp_path):
    table = build_table([])
    assert not plots.draw_heat_maps(table, tmp_path)
    assert not plots.draw_mergers(table, tmp_path)
    assert not plots.draw_training({"": {"a": []}}, tmp_path)
    assert not plots.draw_searches({"": {}}, (), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, in place of their files."""
    kept = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: kept.append(figure) or path)
    return kept


def line_colors(figure):
    """By the texts of the legend."""
    (legend,) = figure.legends
    handles = legend.legend_handles
    return dict(zip((t.get_text() for t in legend.get_texts()), (h.get_color() for h in handles), strict=True))


def test_a_method_has_one_color_in_every_figure_of_every_report(tmp_path, record, drawn):
    def colors(*mergers):
        records = [record(merger=m, task=t) for m in mergers for t in "abc"]
        records += [record(kind="expert", task=t) for t in "abc"]
        table = build_table(records)
        drawn.clear()
        plots.draw_mergers(table, tmp_path)
        plots.draw_radars(table, tmp_path)
        plots.draw_searches({"": {"ties": SEARCH}}, table.mergers, tmp_path)
        bars, radar, search = drawn
        (row,) = (i for i, text in enumerate(bars.axes[0].get_yticklabels()) if text.get_text() == "TIES")
        bar = next(b for b in bars.axes[0].patches if round(b.get_y() + b.get_height() / 2) == row)
        return {to_hex(bar.get_facecolor()), *(to_hex(line_colors(f)["TIES"]) for f in (radar, search))}

    assert colors("ties", "tsvm") == colors("average", "my own", "ties", "dare") == colors("ties")
    assert len(colors("ties")) == 1


def test_no_two_methods_look_alike_and_other_labels_look_the_same_in_every_report():
    methods = names.choose_looks(names.NAMES)
    assert len(set(methods.values())) == len(names.NAMES) >= len(list((conf_dir() / "merger").glob("*.yaml")))
    assert set(names.NAMES) == {file.stem for file in (conf_dir() / "merger").glob("*.yaml")}
    mine = names.choose_looks(["mine"])["mine"]
    assert names.choose_looks(["ties", "mine", "tsvm"])["mine"] == mine
    many = names.choose_looks([*names.NAMES, "a", "b", "c", "d"])
    assert len(set(many.values())) == len(names.NAMES) + 4


def test_a_method_that_stands_several_times_has_one_color_and_several_looks():
    labels = ["ties", "ties (α=0.3)", "ties (α=0.7)", "tsvm"]
    looks = names.choose_looks(labels)
    assert len({looks[label].color for label in labels[:3]}) == 1
    assert len(set(looks.values())) == 4
    analysis = figures.Lines("", "", "", dict.fromkeys(["experts", "ties", "mine"], ([0], [1])), mergers=True)
    assert (analysis.looks["ties"], analysis.looks["experts"]) == (looks["ties"], names.REFERENCE)


def test_losses_stand_on_a_logarithmic_axis_and_accuracies_do_not(tmp_path, drawn):
    plots.draw_training({"": {"a": CURVE}}, tmp_path)
    assert [axes.get_yscale() for axes in drawn[0].axes] == ["log", "log", "linear"]
    plots.draw_training({"": {"a": [{"step": 0, "train_loss": 0.0}]}}, tmp_path)
    assert drawn[1].axes[0].get_yscale() == "linear"


def test_a_figure_is_also_an_svg_and_a_pdf_for_papers_without_its_title_the_same_each_time(tmp_path):
    def written(folder):
        plots.draw_training({"A title": {"a": CURVE}}, tmp_path / folder)
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    files = written("one")
    assert set(files) == {"training.png", "training.svg", "training.pdf", "training.vl.json"}
    assert written("two") == files
    assert files["training.pdf"].startswith(b"%PDF")
    assert b"Training loss" in files["training.svg"]
    assert b"A title" not in files["training.svg"]


def test_the_search_is_drawn_in_order_with_a_ring_around_the_choice(tmp_path, drawn):
    plots.draw_searches({"": {"ties": SEARCH}}, ["ties"], tmp_path)
    line, ring = drawn[0].axes[0].lines
    assert list(line.get_xdata()) == [0.1, 0.5]
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([0.5], [0.9])


def test_every_label_is_in_the_legend_a_long_one_shortened():
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure()
    drawing.add_legend(figure, [Line2D([], [])] * 2, ["_x", "m" * 40])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_x", "m" * 27 + "…"]


def test_drawing_leaves_matplotlib_as_it_was(tmp_path, study):
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.draw_mergers(build_table(study(1, 1)), tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_the_front_holds_what_nothing_cheaper_equals() -> None:
    points = [(1.0, 0.5), (2.0, 0.7), (2.0, 0.6), (3.0, 0.7), (4.0, 0.9), (5.0, 0.8)]
    assert plots.find_front(points) == [(1.0, 0.5), (2.0, 0.7), (4.0, 0.9)]


def test_a_merged_model_costs_its_experts_too_and_the_costs_are_drawn(tmp_path, record) -> None:
    records = [
        record(
            kind=kind, merger=merger, task=task, value=value, model_seconds=seconds,
            model_key=f"{kind}{merger}{own}",
        )
        for task in ("a", "b")
        for kind, merger, value, seconds, own in (
            ("expert", None, 0.9, 100.0, task),
            ("merged", "ties", 0.7, 3.0, ""),
            ("merged", "tsvm", 0.8, 20.0, ""),
            ("joint", None, 0.85, 350.0, ""),
        )
    ]  # fmt: skip
    table = build_table(records)
    assert {row.label: row.seconds for row in table.rows} == {
        "experts": None, "ties": 203.0, "tsvm": 220.0, "+joint": 350.0,
    }  # fmt: skip
    assert [path.name for path in plots.draw_costs(table, tmp_path)] == ["cost.png"]
    seconds_alone = size(tmp_path / "cost.png")
    measured = [replace(r, model_peak_memory_bytes=2**30) if r.kind == "merged" else r for r in records]
    plots.draw_costs(build_table(measured), tmp_path)
    assert size(tmp_path / "cost.png")[0] > 1.4 * seconds_alone[0]  # memory has a panel of its own
    unknown = [record(merger="x", model_seconds=None), record(merger="y", model_seconds=1.0)]
    assert plots.draw_costs(build_table(unknown), tmp_path) == []


def test_cells_that_are_not_finite_are_left_out_of_a_planes_scale_and_shown_as_missing(tmp_path) -> None:
    gray = int(figures.MISSING_COLOR[1:3], 16)

    def missing(values: list[list[float]]) -> int:
        (png, _) = figures.draw_analysis(
            "title", [figures.Plane("panel", values)], tmp_path / "plane", alphas=[0.0, 1.0, 2.0]
        )
        return sum(number for number, pixel in Image.open(png).convert("RGB").getcolors(1 << 20)
                   if pixel == (gray, gray, gray))  # fmt: skip

    whole = [[float(x + y) for y in range(3)] for x in range(3)]
    lost = [[math.nan, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, math.inf]]
    edge = missing(whole)  # of the panel
    assert edge + 10_000 < missing(lost) < missing([[math.nan] * 3] * 3)
    assert figures.spread_levels([value for row in lost for value in row]) == [1.0, 2.0, 3.0]


def test_the_interval_of_an_average_is_drawn_else_the_deviation_over_seeds(tmp_path, record, drawn):
    records = [record(seed=seed, value=value) for seed, value in ((0, 0.5), (1, 0.7))]
    (row,) = build_table(records).rows
    deviation = 0.2 / math.sqrt(2)
    assert row.error_bar("average") == pytest.approx((0.6 - deviation, 0.6 + deviation))
    sure = replace(row, interval=(0.55, 0.62))
    assert sure.error_bar("average") == (0.55, 0.62)
    assert build_table(records[:1]).rows[0].error_bar("normalized") is None
    table = replace(build_table(records), rows=(sure,))
    plots.draw_mergers(table, tmp_path)
    bars = drawn[0].axes[0].collections[0].get_segments()[0]
    assert bars[:, 0].tolist() == pytest.approx([0.55, 0.62])
    (panel,) = charts.load_charts(tmp_path / "mergers.png")["concat"]
    assert [panel["data"]["values"][0][end] for end in ("low", "high")] == [55, 62]
    assert plots.explain_error_bars(table) == "95 % of the average, standard deviation over seeds"


def test_labels_stand_beside_their_points_and_on_no_other():
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6, 4)).subplots()
    places = [(0.5 + 0.002 * i, 0.5, f"a rather long name {i}") for i in range(6)] + [(1.0, 0.5, "at the edge")]
    axes.plot([place[0] for place in places], [0.5] * 7, "o")
    axes.set_xlim(0, 1)
    drawing.place_labels(axes, places, fontsize=8)
    axes.figure.draw_without_rendering()
    boxes = [drawing.measure(text) for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [place[2] for place in places]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(axes.get_window_extent().contains(*corner) for box in boxes for corner in (box.min, box.max))


def test_a_matrix_is_colored_on_the_scale_of_its_data_without_the_diagonal():
    values = [[1.0, 0.02, 0.05], [0.02, 1.0, 0.03], [0.05, 0.03, 1.0]]
    assert figures.Matrix("", "abc", values).limits == (0.02, 0.05)
    assert figures.Matrix("", "abc", values, signed=True).limits == (-0.05, 0.05)
    assert figures.Matrix("", "a", [[1.0]]).limits == (0.0, 1.0)
    chart = charts.chart_matrix("", "cab", values, (0.02, 0.05), False)
    assert [chart["encoding"][axis]["sort"] for axis in "xy"] == [["c", "a", "b"]] * 2
    cells = chart["data"]["values"]
    assert [cell["value"] for cell in cells if cell["row"] == cell["column"]] == [None] * 3
    assert [cell["value"] for cell in cells if cell["row"] == "c"][1:] == [0.02, 0.05]


def test_losses_of_analyses_are_logarithmic_unless_one_is_not_positive(tmp_path, drawn):
    for low, scale in ((0.1, "log"), (-0.1, "linear")):
        panel = figures.Lines("", "x", "loss", {"a": ([0, 1], [1.0, low])}, logarithmic=True)
        figures.draw_analysis("", [panel], tmp_path / "a")
        assert drawn[-1].axes[0].get_yscale() == scale
        (chart,) = charts.load_charts(tmp_path / "a.png")["concat"]
        assert (chart["layer"][0]["encoding"]["y"]["scale"].get("type") or "linear") == scale


@pytest.mark.parametrize("text", ["{", "[]", '{"concat": [1], "config": {}}', '{"concat": [{}]}', "[" * 10_000])
def test_a_chart_that_cannot_be_drawn_leaves_the_picture(tmp_path, text):
    (tmp_path / "a.vl.json").write_text(text)
    assert charts.load_charts(tmp_path / "a.png") is None
