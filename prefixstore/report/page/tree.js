// The tree: nodes in columns. Node 0 is the location, then the namespaces, then the runs; parents come first.

const BANDS = { uses: [1, 2, 4, 8, 16, 64], idle: [30 * 86400, 7 * 86400, 86400, 6 * 3600, 3600] };
const BAND_NAMES = {
  uses: ["never", "1", "2–3", "4–7", "8–15", "16–63", "64 or more"],
  idle: ["over 30 days", "7 to 30 days", "1 to 7 days", "6 h to 1 day", "1 to 6 h", "under 1 h"],
};

function makeTree(content) {
  const runs = content.runs, spaces = content.spaces, first = 1 + spaces.length, n = first + runs.parent.length;
  const tree = {
    content, n, first, order: null, offset: new Int32Array(n + 1),
    parent: new Int32Array(n), depth: new Int32Array(n), x: new Float64Array(n), w: new Float64Array(n),
    below: { tokens: new Float64Array(n), bytes: new Float64Array(n), pages: new Float64Array(n), idle: new Float64Array(n).fill(-1) },
  };
  const { parent, depth, below } = tree;
  parent[0] = -1;
  for (let i = 1; i < first; i++) { depth[i] = 1; }
  for (let i = first; i < n; i++) {
    const r = i - first;
    parent[i] = runs.parent[r] >= 0 ? first + runs.parent[r] : 1 + runs.space[r];
    below.tokens[i] = Math.max(runs.tokens[r], 1);
    below.bytes[i] = Math.max(runs.bytes[r], 1);
    below.pages[i] = runs.pages[r] + runs.snapshots[r];
    below.idle[i] = runs.idle[r];
  }
  for (let i = 1; i < n; i++) depth[i] = depth[parent[i]] + 1;
  for (let i = n - 1; i > 0; i--) {
    const p = parent[i];
    for (const name of ["tokens", "bytes", "pages"]) below[name][p] += below[name][i];
    if (below.idle[i] >= 0 && (below.idle[p] < 0 || below.idle[i] < below.idle[p])) below.idle[p] = below.idle[i];
    tree.offset[p + 1]++;
  }
  for (let i = 0; i < n; i++) tree.offset[i + 1] += tree.offset[i];
  return tree;
}

// Place the nodes in the width from 0 to 1; the largest child is on the left.
function layOut(tree, name) {
  const { n, parent, offset, x, w } = tree, size = tree.below[name];
  const next = offset.slice(), order = new Int32Array(n);
  for (let i = 1; i < n; i++) order[next[parent[i]]++] = i;
  for (let i = 0; i < n; i++) {
    if (offset[i + 1] - offset[i] > 1) order.subarray(offset[i], offset[i + 1]).sort((a, b) => size[b] - size[a] || a - b);
  }
  tree.order = order;
  x[0] = 0; w[0] = 1;
  const scale = size[0] ? 1 / size[0] : 0;
  for (let i = 0; i < n; i++) {
    let at = x[i];
    for (let c = offset[i]; c < offset[i + 1]; c++) {
      const child = order[c];
      x[child] = at; w[child] = size[child] * scale;
      at += w[child];
    }
  }
}

function children(tree, i) { return tree.order.subarray(tree.offset[i], tree.offset[i + 1]); }

function nameOf(tree, i) {
  const { content, first } = tree;
  if (i === 0) return "All";
  if (i < first) {
    const space = content.spaces[i - 1];
    return [space.model, space.tenant && `tenant ${space.tenant}`].filter(Boolean).join(" · ");
  }
  const r = i - first, runs = content.runs;
  if (isRest(tree, i)) return `${count(runs.runs[r])} smaller branches`;
  return runs.labels[r] || `from token ${count(runs.start[r])}`;
}

function isRest(tree, i) { return i >= tree.first && tree.content.runs.keys.startsWith("  ", (i - tree.first) * 12); }

function keyOf(tree, i) {
  if (i === 0) return "";
  return i < tree.first ? tree.content.spaces[i - 1].key : tree.content.runs.keys.slice((i - tree.first) * 12, (i - tree.first + 1) * 12).trim();
}

function pathOf(tree, i) {
  const path = [];
  for (; i >= 0; i = tree.parent[i]) path.unshift(i);
  return path;
}

function bandOf(tree, i, name) {
  const runs = tree.content.runs, r = i - tree.first;
  if (name === "uses") {
    let band = 0;
    while (band < BANDS.uses.length && runs.hits[r] >= BANDS.uses[band]) band++;
    return band;
  }
  const idle = runs.idle[r];
  if (idle < 0) return 0;
  let band = 0;
  while (band < BANDS.idle.length && idle <= BANDS.idle[band]) band++;
  return band;
}

// Nodes whose name, key or tenant has these words.
function search(tree, text) {
  const wanted = text.toLowerCase(), found = [];
  if (!tree.names) tree.names = Array.from({ length: tree.n }, (_, i) => nameOf(tree, i).toLowerCase());
  const isKey = /^[0-9a-f]{4,}$/.test(wanted), short = wanted.slice(0, 12);
  for (let i = 1; i < tree.n; i++) {
    if (tree.names[i].includes(wanted) || (isKey && keyOf(tree, i).startsWith(short))) found.push(i);
  }
  return found;
}

// -- numbers as text ---------------------------------------------------------------------------------------------------

function count(n) { return Math.round(n).toLocaleString("en-US"); }

function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(n) < 1024) return unit === "B" ? `${n.toFixed(0)} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}

function short(n) {
  for (const unit of ["", " k", " M"]) {
    if (Math.abs(n) < 1000) return unit ? `${n.toFixed(n < 10 ? 1 : 0)}${unit}` : `${n}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} G`;
}

function duration(seconds) {
  for (const [unit, size] of [["days", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${count(seconds / size)} ${unit}`;
  }
  return `${Math.max(Math.round(seconds), 0)} s`;
}

function time(seconds) { return new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }); }

function ago(seconds) { return seconds < 0 ? "unknown" : `${duration(seconds)} ago`; }

function percent(share) { return `${(100 * share).toFixed(share > 0 && share < .1 ? 1 : 0)} %`; }

function plural(n, one, many) { return `${count(n)} ${n === 1 ? one : many || `${one}s`}`; }
