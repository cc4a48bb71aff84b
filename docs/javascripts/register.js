// The register's page: rows with search and filters, and the form "which flag?". The data are in the page itself, so that
// it works without a server and without a network. Text of the data becomes text nodes alone, never HTML.
"use strict";

(() => {
  const WORDS = {
    sequence_reverse: "reverse KL of completions",
    sequence_forward: "forward KL of completions",
    token_reverse: "reverse KL of each token",
    token_forward: "forward KL of each token",
    token_chi_square: "chi-square of each token",
    token_reference_chi_square: "chi-square of reference against policy",
    token_total_variation: "total variation of each token",
    token_jensen_shannon: "Jensen-Shannon divergence of each token",
    token_policy_square: "half the mean square log-ratio, under the policy",
    token_reference_square: "half the mean square log-ratio, under the reference",
    sequence_k2_cost: "mean of k2 less the reverse KL of each token",
    sequence_k3_cost: "reverse KL of completions less the forward KL of each token",
    zero: "nothing: noise of zero mean",
    none: "the gradient of no KL",
  };
  // Of a loss that hits no objective on stale samples (docs/off_policy_terms.md).
  const OFF_POLICY = {
    proper_loss: "a loss with its minimum at the reference",
    repulsion: "a repulsion from the samples",
    difference: "a function whose minimum is not at the reference",
    no_function: "the gradient of no function",
  };
  const SILENT = "nothing: no completion has a gradient";
  const KINDS = {
    right: "optimizes what is meant",
    other: "optimizes something else",
    leak: "leaks masked tokens",
  };

  const dataOf = (id) => {
    const element = document.getElementById(id);
    return element ? JSON.parse(element.textContent) : null;
  };

  // An element with attributes and children; strings become text.
  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };

  const labelled = (text, control) => make("label", {}, make("span", {}, text), control);

  const select = (options, title) => {
    const element = make("select", { "aria-label": title });
    for (const [value, text] of options) element.append(make("option", { value }, text));
    return element;
  };

  const percent = (share) => {
    if (share === null || share === undefined) return "not finite";
    const value = 100 * share;
    return `${value >= 99.5 ? value.toFixed(0) : Number(value.toPrecision(2))} %`;
  };

  const objective = (figures) => {
    if (!figures) return "not rebuilt";
    if (figures.silent) return SILENT;
    if (figures.kind) return OFF_POLICY[figures.kind];
    let words = WORDS[figures.target] || figures.target;
    if (figures.coefficient !== null && Math.abs(figures.coefficient - 1) > 1e-3) {
      words = `${Number(figures.coefficient.toPrecision(3))} times the ${words}`;
    }
    return figures.near ? `${words}, while no clamp acts` : words;
  };

  const holes = (figures) => {
    if (!figures) return "not tried";
    const parts = [];
    if (figures.change) parts.push(`leak: ${percent(figures.change)} of the gradient`);
    if (figures.reached) parts.push("the masked token gets a gradient");
    return parts.join(", ") || "no leak";
  };

  const madeBy = (row) => {
    if (!row.not_rebuilt) return row.made_by;
    if (!row.rebuilt) return `not rebuilt: ${row.not_rebuilt}`;
    return `${row.made_by}, not rebuilt since ${row.rebuilt}: ${row.not_rebuilt}`;
  };

  const kindsOf = (row) => {
    const kinds = [];
    if (row.fresh) kinds.push(row.fresh.target === row.intended ? "right" : "other");
    if (row.holes && (row.holes.change || row.holes.reached)) kinds.push("leak");
    return kinds;
  };

  const errors = (fresh, stale) => `${percent(fresh.error)} fresh, ${percent(stale.error)} stale`;

  // A list of names and texts; without a text there is no entry.
  const factsOf = (entries) => {
    const facts = make("dl", {});
    for (const [name, text] of entries) {
      if (text) facts.append(make("div", {}, make("dt", {}, name), make("dd", {}, text)));
    }
    return facts;
  };

  const code = (text) => (text ? make("code", {}, text) : "");

  // The first seven digits of a commit, as git writes it.
  const shortSource = (source) => (source || "").replace(/@([0-9a-f]{7})[0-9a-f]{33}:/, "@$1:");

  const card = (row) => {
    const isMeasured = Boolean(row.fresh);
    const withTheFix = row.fixed_fresh && `${objective(row.fixed_fresh)}; ${errors(row.fixed_fresh, row.fixed_stale)}`;
    const facts = factsOf([
      ["Fresh samples", objective(row.fresh)],
      ["Stale samples", objective(row.stale)],
      ["Error", isMeasured && errors(row.fresh, row.stale)],
      ["With holes", holes(row.holes)],
      ["Fix", row.fix],
      ["With the fix", withTheFix],
    ]);
    const provenance = factsOf([
      ["Function", code(row.function)],
      ["Source", code(shortSource(row.source))],
      ["Called at", code(row.called_at)],
      ["SHA-256", code((row.sha256 || "").slice(0, 16))],
    ]);
    const chips = make("p", { class: "kl-chips" });
    for (const kind of kindsOf(row)) chips.append(make("span", { class: `kl-chip kl-${kind}` }, KINDS[kind]));
    if (row.issue && row.fresh) {
      const link = make("a", { href: `../evidence/register/issues/${row.id}/` }, row.issue);
      facts.append(make("div", {}, make("dt", {}, "Text of an issue"), make("dd", {}, link)));
    }
    return make(
      "article",
      { class: "kl-card", "data-id": row.id },
      make("h3", {}, row.system),
      make("p", { class: "kl-setting" }, make("code", {}, row.flags)),
      chips,
      facts,
      make("details", {}, make("summary", {}, `${row.version}; ${madeBy(row)}`), provenance),
    );
  };

  const showRegister = (root, rows) => {
    const search = make("input", { type: "search", "aria-label": "Search the rows", placeholder: "slime, k3, swapped ..." });
    const systems = [...new Set(rows.map((row) => row.system))];
    const system = select([["", "every system"], ...systems.map((name) => [name, name])], "System");
    const makers = [...new Set(rows.map((row) => row.made_by))];
    const maker = select([["", "released code and ours"], ...makers.map((name) => [name, name])], "Made by");
    const kind = select([["", "every verdict"], ...Object.entries(KINDS)], "Verdict");
    const count = make("p", { role: "status", class: "kl-count" });
    const list = make("div", { class: "kl-cards" });
    const wordsOf = (row) => [objective(row.fresh), objective(row.stale), holes(row.holes), madeBy(row)].join(" ");
    const cards = rows.map((row) => [row, (JSON.stringify(row) + wordsOf(row)).toLowerCase(), card(row)]);
    const update = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = cards.filter(
        ([row, text]) =>
          words.every((word) => text.includes(word)) &&
          (!system.value || row.system === system.value) &&
          (!maker.value || row.made_by === maker.value) &&
          (!kind.value || kindsOf(row).includes(kind.value)),
      );
      list.replaceChildren(...shown.map((entry) => entry[2]));
      count.textContent = `${shown.length} of ${rows.length} rows`;
    };
    for (const control of [search, system, maker, kind]) control.addEventListener("input", update);
    const controls = make("div", { class: "kl-controls" });
    controls.append(labelled("Search", search), labelled("System", system), labelled("Made by", maker), labelled("Verdict", kind));
    root.replaceChildren(controls, count, list);
    update();
  };

  const showForm = (root, data) => {
    const names = Object.keys(data.systems);
    const system = select(names.map((name) => [name, data.systems[name].title]), "System");
    const version = make("select", { "aria-label": "Version" });
    const source = make("p", { class: "kl-source" });
    const flags = make("div", { class: "kl-controls" });
    const answer = make("div", { class: "kl-answer", role: "status" });
    let controls = [];
    let fields = [];

    // The trainers that a flag names at the start of its meaning, as in "grpo: the level of that ratio".
    const belongs = (flag, trainer) => {
      const named = flag.meaning.match(/^([a-z_]+): /);
      if (!named || !trainer) return true;
      return trainer === named[1] || trainer.endsWith(`_${named[1]}`);
    };

    // Only the flags of the chosen trainer are asked for; the others are at their defaults.
    const showFields = () => {
      const chosen = data.systems[system.value];
      const number = chosen.flags.findIndex((flag) => flag.name === "trainer");
      const trainer = number < 0 ? "" : controls[number].value;
      const trainers = number < 0 ? [] : chosen.flags[number].options;
      chosen.flags.forEach((flag, place) => {
        const isOfATrainer = trainers.some((name) => flag.meaning.startsWith(`${name}: `));
        fields[place].hidden = isOfATrainer && !belongs(flag, trainer);
        if (fields[place].hidden) controls[place].selectedIndex = 0;
      });
    };

    // What was chosen, as the fragment of an address that can be shared; defaults are left out.
    const address = () => {
      const chosen = data.systems[system.value];
      const words = new URLSearchParams({ system: system.value });
      if (version.selectedIndex > 0) words.set("version", "older");
      chosen.flags.forEach((flag, number) => {
        if (controls[number].selectedIndex > 0) words.set(flag.name, controls[number].value);
      });
      return `#${words}`;
    };

    const restore = () => {
      const words = new URLSearchParams(location.hash.slice(1));
      const name = words.get("system");
      // Another fragment is that of a heading; without any, the form is as it was at first.
      if (location.hash && !data.systems[name]) return;
      system.value = name || names[0];
      showFlags();
      if (words.get("version") === "older" && version.options.length > 1) version.selectedIndex = 1;
      data.systems[system.value].flags.forEach((flag, number) => {
        if (flag.options.includes(words.get(flag.name))) controls[number].value = words.get(flag.name);
      });
      showFields();
      showAnswer();
    };

    // An entry of the browser's history for each choice, so that "back" undoes it.
    const chose = () => {
      showFields();
      showAnswer();
      if (location.hash !== address()) history.pushState(null, "", address());
    };

    const showAnswer = () => {
      const chosen = data.systems[system.value];
      // Each flag's table leads to a row of the next one's, and the last table to an answer; no choice leads nowhere.
      let place = 0;
      chosen.steps.forEach((rows, number) => {
        place = rows[place]?.[controls[number].selectedIndex];
      });
      const numbers = data.answers[place];
      if (!numbers) {
        answer.replaceChildren(make("p", {}, "No answer was computed for this choice."));
        return;
      }
      const lines = numbers.map((number) => data.lines[number]);
      const items = lines.map((line) => {
        const colon = line.indexOf(": ");
        return make("p", {}, make("strong", {}, line.slice(0, colon).replace("_", "-")), line.slice(colon));
      });
      const isOlder = version.selectedIndex > 0;
      const changes = chosen.changes.map((text) => make("p", {}, make("strong", {}, "other versions"), `: ${text}`));
      if (isOlder) changes.push(make("p", {}, `The answer of ${chosen.version}:`));
      answer.replaceChildren(...(isOlder ? changes : []), ...items);
    };

    const showFlags = () => {
      const chosen = data.systems[system.value];
      version.replaceChildren(make("option", {}, chosen.version));
      if (chosen.changes.length) version.append(make("option", {}, "an older release"));
      source.textContent = `From ${chosen.source}.`;
      controls = chosen.flags.map((flag) =>
        select(flag.options.map((option, number) => [option, number === 0 ? `${option} (default)` : option]), flag.name),
      );
      fields = chosen.flags.map((flag, number) => {
        const field = labelled(flag.name, controls[number]);
        field.append(make("small", {}, flag.meaning));
        controls[number].addEventListener("input", chose);
        return field;
      });
      // The trainer decides which of the others exist: it is asked first, beside system and version.
      const first = fields.filter((_, number) => chosen.flags[number].name === "trainer");
      chooser.replaceChildren(labelled("System", system), ...first, labelled("Version", version));
      flags.replaceChildren(...fields.filter((field) => !first.includes(field)));
      if (chosen.left_out.length) {
        flags.append(make("p", {}, `At their defaults: ${chosen.left_out.join(", ")}.`));
      }
      showFields();
      showAnswer();
    };

    const chooser = make("div", { class: "kl-controls" });
    system.addEventListener("input", () => {
      showFlags();
      chose();
    });
    version.addEventListener("input", chose);
    window.addEventListener("popstate", restore);
    const share = make("p", { class: "kl-source" }, "The address of this page holds the choice: copy it to share the answer.");
    root.replaceChildren(chooser, answer, flags, source, share);
    showFlags();
    restore();
  };

  const show = () => {
    const rows = dataOf("register-rows");
    const answers = dataOf("register-answers");
    const register = document.getElementById("kl-register");
    const form = document.getElementById("kl-which-flag");
    if (register && rows) showRegister(register, rows);
    if (form && answers) showForm(form, answers);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", show);
  else show();
})();
