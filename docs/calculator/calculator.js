// What docs/calculator/make.py wrote, times what the reader chose. Bytes and times follow turboquant/cli/calc.py, line by line;
// tests/test_calculator_page.py compares the two.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("calculator-data").textContent);
  const page = document.getElementById("calculator");
  const inputs = Object.fromEntries([...page.querySelectorAll("[name]")].map((one) => [one.name, one]));
  const count = (number) => number.toLocaleString("en-US");
  const decimals = (number) => number.toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
  const sum = (list, of) => list.reduce((total, one) => total + of(one), 0);

  // ---- bytes ----

  function fullBytes(model, batch, tokens, itemBytes) {
    return itemBytes * batch * sum(model.layers, ([n, , stores, window]) => n * stores * Math.min(tokens, window || tokens));
  }

  function packedBytes(packed, spec, batch, tokens) {
    const rows = Math.ceil(Math.max(0, tokens - spec.sinks - spec.window) / data.page);
    const held = (need, most) => (need > 0 ? Math.min(most, Math.max(need, 16)) : 0);
    const exact = held(Math.min(tokens, spec.sinks), spec.sinks) + held(Math.min(tokens - spec.sinks, spec.window), spec.window);
    return packed.once + batch * (packed.sequence + 4 * tokens) + sum(packed.layers, ([n, pageBytes, tokenBytes, window]) => {
      const unseen = Math.floor(Math.max(0, tokens - window + 1 - data.page - spec.sinks) / data.page);
      const free = window && tokens > 1 ? batch * Math.min(rows, unseen) : 0;
      const pages = batch * rows - (free > Math.floor((batch * rows) / 64) + batch ? free : 0);
      return Math.round(n * pages * pageBytes) + n * batch * (4 * rows + exact * tokenBytes);
    });
  }

  function tokensThatFit(size, memory) {
    if (size(1) > memory) return 0;
    if (size(data.most) <= memory) return null;
    let fits = 1, tooMany = data.most;
    while (tooMany - fits > 1) {
      const half = Math.floor((fits + tooMany) / 2);
      if (size(half) <= memory) fits = half;
      else tooMany = half;
    }
    return fits;
  }

  // ---- time ----

  // [[how many layers, bytes that the attention of one reads]]
  function reads(cache, batch, tokens) {
    const seen = (window) => Math.min(tokens, window || tokens);
    if (!cache.packed) return cache.layers.map(([n, numbers, , window]) => [n, cache.itemBytes * batch * numbers * seen(window)]);
    const exact = cache.spec.sinks + cache.spec.window;
    return cache.packed.layers.map(([n, pageBytes, tokenBytes, window]) => {
      const kept = Math.min(seen(window), exact);
      return [n, batch * (kept * tokenBytes + ((seen(window) - kept) * pageBytes) / data.page)];
    });
  }

  function line(points, times, at) {
    const last = points.length - 1;
    if (at >= points[last]) return (times[last] * at) / points[last];
    const i = points.findIndex((point, j) => j > 0 && at < point);
    const share = Math.max(0, at - points[i - 1]) / (points[i] - points[i - 1]);
    return times[i - 1] + share * (times[i] - times[i - 1]);
  }

  function step(cache, gpu, batch, tokens) {
    if (!cache.column) return null;
    const layers = reads(cache, batch, tokens);
    const points = data.timed[cache.column], times = gpu.times[cache.column];
    const seconds = 1e-6 * sum(layers, ([n, read]) => n * line(points, times, gpu.scale * read));
    return { seconds, share: sum(layers, ([n, read]) => n * read) / seconds / gpu.speed };
  }

  // ---- all of it ----

  // The caches that are compared: {name, size: tokens -> bytes, tokens that fit, step}.
  function calculate({ model: name, batch, tokens, spec: specName, memory, gpu: gpuName }) {
    const model = data.models[name], gpu = data.gpus[gpuName];
    const caches = Object.entries(data.full).map(([full, itemBytes]) => ({
      name: full, column: "bf16", layers: model.layers, itemBytes, size: (tokens) => fullBytes(model, batch, tokens, itemBytes),
    }));
    const packed = model.packed[specName], spec = data.specs[specName];
    if (packed) {
      const size = (tokens) => packedBytes(packed, spec, batch, tokens);
      caches.push({ name: specName, column: spec.column, packed, spec, size });
    }
    for (const cache of caches) {
      cache.bytes = cache.size(tokens);
      cache.fit = memory === null ? undefined : tokensThatFit(cache.size, memory);
      cache.step = step(cache, gpu, batch, tokens);
    }
    return caches;
  }

  // The packed cache of every preset and number of bits, where there is one.
  function every(settings) {
    const names = Object.values(data.groups).flat().filter((spec) => data.models[settings.model].packed[spec]);
    return names.map((spec) => calculate({ ...settings, spec }).at(-1));
  }

  // ---- the page ----

  // What a slider stands for at a power of two.
  const amounts = {
    batch: (power) => `${2 ** power}`,
    tokens: (power) => `${128 * Math.round(2 ** power / 128)}`,
    memory: (power) => `${Math.round(2 ** power)}GB`,
  };
  const sliders = [...page.querySelectorAll("[data-of]")];

  const written = () => Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value.trim()]));

  function checked(text) {
    const wrong = (name, wants) => { throw new Error(`${name} must be ${wants}, got ${JSON.stringify(text[name])}.`); };
    for (const [name, known] of [["model", data.models], ["spec", data.specs], ["gpu", data.gpus]])
      if (!Object.hasOwn(known, text[name])) wrong(name, "one of the list");
    const whole = (name) => {
      if (!/^\d{1,10}$/.test(text[name]) || +text[name] < 1 || +text[name] > data.most) wrong(name, `in 1..${data.most}`);
      return +text[name];
    };
    const found = /^(\d+(?:\.\d+)?) ?([KMGT]?I?B)$/.exec(text.memory.toUpperCase());
    const memory = found ? Math.floor(found[1] * data.units[found[2]]) : null;
    if (text.memory && !memory) wrong("memory", "empty or a size above 0 such as 40GB or 512MiB");
    return { ...text, batch: whole("batch"), tokens: whole("tokens"), memory };
  }

  const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const put = (name, html) => { page.querySelector(`.${name}`).innerHTML = html; };

  function show() {
    const text = written();
    let settings;
    try {
      settings = checked(text);
    } catch (error) {
      put("wrong", escaped(error.message));
      page.classList.add("is-wrong");
      return;
    }
    page.classList.remove("is-wrong");
    put("wrong", "");
    history.replaceState(null, "", `#${new URLSearchParams(text)}`);
    const model = data.models[settings.model], gpu = data.gpus[settings.gpu];
    const caches = calculate(settings);
    const amount = { batch: settings.batch, tokens: settings.tokens, memory: settings.memory / 1e9 };
    for (const slider of sliders) slider.value = Math.log2(amount[slider.dataset.of] || 1);
    put("about", escaped(model.about));
    const why = model.unfit[settings.spec] || model.refused;
    put("refused", why ? escaped(`Its cache packed by ${text.spec} is not counted: ${why}.`) : "");
    put("results", table(caches, caches, text, gpu));
    put("how", how(text.gpu, gpu));
    put("all", model.refused ? "" : table(every(settings), caches, text, gpu));
    put("chart", chart(caches, settings, text.memory));
    const memory = text.memory ? ` --memory ${text.memory.replace(" ", "")}` : "";
    put("command", escaped(`turboquant calc ${text.model} --batch ${settings.batch} --tokens ${settings.tokens} ` +
      `--spec ${text.spec}${memory} --gpu ${text.gpu}`));
  }

  // Of `shown`, with ratios to the bf16 of `caches`.
  function table(shown, caches, { memory, gpu: name }, gpu) {
    const bf16 = caches.find((cache) => cache.name === "bf16").bytes;
    const heads = ["cache", "bytes", "GiB", "to bf16", ...(memory ? [`tokens in ${escaped(memory)}`] : []),
      `step, ${name.toUpperCase()} (${gpu.measured ? "estimate" : "guess"})`, "share of bandwidth"];
    const rows = shown.map((cache) => [
      `<i class="${cache.packed ? "packed" : cache.name}"></i>${escaped(cache.name)}`,
      count(cache.bytes), decimals(cache.bytes / 2 ** 30), `${(bf16 / cache.bytes).toFixed(2)}x`,
      ...(memory ? [cache.fit === null ? "no limit" : count(cache.fit)] : []),
      ...(cache.step ? [`${decimals(1e3 * cache.step.seconds)} ms`, `${(100 * cache.step.share).toFixed(0)}%`] : ["not timed", ""]),
    ]);
    const row = (cells, tag) => `<tr>${cells.map((cell) => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
    return `<table><thead>${row(heads, "th")}</thead><tbody>${rows.map((cells) => row(cells, "td")).join("")}</tbody></table>`;
  }

  function how(name, gpu) {
    const speed = `${(gpu.speed / 1e12).toFixed(2)} TB/s that the ${name.toUpperCase()} ${gpu.measured ? "was measured" : "is assumed"} to read`;
    return "Bytes are those of the cache alone, with sinks and window in bfloat16. A step is the attention of all layers in one " +
      `decoding step, without weights and the rest of the model. Its time is ${gpu.measured ?
        "an estimate from times measured on this GPU" : "a guess: times measured on an H100, scaled by the bandwidths"}. ` +
      `The share is that of the ${speed}. fp32 and fp8 are timed as bf16 over their bytes.`;
  }

  // Bytes against tokens, up to twice the chosen number: one line for each cache, the memory as a dashed line across.
  function chart(caches, { tokens: chosen, memory }, memoryText) {
    const width = Math.max(280, Math.min(760, page.clientWidth || 760)), height = 300;
    const [left, right, top, bottom] = [52, 56, 26, 40];
    const most = Math.max(2 * chosen, 2);
    const highest = Math.max(...caches.map((cache) => cache.size(most)));
    const [unit, unitBytes] = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, size]) => highest >= size) ?? ["bytes", 1];
    const rough = highest / unitBytes / 4, power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const peak = Math.ceil(highest / unitBytes / tick) * tick * unitBytes;
    const x = (tokens) => left + ((width - left - right) * tokens) / most;
    const y = (bytes) => top + (height - top - bottom) * (1 - bytes / peak);
    const text = (at, down, anchor, words, kind = "") => `<text x="${at}" y="${down}" text-anchor="${anchor}" class="${kind}">${words}</text>`;
    const rule = (x1, y1, x2, y2, kind) => `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" class="${kind}"/>`;
    let drawn = text(4, 14, "start", `${unit} of cache`);
    for (let at = 0; at <= peak * 1.001; at += tick * unitBytes)
      drawn += rule(left, y(at), width - right, y(at), "grid") + text(left - 6, y(at) + 4, "end", +(at / unitBytes).toPrecision(4));
    drawn += rule(x(chosen), top, x(chosen), height - bottom, "mark");
    for (const tokens of [0, chosen, most]) drawn += text(x(tokens), height - bottom + 16, "middle", count(tokens));
    drawn += text(x(chosen), height - 6, "middle", "tokens of each sequence");
    if (memory !== null && memory <= peak)
      drawn += rule(left, y(memory), width - right, y(memory), "mark") + text(left + 4, y(memory) - 4, "start", escaped(memoryText));
    let lowest = Infinity; // the ends of lines that lie close get their names above each other
    for (const cache of [...caches].sort((a, b) => a.size(most) - b.size(most))) {
      const kind = cache.packed ? "packed" : cache.name;
      const points = Array.from({ length: 97 }, (_, i) => Math.max(1, Math.round((most * i) / 96)));
      drawn += `<polyline class="${kind}" points="${points.map((n) => `${x(n).toFixed(1)},${y(cache.size(n)).toFixed(1)}`).join(" ")}"/>`;
      drawn += `<circle class="${kind}" cx="${x(chosen)}" cy="${y(cache.bytes)}" r="3"/>`;
      lowest = Math.min(y(cache.size(most)) + 4, lowest - 13);
      drawn += text(width - right + 6, lowest, "start", kind, kind);
    }
    return `<svg width="${width}" height="${height}" role="img" aria-label="Bytes of each cache against tokens">${drawn}</svg>`;
  }

  function options(name, groups) {
    const option = ([value, label]) => `<option value="${escaped(value)}">${escaped(label)}</option>`;
    inputs[name].innerHTML = groups.map(([label, some]) =>
      label ? `<optgroup label="${escaped(label)}">${some.map(option).join("")}</optgroup>` : some.map(option).join("")).join("");
  }

  function readLink() {
    for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
      if (Object.hasOwn(inputs, name)) inputs[name].value = value;
    show();
  }

  const same = (name) => [name, name];
  options("model", [["", Object.keys(data.models).map(same)]]);
  options("spec", Object.entries(data.groups).map(([label, names]) => [label, names.map(same)]));
  options("gpu", [["", Object.entries(data.gpus).map(([name, gpu]) =>
    [name, `${name.toUpperCase()} (${gpu.measured ? "measured" : "guess"})`])]]);
  for (const [name, value] of [["model", "llama-3.1-8b"], ["spec", "default"], ["gpu", "h100"]]) inputs[name].value = value;
  page.addEventListener("input", ({ target }) => {
    if (target.dataset.of) inputs[target.dataset.of].value = amounts[target.dataset.of](+target.value);
    show();
  });
  window.addEventListener("hashchange", readLink);
  window.addEventListener("resize", show);
  readLink();
  page.calculate = calculate; // for the test
})();
