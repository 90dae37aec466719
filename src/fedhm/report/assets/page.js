// Hands the figures to plotly, and the page's switches and news to the figures. All drawing is plotly's.
"use strict";
(() => {
  const options = { responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] };
  let figures = {};

  const unchecked = () => [...document.querySelectorAll(".switches input:not(:checked)")].map((box) => [box.name, box.value]);

  // The figures have the colours of light pages. A dark page's style sheet names the twin of each.
  const twin = (colour) => getComputedStyle(document.documentElement).getPropertyValue(`--c${colour.slice(1)}`).trim() || colour;
  function coloured(trace) {
    const changed = { ...trace };
    for (const part of ["line", "marker"]) if (trace[part]?.color) changed[part] = { ...trace[part], color: twin(trace[part].color) };
    if (trace.fillcolor) changed.fillcolor = twin(trace.fillcolor);
    return changed;
  }

  function draw(figure) {
    const place = figure.querySelector(".interactive"), { data, layout } = figures[figure.id];
    const off = unchecked();
    const isOff = (trace) => off.some(([name, value]) => trace.meta[name] === value);
    place.hidden = false;
    figure.classList.add("drawn");
    const traces = data.map((trace) => ({ ...coloured(trace), visible: !isOff(trace) }));
    return Plotly.react(place, traces, layout, options);
  }

  function drawAll() {
    for (const form of document.querySelectorAll(".switches")) form.hidden = false;
    // what lies folded has no width yet, and is drawn when it is opened
    for (const figure of document.querySelectorAll("figure")) if (!figure.closest("details:not([open])")) draw(figure);
  }

  function read() { figures = JSON.parse(document.getElementById("figures").textContent); }

  document.addEventListener("change", (event) => { if (event.target.closest(".switches")) drawAll(); });
  document.addEventListener("toggle", (event) => { if (event.target.matches("details.folded[open]")) drawAll(); }, true);

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  // A run that goes on: what is new takes the place of what was, with the same switches off, tables open and zoom.
  async function renew(address, known) {
    const answer = await fetch(address, { headers: known ? { "If-None-Match": known } : {} });
    if (answer.status !== 200) return known;
    const news = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const old = document.querySelector("main"), off = unchecked();
    for (const box of news.querySelectorAll(".switches input"))
      box.checked = !off.some(([name, value]) => box.name === name && box.value === value);
    const open = [...old.querySelectorAll("details")].filter((one) => one.open).map((one) => one.querySelector("summary").textContent);
    for (const one of news.querySelectorAll("details")) one.open = open.includes(one.querySelector("summary").textContent);
    for (const figure of old.querySelectorAll("figure.drawn")) {
      const place = news.querySelector(`figure[id="${CSS.escape(figure.id)}"] .interactive`);
      if (place) place.replaceWith(figure.querySelector(".interactive"));
    }
    old.replaceWith(news);
    read();
    drawAll();
    return answer.headers.get("ETag");
  }

  read();
  drawAll();
  const address = document.body.dataset.live;
  if (address) {
    let known = null;
    const look = () => renew(address, known).then((tag) => { known = tag; document.body.classList.remove("alone"); },
      () => document.body.classList.add("alone")).finally(() => setTimeout(look, 2000));
    look();
  }
})();
