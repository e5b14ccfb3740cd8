"use strict";
const drop = document.getElementById("drop"), answers = document.getElementById("answers");

function add(parent, kind, text) {
  const made = parent.appendChild(document.createElement(kind));
  if (text !== undefined) made.textContent = text;
  return made;
}

function picture(card, address, words) {
  const figure = add(card, "figure"), image = add(figure, "img");
  image.onerror = () => figure.remove(); // browsers show no TIFF
  image.src = address;
  image.alt = words;
  add(figure, "figcaption", words).className = "note";
}

function show(card, found) {
  const title = card.querySelector("h2");
  if (found.error) {
    add(card, "p", found.error);
    return;
  }
  const best = found.classes[0].class;
  const said = found.labels ? found.labels.join(", ") || "none" : best;
  title.textContent += ": " + (found.answer === null ? "unsure" : said);
  if (found.heat_map) picture(card, found.heat_map, "Orange: what speaks for " + best);
  const list = add(card, "dl");
  for (const one of found.classes) {
    add(list, "dt", one.class);
    const value = add(list, "dd"), bar = add(value, "progress");
    bar.value = one.probability;
    bar.setAttribute("aria-label", one.class);
    add(value, "output", (100 * one.probability).toFixed(1) + "%");
  }
}

async function ask(file) {
  const card = document.createElement("article");
  card.className = "card photo";
  add(card, "h2", file.name);
  answers.prepend(card);
  picture(card, URL.createObjectURL(file), "The photo");
  try {
    const answer = await fetch("classify", { method: "POST", body: file });
    const is_known = answer.ok || answer.status === 400;
    show(card, is_known ? await answer.json() : { error: "It was not answered (" + answer.status + ")." });
  } catch (error) {
    show(card, { error: "It was not answered: is the photo too large, or is the server stopped?" });
  }
}

async function askAll(files) {
  for (const file of files) await ask(file);
}

drop.querySelector("input").addEventListener("change", (event) => askAll([...event.target.files]));
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop") askAll([...event.dataTransfer.files]);
  });
}
