// Generates by /v1/completions with token ids. A branch is the tokens of a prompt, those of another branch up to a
// place, and what is generated behind them: the server finds the KV of what two branches share in its prefix cache.

const ALTERNATIVES = 6;
const MAX_INDENT = 6;
const RETRY_MS = 1000;
const byId = (id) => document.getElementById(id);
const fields = Object.fromEntries(
  ["prompt", "model", "kind", "max_tokens", "temperature", "top_p", "seed", "key", "message"].map((id) => [id, byId(id)]),
);

// All branches; the shown one; the running request; the place whose alternatives are shown, and whether it stays when
// the pointer moves on.
const state = { branches: [], branch: null, running: null, place: null, isKept: false };

class Refused extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

async function call(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (fields.key.value) headers.authorization = `Bearer ${fields.key.value}`;
  const request = body === undefined ? { headers, signal } : { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await fetch(path, request);
  if (!response.ok) {
    const { error } = await response.json().catch(() => ({}));
    if (response.status === 401) byId("key_label").hidden = false;
    throw new Refused(error?.message ?? `the server answered with status ${response.status}`, error?.code);
  }
  return response;
}

const answer = async (path, body) => (await call(path, body, state.running.signal)).json();

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused("The answer ended too early.");
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const data = rest.slice(0, end).replace(/^data: /, "");
      rest = rest.slice(end + 2);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
  }
}

// Generating.

async function begin() {
  if (!fields.model.value) await listModels();
  const content = fields.prompt.value;
  if (fields.kind.value === "chat") {
    try {
      return await ask(null, { messages: [{ role: "user", content }] });
    } catch (error) {
      if (error.code !== "no_chat_template") throw error;
      fields.kind.value = "text";
    }
  }
  return ask(null, { prompt: content });
}

async function reply() {
  const { branch } = state;
  const tokens = branch.tokens.map((token) => token.id);
  const said = await answer("/detokenize", { model: fields.model.value, tokens });
  const next = [{ role: "assistant", content: said.prompt }, { role: "user", content: fields.message.value }];
  await ask(branch, { messages: [...branch.asked.messages, ...next] });
  fields.message.value = "";
}

// A branch with a prompt of its own, a text or messages. It is forgotten if it fails before its first token.
async function ask(parent, asked) {
  const { tokens } = await answer("/tokenize", { model: fields.model.value, ...asked });
  const before = state.branch;
  const branch = addBranch(parent, { asked, ids: tokens, at: null, tokens: [] });
  try {
    await generate(branch);
  } finally {
    if (!branch.tokens.length && !branch.hasEnded) {
      state.branches.splice(state.branches.indexOf(branch), 1);
      if (state.branch === branch) select(before, null);
    }
  }
}

// A branch that begins with the tokens before a place and another token there.
function fork(place, other) {
  const { branch } = state;
  const token = { ...branch.tokens[place], id: other.id, text: other.text, logprob: other.logprob };
  const tokens = [...branch.tokens.slice(0, place), token];
  const forked = addBranch(branch, { asked: branch.asked, ids: branch.ids, at: place, tokens });
  return run(() => generate(forked));
}

function addBranch(parent, fork) {
  const branch = { ...fork, parent, depth: parent ? parent.depth + 1 : 0, hasEnded: false };
  state.branches.push(branch);
  select(branch, branch.at);
  return branch;
}

async function generate(branch) {
  const body = {
    model: fields.model.value,
    prompt: [...branch.ids, ...branch.tokens.map((token) => token.id)],
    max_tokens: fields.max_tokens.valueAsNumber,
    temperature: fields.temperature.valueAsNumber,
    top_p: fields.top_p.valueAsNumber,
    seed: Number.isNaN(fields.seed.valueAsNumber) ? null : fields.seed.valueAsNumber,
    logprobs: ALTERNATIVES,
    return_token_ids: true,
    stream: true,
    stream_options: { include_usage: true },
  };
  const before = branch.tokens.length;
  const beganMs = performance.now();
  for await (const { choices: [choice], usage } of events(await call("/v1/completions", body, state.running.signal))) {
    if (choice) {
      add(branch, choice.logprobs);
      branch.hasEnded = choice.finish_reason === "stop";
      showNew(branch);
    }
    const made = branch.tokens.length - before;
    const speed = `${made} tokens, ${(made / ((performance.now() - beganMs) / 1000)).toFixed(0)} a second`;
    const held = usage && `; of ${usage.prompt_tokens} before them ${usage.prompt_tokens_details.cached_tokens} were in the cache`;
    byId("status").textContent = speed + (held ?? "");
  }
}

