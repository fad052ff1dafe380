// Adds a button to every block of code, which copies the code without prompts.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const code = block.querySelector("pre");
    if (!code || code.closest("table.highlighttable")) continue;
    const text = code.innerText;
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text.replace(/^(\$|>>>) /gm, "").trimEnd());
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.style.position = "relative";
    block.append(button);
  }
});
