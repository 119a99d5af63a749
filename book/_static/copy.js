// A copy button on each annotated excerpt; the code reads the same without it.
(() => {
  "use strict";
  const lineText = (line) => (" ".repeat(Number(line.dataset.in)) + line.querySelector("code").textContent).trimEnd();
  for (const figure of document.querySelectorAll("figure.src")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "src-copy";
    button.textContent = "复制";
    button.setAttribute("aria-label", "复制这段源码");
    button.addEventListener("click", async () => {
      const code = [...figure.querySelectorAll(".src-line")].map(lineText).join("\n");
      try {
        await navigator.clipboard.writeText(code);
        button.textContent = "已复制";
      } catch {
        button.textContent = "浏览器不允许复制";
      }
      setTimeout(() => (button.textContent = "复制"), 2000);
    });
    figure.querySelector(".src-head").append(button);
  }
})();
