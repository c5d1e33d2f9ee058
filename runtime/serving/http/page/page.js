"use strict";
// A chat with a model of the swarm, over the API of the peer that this page comes from. What a model says is text, never markup.

const at = (id) => document.getElementById(id);
let messages = []; // {role, content}, as the API takes them
let running = null; // the AbortController of the answer that is being given

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function show(role, text) {
  const article = element("article", role, text);
  article.setAttribute("aria-label", { user: "You", assistant: at("model").value, error: "Error" }[role]);
  at("said").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

// Does what changes the log, and stays at its end if that was in sight.
function following(change) {
  const log = at("said");
  const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (follow) log.scrollTop = log.scrollHeight;
}

// The peers that run an answer's stages, in a line below it; who took over from whom while it was given, in lines of its own.
class Route {
  constructor(article) {
    this.article = article;
    this.list = element("ol", "route");
    this.list.setAttribute("aria-label", "Route");
    this.names = [];
  }

  show({ gateway, stages }) {
    if (!this.list.isConnected) this.article.after(this.list);
    const asked = this.hop(gateway.name, `the peer that was asked: ${gateway.peer}`, gateway, "stage 0");
    const hops = stages.map((each, i) => {
      const next = `stage ${(i + 1) % stages.length}`;
      return this.hop(`${i}: ${each.name}`, `stage ${i}: ${each.peer}`, each, next);
    });
    this.list.replaceChildren(asked, ...hops);
    stages.forEach(({ name }, i) => {
      const before = this.names[i] ?? name;
      if (before !== name) this.list.before(element("p", "note", `${name} took stage ${i} over from ${before}`));
    });
    this.names = stages.map((each) => each.name);
  }

  hop(text, title, { round_trip_ms: trip }, next) {
    const item = element("li", "", text);
    item.title = title;
    if (trip !== null) {
      const way = element("span", "trip", `${trip < 10 ? trip.toFixed(1) : Math.round(trip)} ms`);
      way.title = `to ${next} and back`;
      item.append(" ", way);
    }
    return item;
  }
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

// What each event of a stream says; throws {message, code} for an error, whenever it comes.
async function* stream(path, body) {
  const response = await fetch(path, {
    method: "POST", headers: headers(), signal: running.signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_route: true } }),
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
      yield value;
    }
  }
  throw new Error("The peer hung up before the answer had ended.");
}

async function answer(said, article) {
  const settings = {
    model: at("model").value, temperature: Number(at("temperature").value), max_tokens: Number(at("tokens").value),
  };
  const route = new Route(article);
  const read = async (path, body, text) => {
    for await (const { choices: [choice], route: told } of stream(path, { ...settings, ...body })) {
      following(() => {
        if (told) route.show(told);
        if (choice) article.textContent += text(choice) ?? "";
      });
    }
  };
  try {
    await read("v1/chat/completions", { messages: said }, (choice) => choice.delta.content);
  } catch (error) {
    if (error.code !== "no_chat_template") throw error; // a model that goes on from a text
    await read("v1/completions", { prompt: said.at(-1).content }, (choice) => choice.text);
  }
}

async function ask(event) {
  event.preventDefault();
  const text = at("text").value;
  if (running || !text.trim()) return;
  const said = messages; // another chat may begin meanwhile
  said.push({ role: "user", content: text });
  show("user", text);
  at("text").value = "";
  const article = show("assistant", "");
  article.classList.add("running");
  running = new AbortController();
  at("send").hidden = !(at("stop").hidden = false);
  let problem = null;
  try {
    await answer(said, article);
  } catch (error) {
    problem = error.name === "AbortError" ? null : error;
  }
  article.classList.remove("running");
  if (article.textContent) said.push({ role: "assistant", content: article.textContent });
  else { said.pop(); article.remove(); }
  if (problem && said === messages) show("error", problem.message);
  running = null;
  at("send").hidden = !(at("stop").hidden = true);
  at("text").focus();
}

at("ask").addEventListener("submit", ask);
at("stop").addEventListener("click", () => running?.abort());
at("key").addEventListener("change", loadModels);
at("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
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
