const options = {
  mode: "vega-lite", ast: true, renderer: "svg", actions: false, defaultStyle: false,
  tooltip: {disableDefaultStyle: true}, logLevel: vega.Error,
};
const size = {width: "container", autosize: {type: "fit-x", contains: "padding"}};
const draw = async (place, chart, tall) => {
  const panels = document.createElement("div");
  panels.className = "panels";
  const heading = document.createElement("p");
  heading.className = "title";
  heading.textContent = chart.title.text;
  place.append(heading, panels);
  const boxes = chart.concat.map(panel => {
    const box = document.createElement("div"), inside = document.createElement("div");
    box.className = "panel";
    inside.style.minWidth = `${panel.usermeta?.minimum ?? 0}px`;
    box.append(inside);
    panels.append(box);
    return [box, inside, panel];
  });
  const config = {...chart.config, legend: {...chart.config.legend, columns: 2}};
  for (const [box, inside, {usermeta, ...panel}] of boxes) {
    const height = tall && typeof panel.height === "number" ? Math.round(innerHeight * 0.6) : panel.height;
    await vegaEmbed(inside, {$schema: chart.$schema, config, ...panel, ...size, height}, options);
    const focus = () => {
      if (box.scrollWidth > box.clientWidth) Object.assign(box, {tabIndex: 0, role: "region", ariaLabel: chart.title.text});
    };
    focus();
    addEventListener("resize", focus);
  }
};
for (const figure of document.querySelectorAll("figure.drawing")) {
  const data = figure.querySelector("script[type='application/json']");
  if (!data) continue;
  const chart = JSON.parse(data.textContent), picture = figure.querySelector(".picture");
  let drawn = false;
  const replace = async () => {
    if (drawn) return;
    drawn = true;
    const place = document.createElement("div");
    place.className = "chart";
    picture.before(place);
    try {
      await draw(place, chart, false);
      place.addEventListener("dblclick", event => event.preventDefault());
      place.addEventListener("click", () => figure.querySelector("button.enlarge").click());
      picture.hidden = true;
    } catch {
      place.remove();
    }
  };
  figure.addEventListener("enlarge", event => {
    if (!picture.hidden) return;
    const place = document.createElement("div");
    place.className = "chart";
    event.detail.replaceChildren(place);
    draw(place, chart, true);
  });
  const folded = figure.closest("details");
  if (folded) folded.addEventListener("toggle", replace);
  else replace();
}
