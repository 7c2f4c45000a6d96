// SPDX-License-Identifier: Apache-2.0
// Parts of a page with data-live are loaded again every few seconds, while their box is ticked.
"use strict";

const EVERY_MS = 3000;

async function update(part) {
  const box = document.getElementById(part.dataset.live);
  if (!box.checked || document.visibilityState !== "visible") return;
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (answer.status === 401) location.reload(); // the session has ended
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
  part.replaceChildren(...fresh.getElementById(part.id).childNodes);
  if (focused) document.getElementById(focused)?.focus();
}

for (const part of document.querySelectorAll("[data-live]")) {
  setInterval(() => update(part).catch(() => {}), EVERY_MS); // the server may be away for a while
}
