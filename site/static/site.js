// What scrolls by itself can be reached by the keyboard; what does not is no stop on the way.
const scrollers = document.querySelectorAll(".table-wrapper, .figure.wide, div.math, .highlight pre");
const mark = () => scrollers.forEach(element => {
  if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
  else element.removeAttribute("tabindex");
});
addEventListener("load", mark);
addEventListener("resize", mark);
