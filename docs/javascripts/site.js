// What the theme adds to a page is no landmark of its own, and what scrolls can be reached by keyboard.
new MutationObserver(() => {
  for (const each of document.querySelectorAll(".md-code__nav:not([role])")) each.setAttribute("role", "presentation");
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap, p:has(> img)")) each.tabIndex = 0;
}).observe(document.body, { childList: true, subtree: true });
