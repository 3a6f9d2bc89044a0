// A button beside each block of code copies it; of a console's block, the commands alone.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const text = block.textContent.trimEnd();
    const commands = text.split("\n").filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(commands.length ? commands.join("\n") : text);
        button.textContent = "copied";
      } catch {
        button.textContent = "not copied"; // the browser does not allow it
      }
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    block.append(button);
  }
});
