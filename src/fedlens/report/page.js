"use strict";
// Charts that can be zoomed, switched and read out. Without this script their pictures stay.
(() => {
  // What the lines are drawn with is decided in palette.py; markers have matplotlib's letters.
  const MARKERS = {
    o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
    s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    D: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0z`,
    "^": (r) => `M0,${-1.2 * r}L${1.2 * r},${r}H${-1.2 * r}z`,
    v: (r) => `M0,${1.2 * r}L${1.2 * r},${-r}H${-1.2 * r}z`,
    P: (r) => `M${-r / 2.5},${-r}h${r / 1.25}v${r / 1.7}h${r / 1.7}v${r / 1.25}h${-r / 1.7}v${r / 1.7}h${-r / 1.25}v${-r / 1.7}h${-r / 1.7}v${-r / 1.25}h${r / 1.7}z`,
    X: (r) => `M${-r},${-r}L${r},${r}M${r},${-r}L${-r},${r}`,
  };
  const SIDE_BY_SIDE = 3; // names that fit into a line below a chart
  const LETTER = 7.2; // pixels that a letter beside an axis takes at most, about
  const MOST_READ = 12; // values in the box at the pointer
  const POLL = 1000; // milliseconds between two questions of a live page
  const HUGE = 1e12; // from here on numbers have an exponent
  const states = new Map(); // by figure: what is hidden and where it is zoomed to

  const escaped = (text) =>
    String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  // A piece of a line, for legends.
  const stroke = (how, ink, mark = "") =>
    `<svg viewBox="0 0 28 12" aria-hidden="true"><path d="M1,6H27" style="stroke:${ink};${how}"/>${mark}</svg>`;

  const grouped = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 8 });

  function written(value, percent) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (percent) return `${(100 * value).toFixed(1)}%`;
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= HUGE)) return value.toExponential(1);
    if (size >= 1e4) return grouped(Math.round(value));
    return Number.isInteger(value) || size >= 1000 ? value.toFixed(0) : value.toFixed(3);
  }

  // Where on an axis something is: with commas, and with an exponent where it is very small or large.
  function placed(number) {
    const size = Math.abs(number);
    if (size >= HUGE) return number.toExponential();
    return size < 1000 ? String(number) : grouped(number);
  }

  // A number beside an axis: in millions where that is shorter. It is not rounded, since a label may
  // not say another number than its place does. Figures have the same rule: format_tick.
  function tickLabel(value) {
    const number = Number(value.toPrecision(12));
    const size = Math.abs(number);
    const plain = placed(number);
    const [unit, letter] = size < 1e9 ? [1e6, "M"] : [1e9, "B"];
    const short = `${Number((number / unit).toPrecision(12))}${letter}`;
    return size >= 1e6 && size < HUGE && short.length < plain.length ? short : plain;
  }

  function linearTicks(low, high, count, whole) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    if (whole) step = Math.max(1, Math.round(step));
    const ticks = [];
    for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + 1e-9 * step; t += step) {
      ticks.push(Math.abs(t) < step * 1e-9 ? 0 : t);
    }
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [];
    const few = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
    const skip = Math.max(1, Math.ceil(Math.log10(high / low) / 6));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      if (power % skip) continue;
      for (const n of few) {
        const t = n * 10 ** power;
        if (t >= low * 0.999 && t <= high * 1.001) ticks.push(t);
      }
    }
    return ticks;
  }

  function axis(low, high, from, to, log) {
    const f = log ? Math.log10 : (v) => v;
    const scale = (to - from) / (f(high) - f(low) || 1);
    const at = (value) => from + (f(value) - f(low)) * scale;
    const back = (place) => {
      const v = f(low) + (place - from) / scale;
      return log ? 10 ** v : v;
    };
    return { at, back, low, high };
  }

  const usable = (value, log) => value !== null && Number.isFinite(value) && (!log || value > 0);

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.data = JSON.parse(figure.querySelector("script").textContent);
      const off = this.data.names.filter((one) => one.off).map((one) => one.name);
      this.state = states.get(figure.id) || { hidden: new Set(off), view: null };
      states.set(figure.id, this.state);
      this.hover = null;
      this.drag = null;
      this.xs = [...new Set(this.data.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
      const host = figure.querySelector(".chart");
      const still = figure.querySelector(".still");
      host.innerHTML =
        `<div class="plot"><svg tabindex="0" role="img"></svg><div class="tip" hidden></div>` +
        `<button type="button" class="reset" hidden>reset zoom</button></div><div class="legend"></div>`;
      this.svg = host.querySelector("svg");
      this.svg.setAttribute("aria-label", still.getAttribute("aria-label"));
      this.tip = host.querySelector(".tip");
      this.reset = host.querySelector(".reset");
      this.legend = host.querySelector(".legend");
      this.chosen = null; // the name under the pointer, or with the focus: its line stands out
      figure.classList.add("alive");
      figure.classList.toggle("crowded", this.data.names.length > SIDE_BY_SIDE);
      this.makeLegend();
      this.listen();
      this.draw();
    }

    swatch(line) {
      return stroke(this.data.strokes[line.style], line.colour, ["solid", "dots"].includes(line.style) ? this.mark([14, 6], line, 3.4) : "");
    }

    makeLegend() {
      this.entries = this.data.names.map((line) => {
        const { name, note } = line;
        const entry = document.createElement("button");
        entry.type = "button";
        entry.innerHTML =
          `${this.swatch(line)}<span><span class="name">${escaped(name)}</span>` +
          `${note ? ` <span class="note">${escaped(note)}</span>` : ""}</span>`;
        entry.addEventListener("click", () => this.toggle(name));
        for (const [event, chosen] of [["pointerenter", name], ["focus", name], ["pointerleave", null], ["blur", null]]) {
          entry.addEventListener(event, () => {
            this.chosen = chosen;
            this.draw();
          });
        }
        this.legend.append(entry);
        return { name, line, entry };
      });
      const keys = this.data.keys.map(([style, meaning]) => `<span>${stroke(this.data.strokes[style], "var(--soft)")}${escaped(meaning)}</span>`);
      if (keys.length) {
        const shown = document.createElement("p");
        shown.className = "styles";
        shown.innerHTML = keys.join(" ");
        this.legend.append(shown);
      }
    }

    toggle(name) {
      const hidden = this.state.hidden;
      if (!hidden.delete(name)) hidden.add(name);
      this.draw();
    }

    zoom(view) {
      this.state.view = view;
      this.draw();
    }

    place(event) {
      const box = this.svg.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }

    nearest(value) {
      const seen = this.xs.filter((x) => x >= this.x.low && x <= this.x.high);
      const far = (x) => Math.abs(this.x.at(x) - this.x.at(value));
      return seen.reduce((best, x) => (best === null || far(x) < far(best) ? x : best), null);
    }

    listen() {
      const svg = this.svg;
      svg.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        this.drag = { from: this.place(event), to: this.place(event) };
        svg.setPointerCapture(event.pointerId);
      });
      svg.addEventListener("pointermove", (event) => {
        const at = this.place(event);
        if (this.drag) this.drag.to = at;
        this.hover = this.nearest(this.x.back(at[0]));
        this.draw();
      });
      svg.addEventListener("pointerup", () => {
        const drag = this.drag;
        this.drag = null;
        if (!drag) return;
        const [left, right] = [drag.from[0], drag.to[0]].sort((a, b) => a - b);
        const [top, bottom] = [drag.from[1], drag.to[1]].sort((a, b) => a - b);
        if (right - left < 8) return this.draw();
        const clamp = (v, axis) => Math.min(Math.max(v, axis.low), axis.high);
        const view = { x: [left, right].map((p) => clamp(this.x.back(p), this.x)) };
        if (bottom - top > 30) view.y = [bottom, top].map((p) => clamp(this.y.back(p), this.y));
        if (view.x[0] < view.x[1]) this.zoom(view);
      });
      svg.addEventListener("pointercancel", () => {
        this.drag = null;
        this.draw();
      });
      const leave = () => {
        this.hover = null;
        this.draw();
      };
      svg.addEventListener("pointerleave", () => this.drag || leave());
      svg.addEventListener("dblclick", () => this.zoom(null));
      svg.addEventListener("blur", leave);
      this.reset.addEventListener("click", () => {
        this.zoom(null);
        svg.focus();
      });
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (step) {
          const seen = this.xs.filter((x) => x >= this.x.low && x <= this.x.high);
          const now = seen.indexOf(this.hover);
          const next = now < 0 ? (step > 0 ? 0 : seen.length - 1) : now + step;
          this.hover = seen[Math.min(Math.max(next, 0), seen.length - 1)] ?? null;
        } else if (event.key === "+") {
          const middle = this.x.at(this.hover ?? this.x.back((this.box.left + this.box.right) / 2));
          const quarter = (this.box.right - this.box.left) / 4;
          this.zoom({ x: [middle - quarter, middle + quarter].map(this.x.back) });
        } else if (event.key === "Escape") {
          this.hover = null;
          this.zoom(null);
        } else return;
        event.preventDefault();
        this.draw();
      });
      new ResizeObserver(() => {
        if (this.width !== svg.clientWidth) this.draw();
      }).observe(svg);
    }

    banded(line) {
      return this.data.banded || line.name === this.chosen;
    }

    range(lines) {
      const { data } = this;
      const view = this.state.view;
      const xs = this.xs.filter((x) => usable(x, data.log_x));
      let [left, right] = view ? view.x : data.span ?? [xs[0] ?? 0, xs[xs.length - 1] ?? 1];
      if (data.log_x && left === right) [left, right] = [left / 2, right * 2];
      if (view && view.y) return [left, right, ...view.y];
      const ys = data.levels.map(([, y]) => y);
      for (const line of lines) {
        line.x.forEach((x, i) => {
          if (x < left || x > right) return;
          ys.push(line.y[i]);
          if (line.low && this.banded(line)) ys.push(line.low[i], line.high[i]);
        });
      }
      const sound = ys.filter((y) => usable(y, data.log_y));
      let low = sound.length ? Math.min(...sound) : data.log_y ? 1 : 0;
      let high = sound.length ? Math.max(...sound) : data.log_y ? 10 : 1;
      if (data.log_y) return [left, right, low / 1.1, high * 1.1];
      if (low === high) [low, high] = [low - Math.abs(low) * 0.1 - 0.01, high + Math.abs(high) * 0.1 + 0.01];
      const above = 0.05 * (high - low);
      [low, high] = [low - above, high + above];
      const lasting = [...lines.flatMap((line) => line.y), ...data.levels.map(([, y]) => y)].filter((y) => usable(y, false));
      if (data.percent && lasting.length && Math.min(...lasting) >= 0 && Math.max(...lasting) <= 1) {
        const air = 0.02 * (Math.min(high, 1) - Math.max(low, 0)); // no accuracy is above 100%, though a band may be
        [low, high] = [Math.max(low, -air), Math.min(high, 1 + air)];
      }
      return [left, right, low, high];
    }

    draw() {
      const { data, svg } = this;
      const width = svg.clientWidth || 480;
      const height = Math.round(Math.min(Math.max(width * 0.55, 210), width > 640 ? 400 : 320));
      this.width = width;
      const shown = data.lines.filter((line) => !this.state.hidden.has(line.name));
      const [left, right, low, high] = this.range(shown);
      const yTicks = data.log_y ? logTicks(low, high) : linearTicks(low, high, 5, false);
      const spread = yTicks.length > 1 ? yTicks[1] - yTicks[0] : 1;
      const places = Math.max(0, Math.ceil(-Math.log10(spread * (data.percent ? 100 : 1)) - 1e-9));
      const yLabels = yTicks.map((t) => {
        if (data.percent) return `${(100 * t).toFixed(places)}%`;
        return data.log_y || Math.abs(t) >= 1e4 ? tickLabel(t) : t.toFixed(places);
      });
      const widest = LETTER * Math.max(0, ...yLabels.map((label) => label.length));
      const box = { left: Math.max(data.percent ? 46 : 54, widest + 8), right: width - 12, top: 8, bottom: height - 40 };
      this.box = box;
      const x = (this.x = axis(left, right, box.left, box.right, data.log_x));
      const y = (this.y = axis(low, high, box.bottom, box.top, data.log_y));
      const parts = [];
      const id = `clip-${this.figure.id}`;
      parts.push(
        `<defs><clipPath id="${id}"><rect x="${box.left - 5}" y="${box.top - 5}" width="${box.right - box.left + 10}" height="${box.bottom - box.top + 10}"/></clipPath></defs>`,
      );
      yTicks.forEach((t, i) => {
        parts.push(
          `<path class="grid" d="M${box.left},${y.at(t)}H${box.right}"/><text x="${box.left - 6}" y="${y.at(t) + 4}" text-anchor="end">${yLabels[i]}</text>`,
        );
      });
      const many = Math.max(4, Math.floor((box.right - box.left) / 60));
      for (const t of data.log_x ? logTicks(left, right) : linearTicks(left, right, many, data.whole)) {
        const label = data.ticks.length ? data.ticks[t] ?? "" : tickLabel(t);
        const middle = Math.min(x.at(t), width - (LETTER * label.length) / 2); // the last one is not cut off
        parts.push(
          `<path class="tick" d="M${x.at(t)},${box.bottom}v4"/><text x="${middle}" y="${box.bottom + 17}" text-anchor="middle">${escaped(label)}</text>`,
        );
      }
      parts.push(
        `<path class="edge" d="M${box.left},${box.bottom}H${box.right}"/><text class="label" x="${(box.left + box.right) / 2}" y="${height - 6}" text-anchor="middle">${escaped(data.x_label)}</text>`,
      );
      parts.push(`<g clip-path="url(#${id})">`);
      for (const [, level] of data.levels) {
        parts.push(
          `<path class="level" d="M${box.left},${y.at(level)}H${box.right}" style="${data.strokes.level}"/>`,
        );
      }
      this.standsOut = this.state.hidden.has(this.chosen) ? null : this.chosen;
      const last = (line) => line.name === this.standsOut; // over the others
      for (const line of [...shown].sort((a, b) => last(a) - last(b))) parts.push(this.lineOf(line, x, y));
      parts.push("</g>");
      if (this.hover !== null) {
        const at = x.at(this.hover);
        parts.push(`<path class="rule" d="M${at},${box.top}V${box.bottom}"/>`);
      }
      if (this.drag) {
        const [[x0, y0], [x1, y1]] = [this.drag.from, this.drag.to];
        const tall = Math.abs(y1 - y0) > 30;
        parts.push(
          `<rect class="drag" x="${Math.min(x0, x1)}" width="${Math.abs(x1 - x0)}" y="${tall ? Math.min(y0, y1) : box.top}" height="${tall ? Math.abs(y1 - y0) : box.bottom - box.top}"/>`,
        );
      }
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("height", height);
      svg.innerHTML = parts.join("");
      this.reset.hidden = !this.state.view;
      this.readOut();
    }

    lineOf(line, x, y) {
      const { log_x, log_y } = this.data;
      const points = line.x.map((at, i) => {
        const sound = usable(at, log_x) && usable(line.y[i], log_y);
        return sound ? [x.at(at), y.at(line.y[i])] : null;
      });
      let path = "";
      let pen = "M";
      for (const point of points) {
        if (point) path += `${pen}${point[0].toFixed(2)},${point[1].toFixed(2)}`;
        pen = point ? "L" : "M";
      }
      const ink = line.colour;
      const solid = line.style === "solid";
      let drawn = "";
      if (line.low && this.banded(line)) {
        const there = line.x.map((_, i) => i).filter((i) => usable(line.low[i], log_y) && usable(line.high[i], log_y));
        const edge = (values, order) => order.map((i) => `${x.at(line.x[i]).toFixed(2)},${y.at(values[i]).toFixed(2)}`).join("L");
        if (there.length) {
          drawn += `<path class="band" d="M${edge(line.high, there)}L${edge(line.low, [...there].reverse())}z" style="fill:${ink}"/>`;
        }
      }
      drawn += `<path class="line" d="${path}" style="stroke:${ink};${this.data.strokes[line.style]}"/>`;
      const visible = points.filter((p) => p && p[0] >= this.box.left && p[0] <= this.box.right);
      const apart = line.style === "dots";
      if (solid || apart || visible.length === 1) {
        const every = apart ? 1 : Math.max(1, Math.floor(visible.length / 6));
        const first = Math.min(2 * line.place, Math.max(0, visible.length - 1)) % every;
        for (let i = first; i < visible.length; i += every) drawn += this.mark(visible[i], line, 3.2);
      }
      if (line.ring && usable(line.ring[1], log_y)) {
        drawn += `<circle cx="${x.at(line.ring[0])}" cy="${y.at(line.ring[1])}" r="6" style="fill:none;stroke:${ink};stroke-width:1.8"/>`;
      }
      if (this.hover !== null) {
        const i = line.x.indexOf(this.hover);
        if (i >= 0 && points[i]) drawn += this.mark(points[i], line, 4.6);
      }
      return [null, line.name].includes(this.standsOut) ? drawn : `<g class="faint">${drawn}</g>`;
    }

    mark([left, top], { marker, colour }, size) {
      return `<path transform="translate(${left.toFixed(2)},${top.toFixed(2)})" d="${MARKERS[marker](size)}" style="fill:${colour};stroke:${colour}"/>`;
    }

    readOut() {
      for (const { name, entry } of this.entries) {
        entry.setAttribute("aria-pressed", String(!this.state.hidden.has(name)));
      }
      this.tip.hidden = this.hover === null;
      if (this.hover === null) return;
      const { data } = this;
      const read = this.entries
        .filter(({ name }) => !this.state.hidden.has(name))
        .map(({ name, line }) => {
          const mine = data.lines.filter((one) => one.name === name && one.x.includes(this.hover));
          const at = (one) => one.y[one.x.indexOf(this.hover)];
          const values = mine.map((one) => {
            const i = one.x.indexOf(this.hover);
            const meaning = Object.keys(data.styles).length > 1 && one.style !== "solid" ? `${data.styles[one.style]} ` : "";
            const band = one.low ? ` (${written(one.low[i], data.percent)} to ${written(one.high[i], data.percent)})` : "";
            return meaning + written(one.y[i], data.percent) + band;
          });
          return { name, line, values, height: mine.length ? at(mine.find((one) => one.style === "solid") || mine[0]) : null };
        })
        .filter(({ values }) => values.length)
        .sort((a, b) => (b.height ?? -Infinity) - (a.height ?? -Infinity)); // as the lines lie
      const left = read.length - MOST_READ;
      const place = Number.isInteger(this.hover) ? this.hover : Number(this.hover.toPrecision(Math.abs(this.hover) < 1e6 ? 6 : 12));
      this.tip.innerHTML =
        `<p class="at">${escaped(data.ticks[place] ?? `${data.x_label} ${placed(place)}`)}</p>` +
        read
          .slice(0, MOST_READ)
          .map(({ name, line, values }) => `<p>${this.swatch(line)}<span>${escaped(name)} <span class="value">${escaped(values.join(", "))}</span></span></p>`)
          .join("") +
        (left > 0 ? `<p class="note">and ${left} more below</p>` : "");
      const at = this.x.at(this.hover);
      const late = at > (this.box.left + this.box.right) / 2;
      this.tip.style.left = late ? "" : `${at + 12}px`;
      this.tip.style.right = late ? `${this.width - at + 12}px` : "";
    }
  }

  // A table that is wider than its card says so.
  const watched = new ResizeObserver((seen) => {
    for (const { target } of seen) target.classList.toggle("more", target.scrollWidth > target.clientWidth + 1);
  });

  const start = (root) => {
    for (const figure of root.querySelectorAll("figure:has(.chart)")) {
      if (!figure.classList.contains("alive")) new Chart(figure);
    }
    for (const table of root.querySelectorAll(".scroll")) watched.observe(table);
  };

  // Asks for the page again and again, and shows what is new in it.
  function live() {
    let last = new DOMParser().parseFromString(document.documentElement.outerHTML, "text/html");
    let version = "";
    const ids = (page) => [...page.querySelectorAll("[data-block]")].map((block) => block.id);
    const renew = (page) => {
      document.title = page.title;
      document.querySelector("header").innerHTML = page.querySelector("header").innerHTML;
      if (ids(page).join() === ids(last).join()) {
        for (const block of page.querySelectorAll("[data-block]")) {
          if (block.outerHTML === last.getElementById(block.id).outerHTML) continue;
          document.getElementById(block.id).replaceWith(document.importNode(block, true));
        }
      } else {
        document.querySelector("main").innerHTML = page.querySelector("main").innerHTML;
      }
      last = page;
      document.body.dataset.live = page.body.dataset.live;
      start(document);
    };
    const ask = async () => {
      try {
        const answer = await fetch("./", { headers: { "If-None-Match": version } });
        if (answer.status === 200) {
          renew(new DOMParser().parseFromString(await answer.text(), "text/html"));
          version = answer.headers.get("ETag");
        }
      } catch {} // the server is away: it may come back
      if (document.body.dataset.live === "yes") setTimeout(ask, POLL);
    };
    ask();
  }
  if (document.body.dataset.live === "yes") live();
  start(document);
})();
