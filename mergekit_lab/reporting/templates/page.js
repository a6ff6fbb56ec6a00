for (const form of document.querySelectorAll("form.filters")) {
  const table = document.querySelector("table.sortable"), rows = [...table.tBodies[0].rows];
  const selects = [...form.querySelectorAll("select")], names = selects.map(each => each.dataset.filter);
  const titles = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
  const fits = (row, name, wanted) => {
    if (name === "seed") return row.dataset.seed === wanted;
    if (wanted === "") return true;
    if (name === "merger") return row.dataset.merger === "" || row.dataset.merger === wanted;
    return row.cells[titles.indexOf(name)].textContent === wanted;
  };
  const apply = () => {
    let shown = 0;
    for (const row of rows) {
      row.hidden = !selects.every((each, place) => fits(row, names[place], each.value));
      if (!names.includes("seed") && row.dataset.seed !== "") row.hidden = true;
      shown += !row.hidden;
    }
    form.querySelector("output").textContent = `${shown} rows`;
  };
  form.hidden = false;
  form.addEventListener("change", apply);
  form.addEventListener("submit", event => event.preventDefault());
  apply();
}
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  headings.forEach((heading, column) => heading.querySelector("button")?.addEventListener("click", () => {
    const numeric = "value" in body.rows[0].cells[column].dataset;
    const before = heading.getAttribute("aria-sort");
    const down = before === "none" ? numeric : before === "ascending";
    headings.forEach(other => other.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => numeric ? row.cells[column].dataset.value : row.cells[column].textContent;
    const sign = down ? -1 : 1;
    body.append(...[...body.rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (numeric && (x === "" || y === "")) return (x === "") - (y === "");
      return sign * (numeric ? x - y : x.localeCompare(y, undefined, {numeric: true}));
    }));
  }));
}
for (const button of document.querySelectorAll("button.copy")) {
  const code = button.parentElement.querySelector("code");
  button.hidden = false;
  button.addEventListener("click", async () => {
    const range = document.createRange(), selection = getSelection();
    range.selectNodeContents(code);
    selection.removeAllRanges();
    selection.addRange(range);
    let copied = document.execCommand("copy");
    if (!copied) copied = await navigator.clipboard?.writeText(code.textContent).then(() => true, () => false);
    button.textContent = copied ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
const dialog = document.querySelector("dialog"), stage = dialog.querySelector(".stage");
const enlarge = figure => {
  stage.replaceChildren(figure.querySelector(".picture").cloneNode(true));
  dialog.showModal();
  figure.dispatchEvent(new CustomEvent("enlarge", {detail: stage}));
};
for (const figure of document.querySelectorAll("figure.drawing")) {
  const button = figure.querySelector("button.enlarge");
  button.hidden = false;
  button.addEventListener("click", () => enlarge(figure));
  figure.querySelector(".picture").addEventListener("click", () => enlarge(figure));
}
dialog.addEventListener("close", () => stage.replaceChildren());
