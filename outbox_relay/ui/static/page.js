// Times in the reader's zone, and fresh figures every five seconds while the page is looked at.
"use strict";
(() => {
  const SECONDS = 5;

  function format(at) {  // the form in which the server shows times in UTC
    const offset = -at.getTimezoneOffset();
    const two = (number) => String(number).padStart(2, "0");
    const size = Math.abs(offset);
    const zone = offset === 0 ? "UTC" : `${offset < 0 ? "-" : "+"}${two(Math.floor(size / 60))}:${two(size % 60)}`;
    return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ` +
      `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())} ${zone}`;
  }

  function showTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const at = new Date(element.dateTime);
      if (!Number.isNaN(at.getTime())) element.textContent = format(at);
    }
  }

  function isInUse(live) {
    const selection = document.getSelection();
    return live.contains(document.activeElement) || live.querySelector("details[open]") !== null ||
      (selection !== null && !selection.isCollapsed && live.contains(selection.anchorNode));
  }

  document.addEventListener("DOMContentLoaded", () => {
    showTimes(document);
    const live = document.getElementById("live");
    const connection = document.getElementById("connection");
    if (!live || !window.htmx) return;
    document.body.addEventListener("htmx:afterSwap", () => { showTimes(live); connection.textContent = ""; });
    for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) {
      document.body.addEventListener(name, () => { connection.textContent = "Not up to date: the server did not answer."; });
    }
    setInterval(() => {
      if (!document.hidden && !isInUse(live)) window.htmx.trigger(document.body, "refresh");
    }, SECONDS * 1000);
  });
})();
