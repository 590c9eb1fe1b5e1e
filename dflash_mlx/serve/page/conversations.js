// Conversations are records of IndexedDB, which all tabs share. The turns of one are a tree: each
// names its parent, and `leaf` is the end of the path that is shown.
const $ = (id) => document.getElementById(id);
// Any storage may be full, damaged by other programs, or forbidden: the page works without it.
const read = (name) => { try { return JSON.parse(localStorage.getItem(name)) ?? {}; } catch { return {}; } };
const readKey = () => { try { return sessionStorage.getItem("key") ?? ""; } catch { return ""; } };
const known = (defaults, given) => Object.fromEntries(Object.entries(defaults).map(([name, value]) =>
  [name, ["string", "number", "boolean"].includes(typeof given?.[name]) ? given[name] : value]));
const SETTINGS = { system: "", temperature: 0, top_p: "", top_k: "", min_p: "", max_tokens: 2048, seed: "",
  thinking: "", tools: "" };
const state = {
  chats: [],
  here: null,
  defaults: known(SETTINGS, read("defaults")),
  browser: known({ color: true, theme: "" }, read("settings")),
};
const newId = () => `${Date.now()}-${Math.random()}`;
const blank = () => ({ id: newId(), created: Date.now(), version: 0, title: "", model: "",
  settings: { ...state.defaults }, turns: [], leaf: -1 });

function path(one, leaf = one.leaf) {
  const places = [];
  for (let at = leaf; at >= 0; at = one.turns[at].parent) places.unshift(at);
  return places;
}
const children = (one, parent) => [...one.turns.keys()].filter((at) => one.turns[at].parent === parent);
function lastBelow(one, place) {
  const below = children(one, place);
  return below.length ? lastBelow(one, below.at(-1)) : place;
}

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = request.oncomplete = () => resolve(request.result);
  request.onerror = request.onabort = () => reject(request.error);
});
const opened = (async () => {
  const request = indexedDB.open("dflash-mlx", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
  return done(request);
})();
const otherTabs = new BroadcastChannel("dflash-mlx");
otherTabs.onmessage = () => refresh();
const chats = async (...mode) => (await opened).transaction("chats", ...mode).objectStore("chats");
function notice(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}
const unkept = (error) => notice(`This browser cannot keep conversations (${error?.message || error?.name || "it is full"}).`);

const isSound = (one) => typeof one?.title === "string" && Array.isArray(one.turns)
  && one.turns.every((turn, at) => typeof turn?.content === "string"
    && ["user", "assistant", "tool"].includes(turn.role) && isPlace(turn.parent ?? at - 1, at));
const isPlace = (place, length) => Number.isInteger(place) && place >= -1 && place < length;
const isSpeed = (speed) => ["tokens", "steps", "perStep", "seconds"].every((name) => Number.isFinite(speed?.[name]));
const isCall = (call) => ["id", "name", "arguments"].every((name) => typeof call?.[name] === "string");
const text = (value) => typeof value === "string" ? value : "";

// What is kept of a turn and of a conversation, which may come from an older page or from a file.
const turnRecord = ({ parent, role, content, reasoning, calls, callId, finish, error, speed, race }, at) => ({
  parent: parent ?? at - 1, role, content, reasoning: text(reasoning), callId: text(callId), finish: text(finish),
  error: text(error), race: text(race), speed: isSpeed(speed) ? speed : null,
  calls: Array.isArray(calls) ? calls.filter(isCall) : [] });
const record = ({ id, created, version, title, model, settings, turns, leaf }) => ({
  id, created: Number(created) || 0, version: version || 0, title, model: text(model),
  settings: known(state.defaults, settings), turns: turns.map(turnRecord),
  leaf: isPlace(leaf, turns.length) ? leaf : turns.length - 1 });

async function keep(one) {
  const kept = record(one);
  one.unkept = true;
  try {
    const store = await chats("readwrite");
    const stored = await done(store.get(one.id));
    // Another tab has gone on with it meanwhile: both stay.
    if (stored && stored.version !== one.version) one.id = newId();
    const version = one.version + 1;
    store.put({ ...kept, id: one.id, version });
    await done(store.transaction);
    Object.assign(one, { version, unkept: false });
    otherTabs.postMessage(one.id);
  } catch (error) { unkept(error); }
}

async function drop(one) {
  if (!confirm(`Delete “${one.title || "New conversation"}”?`)) return;
  one.running?.stopper.abort();
  const next = state.chats.indexOf(one);
  state.chats = state.chats.filter((other) => other !== one);
  if (state.here === one) state.here = state.chats[next] ?? state.chats.at(-1) ?? null;
  one.dropped = true;
  try {
    const store = await chats("readwrite");
    store.delete(one.id);
    await done(store.transaction);
    otherTabs.postMessage(one.id);
  } catch (error) { unkept(error); }
  await refresh();
  show();
}

// Take over what this and other tabs have kept.
async function refresh() {
  let stored = [];
  try { stored = (await done((await chats()).getAll())).filter(isSound).map(record); } catch (error) { unkept(error); }
  const { here } = state;
  const mine = state.chats.filter((one) => one.unkept || one.running || (one === here && !one.turns.length));
  state.chats = [...mine, ...stored.filter((one) => !mine.some((other) => other.id === one.id))];
  state.chats.sort((a, b) => b.created - a.created);
  if (!state.chats.length) state.chats.push(blank());
  const found = state.chats.findIndex((one) => one.id === here?.id);
  if (found >= 0 && state.chats[found].version === here.version) {
    state.chats[found] = here;
    list();
  } else {
    state.here = state.chats[Math.max(0, found)];
    show();
  }
}

function exported() {
  const conversations = listed().filter((one) => one.turns.length).map(record);
  const blob = new Blob([JSON.stringify({ conversations }, null, 1)], { type: "application/json" });
  const link = Object.assign(document.createElement("a"),
    { href: URL.createObjectURL(blob), download: "conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function imported(file) {
  let found = [];
  try { found = JSON.parse(await file.text()).conversations; } catch { /* said below */ }
  const sound = Array.isArray(found) ? found.filter(isSound) : [];
  for (const one of sound.map(record)) await keep({ ...one, id: newId(), version: 0 });
  await refresh();
  notice(sound.length ? "" : `There are no conversations in ${file.name}.`);
  $("found").textContent = `${sound.length} imported`;
}
