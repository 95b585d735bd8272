// The list of results: search, filters, and one result opened. Every text becomes a text node.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const keys = "id outcome level family topology rule seconds line cause sections".split(" ");
  const results = data.rows.map((row) => Object.fromEntries(keys.map((key, n) => [key, row[n]])));
  const form = document.getElementById("filter");
  const list = document.getElementById("list");
  const found = document.getElementById("found");
  const more = document.getElementById("more");
  const choices = ["outcome", "level", "family", "topology", "rule", "cause"];
  const worst = ["HARNESS", "FAIL", "WARNING", "BLOCKED", "KNOWN", "NOT-APPLICABLE", "PASS"];
  const STEP = 100; // results that are added to the page at once
  let matching = results;
  let shown = 0;

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // ---- pictures: the signs of cells get colours, the words stay as they are ------------------------------

  const kindOf = { ".": "right", "?": "lost", "-": "lost", "0": "lost" };
  const isRow = (line) => /^ {2}(layers?[. ]|question +\d)/.test(line) || /( [.?\-0MxU!]){2,} *$/.test(line);
  const colour = (block) => {
    const lines = block.textContent.split("\n");
    block.textContent = "";
    lines.forEach((line, n) => {
      if (n) block.append("\n");
      const cells = isRow(line) && line.match(/^(.*?)((?: +[.?\-0MxU!])+ *)$/);
      const questions = line.match(/^( {2}question +\d+ {2})([.+x-]+)$/);
      const [head, tail] = questions ? questions.slice(1) : cells ? cells.slice(1) : [line, ""];
      block.append(head);
      for (const sign of tail) {
        if (sign === " ") block.append(sign);
        else block.append(make("span", `sign sign-${kindOf[sign] || "wrong"}`, sign));
      }
    });
  };
  document.querySelectorAll("pre.differs").forEach(colour);

  // ---- one result ----------------------------------------------------------------------------------------

  const sectionsOf = (result) => {
    const sections = make("dl", "sections");
    const facts = [["case", [`${result.rule}, level ${result.level || "unknown"}, ${result.seconds} s`]]];
    for (const [name, lines] of facts.concat(result.sections)) {
      sections.append(make("dt", "", name));
      const body = make("dd");
      if (["differs", "log", "again"].includes(name)) {
        const block = make("pre", name, lines.join("\n"));
        block.tabIndex = 0;
        if (name === "differs") colour(block);
        body.append(block);
      } else for (const line of lines) body.append(make("p", "", line));
      sections.append(body);
    }
    return sections;
  };

  const itemOf = (result) => {
    const item = make("details", "result");
    const summary = make("summary");
    summary.append(
      make("span", `badge w-${result.outcome}`, result.outcome),
      make("span", "id", result.id),
      make("small", "", result.level),
    );
    if (result.line) summary.append(make("span", "line", result.line));
    item.append(summary);
    item.addEventListener("toggle", () => {
      if (item.open && item.childElementCount === 1) item.append(sectionsOf(result));
      if (item.open) history.replaceState(null, "", `#${encodeURIComponent(result.id)}`);
    });
    return item;
  };

  // ---- the list ------------------------------------------------------------------------------------------

  const showMore = () => {
    const next = matching.slice(shown, shown + STEP);
    list.append(...next.map(itemOf));
    shown += next.length;
    more.hidden = shown >= matching.length;
    more.textContent = `Show more (${matching.length - shown} left)`;
  };

  const update = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = choices.map((key) => [key, form.elements[key].value]).filter(([, value]) => value);
    matching = results.filter(
      (result) =>
        wanted.every(([key, value]) => String(result[key]) === value) &&
        words.every((word) => `${result.id} ${result.rule} ${result.line}`.toLowerCase().includes(word)),
    );
    document.body.classList.toggle("filtered", words.length + wanted.length > 0);
    found.textContent = `${matching.length} of ${results.length} results`;
    list.textContent = "";
    shown = 0;
    showMore();
  };

  const choose = (wanted) => {
    form.reset();
    for (const [key, value] of Object.entries(wanted)) form.elements[key].value = value;
    update();
    const heading = document.getElementById("results");
    heading.scrollIntoView();
    heading.focus({ preventScroll: true });
  };

  const openFromAddress = () => {
    let id = "";
    try {
      id = decodeURIComponent(location.hash.slice(1));
    } catch {
      return; // the address is no address of a result
    }
    const wanted = results.find((result) => result.id === id);
    if (!wanted) return;
    choose({ text: id });
    matching = [wanted, ...matching.filter((result) => result !== wanted)];
    list.textContent = "";
    shown = 0;
    showMore();
    list.firstElementChild.open = true;
  };

  for (const key of choices) {
    const values = [...new Set(results.map((result) => String(result[key])))].filter(
      (value) => value && value !== "-1",
    );
    values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    for (const value of values) {
      const words = key === "cause" ? data.causes[Number(value)].slice(0, 80) : value;
      const option = make("option", "", words);
      option.value = value;
      form.elements[key].append(option);
    }
    form.elements[key].closest("label").hidden = values.length < 2 && key !== "cause";
  }
  results.sort((a, b) => worst.indexOf(a.outcome) - worst.indexOf(b.outcome)); // stable: then by id

  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, 80);
  });
  form.querySelector("[type=reset]").addEventListener("click", () => setTimeout(update));
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", showMore);
  document.querySelectorAll("a.square, a[data-cause]").forEach((link) =>
    link.addEventListener("click", (event) => {
      event.preventDefault();
      choose(Object.fromEntries(Object.entries(link.dataset).filter(([, value]) => value)));
    }),
  );
  window.addEventListener("hashchange", openFromAddress);
  let openedToPrint = [];
  window.addEventListener("beforeprint", () => {
    openedToPrint = [...document.querySelectorAll("details.cause:not([open]), details.calls:not([open])")];
    openedToPrint.forEach((cause) => (cause.open = true));
  });
  window.addEventListener("afterprint", () => openedToPrint.forEach((cause) => (cause.open = false)));
  form.hidden = false;
  update();
  openFromAddress();
})();
