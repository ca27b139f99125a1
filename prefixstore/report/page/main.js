// Everything put together.

const find = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];
let shown = null;

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  find("theme").textContent = `Theme: ${name}`;
  if (shown) shown.icicle.recolour();
}

let theme = "auto";
// a page from a file may have no storage
try { theme = THEMES.includes(localStorage.getItem("prefixstore-theme")) ? localStorage.getItem("prefixstore-theme") : "auto"; } catch { /* it is auto then */ }
setTheme(theme);
find("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  setTheme(theme);
  try { localStorage.setItem("prefixstore-theme", theme); } catch { /* it holds as long as the page */ }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (shown) shown.icicle.recolour(); });

function describe(tree, i) {
  const { content, below, first } = tree, runs = content.runs, facts = [];
  if (i < first || isRest(tree, i)) {
    facts.push(`${plural(below.pages[i], "page")}, ${short(below.tokens[i])} tokens, ${bytes(below.bytes[i])}`, `last used ${ago(below.idle[i])}`);
  } else {
    const r = i - first, low = runs.least_hits[r], high = runs.hits[r];
    facts.push(`tokens from ${count(runs.start[r])}`, `${short(runs.tokens[r])} tokens in ${plural(runs.pages[r], "page")}${runs.snapshots[r] ? ` and ${plural(runs.snapshots[r], "snapshot")}` : ""}, ${bytes(runs.bytes[r])}`);
    facts.push(high ? `restored ${low === high ? plural(high, "time") : `${count(low)} to ${count(high)} times`}` : "never restored");
    facts.push(`last used ${ago(runs.idle[r])}`, `stored ${ago(runs.age[r])}`);
    if (runs.pinned[r]) facts.push("pinned");
    if (tree.offset[i + 1] > tree.offset[i]) facts.push(`${plural(tree.offset[i + 1] - tree.offset[i], "branch", "branches")} below, ${bytes(below.bytes[i])} in all`);
  }
  const key = keyOf(tree, i);
  return [element("div", { class: "label" }, nameOf(tree, i)), element("div", { class: "more" }, facts.join(" · "), key ? " · " : "", key ? element("code", {}, key) : null)];
}

function legend(name) {
  find("legend").replaceChildren(element("span", {}, name === "uses" ? "Restores of a page:" : "Last use:"), ...BAND_NAMES[name].map((text, i) => {
    const swatch = element("i");
    swatch.style.background = `var(--b${i})`;
    return element("span", {}, swatch, text);
  }));
}

function open(content) {
  const tree = makeTree(content), selected = find("selected");
  let hits = [], current = -1;
  const listener = {
    zoomed(i) {
      const path = pathOf(tree, i);
      // of a long one, the beginning and the end
      if (path.length > 8) path.splice(2, path.length - 6, -1);
      find("path").replaceChildren(...path.flatMap((node, at) => node < 0 ? [element("span", {}, "› …")] : [
        at ? element("span", { "aria-hidden": "true" }, "›") : "",
        element("button", { type: "button", on: () => icicle.zoom(node), ...(node === i ? { "aria-current": "location" } : {}) }, nameOf(tree, node)),
      ]).filter(Boolean));
    },
    selected(i) { selected.replaceChildren(...describe(tree, i)); },
    hovered(i, rest) {
      if (rest) selected.replaceChildren(element("div", { class: "label" }, `${count(rest.n)} smaller branches`), element("div", { class: "more" }, "Click to see them"));
      else selected.replaceChildren(...describe(tree, i >= 0 ? i : icicle.state.selected));
    },
    cleared() { find("search").value = ""; searched(); },
  };
  const icicle = makeIcicle(find("tree"), tree, listener);
  shown = { icicle };

  function searched() {
    const text = find("search").value.trim();
    hits = text ? search(tree, text) : [];
    current = -1;
    find("matches").hidden = !text;
    if (!text) { icicle.matches(null); return; }
    hits.sort((a, b) => tree.below.bytes[b] - tree.below.bytes[a]);
    find("count").textContent = hits.length ? `${plural(hits.length, "match", "matches")}${hits.length > 1 ? "; Enter shows the next" : ""}` : "No match";
    find("found").replaceChildren(...hits.slice(0, 50).map((i, at) => element("li", {}, element("button", { type: "button", on: () => go(at) }, element("b", {}, nameOf(tree, i)), element("small", {}, bytes(tree.below.bytes[i]))))));
    const lit = new Map();
    for (const i of hits) for (let node = i; node >= 0 && !lit.has(node); node = tree.parent[node]) lit.set(node, 1);
    for (const i of hits) lit.set(i, 2);
    icicle.matches(lit);
  }

  function go(at) {
    current = at;
    icicle.zoom(hits[at]);
    [...find("found").querySelectorAll("button")].forEach((button, i) => { if (i === at) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current"); });
  }

  find("search").oninput = searched;
  find("search").onkeydown = (event) => {
    if (event.key === "Enter" && hits.length) { go((current + (event.shiftKey ? hits.length - 1 : 1)) % hits.length); event.preventDefault(); }
    if (event.key === "Escape") { listener.cleared(); find("tree").focus(); event.preventDefault(); }
  };
  find("width").onchange = (event) => icicle.width(event.target.value);
  find("colour").onchange = (event) => { icicle.colour(event.target.value); legend(event.target.value); };
  find("width").value = "tokens"; find("colour").value = "uses"; find("search").value = "";
  find("matches").hidden = true;

  find("place").textContent = `${content.location} · ${time(content.made)}`;
  find("facts").replaceChildren(...overview(content));
  legend("uses");
  find("report").hidden = false;
  find("panels").replaceChildren(hitPanel(content), sizePanel(tree), stalePanel(tree, icicle), reusePanel(content), agePanel(content));
  const notes = { tokens: "Labels are token ids, from where a branch differs from the others.", text: "Labels are the text from where a branch differs from the others." };
  find("footer").textContent = [notes[content.labels], content.unreadable ? `${plural(content.unreadable, "page")} could not be read; prefixstore check tells why.` : ""].filter(Boolean).join(" ");
  say(content.pages ? "" : "Nothing is stored yet.");
  listener.zoomed(0);
  listener.selected(0);
  icicle.draw();
}

function say(text) { find("message").textContent = text; find("message").hidden = !text; }

addEventListener("keydown", (event) => {
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) { find("search").focus(); event.preventDefault(); }
});

open(JSON.parse(find("data").textContent));
