import json
import math
import re
import struct
from dataclasses import replace

import pytest
import vl_convert

from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting import drawing, encoding, figures, names, plots
from mergekit_lab.reporting.leaderboard import build_table

CURVE = [
    {"step": 0, "train_loss": 2.0, "val_loss": 2.1, "val_accuracy": 0.1},
    {"step": 10, "train_loss": 1.0},
    {"step": 20, "train_loss": 0.5, "val_loss": 0.7, "val_accuracy": 0.8},
]
SEARCH = [
    {"coefficient": 0.5, "normalized": 0.9, "chosen": True},
    {"coefficient": 0.1, "normalized": 0.7, "chosen": False},
]


def draw(plot, *arguments):
    """The files of the figures that it draws."""
    return [figure.path for figure in plot(*arguments)]


@pytest.fixture
def drawn(monkeypatch):
    """Figures are drawn in this test."""
    monkeypatch.setattr("vl_convert.vegalite_to_svg", DRAW)


DRAW = vl_convert.vegalite_to_svg


def list_panels(path):
    """Of the figure's description."""
    return drawing.load_chart(path)["concat"]


def find_layer(panel, mark):
    return next(layer for layer in panel["layer"] if layer["mark"]["type"] == mark)


def size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[12:16] == b"IHDR"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(("tasks", "mergers", "optimizers"), [(1, 1, 1), (20, 15, 1), (2, 3, 4), (3, 0, 1)])
def test_every_size_of_study_is_drawn(tmp_path, study, drawn, tasks, mergers, optimizers):
    table = build_table(study(tasks, mergers, optimizers))
    heat_maps = draw(plots.draw_heat_maps, table, tmp_path)
    assert len(heat_maps) == optimizers
    assert all(size(path)[0] >= 600 for path in heat_maps)
    bars = draw(plots.draw_mergers, table, tmp_path)
    assert [path.name for path in bars] == (["mergers.png"] if mergers else [])
    assert all(size(path)[1] > 40 * mergers for path in bars)


def test_the_shares_of_each_group_with_a_merger_are_drawn(tmp_path, study):
    assert draw(plots.draw_shares, build_table(study(3, 0, 1)), tmp_path) == []
    assert draw(plots.draw_shares, build_table(study(1, 3, 1)), tmp_path) == []
    two = draw(plots.draw_shares, build_table(study(2, 3, 2)), tmp_path)
    assert [path.name for path in two] == ["shares-1-optimizer0.png", "shares-2-optimizer1.png"]
    (panel,) = list_panels(two[0])
    assert len(panel["layer"][0]["data"]["values"]) == 2 * 3


def test_missing_cells_and_hostile_names_are_drawn(tmp_path, record, drawn):
    records = [
        record(merger="_$x^{$ <b>", task="a"),
        record(merger="m" * 90, task="$\\frac{$", optimizer="../x"),
        record(merger="m" * 90, task="b", expert_value=None, optimizer="../x"),
    ]
    table = build_table(records)
    paths = [
        *draw(plots.draw_heat_maps, table, tmp_path),
        *draw(plots.draw_mergers, table, tmp_path),
        *draw(plots.draw_searches, {"": {"_$x^{$": SEARCH}}, table.mergers, tmp_path),
        *draw(plots.draw_training, {"$_{": {"_a$": CURVE}}, tmp_path),
    ]
    assert [path.name for path in paths] == [
        "heatmap-1-adamw.png",
        "heatmap-2-x.png",
        "mergers.png",
        "coefficients.png",
        "training.png",
    ]
    assert all(600 < size(path)[0] < 2600 for path in paths)
    texts = (tmp_path / "mergers.svg").read_text()
    assert "_$x^{$ &lt;b&gt;" in texts
    assert re.search(">m+…<", texts)


def test_many_curves_are_spread_over_files_of_a_dozen(tmp_path):
    curves = {f"expert{number}": CURVE for number in range(20)}
    paths = draw(plots.draw_training, {"": curves}, tmp_path)
    assert [path.name for path in paths] == ["training-1.png", "training-2.png"]


def test_each_group_has_its_own_curves(tmp_path):
    paths = draw(plots.draw_training, {"": {"one": CURVE[1:2]}, "b": {"one": CURVE}}, tmp_path)
    assert [path.name for path in paths] == ["training-1.png", "training-2-b.png"]


