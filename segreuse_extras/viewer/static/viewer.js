// SPDX-License-Identifier: Apache-2.0
// A prompt as a strip: arrow keys go from stretch to stretch, and its row says what it is.
"use strict";

function wire(strip) {
  const bars = [...strip.querySelectorAll("a")];
  const detail = strip.querySelector(".detail");
  const cursor = strip.querySelector(".frame").cloneNode(); // above all bars, so that it is whole
  cursor.setAttribute("class", "cursor");
  strip.querySelector("svg").append(cursor);
  const row = (bar) => document.getElementById(bar.getAttribute("href").slice(1));

  function show(bar) {
    for (const other of bars) {
      row(other).classList.toggle("current", other === bar);
      other.setAttribute("tabindex", other === bar ? "0" : "-1");
    }
    for (const side of ["x", "width"]) {
      cursor.setAttribute(side, bar.querySelector(".frame").getAttribute(side));
    }
    const text = row(bar).querySelector(".text").textContent;
    detail.textContent = bar.getAttribute("aria-label") + (text && ". “" + text + "”");
  }

  strip.addEventListener("focusin", (event) => show(event.target.closest("a")));
  strip.addEventListener("pointerover", (event) => {
    const bar = event.target.closest("a");
    if (bar) show(bar);
  });
  strip.addEventListener("keydown", (event) => {
    const here = bars.indexOf(document.activeElement);
    const there = {
      ArrowRight: here + 1,
      ArrowLeft: here - 1,
      Home: 0,
      End: bars.length - 1,
    }[event.key];
    if (here < 0 || there === undefined) return;
    event.preventDefault();
    bars[Math.min(Math.max(there, 0), bars.length - 1)].focus();
  });
  bars.forEach((bar, i) => bar.setAttribute("tabindex", i ? "-1" : "0"));
}

document.querySelectorAll(".strip").forEach(wire);
