// The list of conversations, settings, models and keys.
function listed() {
  const words = $("search").value.trim().toLowerCase();
  const has = (content) => content.toLowerCase().includes(words);
  return state.chats.filter((one) => !words || has(one.title) || one.turns.some(({ content }) => has(content)));
}

function list() {
  const found = listed();
  $("list").replaceChildren(...found.map((one) => {
    const item = make("li"), name = one.title || "New conversation";
    const open = button(one.running ? `… ${name}` : name, () => go(one), name);
    open.setAttribute("aria-current", String(one === state.here));
    const remove = button("×", () => drop(one));
    remove.setAttribute("aria-label", `Delete ${name}`);
    item.append(open, remove);
    return item;
  }));
  $("found").textContent = $("search").value ? `${found.length} found` : "";
}

function go(one) {
  if (!one) return;
  state.here = one;
  menu(false);
  if (!state.silent) notice("");
  show();
  $("input").focus();
}

function fresh() {
  const empty = state.chats.find((one) => !one.turns.length) ?? blank();
  if (!state.chats.includes(empty)) state.chats.unshift(empty);
  go(empty);
}

function menu(open) {
  $("nav").classList.toggle("open", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

function submit() {
  const one = state.here, question = $("input").value.trim();
  if (!question || !one || one.running) return;
  $("input").value = "";
  grow();
  // A question without an answer becomes a branch of its own, because it may have been too long.
  ask(one, question, one.turns[one.leaf]?.role === "user" ? one.turns[one.leaf].parent : one.leaf);
}

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

const fields = (part) => [...$(part).querySelectorAll("[name]")];
function fillSettings() {
  for (const field of fields("conversation-settings")) field.value = state.here.settings[field.name];
  for (const field of fields("browser-settings")) field[field.type === "checkbox" ? "checked" : "value"] = state.browser[field.name];
  $("key").value = readKey();
}

function takeSettings() {
  const one = state.here;
  for (const { name, value } of fields("conversation-settings")) one.settings[name] = value;
  $("tools-error").hidden = isTools(one.settings.tools);
  if (!$("tools-error").hidden) one.settings.tools = "";
  for (const { name, type, value, checked } of fields("browser-settings")) state.browser[name] = type === "checkbox" ? checked : value;
  store(() => sessionStorage.setItem("key", $("key").value));
  store(() => localStorage.setItem("settings", JSON.stringify(state.browser)));
  if (one.turns.length) keep(one);
  applyLook();
}

function isTools(tools) {
  try { return !tools || Array.isArray(JSON.parse(tools)); } catch { return false; }
}

function store(act) {
  try { act(); } catch (error) { unkept(error); }
}

function applyLook() {
  document.documentElement.dataset.theme = state.browser.theme;
  $("turns").classList.toggle("color", state.browser.color);
}

async function loadModels() {
  const response = await fetch("/v1/models", { headers: headers() }).catch(() => null);
  const told = await response?.json().catch(() => null);
  if (!told?.data) notice(told?.error ? whatToDo(told.error) : "The server does not answer.");
  else if (state.silent) notice("");
  state.silent = !told?.data;
  if (state.silent) return;
  $("model").replaceChildren(...told.data.map(({ id, state: known }) => {
    const option = make("option", "", known === "not-loaded" ? `${id} (not loaded)` : id);
    option.value = id;
    option.dataset.state = known;
    return option;
  }));
  const isToy = told.data.every(({ id }) => id === "tiny");
  $("turns").dataset.empty = isToy
    ? "tiny is a toy: sums, counting, short stories. Start the server with --model NAME for a real one." : "Ask something.";
  showModel();
}

function showModel() {
  const names = [...$("model").options].map((option) => option.value);
  if (names.includes(state.here?.model)) $("model").value = state.here.model;
  else if (state.here && !state.here.running) state.here.model = "";
}

const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;
$("form").onsubmit = (event) => { event.preventDefault(); submit(); };
$("input").oninput = grow;
$("input").onkeydown = (event) => {
  if (isSend(event)) { event.preventDefault(); submit(); }
  const asked = path(state.here).findLast((place) => state.here.turns[place].role === "user");
  if (event.key === "ArrowUp" && !$("input").value && asked !== undefined && !state.here.running) {
    event.preventDefault();
    edit(state.here, asked);
  }
};
$("stop").onclick = () => state.here.running?.stopper.abort();
$("new").onclick = fresh;
$("search").oninput = list;
$("export").onclick = exported;
$("import").onclick = () => $("file").click();
$("file").onchange = async ({ target }) => { await imported(target.files[0]); target.value = ""; };
$("model").onchange = () => { state.here.model = $("model").value; if (state.here.turns.length) keep(state.here); };
$("menu").onclick = () => menu(!$("nav").classList.contains("open"));
$("open-settings").onclick = () => { menu(false); fillSettings(); $("settings").showModal(); };
$("close-settings").onclick = () => $("settings").close();
$("as-defaults").onclick = () => {
  state.defaults = { ...state.here.settings };
  store(() => localStorage.setItem("defaults", JSON.stringify(state.defaults)));
};
$("settings").onchange = takeSettings;
$("settings").onclose = () => { loadModels(); $("input").focus(); };
window.onfocus = () => { if (state.silent) loadModels(); };
document.onkeydown = (event) => {
  const writing = event.target.matches("input, textarea, select");
  if ($("settings").open) return;
  if (event.key === "Escape") { state.here.running?.stopper.abort(); menu(false); }
  else if (event.key === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); fresh(); }
  else if (event.key === "/" && !writing) { event.preventDefault(); menu(true); $("search").focus(); }
  else if (event.altKey && ["ArrowUp", "ArrowDown"].includes(event.key)) {
    event.preventDefault();
    const chats = listed();
    go(chats[chats.indexOf(state.here) + (event.key === "ArrowUp" ? -1 : 1)]);
  }
};
applyLook();
refresh().then(loadModels);
$("input").focus();