function add(branch, logprobs) {
  (logprobs?.tokens ?? []).forEach((text, index) => {
    const ids = logprobs.top_token_ids[index];
    const top = Object.entries(logprobs.top_logprobs[index]).map(([name, logprob]) => ({ id: ids[name], text: name, logprob }));
    top.sort((one, other) => other.logprob - one.logprob);
    branch.tokens.push({ id: ids[text], text, logprob: logprobs.token_logprobs[index], top });
  });
}

async function run(work) {
  state.running?.abort();
  const own = new AbortController();
  state.running = own;
  byId("error").hidden = true;
  byId("status").textContent = "";
  showButtons();
  try {
    await work();
  } catch (error) {
    if (error.name !== "AbortError") {
      if (!(error instanceof Refused)) console.error(error);
      byId("error").textContent = error instanceof Refused ? error.message : "The server cannot be reached.";
      byId("error").hidden = false;
    }
  }
  if (state.running !== own) return;
  state.running = null;
  showButtons();
  showBranches();
}

// What is seen. Texts of the model are always text, never HTML.

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
const percent = (logprob) => Math.exp(logprob) * 100;
const asPercent = (logprob) => (percent(logprob) < 0.05 ? "< 0.1 %" : `${percent(logprob).toFixed(1)} %`);
const asNumber = (logprob) => logprob.toFixed(3).replace("-", "−");
const tokenAt = (place) => byId("text").querySelectorAll(".token")[place];

function showButtons() {
  byId("stop").disabled = !state.running;
  byId("status").ariaBusy = String(Boolean(state.running));
  byId("more").disabled = Boolean(state.running) || !state.branch || state.branch.hasEnded;
  byId("reply").hidden = Boolean(state.running) || !state.branch?.asked.messages;
}

function select(branch, place) {
  Object.assign(state, { branch, place, isKept: place !== null });
  byId("answer").hidden = byId("side").hidden = !branch;
  showButtons();
  if (!branch) return;
  const said = ({ role, content }) => element("p", `said ${role}`, content);
  byId("asked").replaceChildren(...(branch.asked.messages ?? []).map(said));
  byId("text").replaceChildren(element("span", "prompt", branch.asked.prompt ?? ""));
  showNew(branch);
  showAlternatives();
  showBranches();
  tokenAt(place ?? -1)?.focus();
}

function showNew(branch) {
  if (branch !== state.branch) return;
  const text = byId("text");
  for (let place = text.querySelectorAll(".token").length; place < branch.tokens.length; place += 1) {
    text.append(tokenElement(branch.tokens[place], place));
  }
  if (!branch.hasEnded || text.querySelector(".mark")) return;
  const mark = element("span", "mark", " ■");
  mark.title = "The model ended the text here.";
  text.append(mark);
}

function tokenElement(token, place) {
  // A part of a character has no text of its own.
  const shown = token.text.startsWith("bytes:") ? "▯" : token.text.replaceAll("\n", "↵\n");
  const made = element("span", "token", shown);
  made.title = `log-probability ${asNumber(token.logprob)}`;
  made.tabIndex = place === (state.place ?? 0) ? 0 : -1;
  made.style.setProperty("--doubt", String(100 - percent(token.logprob)));
  made.classList.toggle("chosen", place === state.place);
  made.classList.toggle("kept", place === state.place && state.isKept);
  for (const event of ["pointerenter", "focus"]) made.addEventListener(event, () => state.isKept || choose(place, false));
  made.addEventListener("click", () => choose(place, !(state.isKept && state.place === place)));
  return made;
}

