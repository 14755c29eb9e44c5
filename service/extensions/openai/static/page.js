// Generates by /v1/completions with token ids. A branch is the prompt's tokens, those of another branch up to a
// place, and what is generated behind them: the server finds the KV of what two branches share in its prefix cache.

const ALTERNATIVES = 6;
const byId = (id) => document.getElementById(id);
const fields = Object.fromEntries(
  ["prompt", "model", "kind", "max_tokens", "temperature", "top_p", "seed", "key"].map((id) => [id, byId(id)]),
);

// The prompt as text and as token ids; the branches; the shown one; the running request; the place whose alternatives
// are shown, and whether it stays when the pointer moves on.
const state = { prompt: "", ids: [], branches: [], branch: null, running: null, place: null, isKept: false };

class Refused extends Error {}

async function call(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (fields.key.value) headers.authorization = `Bearer ${fields.key.value}`;
  const request = body === undefined ? { headers, signal } : { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await fetch(path, request);
  if (!response.ok) {
    const { error } = await response.json().catch(() => ({}));
    if (response.status === 401) byId("key_label").hidden = false;
    throw new Refused(error?.message ?? `the server answered with status ${response.status}`);
  }
  return response;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
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
  const model = fields.model.value;
  const prompt = fields.prompt.value;
  const asked = fields.kind.value === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const { tokens } = await (await call("/tokenize", { model, ...asked })).json();
  Object.assign(state, { prompt, ids: tokens, branches: [], branch: null, place: null, isKept: false });
  await generate(addBranch(null, []));
}

function addBranch(parent, tokens) {
  const branch = { parent, at: tokens.length - 1, tokens, depth: parent ? parent.depth + 1 : 0, end: "" };
  state.branches.push(branch);
  state.branch = branch;
  return branch;
}

async function generate(branch) {
  const body = {
    model: fields.model.value,
    prompt: [...state.ids, ...branch.tokens.map((token) => token.id)],
    max_tokens: fields.max_tokens.valueAsNumber,
    temperature: fields.temperature.valueAsNumber,
    top_p: fields.top_p.valueAsNumber,
    seed: Number.isNaN(fields.seed.valueAsNumber) ? null : fields.seed.valueAsNumber,
    logprobs: ALTERNATIVES,
    return_token_ids: true,
    stream: true,
  };
  const before = branch.tokens.length;
  const beganMs = performance.now();
  branch.end = "";
  show();
  for await (const event of events(await call("/v1/completions", body, state.running.signal))) {
    const [choice] = event.choices;
    if (!choice) continue;
    add(branch, choice.logprobs);
    if (choice.finish_reason === "stop") branch.end = "end";
    showNew(branch);
    const made = branch.tokens.length - before;
    byId("status").textContent = `${made} tokens, ${(made / ((performance.now() - beganMs) / 1000)).toFixed(0)} a second`;
  }
}

function add(branch, logprobs) {
  (logprobs?.tokens ?? []).forEach((text, index) => {
    const names = Object.entries(logprobs.top_logprobs[index] ?? {});
    const top = names.map(([name, logprob], place) => ({ id: logprobs.top_token_ids[index][place], name, logprob }));
    branch.tokens.push({ id: top[0].id, text, logprob: logprobs.token_logprobs[index], top });
  });
}

// A branch that begins with the tokens before a place and another token there.
function fork(place, other) {
  const { branch } = state;
  const token = { ...branch.tokens[place], id: other.id, text: other.name, logprob: other.logprob };
  const made = addBranch(branch, [...branch.tokens.slice(0, place), token]);
  state.place = place;
  return run(() => generate(made));
}

async function run(work) {
  state.running?.abort();
  const own = new AbortController();
  state.running = own;
  byId("error").hidden = true;
  enable();
  try {
    await work();
  } catch (error) {
    if (error.name !== "AbortError") {
      byId("error").textContent = error instanceof Refused ? error.message : "The server cannot be reached.";
      byId("error").hidden = false;
    }
  }
  if (state.running === own) state.running = null;
  show();
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

function enable() {
  byId("stop").disabled = !state.running;
  byId("more").disabled = Boolean(state.running) || !state.branch || state.branch.end !== "";
}

function show() {
  enable();
  byId("answer").hidden = byId("side").hidden = !state.branch;
  if (!state.branch) return;
  const text = byId("text");
  text.replaceChildren(element("span", "prompt", fields.kind.value === "chat" ? `${state.prompt}\n\n` : state.prompt));
  showNew(state.branch);
  showAlternatives();
  showBranches();
}

function showNew(branch) {
  if (branch !== state.branch) return;
  const text = byId("text");
  for (let place = text.querySelectorAll(".token").length; place < branch.tokens.length; place += 1) {
    text.append(tokenElement(branch.tokens[place], place));
  }
  if (branch.end && !text.querySelector(".mark")) text.append(element("span", "mark", " ■"));
}

function tokenElement(token, place) {
  // A part of a character has no text of its own.
  const shown = token.text.startsWith("bytes:") ? "▯" : token.text.replaceAll("\n", "↵\n");
  const made = element("span", "token", shown);
  made.tabIndex = place ? -1 : 0;
  made.style.setProperty("--doubt", String(100 - percent(token.logprob)));
  made.classList.toggle("chosen", place === state.place);
  made.classList.toggle("kept", place === state.place && state.isKept);
  made.addEventListener("pointerenter", () => state.isKept || choose(place));
  made.addEventListener("click", () => keep(place, !(state.isKept && state.place === place)));
  return made;
}

function keep(place, isKept) {
  state.isKept = isKept;
  choose(place);
}

function choose(place) {
  state.place = place;
  byId("text").querySelectorAll(".token").forEach((each, at) => {
    each.classList.toggle("chosen", at === place);
    each.classList.toggle("kept", at === place && state.isKept);
    each.tabIndex = at === place ? 0 : -1;
  });
  showAlternatives();
}

function showAlternatives() {
  const token = state.branch?.tokens[state.place ?? -1];
  const likeliest = [...(token?.top ?? [])].sort((one, other) => other.logprob - one.logprob);
  byId("alternatives").replaceChildren(...likeliest.map((other) => row(other, token)));
}

function row(other, token) {
  const button = element("button", "", "");
  button.type = "button";
  button.append(element("span", "name", visible(other.name)), element("span", "share", `${percent(other.logprob).toFixed(1)} %`));
  button.style.setProperty("--share", String(percent(other.logprob)));
  button.title = `token ${other.id}, log-probability ${other.logprob.toFixed(3)}`;
  if (other.id === token.id) button.setAttribute("aria-current", "true");
  const { place } = state;
  button.addEventListener("click", () => other.id !== token.id && fork(place, other));
  const item = document.createElement("li");
  item.append(button);
  return item;
}

function showBranches() {
  byId("branches").replaceChildren(...inOrder(null).map(branchRow));
}

// Each branch behind the one that it was forked from.
function inOrder(parent) {
  return state.branches.filter((branch) => branch.parent === parent).flatMap((branch) => [branch, ...inOrder(branch)]);
}

function branchRow(branch) {
  const button = element("button", "", "");
  button.type = "button";
  const from = branch.tokens.slice(Math.max(0, branch.at));
  const name = element("span", "name", from.map((token) => token.text).join("").replaceAll("\n", " ") || "…");
  name.style.setProperty("--depth", String(branch.depth));
  button.append(name, element("span", "share", `${branch.tokens.length}`));
  button.setAttribute("aria-current", String(branch === state.branch));
  button.addEventListener("click", () => {
    Object.assign(state, { branch, place: branch.parent ? branch.at : null });
    show();
  });
  const item = document.createElement("li");
  item.append(button);
  return item;
}

// What is done.

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run(begin);
});
byId("more").addEventListener("click", () => run(() => generate(state.branch)));
byId("stop").addEventListener("click", () => state.running?.abort());
fields.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("text").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const next = byId("text").querySelectorAll(".token")[(state.place ?? -1) + step];
  if (!next) return;
  keep((state.place ?? -1) + step, true);
  next.focus();
});

async function listModels() {
  const { data } = await (await call("/v1/models")).json();
  // A provider's models return no token ids.
  const own = data.filter((model) => model.max_model_len);
  fields.model.replaceChildren(...own.map(({ id }) => new Option(id)));
  // The name of the model says more than that of the runtime.
  fields.model.value = (own.find(({ id }) => id !== "local") ?? own[0])?.id ?? "";
}
fields.key.addEventListener("change", () => run(listModels));
run(listModels);
