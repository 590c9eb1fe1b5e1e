// Conversations are records of IndexedDB, which all tabs share.
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
function warn(error) {
  $("unkept").hidden = !error;
  $("unkept").textContent = error ? `This browser cannot keep conversations (${error.message || error.name}).` : "";
}
const figures = (speed) => ["perSecond", "perRound", "tokens", "seconds"].every((name) =>
  Number.isFinite(speed?.[name])) ? speed : undefined;
// What was said stays; how steps fell is not worth the room.
const record = ({ id, created, version, title, turns }) => ({ id, created, version: version || 0, title, turns: turns.map(
  ({ role, content, reasoning, speed, plain }) =>
    ({ role, content, reasoning, speed: figures(speed), plain: figures(plain) })) });
const isSound = ({ title, turns }) => typeof title === "string" && Array.isArray(turns)
  && turns.every((turn) => typeof turn?.content === "string" && ["user", "assistant"].includes(turn.role));

async function keep(one) {
  one.unkept = true;
  try {
    const store = await chats("readwrite");
    const stored = await done(store.get(one.id));
    // Another tab has gone on with it meanwhile: both stay.
    if (stored && stored.version !== one.version) one.id = newId();
    const version = one.version + 1;
    store.put({ ...record(one), version });
    await done(store.transaction);
    Object.assign(one, { version, unkept: false });
    otherTabs.postMessage(one.id);
    warn(null);
  } catch (error) { warn(error ?? { name: "it is full" }); }
}

async function drop(one) {
  const here = chat();
  state.chats = state.chats.filter((other) => other !== one);
  state.at = Math.max(0, state.chats.indexOf(here));
  try {
    const store = await chats("readwrite");
    store.delete(one.id);
    await done(store.transaction);
    otherTabs.postMessage(one.id);
  } catch (error) { warn(error); }
  refresh();
}

// Take over what this and other tabs have kept.
async function refresh() {
  let stored = [];
  try { stored = (await done((await chats()).getAll())).filter(isSound).map(record); } catch (error) { warn(error); }
  const here = chat();
  const mine = state.chats.filter((one) => one.unkept || (one === here && (state.running || !one.turns.length)));
  state.chats = [...mine, ...stored.filter((one) => !mine.some((other) => other.id === one.id))];
  state.chats.sort((a, b) => b.created - a.created);
  if (!state.chats.length) state.chats.push(blank());
  state.at = Math.max(0, state.chats.findIndex((one) => one.id === here?.id));
  if (chat() === here || (chat().id === here?.id && chat().version === here.version)) {
    state.chats[state.at] = here;
    list();
  } else show();
}