function choose(place, isKept) {
  Object.assign(state, { place, isKept });
  byId("text").querySelectorAll(".token").forEach((each, at) => {
    each.classList.toggle("chosen", at === place);
    each.classList.toggle("kept", at === place && isKept);
    each.tabIndex = at === place ? 0 : -1;
  });
  showAlternatives();
}

function showAlternatives() {
  const token = state.branch?.tokens[state.place ?? -1];
  const none = element("li", "none", "Point at a token.");
  byId("alternatives").replaceChildren(...(token ? token.top.map((other) => row(other, token)) : [none]));
}

function row(other, token) {
  const { place } = state;
  const made = listButton(visible(other.text), asNumber(other.logprob), asPercent(other.logprob));
  made.button.style.setProperty("--share", String(percent(other.logprob)));
  made.button.title = `token ${other.id}`;
  made.button.setAttribute("aria-current", String(other.id === token.id));
  made.button.addEventListener("click", () => other.id !== token.id && fork(place, other));
  return made.item;
}

function listButton(name, ...figures) {
  const button = element("button", "", "");
  button.type = "button";
  button.append(element("span", "name", name), ...figures.map((figure) => element("span", "figure", figure)));
  const item = document.createElement("li");
  item.append(button);
  return { button, item };
}

function showBranches() {
  const list = byId("branches");
  const hadFocus = list.contains(document.activeElement);
  list.replaceChildren(...inOrder(null).map(branchRow));
  if (hadFocus) list.querySelector("[aria-current=true]")?.focus();
}

// Each branch behind the one that it was forked from.
function inOrder(parent) {
  return state.branches.filter((branch) => branch.parent === parent).flatMap((branch) => [branch, ...inOrder(branch)]);
}

function branchRow(branch) {
  const { asked, at, tokens } = branch;
  const name = at === null ? `› ${asked.prompt ?? asked.messages.at(-1).content}` : tokens.slice(at).map(({ text }) => text).join("");
  const made = listButton(name.replaceAll("\n", " ").trim(), String(tokens.length));
  made.button.style.setProperty("--depth", String(Math.min(branch.depth, MAX_INDENT)));
  made.button.setAttribute("aria-current", String(branch === state.branch));
  made.button.addEventListener("click", () => {
    select(branch, branch.at);
    byId("branches").querySelector("[aria-current=true]").focus();
  });
  return made.item;
}

// What is done.

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run(begin);
});
byId("reply").addEventListener("submit", (event) => {
  event.preventDefault();
  if (byId("ask").reportValidity()) run(reply);
});
byId("more").addEventListener("click", () => run(() => generate(state.branch)));
byId("stop").addEventListener("click", () => state.running?.abort());
fields.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && state.running?.abort());
byId("text").addEventListener("keydown", (event) => {
  const at = state.place ?? -1;
  const places = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: state.branch.tokens.length - 1 };
  const next = tokenAt(places[event.key]);
  if (event.key === "Enter") {
    choose(at, true);
    byId("alternatives").querySelector("button")?.focus();
  } else if (next) {
    choose(places[event.key], true);
    next.focus();
  } else return;
  event.preventDefault();
});
byId("alternatives").addEventListener("keydown", (event) => {
  if (event.key === "Escape") tokenAt(state.place).focus();
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  document.activeElement.closest("li")[step]?.firstElementChild.focus();
});

async function listModels() {
  const { signal } = state.running;
  let own;
  for (;;) {
    const { data } = await (await call("/v1/models", undefined, signal)).json();
    // A provider's models return no token ids. Those of this server have a length once a worker has loaded them.
    own = data.filter((model) => "max_model_len" in model);
    if (!own.length) throw new Refused("This server has no model of its own: the tokens of providers are not known.");
    if (own[0].max_model_len) break;
    byId("status").textContent = "The model is being loaded.";
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  byId("status").textContent = "";
  fields.model.replaceChildren(...own.map(({ id }) => new Option(id)));
  // The name of the model says more than that of the runtime.
  fields.model.value = (own.find(({ id }) => id !== "local") ?? own[0]).id;
}
fields.key.addEventListener("change", () => run(listModels));
run(listModels);