def test_nothing_to_show_makes_no_file(tmp_path):
    table = build_table([])
    assert not draw(plots.draw_heat_maps, table, tmp_path)
    assert not draw(plots.draw_mergers, table, tmp_path)
    assert not draw(plots.draw_training, {"": {"a": []}}, tmp_path)
    assert not draw(plots.draw_searches, {"": {}}, (), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_method_has_one_color_in_every_figure_of_every_report(tmp_path, record):
    def list_colors(*mergers):
        records = [record(merger=m, task=t) for m in mergers for t in "abc"]
        records += [record(kind="expert", task=t) for t in "abc"]
        table = build_table(records)
        paths = [
            *draw(plots.draw_mergers, table, tmp_path),
            *draw(plots.draw_shares, table, tmp_path),
            *draw(plots.draw_searches, {"": {"ties": SEARCH}}, table.mergers, tmp_path),
        ]
        scales = [list_panels(path)[0]["layer"][0]["encoding"]["color"]["scale"] for path in paths]
        assert len(scales) == 3
        return {scale["range"][scale["domain"].index("TIES")] for scale in scales}

    assert (
        list_colors("ties", "tsvm") == list_colors("average", "my own", "ties", "dare") == list_colors("ties")
    )
    assert len(list_colors("ties")) == 1


def test_no_two_methods_look_alike_and_other_labels_look_the_same_in_every_report():
    methods = names.choose_looks(names.NAMES)
    assert (
        len(set(methods.values())) == len(names.NAMES) >= len(list((find_conf_dir() / "merger").glob("*.yaml")))
    )
    assert set(names.NAMES) == {file.stem for file in (find_conf_dir() / "merger").glob("*.yaml")}
    mine = names.choose_looks(["mine"])["mine"]
    assert names.choose_looks(["ties", "mine", "tsvm"])["mine"] == mine
    many = names.choose_looks([*names.NAMES, "a", "b", "c", "d"])
    assert len(set(many.values())) == len(names.NAMES) + 4


def test_a_method_that_stands_several_times_has_one_color_and_several_looks():
    labels = ["ties", "ties (α=0.3)", "ties (α=0.7)", "tsvm"]
    looks = names.choose_looks(labels)
    assert len({looks[label].color for label in labels[:3]}) == 1
    assert len(set(looks.values())) == 4
    analysis = figures.chart_mergers("", "", "", dict.fromkeys(["experts", "ties", "mine"], ([0], [1])))
    colors = analysis["layer"][0]["encoding"]["color"]["scale"]
    assert colors["domain"] == ["experts", "TIES", "mine"]
    assert colors["range"][:2] == [names.REFERENCE.color, looks["ties"].color]


def test_losses_stand_on_a_logarithmic_axis_and_accuracies_do_not(tmp_path):
    def list_scales(curve):
        (path,) = draw(plots.draw_training, {"": {"a": curve}}, tmp_path)
        return [
            panel["layer"][0]["encoding"]["y"]["scale"].get("type", "linear") for panel in list_panels(path)
        ]

    assert list_scales(CURVE) == ["log", "log", "linear"]
    assert list_scales([{"step": 0, "train_loss": 0.0}]) == ["linear"]
    (path,) = draw(plots.draw_training, {"": {"a": [CURVE[0], {"step": 9, "train_loss": 0.01}]}}, tmp_path)
    labeled = ["labelExpr" in panel["layer"][0]["encoding"]["y"]["axis"] for panel in list_panels(path)]
    assert labeled == [False, True, False], "within a decade every tick"


def test_a_figure_is_also_an_svg_and_a_pdf_for_papers_without_its_title_the_same_each_time(tmp_path, drawn):
    def read_files(folder):
        draw(plots.draw_training, {"A title": {"a": CURVE}}, tmp_path / folder)
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    files = read_files("one")
    assert set(files) == {"training.png", "training.svg", "training.pdf", "training.vl.json"}
    again = read_files("two")
    assert len(again.pop("training.pdf")) == len(files["training.pdf"])  # the order of its resources is free
    assert again.items() <= files.items()
    assert files["training.pdf"].startswith(b"%PDF")
    assert b"Training loss" in files["training.svg"]
    assert b"A title" not in files["training.svg"]
    assert json.loads(files["training.vl.json"])["title"]["text"] == "A title"


def test_the_search_is_drawn_in_order_with_a_ring_around_the_choice(tmp_path):
    (path,) = draw(plots.draw_searches, {"": {"ties": SEARCH}}, ["ties"], tmp_path)
    (panel,) = list_panels(path)
    assert "labelExpr" not in panel["layer"][0]["encoding"]["x"]["axis"]
    points = [(value["x"], value["y"], value.get("chosen")) for value in panel["data"]["values"]]
    assert points == [(0.1, 70, None), (0.5, 90, True)]
    assert panel["layer"][-1]["transform"] == [{"filter": "datum.chosen"}]


def test_panels_share_a_legend_where_it_is_the_same(tmp_path):
    def read_color_scale(*labels):
        lines = [figures.chart_lines("", "x", "y", {label: ([0, 1], [1.0, 2.0])}) for label in labels]
        drawing.save_figure(tmp_path / "a.png", "", lines)
        return drawing.load_chart(tmp_path / "a.png")["resolve"]["scale"]["color"]

    assert read_color_scale("one", "one") == "shared"
    assert read_color_scale("one", "two") == "independent"


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
    assert [path.name for path in draw(plots.draw_costs, table, tmp_path)] == ["cost.png"]
    assert len(list_panels(tmp_path / "cost.png")) == 1
    measured = [replace(r, model_peak_memory_bytes=2**30) if r.kind == "merged" else r for r in records]
    draw(plots.draw_costs, build_table(measured), tmp_path)
    seconds, memory = list_panels(tmp_path / "cost.png")
    assert find_layer(memory, "point")["encoding"]["x"]["title"].startswith("peak memory")
    legends = [find_layer(panel, "point")["encoding"]["color"]["scale"] for panel in (seconds, memory)]
    assert legends[0] == legends[1]
    unknown = [record(merger="x", model_seconds=None), record(merger="y", model_seconds=1.0)]
    assert draw(plots.draw_costs, build_table(unknown), tmp_path) == []


def test_cells_that_are_not_finite_are_left_out_of_a_planes_scale_and_shown_as_missing(tmp_path, drawn) -> None:
    lost = [[math.nan, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, math.inf]]
    for values, missing in (([[float(x + y) for y in range(3)] for x in range(3)], 0), (lost, 2)):
        axis = [0.0, 1.0, 2.0]
        plane = figures.chart_plane("panel", values, (axis, axis), ("a", "b"), points={"here": (1.0, 1.0)})
        assert plane["title"] == ("panel (2 of 9 not finite)" if missing else "panel")
        png = drawing.save_figure(tmp_path / "plane.png", "title", [plane])
        assert png.with_suffix(".svg").read_text().count(f'fill="{encoding.MISSING_COLOR}"') == missing
    assert figures.spread_levels([value for row in lost for value in row]) == [1.0, 2.0, 3.0]


def test_the_interval_of_an_average_is_drawn_else_the_deviation_over_seeds(tmp_path, record):
    records = [record(seed=seed, value=value) for seed, value in ((0, 0.5), (1, 0.7))]
    (row,) = build_table(records).rows
    deviation = 0.2 / math.sqrt(2)
    assert row.compute_error_bar("average") == pytest.approx((0.6 - deviation, 0.6 + deviation))
    sure = replace(row, interval=(0.55, 0.62))
    assert sure.compute_error_bar("average") == (0.55, 0.62)
    assert build_table(records[:1]).rows[0].compute_error_bar("normalized") is None
    table = replace(build_table(records), rows=(sure,))
    draw(plots.draw_mergers, table, tmp_path)
    (panel,) = list_panels(tmp_path / "mergers.png")
    assert find_layer(panel, "errorbar")["encoding"]["x2"]["field"] == "high"
    assert [panel["data"]["values"][0][end] for end in ("low", "high")] == [55, 62]
    assert plots.explain_error_bars(table) == "95 % of the average, standard deviation over seeds"


def test_names_of_points_stand_beside_them_and_on_no_other(tmp_path):
    points = {f"name {i}": (0.5 + 0.01 * i, 0.5) for i in range(4)} | {"a name at the edge": (1.0, 0.9)}
    plane = figures.chart_plane("", [[0.0, 1.0]] * 2, ([0.0, 1.0], [0.0, 1.0]), ("a", "b"), points=points)
    path = drawing.save_figure(tmp_path / "a.png", "", [plane])
    texts = [layer for layer in list_panels(path)[0]["layer"] if layer["mark"]["type"] == "text"]
    sides = {each["data"]["values"][0]["name"]: (each["mark"]["align"], each["mark"]["dy"]) for each in texts}
    assert sides.keys() == points.keys()
    assert len({sides[f"name {i}"] for i in range(4)}) == 4
    assert sides["a name at the edge"][0] == "right"


def test_a_matrix_is_colored_on_the_scale_of_its_data_without_the_diagonal():
    values = [[1.0, 0.02, 0.05], [0.02, 1.0, 0.03], [0.05, 0.03, 1.0]]

    def find_limits(chart):
        return chart["layer"][0]["encoding"]["color"]["scale"]["domain"]

    assert find_limits(figures.chart_matrix("", "abc", values)) == [0.02, 0.05]
    assert find_limits(figures.chart_matrix("", "abc", values, signed=True)) == [-0.05, 0.05]
    assert find_limits(figures.chart_matrix("", "a", [[1.0]])) == [0.0, 1.0]
    chart = figures.chart_matrix("", "cab", values)
    assert [chart["encoding"][axis]["sort"] for axis in "xy"] == [["c", "a", "b"]] * 2
    cells = chart["data"]["values"]
    assert [cell["value"] for cell in cells if cell["row"] == cell["column"]] == [None] * 3
    assert [cell["value"] for cell in cells if cell["row"] == "c"][1:] == [0.02, 0.05]


def test_losses_of_analyses_are_logarithmic_unless_one_is_not_positive(tmp_path):
    for low, scale in ((0.1, "log"), (-0.1, "linear")):
        panel = figures.chart_lines("", "x", "loss", {"a": ([0, 1], [1.0, low])}, logarithmic=True)
        drawing.save_figure(tmp_path / "a.png", "", [panel])
        (chart,) = list_panels(tmp_path / "a.png")
        assert (chart["layer"][0]["encoding"]["y"]["scale"].get("type") or "linear") == scale


@pytest.mark.parametrize("text", ["{", "[]", '{"concat": [1], "config": {}}', '{"concat": [{}]}', "[" * 10_000])
def test_a_chart_that_cannot_be_drawn_leaves_the_picture(tmp_path, text):
    (tmp_path / "a.vl.json").write_text(text)
    assert drawing.load_chart(tmp_path / "a.png") is None
