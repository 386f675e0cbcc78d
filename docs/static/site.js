// The keyboard can reach elements that scroll on their own, and skips the others.
const scrollers = document.querySelectorAll(".table-wrapper, .figure.wide, div.math, .highlight pre");
const mark = () => scrollers.forEach(element => {
  if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
  else element.removeAttribute("tabindex");
});
addEventListener("load", mark);
addEventListener("resize", mark);

// The other language opens at the same heading.
for (const link of document.querySelectorAll("a.language"))
  link.addEventListener("click", () => { link.hash = location.hash; });
