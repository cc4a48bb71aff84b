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
// Texts of the data are shown as text alone: they may be anything.
const add = (parent, name, text, style) => {
  const node = document.createElement(name);
  node.textContent = text;
  if (style) node.className = style;
  parent.append(node);
  return node;
};
const shortNumber = (value) => {
  const number = Number(value);
  if (!Number.isFinite(number)) return String(number).replace("Infinity", "\u221e");
  return String(Number(number.toPrecision(4))).replace("-", "\u2212");
};
const levelOf = (value) => {
  const size = Math.abs(value);
  const level = [0.001, 0.01, 0.1, 1].filter((bound) => size >= bound).length;
  if (!level) return "";
  return `${value > 0 ? "more" : "less"}-${level}`;
};
const shownText = (completion, at) => {
  const special = completion.special[at];
  if (special !== undefined) return special;
  if (completion.text[at] === "") return "\u25cc";
  return completion.text[at].replaceAll("\n", "\u21b5\n");
};
const tokenFacts = (completion, at) => {
  const facts = [`Token ${at + 1} of ${completion.tokens}: ${JSON.stringify(completion.special[at] ?? completion.text[at])}`];
  if (completion.text[at] === "" && completion.special[at] === undefined) {
    facts.push("a part of the character that a later token completes");
  }
  if (completion.use[at] === "e") return [...facts, tokenUses.e].join(" \u00b7 ");
  facts.push(`KL k1 ${shortNumber(completion.k1_reverse[at])} nats`);
  if (completion.exact_reverse) facts.push(`exact KL ${shortNumber(completion.exact_reverse[at])} nats`);
  facts.push(`ratio to the sampler ${shortNumber(Math.exp(Number(completion.log_ratio[at])))}`);
  facts.push(tokenUses[completion.use[at]]);
  facts.push(`reward ${shortNumber(completion.reward)}`);
  return facts.join(" \u00b7 ");
};
const tokenUses = {};
for (const mark of document.querySelectorAll(".uses [data-use]")) {
  tokenUses[mark.dataset.use] = mark.closest("dt").nextElementSibling.textContent;
}
const sumOf = (values) => shortNumber(values.reduce((sum, value) => sum + Number(value), 0));
const headOf = (completion) => {
  const facts = [`reward ${shortNumber(completion.reward)}`, completion.status, `ended by ${completion.stop_reason}`];
  facts.push(`KL k1 ${sumOf(completion.k1_reverse)} nats`);
  if (completion.exact_reverse) facts.push(`exact KL ${sumOf(completion.exact_reverse)} nats`);
  const count = completion.text.length;
  facts.push(count < completion.tokens ? `the first ${count} of ${completion.tokens} tokens` : `${count} tokens`);
  return facts.join(" \u00b7 ");
};
const showCompletion = (parent, completion, number, quantity) => {
  add(parent, "p", `Completion ${number}: ${headOf(completion)}`, "run");
  const list = add(parent, "div", "", "tokens");
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", `Tokens of completion ${number}`);
  completion.text.forEach((piece, at) => {
    const token = add(list, "span", shownText(completion, at), `token use-${completion.use[at]}`);
    const level = levelOf(Number(completion[quantity][at]));
    if (level) token.classList.add(level);
    if (completion.special[at] !== undefined) token.classList.add("special");
    token.setAttribute("role", "option");
    token.setAttribute("aria-selected", "false");
    if (!piece.trim()) token.setAttribute("aria-label", completion.special[at] ?? JSON.stringify(piece));
    // One stop of the Tab key for a completion; the arrow keys lead along it.
    token.tabIndex = at === 0 ? 0 : -1;
    token.facts = tokenFacts(completion, at);
  });
};
const startViewer = (source) => {
  const runs = JSON.parse(source.textContent);
  const part = (name) => document.getElementById(`viewer-${name}`);
  const run = part("run");
  const update = part("update");
  const colour = part("colour");
  const facts = part("facts");
  const shown = part("completions");
  const updates = () => runs[run.value].updates;
  const show = () => {
    const completions = updates()[update.value].completions;
    const exact = [...colour.options].find((option) => option.value === "exact_reverse");
    // Only some updates measure it.
    exact.disabled = !completions.every((completion) => completion.exact_reverse);
    if (exact.disabled && exact.selected) colour.value = "k1_reverse";
    shown.textContent = "";
    let group;
    completions.forEach((completion, at) => {
      if (completion.group !== group) {
        group = completion.group;
        add(shown, "h3", `Group ${group}`);
        add(shown, "pre", completion.problem);
        if (completion.answer) add(shown, "p", `Answer: ${completion.answer}`, "note");
      }
      showCompletion(shown, completion, at + 1, colour.value);
    });
  };
  const listUpdates = () => {
    // The chosen update stays where the other run has it too.
    const before = update.selectedOptions[0]?.textContent;
    update.textContent = "";
    updates().forEach((item, at) => { add(update, "option", String(item.update)).value = at; });
    const same = [...update.options].find((option) => option.textContent === before);
    update.value = same ? same.value : updates().length - 1;
    show();
  };
  const choose = (token) => {
    facts.textContent = token.facts;
    shown.querySelectorAll("[aria-selected=true]").forEach((other) => other.setAttribute("aria-selected", "false"));
    token.setAttribute("aria-selected", "true");
  };
  shown.addEventListener("mouseover", (event) => { if (event.target.facts) choose(event.target); });
  shown.addEventListener("focusin", (event) => { if (event.target.facts) choose(event.target); });
  shown.addEventListener("keydown", (event) => {
    const token = event.target;
    const ends = { Home: token.parentElement.firstChild, End: token.parentElement.lastChild };
    const sides = { ArrowRight: token.nextSibling, ArrowLeft: token.previousSibling };
    const next = { ...ends, ...sides }[event.key];
    if (!token.facts || !next) return;
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    event.preventDefault();
  });
  runs.forEach((item, at) => { add(run, "option", `${item.name} (${item.configuration})`).value = at; });
  run.addEventListener("change", listUpdates);
  update.addEventListener("change", show);
  colour.addEventListener("change", show);
  listUpdates();
};
const viewerData = document.getElementById("viewer-data");
if (viewerData) startViewer(viewerData);
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
