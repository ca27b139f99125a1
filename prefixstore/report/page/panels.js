// The panels beside the tree. All texts are set as text, never as HTML.

function element(name, options = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "on") made.addEventListener("click", value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...inside.filter((one) => one !== null && one !== undefined && one !== ""));
  return made;
}

function drawing(name, options, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(options)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

function panel(title, lead, ...inside) {
  return element("section", { class: "panel" }, element("h2", {}, title), lead ? element("p", { class: "lead" }, lead) : null, ...inside);
}

// Rows of a name, a bar and a value: [name, small, share of the width, value, small, colour].
function bars(rows) {
  const list = element("div", { class: "bars" });
  for (const [name, detail, share, value, note, colour] of rows) {
    const fill = element("i");
    fill.style.width = `${Math.max(100 * share, share > 0 ? .6 : 0)}%`;
    if (colour !== undefined) fill.style.background = `var(--b${colour})`;
    list.append(
      element("div", { class: "name", title: [name, detail].filter(Boolean).join(" ") }, name, detail ? element("small", {}, detail) : null),
      element("div", { class: "bar", "aria-hidden": "true" }, fill),
      element("div", { class: "value" }, value, note ? element("small", {}, note) : null),
    );
  }
  return list;
}

function overview(content) {
  const fact = (name, value, note, share) => {
    const meter = share === undefined ? null : element("div", { class: "meter" }, element("i"));
    if (meter) meter.firstChild.style.width = `${Math.min(100 * share, 100)}%`;
    return element("div", { class: "fact" }, element("div", { class: "name" }, name), element("div", { class: "value" }, value), meter, element("div", { class: "note" }, note));
  };
  const { max_bytes: most, used_bytes: used, raw_bytes: raw, stored_bytes: stored } = content;
  const share = most ? used / most : undefined, sum = (at) => content.days.reduce((n, day) => n + day[at], 0);
  const asked = sum(1) + sum(2), models = new Set(content.spaces.map((space) => space.model + space.digest)).size;
  const tenants = new Set(content.spaces.map((space) => space.tenant).filter(Boolean)).size;
  const packed = raw > stored * 1.02 ? `; states of ${bytes(raw)}, packed` : "";
  return [
    fact("Stored", bytes(used), most ? `${percent(share)} of ${bytes(most)}${packed}` : `size limit not known${packed}`, share),
    fact("Pages", count(content.pages), `${short(content.tokens)} tokens${content.pinned ? `, ${count(content.pinned)} pinned` : ""}`),
    asked
      ? fact("Hit rate, 31 days", percent(sum(1) / asked), `${plural(asked, "prompt")}, ${short(sum(4))} tokens restored`)
      : fact("Restored", `${short(content.page_uses)} pages`, "by all prompts so far"),
    fact("Models", count(models), tenants ? plural(tenants, "tenant") : "no tenants"),
  ];
}

function hitPanel(content) {
  const sum = (at) => content.days.reduce((n, one) => n + one[at], 0), asked = sum(1) + sum(2);
  if (!asked) return panel("Hit rate", "No prompt was looked up in the last 31 days, as far as this store tells.");
  const lead = element("p", { class: "lead" }, `${percent(sum(1) / asked)} of ${plural(asked, "prompt")} found something; ${short(sum(4))} tokens were restored and ${short(sum(5))} computed.`);
  const swatch = (colour) => { const made = element("i", { class: "swatch" }); made.style.background = `var(${colour})`; return made; };
  return element("section", { class: "panel" }, element("h2", {}, "Hit rate"), lead, hitChart(content.days),
    element("div", { class: "key" }, element("span", {}, swatch("--accent"), "prompts with a hit"), element("span", {}, swatch("--b0"), "without")));
}

function hitChart(some) {
  const step = 86400, width = 560, height = 150, left = 34, low = height - 20, first = some[0][0], last = Math.max(some[some.length - 1][0], first + 23 * step);
  const each = (width - left) / (Math.round((last - first) / step) + 1), most = Math.max(...some.map((one) => one[1] + one[2]), 1), scale = (low - 10) / most;
  const chart = drawing("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Prompts over time, and how many of them found something stored" });
  for (const share of [0, .5, 1]) {
    const y = low - share * (low - 10);
    chart.append(drawing("line", { x1: left, x2: width, y1: y, y2: y }), drawing("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, short(Math.round(most * share))));
  }
  for (const [began, hits, misses] of some) {
    const x = left + Math.round((began - first) / step) * each, w = Math.max(each - Math.min(1, each / 4), .6);
    chart.append(drawing("g", {}, drawing("title", {}, `${time(began)}: ${count(hits)} of ${plural(hits + misses, "prompt")}`),
      drawing("rect", { class: "miss", x, width: w, y: low - (hits + misses) * scale, height: misses * scale }),
      drawing("rect", { class: "hit", x, width: w, y: low - hits * scale, height: hits * scale })));
  }
  const day = (seconds) => new Date(seconds * 1000).toLocaleDateString("en-GB", { month: "short", day: "numeric" });
  chart.append(drawing("text", { x: left, y: height - 4 }, day(first)), drawing("text", { x: width, y: height - 4, "text-anchor": "end" }, day(last)));
  return chart;
}

function sizePanel(tree) {
  const { content, below } = tree;
  const rows = (key) => {
    const found = new Map();
    content.spaces.forEach((space, i) => {
      const name = key(space), one = found.get(name) || [0, 0];
      one[0] += below.bytes[i + 1]; one[1] += below.pages[i + 1];
      found.set(name, one);
    });
    const listed = [...found].sort((a, b) => b[1][0] - a[1][0]), most = listed.length ? listed[0][1][0] : 1, rest = listed.slice(8);
    const shown = listed.slice(0, 8).map(([name, [size, pages]]) => [name, "", size / most, bytes(size), plural(pages, "page")]);
    if (rest.length) {
      const size = rest.reduce((n, one) => n + one[1][0], 0);
      shown.push([`${count(rest.length)} others`, "", size / most, bytes(size), ""]);
    }
    return bars(shown);
  };
  const made = panel("Models and tenants", "", element("h3", {}, "By model"), rows((space) => space.model));
  if (content.spaces.some((space) => space.tenant)) made.append(element("h3", {}, "By tenant"), rows((space) => space.tenant || "no tenant"));
  return made;
}

function bandBars(content, name, names, isColoured) {
  const { bytes: sizes } = content.bands[name], most = Math.max(...sizes, 1), all = Math.max(sizes.reduce((a, b) => a + b, 0), 1);
  const rows = names.map((text, i) => [text, "", sizes[i] / most, bytes(sizes[i]), percent(sizes[i] / all), isColoured ? i : undefined]);
  return bars(name === "uses" ? rows : rows.reverse());
}

function reusePanel(content) {
  const sizes = content.bands.uses.bytes, unused = sizes[0] / Math.max(sizes.reduce((a, b) => a + b, 0), 1);
  return panel("Reuse", `${percent(unused)} of the bytes have never been restored.`, element("h3", {}, "Restores of a page"), bandBars(content, "uses", BAND_NAMES.uses, true));
}

function agePanel(content) {
  return panel("Age", "", element("h3", {}, "Last use"), bandBars(content, "idle", BAND_NAMES.idle, true), element("h3", {}, "Stored since"), bandBars(content, "age", BAND_NAMES.idle, false));
}

function stalePanel(tree, icicle) {
  const { content, parent, below, first, n } = tree, list = element("ul", { class: "stale" }), lead = element("p", { class: "lead" }), command = element("code", { class: "command" });
  const choice = element("select", { "aria-label": "Not used for" }, ...[[1, "1 day"], [7, "7 days"], [30, "30 days"]].map(([days, text]) => element("option", { value: days }, text)));
  const fill = () => {
    const days = Number(choice.value), limit = days * 86400;
    const isStale = (i) => i >= first && below.idle[i] > limit;
    const found = [];
    for (let i = first; i < n; i++) if (isStale(i) && !isStale(parent[i])) found.push(i);
    found.sort((a, b) => below.bytes[b] - below.bytes[a]);
    const size = found.reduce((sum, i) => sum + below.bytes[i], 0);
    lead.textContent = found.length ? `${plural(found.length, "branch", "branches")} with ${bytes(size)}: ${percent(size / Math.max(below.bytes[0], 1))} of the store.${found.some((i) => content.runs.pinned[i - first]) ? " Some are pinned; the command deletes them, too." : ""}` : "None.";
    list.replaceChildren(...found.slice(0, 8).map((i) => element("li", {}, element("button", { type: "button", on: () => { icicle.zoom(i); document.getElementById("tree").scrollIntoView({ block: "center" }); } },
      element("b", {}, nameOf(tree, i)), element("span", {}, bytes(below.bytes[i]), element("small", {}, ago(below.idle[i])))))));
    command.textContent = `prefixstore purge ${content.location} --older-than ${days}d`;
    command.hidden = !found.length;
  };
  choice.value = "7";
  choice.addEventListener("change", fill);
  fill();
  return element("section", { class: "panel" }, element("div", { class: "row" }, element("h2", {}, "Stale branches"), element("label", {}, choice)), lead, list, command);
}
