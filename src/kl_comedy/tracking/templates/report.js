"use strict";
const empty = (value) => value === "" || Number.isNaN(value);
const sortTable = (table, column, rising) => {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", rising ? "ascending" : "descending");
  const key = (row) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  rows.sort(([a], [b]) => {
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return rising ? order : -order;
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
};
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      sortTable(table, column, head.getAttribute("aria-sort") !== "ascending");
    });
  });
}
for (const choice of document.querySelectorAll("select[data-table]")) {
  const table = document.getElementById(choice.dataset.table);
  const listed = [...table.tBodies[0].rows];
  choice.addEventListener("change", () => {
    const [column, order] = choice.value.split(" ");
    if (order) return sortTable(table, Number(column), order === "ascending");
    table.querySelectorAll("thead th").forEach((head) => head.removeAttribute("aria-sort"));
    return table.tBodies[0].append(...listed);
  });
}
for (const input of document.querySelectorAll("input[data-tables]")) {
  const rows = [...document.querySelectorAll(`table${input.dataset.tables} tbody tr`)];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const shown = document.getElementById(input.id + "-count");
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    rows.forEach((row, at) => {
      row.hidden = !words.every((word) => texts[at].includes(word));
      count += row.hidden ? 0 : 1;
    });
    shown.textContent = `${count} of ${rows.length} rows`;
  };
  input.addEventListener("input", apply);
  apply();
}
const reveal = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") {
    target.open = true;
    target.scrollIntoView();
    target.querySelector("summary").focus();
  }
};
addEventListener("hashchange", reveal);
reveal();
