"use strict";
// A chat with a model of the swarm, over the API of the peer that this page comes from. What a model says is text, never markup.

const at = (id) => document.getElementById(id);
const messages = []; // {role, content}, as the API takes them
let running = null; // the AbortController of the answer that is being given

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function show(role, text) {
  const article = document.createElement("article");
  article.className = role;
  article.textContent = text;
  at("said").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

async function problem(response) {
  const body = await response.json().catch(() => ({}));
  return { message: `HTTP ${response.status}`, ...body.error };
}

async function loadModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await problem(response);
    const { data } = await response.json();
    at("model").replaceChildren(...data.map((model) => new Option(model.id)));
    if (!data.length) show("error", "The swarm serves no model now.");
  } catch (error) {
    show("error", error.message);
  }
}

// The `choices[0]` of each event of a stream; throws {message, code} for an error, whenever it comes.
async function* stream(path, body) {
  const response = await fetch(path, {
    method: "POST", headers: headers(), signal: running.signal, body: JSON.stringify({ ...body, stream: true }),
  });
  if (!response.ok) throw await problem(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", part; !(part = await reader.read()).done; ) {
    const events = (text + part.value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw value.error;
      yield value.choices[0];
    }
  }
}

async function answer(article) {
  const settings = {
    model: at("model").value, temperature: Number(at("temperature").value), max_tokens: Number(at("tokens").value),
  };
  const log = at("said");
  const add = (text) => {
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    article.textContent += text ?? "";
    if (follow) log.scrollTop = log.scrollHeight;
  };
  try {
    for await (const choice of stream("v1/chat/completions", { ...settings, messages })) add(choice.delta.content);
  } catch (error) {
    if (error.code !== "no_chat_template") throw error; // a model that goes on from a text
    const prompt = messages.at(-1).content;
    for await (const choice of stream("v1/completions", { ...settings, prompt })) add(choice.text);
  }
}

async function ask(event) {
  event.preventDefault();
  const text = at("text").value;
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  show("user", text);
  at("text").value = "";
  const article = show("assistant", "");
  running = new AbortController();
  at("send").hidden = !(at("stop").hidden = false);
  try {
    await answer(article);
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (article.textContent) messages.push({ role: "assistant", content: article.textContent });
  else { messages.pop(); article.remove(); }
  running = null;
  at("send").hidden = !(at("stop").hidden = true);
  at("text").focus();
}

at("ask").addEventListener("submit", ask);
at("stop").addEventListener("click", () => running?.abort());
at("key").addEventListener("change", loadModels);
at("new").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  at("said").replaceChildren();
  at("text").focus();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
loadModels();
