document.addEventListener("DOMContentLoaded", () => {
  // Long names in tables break after an underscore, before they break anywhere.
  for (const word of document.querySelectorAll("td code .pre")) {
    word.innerHTML = word.innerHTML.replaceAll("_", "_<wbr>");
  }
  // A button on every block of code copies its text.
  if (!navigator.clipboard) return; // only offered to pages from https or this machine
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").textContent.trimEnd() + "\n");
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
