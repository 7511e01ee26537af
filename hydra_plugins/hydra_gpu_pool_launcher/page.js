"use strict";
// What the page does beyond being read: hints, sorting, plots. All text of the app's is set as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const table = document.getElementById("results");
  const tip = document.getElementById("tip");
  const rows = new Map(table ? Array.from(table.tBodies[0].rows, (row) => [Number(row.id.slice(1)), row]) : []);
  document.documentElement.classList.add("js");

  const cell = (num, place) => (rows.has(num) && place >= 0 ? rows.get(num).cells[place].textContent : "");
  const places = (kind) => data.columns.map((column, place) => (column.kind === kind ? place : -1)).filter((p) => p >= 0);
  const pairs = (num, kind) =>
    places(kind).filter((place) => cell(num, place)).map((place) => `${data.columns[place].name} = ${cell(num, place)}`);

  // --- what a job is called when one points at it ---

  const about = (num) => [`job ${num}`, ...pairs(num, "override"), ...pairs(num, "value")].join("\n");

  const span = (seconds) => {
    if (seconds < 60) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  };

  const aboutBar = (bar) => {
    const [num, attempt, state, start, took, slots] = data.tries[bar.dataset.t];
    const count = Number(bar.dataset.n || 1);
    if (count > 1) return `${count} tries, ${data.states[state]}\nthe first is of job ${num}\nin slot ${slots}`;
    const again = attempt > 1 ? `, try ${attempt}` : "";
    const when = `${span(took)} in slot ${slots}, from ${span(start)} on`;
    return [`job ${num}${again}: ${data.states[state]}`, when, ...pairs(num, "override"), ...pairs(num, "value")].join("\n");
  };

  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(x + 14, innerWidth - width - 8));
    const top = y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18;
    tip.style.transform = `translate(${left}px, ${top}px)`;
  };
  const hide = () => { tip.hidden = true; };

  let marked = [];
  const mark = (num, scroll) => {
    marked.forEach((element) => element.classList.remove("on"));
    marked = [...document.querySelectorAll(`circle[data-j="${num}"]`), ...bars.filter((bar) => jobOf(bar) === num)];
    if (rows.has(num)) {
      marked.push(rows.get(num));
      if (scroll) rows.get(num).scrollIntoView({ block: "center" });
    }
    marked.forEach((element) => element.classList.add("on"));
  };

  const jobOf = (element) => (element.dataset.j ? Number(element.dataset.j) : data.tries[element.dataset.t][0]);
  const words = (element) => (element.dataset.t ? aboutBar(element) : about(jobOf(element)));
  const target = (event) => event.target.closest && event.target.closest("rect[data-t], circle[data-j]");

  document.addEventListener("pointermove", (event) => {
    const found = target(event);
    if (found) show(words(found), event.clientX, event.clientY);
    else if (event.pointerType === "mouse" && !(document.activeElement && target({ target: document.activeElement }))) hide();
  });
  document.addEventListener("click", (event) => {
    const found = target(event);
    if (found) {
      mark(jobOf(found), false);
      show(words(found), event.clientX, event.clientY);
    } else hide();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, { passive: true });

  // --- the timeline, by keyboard: one stop for the tab key, arrows from bar to bar ---

  const bars = Array.from(document.querySelectorAll("rect[data-t]"));
  const lanes = Array.from(document.querySelectorAll(".lane"), (lane) => Array.from(lane.children)).filter((lane) => lane.length);
  const focus = (bar) => {
    bars.forEach((each) => { if (each.getAttribute("tabindex") === "0") each.setAttribute("tabindex", "-1"); });
    bar.setAttribute("tabindex", "0");
    bar.focus();
  };
  const start = (bar) => bar.x.baseVal.value;
  const timeline = document.getElementById("timeline");
  if (bars.length) {
    bars[0].setAttribute("tabindex", "0");
    bars[0].setAttribute("aria-label", aboutBar(bars[0]));
    timeline.addEventListener("focusin", (event) => {
      const bar = target(event);
      if (!bar || !bar.matches(":focus-visible")) return;
      const { right, bottom } = bar.getBoundingClientRect();
      bar.setAttribute("aria-label", aboutBar(bar));
      show(aboutBar(bar), Math.min(right, innerWidth), bottom);
    });
    timeline.addEventListener("focusout", hide);
    timeline.addEventListener("keydown", (event) => {
      const bar = target(event);
      if (!bar) return;
      const lane = lanes.findIndex((each) => each.includes(bar)), at = lanes[lane].indexOf(bar);
      const beside = (row) => row && row.reduce((a, b) => (Math.abs(start(b) - start(bar)) < Math.abs(start(a) - start(bar)) ? b : a));
      const next = {
        ArrowRight: () => lanes[lane][at + 1], ArrowLeft: () => lanes[lane][at - 1],
        ArrowDown: () => beside(lanes[lane + 1]), ArrowUp: () => beside(lanes[lane - 1]),
        Home: () => lanes[lane][0], End: () => lanes[lane][lanes[lane].length - 1],
        Enter: () => { mark(jobOf(bar), true); return bar; },
      }[event.key];
      if (!next) return;
      event.preventDefault();
      const found = next();
      if (found) focus(found);
    });
  }

  // --- the table, sorted by a click on a header, and the other way round by another one ---

  const weight = (text) => {
    const clock = /^(?:(\d+):)?(\d+):(\d\d)$/.exec(text);
    if (clock) return Number(clock[1] || 0) * 3600 + Number(clock[2]) * 60 + Number(clock[3]);
    const number = Number(text.replace(/ s$/, "").replace(/^([+-]?)inf$/, "$1Infinity"));
    return text === "" || Number.isNaN(number) ? null : number;
  };
  const compare = (a, b) => {
    if (a.text === "" || b.text === "") return 0;
    if (a.weight !== null && b.weight !== null) return a.weight - b.weight;
    if (a.weight !== null || b.weight !== null) return a.weight !== null ? -1 : 1;
    return a.text < b.text ? -1 : a.text > b.text ? 1 : 0;
  };
  const sort = (head) => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const keyed = Array.from(rows.values(), (row) => {
      const text = row.cells[head.cellIndex].textContent;
      return { row, text, weight: weight(text) };
    });
    // What is empty comes last, either way.
    keyed.sort((a, b) => (a.text === "") - (b.text === "") || (down ? -1 : 1) * compare(a, b));
    table.tBodies[0].append(...keyed.map((each) => each.row));
  };
  if (table) {
    for (const head of table.tHead.rows[0].cells) head.firstElementChild.addEventListener("click", () => sort(head));
    table.tBodies[0].addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) mark(Number(row.id.slice(1)), false);
    });
  }

  // --- plots: the chosen value against each override that is a number, or one of a few words ---

  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const brief = (number) => {
    if (number === 0) return "0";
    const size = Math.abs(number);
    if (size >= 1e5 || size < 1e-3) return number.toExponential(2).replace(/\.?0*e\+?/, "e");
    return String(Number(number.toPrecision(4)));
  };
  const steps = (low, high) => {
    const raw = (high - low) / 5, ten = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * ten).find((s) => s >= raw);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  };
  // A scale: where a number is, from 0 to 1, and which marks to draw.
  const scale = (numbers, ratio) => {
    let low = Math.min(...numbers), high = Math.max(...numbers);
    if (low > 0 && high / low >= ratio) {
      const [a, b] = [Math.log10(low), Math.log10(high)], pad = (b - a) * 0.06;
      const each = Math.max(1, Math.ceil((b - a) / 4)), marks = [];
      for (let k = Math.ceil(a - 1e-9); k <= b + 1e-9; k += each) marks.push(10 ** k);
      if (marks.length < 2) marks.splice(0, marks.length, low, high);
      return { at: (n) => (Math.log10(n) - a + pad) / (b - a + 2 * pad), marks, log: true, label: brief };
    }
    if (low === high) [low, high] = low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const pad = (high - low) * 0.06;
    return { at: (n) => (n - low + pad) / (high - low + 2 * pad), marks: steps(low, high), log: false, label: brief };
  };
  const ordinal = (words) => ({
    at: (word) => (words.indexOf(word) + 0.5) / words.length, marks: words, log: false,
    label: (word) => (word.length > 12 ? `${word.slice(0, 11)}…` : word),
  });

  const plot = (place, points) => {
    const numeric = points.every((point) => weight(point.x) !== null && Number.isFinite(weight(point.x)));
    const words = [...new Set(points.map((point) => point.x))].sort();
    if (!numeric && words.length > 8) return null;
    const x = numeric ? scale(points.map((point) => weight(point.x)), 50) : ordinal(words);
    const y = scale(points.map((point) => point.y), 1000);
    const [width, height, left, bottom] = [360, 220, 46, 24];
    const px = (value) => left + x.at(value) * (width - left), py = (value) => (1 - y.at(value)) * (height - bottom);
    const svg = make("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img" });
    const name = data.columns[place].name;
    svg.setAttribute("aria-label", `${chosen().name} against ${name}: ${points.length} jobs`);
    for (const mark of y.marks) {
      svg.append(make("line", { x1: left, x2: width, y1: py(mark), y2: py(mark) }));
      svg.append(make("text", { x: left - 8, y: py(mark) + 4, "text-anchor": "end" }, y.label(mark)));
    }
    for (const mark of x.marks) svg.append(make("text", { x: px(mark), y: height - 6, "text-anchor": "middle" }, x.label(mark)));
    const radius = points.length > 500 ? 2.5 : points.length > 100 ? 3.5 : 4.5;
    for (const point of points) {
      // In a column of words, dots stand side by side.
      const aside = numeric ? 0 : (((point.num * 0.618) % 1) - 0.5) * Math.min(40, (width - left) / words.length / 2);
      const at = numeric ? px(weight(point.x)) : px(point.x) + aside;
      svg.append(make("circle", { cx: at.toFixed(1), cy: py(point.y).toFixed(1), r: radius, "data-j": point.num }));
    }
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const small = document.createElement("small");
    caption.textContent = name;
    small.textContent = x.log && y.log ? " log, both ways" : x.log ? " log" : y.log ? " log upwards" : "";
    caption.append(small);
    figure.append(caption, svg);
    return figure;
  };

  const key = document.getElementById("key"), plots = document.getElementById("plots");
  const chosen = () => data.best[key ? key.selectedIndex : 0];
  const draw = () => {
    const best = chosen();
    for (const end of ["low", "high"]) {
      const [text, num] = best[end], link = document.getElementById(`${end}-job`);
      document.getElementById(end).textContent = text;
      link.textContent = `job ${num}`;
      link.href = `#j${num}`;
      document.getElementById(`${end}-overrides`).textContent = pairs(num, "override").map((p) => p.replace(" = ", "=")).join(", ");
    }
    const figures = [];
    for (const place of places("override").slice(0, 12)) {
      const points = [];
      for (const num of rows.keys()) {
        const y = weight(cell(num, best.column)), x = cell(num, place);
        if (x !== "" && y !== null && Number.isFinite(y)) points.push({ num, x, y });
      }
      const figure = points.length > 1 && plot(place, points);
      if (figure) figures.push(figure);
    }
    plots.replaceChildren(...figures);
  };
  if (plots) {
    draw();
    if (key) key.addEventListener("change", draw);
  }
})();
