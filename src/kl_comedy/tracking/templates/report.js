"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
      };
      const empty = (value) => value === "" || Number.isNaN(value);
      const rows = [...body.rows].map((row) => [key(row), row]);
      rows.sort(([a], [b]) => {
        if (empty(a) || empty(b)) return empty(a) - empty(b);
        const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
        return rising ? order : -order;
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
for (const input of document.querySelectorAll("input[data-table]")) {
  const body = document.getElementById(input.dataset.table).tBodies[0];
  const shown = document.getElementById(input.dataset.table + "-count");
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = `${count} of ${body.rows.length} rows`;
  };
  input.addEventListener("input", apply);
  apply();
}
