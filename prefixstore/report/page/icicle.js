// The icicle: drawn on a canvas, only what is at least a pixel wide. The view is a part of the width, from a row down.

const ROW = 27, GAP = 1, MOST_ROWS = 32, FEWEST_ROWS = 6, SMALLEST = 1.2;

function makeIcicle(canvas, tree, listener) {
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const state = {
    root: 0, selected: 0, hover: -1, from: 0, to: 1, width: "tokens", colour: "uses", matches: null, boxes: [], rests: [], frame: 0,
  };
  let palette = null, drag = null, scrolled = -Infinity;

  function readPalette() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    const bands = [0, 1, 2, 3, 4, 5, 6].map((i) => get(`--b${i}`));
    palette = {
      bands, inks: bands.map(inkOn), ink: get("--ink"), soft: get("--soft"), track: get("--track"), accent: get("--accent"), warm: get("--warm"),
      line: get("--line"), panel: get("--panel"), font: `12px ${getComputedStyle(document.body).fontFamily}`,
    };
  }

  function draw() {
    state.frame = 0;
    if (!palette) readPalette();
    const { offset, order, x, w } = tree, width = canvas.clientWidth;
    if (!width) return;
    const scale = width / (state.to - state.from), boxes = [], rests = [];
    // from the root of the view down; what is above it fills a row of its own
    let level = [state.root], row = 0;
    if (state.root) boxes.push({ node: tree.parent[state.root], x: 0, w: width, row: row++ });
    while (level.length && row < MOST_ROWS) {
      const next = [];
      for (const i of level) {
        const left = Math.max((x[i] - state.from) * scale, 0), right = Math.min((x[i] + w[i] - state.from) * scale, width);
        boxes.push({ node: i, x: left, w: right - left, row, deeper: row === MOST_ROWS - 1 && offset[i + 1] > offset[i] });
        let at = offset[i];
        for (; at < offset[i + 1]; at++) {
          const child = order[at];
          if (x[child] >= state.to) break;
          if (w[child] * scale < SMALLEST) break;
          if (x[child] + w[child] > state.from) next.push(child);
        }
        if (at < offset[i + 1] && x[order[at]] < state.to) {
          const begin = Math.max((x[order[at]] - state.from) * scale, 0), last = order[offset[i + 1] - 1];
          const end = Math.min((x[last] + w[last] - state.from) * scale, width);
          if (end - begin > .4) rests.push({ parent: i, first: at, n: offset[i + 1] - at, x: begin, w: end - begin, row: row + 1 });
        }
      }
      level = next;
      row++;
    }
    state.boxes = boxes; state.rests = rests;
    const used = [...boxes, ...rests].reduce((most, one) => Math.max(most, one.row), 0) + 1;
    const height = Math.min(Math.max(used, FEWEST_ROWS), MOST_ROWS) * ROW, ratio = devicePixelRatio || 1;
    if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = palette.font;
    context.textBaseline = "middle";
    for (const rest of rests) drawRest(context, rest);
    for (const box of boxes) drawBox(context, box);
  }

  function fillOf(i) {
    if (i < tree.first) return [palette.track, palette.ink];
    if (isRest(tree, i)) return [palette.track, palette.soft];
    const band = bandOf(tree, i, state.colour);
    return [palette.bands[band], palette.inks[band]];
  }

  function drawBox(context, box) {
    const { node } = box, y = box.row * ROW, h = ROW - GAP, w = Math.max(box.w - (box.w > 4 ? GAP : 0), .8);
    // of a search: a match is 2, what leads to one 1, all others 0
    const kind = state.matches ? state.matches.get(node) || 0 : 2, alpha = kind ? 1 : .45;
    const [fill, ink] = kind === 2 ? fillOf(node) : [palette.track, palette.soft];
    context.globalAlpha = alpha;
    context.fillStyle = fill;
    if (box.w > 6) { context.beginPath(); context.roundRect(box.x, y, w, h, Math.min(3, w / 5)); context.fill(); }
    else context.fillRect(box.x, y, w, h);
    if (box.w > 30 && kind) {
      const right = tree.below.pages[node] && node < tree.first ? bytes(tree.below.bytes[node]) : "";
      context.fillStyle = ink;
      const textWidth = right && box.w > 220 ? context.measureText(right).width : 0;
      if (textWidth) {
        context.globalAlpha *= .7;
        context.fillText(right, box.x + w - textWidth - 8, y + h / 2 + .5);
        context.globalAlpha = alpha;
      }
      const text = fitted(context, nameOf(tree, node), box.w - 14 - (textWidth ? textWidth + 14 : 0));
      if (text) context.fillText(text, box.x + 7, y + h / 2 + .5);
    }
    if (box.deeper) { context.fillStyle = palette.panel; context.fillRect(box.x, y + h - 3, w, 1); }
    context.globalAlpha = 1;
    if (node === state.selected || node === state.hover) {
      context.strokeStyle = node === state.selected ? palette.warm : palette.soft;
      context.lineWidth = node === state.selected ? 2 : 1;
      context.beginPath();
      context.roundRect(box.x + 1, y + 1, Math.max(w - 2, 1), h - 2, 3);
      context.stroke();
    }
  }

  function drawRest(context, rest) {
    context.globalAlpha = state.matches ? .3 : 1;
    context.fillStyle = palette.bands[0];
    // thin strokes say that there are many
    const y = rest.row * ROW, right = rest.x + rest.w;
    if (rest.w < 3) context.fillRect(rest.x, y, Math.max(rest.w, .8), ROW - GAP);
    else for (let at = rest.x; at < right - .5; at += 3) context.fillRect(at, y, 1.5, ROW - GAP);
    context.globalAlpha = 1;
  }

  function request() { if (!state.frame) state.frame = requestAnimationFrame(draw); }

  function show(from, to, isAnimated) {
    const span = Math.min(Math.max(to - from, 1e-9), 1);
    from = Math.min(Math.max(from, 0), 1 - span); to = from + span;
    cancelAnimationFrame(state.motion);
    if (!isAnimated || still.matches) { state.from = from; state.to = to; request(); return; }
    const began = performance.now(), a = state.from, b = state.to;
    const step = (now) => {
      const t = Math.min((now - began) / 180, 1), eased = 1 - (1 - t) ** 3;
      state.from = a + (from - a) * eased; state.to = b + (to - b) * eased;
      if (t === 1) { state.from = from; state.to = to; }
      if (state.frame) { cancelAnimationFrame(state.frame); }
      draw();
      if (t < 1) state.motion = requestAnimationFrame(step);
    };
    state.motion = requestAnimationFrame(step);
  }

  function zoom(i) {
    state.root = i; state.selected = i;
    show(tree.x[i], tree.x[i] + tree.w[i], true);
    listener.zoomed(i); listener.selected(i);
  }

  function select(i) {
    state.selected = i;
    const left = tree.x[i], right = left + tree.w[i], span = state.to - state.from;
    if (!pathOf(tree, i).includes(state.root) || tree.depth[i] - tree.depth[state.root] > MOST_ROWS - 3) {
      state.root = Math.max(tree.parent[i], 0);
      listener.zoomed(state.root);
      show(tree.x[state.root], tree.x[state.root] + tree.w[state.root], true);
    } else if (left < state.from || right > state.to) show(Math.min(left, 1 - span), Math.min(left, 1 - span) + Math.max(span, tree.w[i]), true);
    else if (tree.w[i] / span * canvas.clientWidth < 12) widen(i);
    request();
    listener.selected(i);
  }

  // Make a node wide enough to be seen, with its neighbours.
  function widen(i) {
    const span = Math.max(tree.w[i] * 12, 1e-9), middle = tree.x[i] + tree.w[i] / 2;
    show(middle - span / 2, middle + span / 2, true);
  }

  function at(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, row = Math.floor((event.clientY - box.top) / ROW);
    const inside = (one) => one.row === row && px >= one.x && px < one.x + Math.max(one.w, 1);
    const found = state.boxes.find(inside);
    return { node: found ? found.node : -1, rest: found ? null : state.rests.find(inside) || null, px };
  }

  // -- mouse, pen and touch --------------------------------------------------------------------------------------------

  const on = (target, name, work, options = {}) => target.addEventListener(name, work, options);
  on(canvas, "pointerdown", (event) => { drag = { x: event.clientX, from: state.from, to: state.to, moved: false }; });
  on(window, "pointerup", () => { setTimeout(() => { drag = null; }); });
  on(window, "pointercancel", () => { drag = null; });
  on(canvas, "pointermove", (event) => {
    if (drag && event.buttons && (drag.moved || Math.abs(event.clientX - drag.x) > 5)) {
      drag.moved = true;
      const move = (drag.x - event.clientX) / canvas.clientWidth * (drag.to - drag.from);
      show(drag.from + move, drag.to + move, false);
      return;
    }
    if (event.pointerType === "touch") return;
    const { node, rest } = at(event);
    if (node !== state.hover) { state.hover = node; request(); listener.hovered(node, rest); }
    else if (rest) listener.hovered(-1, rest);
  });
  on(canvas, "pointerleave", () => { state.hover = -1; request(); listener.hovered(-1, null); });
  on(canvas, "click", (event) => {
    if (drag && drag.moved) return;
    canvas.focus({ preventScroll: true });
    const { node, rest } = at(event);
    if (rest) {
      const last = tree.order[rest.first + rest.n - 1], begin = tree.x[tree.order[rest.first]];
      show(begin, tree.x[last] + tree.w[last], true);
    } else if (node >= 0) zoom(node);
  });
  on(window, "wheel", (event) => { if (event.target !== canvas) scrolled = event.timeStamp; }, { passive: true });
  on(canvas, "wheel", (event) => {
    // the page is being scrolled, and has come under the pointer
    if (event.timeStamp - scrolled < 400 && !event.ctrlKey) { scrolled = event.timeStamp; return; }
    const span = state.to - state.from;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const amount = (sideways ? event.deltaX : event.deltaY) * (event.deltaMode === 1 ? 16 : 1);
    if (!sideways && amount > 0 && span >= tree.w[state.root] * (1 - 1e-9)) {
      if (state.root === 0) return;
      // out of the branch
      event.preventDefault();
      const middle = tree.parent[state.root];
      state.root = middle; listener.zoomed(middle);
    }
    event.preventDefault();
    if (sideways) { show(state.from + amount / canvas.clientWidth * span, state.to + amount / canvas.clientWidth * span, false); return; }
    const share = (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth, middle = state.from + share * span;
    const low = tree.x[state.root], limit = tree.w[state.root], wide = Math.min(span * Math.exp(amount * .0022), limit);
    const from = Math.min(Math.max(middle - share * wide, low), low + limit - wide);
    show(from, from + wide, false);
  }, { passive: false });

  // -- keys ------------------------------------------------------------------------------------------------------------

  on(canvas, "keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const i = state.selected, parent = tree.parent[i];
    if (event.key === "ArrowDown") { if (tree.offset[i + 1] > tree.offset[i]) select(tree.order[tree.offset[i]]); }
    else if (event.key === "ArrowUp") { if (parent >= 0) select(parent); }
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      if (parent >= 0) {
        const among = children(tree, parent), next = among.indexOf(i) + (event.key === "ArrowLeft" ? -1 : 1);
        if (next >= 0 && next < among.length) select(among[next]);
      }
    } else if (event.key === "Enter" || event.key === " ") zoom(i);
    else if (event.key === "Escape") {
      if (state.matches) listener.cleared();
      else if (state.root) zoom(tree.parent[state.root]);
      else show(0, 1, true);
    } else if (event.key === "Home") zoom(0);
    else return;
    event.preventDefault();
  });

  new ResizeObserver(request).observe(canvas);
  const icicle = {
    state, zoom, select, widen, draw,
    width(name) { state.width = name; layOut(tree, name); show(tree.x[state.root], tree.x[state.root] + tree.w[state.root], false); },
    colour(name) { state.colour = name; request(); },
    matches(found) { state.matches = found; request(); },
    recolour() { palette = null; request(); },
  };
  layOut(tree, state.width);
  return icicle;
}

// Black or white, whichever can be read better on a colour.
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255).map((v) => v <= .04 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  const light = .2126 * r + .7152 * g + .0722 * b;
  return light > .19 ? "#10151d" : "#f5f8fc";
}

function fitted(context, text, width) {
  if (width < 12) return "";
  if (text.length > 200) text = text.slice(0, 200);
  if (context.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle; else high = middle - 1;
  }
  return low > 1 ? `${text.slice(0, low)}…` : "";
}
