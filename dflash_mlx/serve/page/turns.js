// The turns of the conversation that is shown, and what can be done with each.
function show() {
  const one = state.here;
  const inside = $("turns").contains(document.activeElement);
  $("turns").replaceChildren(...path(one).map((place) => turnNode(one, place)));
  $("turns").scrollTop = $("turns").scrollHeight;
  if (inside) $("turns").focus(); // what had the focus is gone
  $("live").textContent = "";
  showModel();
  controls();
  list();
}

function controls() {
  const running = Boolean(state.here.running);
  $("stop").hidden = !running;
  $("send").disabled = running;
  for (const node of document.querySelectorAll("#turns .changes")) node.disabled = running;
}

function follow() {
  const turns = $("turns");
  if (turns.scrollHeight - turns.scrollTop - turns.clientHeight < 120) turns.scrollTop = turns.scrollHeight;
}

const ROLES = { user: "You", assistant: "Answer", tool: "Result of a tool" };
function turnNode(one, place) {
  const turn = one.turns[place];
  const node = make("article", `turn ${turn.role}`);
  node.dataset.place = place;
  node.setAttribute("aria-label", ROLES[turn.role]);
  if (one.running?.place === place) {
    node.ariaBusy = "true";
    node.append(one.running.view.node);
    return node;
  }
  const view = turn.role === "assistant" ? new AnswerView(turn) : null;
  view?.finish().then(follow);
  node.append(view ? view.node : asked(turn.content));
  node.append(...(turn.calls ?? []).map((call) => callNode(one, place, call)), ...notes(one, turn, place));
  node.append(foot(one, place, view));
  return node;
}

function asked(content) {
  const node = make("div", "text", content);
  if (content.length > 1000) node.tabIndex = 0; // it may have to be scrolled
  return node;
}

const ENDS = {
  length: "The limit of tokens cut this answer off.",
  broken: "This answer broke off.",
  stopped: "Stopped.",
};
function notes(one, turn, place) {
  const found = [];
  if (turn.error) found.push(make("p", "error", turn.error));
  const end = ENDS[turn.finish];
  if (end) found.push(make("p", "dim", `${end}${turn.content ? "" : " Raise Max tokens in the settings, and regenerate."} `));
  if (end && turn.content && !turn.calls?.length) found.at(-1).append(change("Go on", () => reply(one, turn.parent, place)));
  if (turn.finish === "stop" && !turn.content) found.push(make("p", "dim", "The model said nothing."));
  return found;
}

// A button that changes the conversation: not while an answer comes.
function change(label, act, about) {
  const node = button(label, act, about);
  node.classList.add("changes");
  return node;
}

function foot(one, place, view) {
  const turn = one.turns[place];
  const node = make("div", "foot");
  const answer = turn.role === "assistant";
  const { speed } = turn;
  if (speed) node.append(make("span", "", `${rateText(speed)} · ${speed.perStep.toFixed(1)} tokens per step · ${speed.tokens} tokens`));
  if (turn.race) node.append(make("strong", "", turn.race));
  node.append(...versions(one, place));
  if (turn.content) node.append(button("Copy", (event) => copy(turn.content, event.target)));
  if (turn.role === "user") node.append(change("Edit", () => edit(one, place), "Ask this in other words"));
  if (answer) node.append(change("Regenerate", () => reply(one, turn.parent), "Another answer; this one stays"));
  else if (place === one.leaf) node.append(change("Try again", () => reply(one, place)));
  if (answer) node.append(change("Branch", () => branch(one, place), "A new conversation that begins like this one"));
  if (speed && isWhole(turn)) node.append(change("Race", () => race(one, place), "Answer again, with and without drafting"));
  if (turn.steps) node.append(button("Steps", () => view.toggle(), "What each decode step brought"));
  return node;
}

// Turns with the same parent are versions of each other.
function versions(one, place) {
  const all = children(one, one.turns[place].parent);
  const at = all.indexOf(place);
  if (all.length < 2 || one.turns[place].role === "tool") return [];
  const go = (label, name, to) => {
    const node = change(label, () => { one.leaf = lastBelow(one, all[to]); show(); keep(one); });
    node.setAttribute("aria-label", name);
    if (!(to in all)) node.style.visibility = "hidden";
    return node;
  };
  return [go("‹", "Previous version", at - 1), make("span", "", `${at + 1}/${all.length}`), go("›", "Next version", at + 1)];
}

function edit(one, place) {
  const node = $("turns").querySelector(`[data-place="${place}"]`);
  const form = make("form", "edit"), field = make("textarea");
  field.value = one.turns[place].content;
  field.setAttribute("aria-label", "Your message, edited");
  form.append(field, make("button", "", "Send"), button("Cancel", show));
  form.onsubmit = (event) => { event.preventDefault(); ask(one, field.value.trim(), one.turns[place].parent); };
  field.onkeydown = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); show(); $("input").focus(); }
    if (isSend(event)) { event.preventDefault(); form.requestSubmit(); }
  };
  node.replaceChildren(form);
  field.style.height = `${field.scrollHeight + 2}px`;
  field.focus();
}

function branch(one, place) {
  const turns = path(one, place).map((at, number) => ({ ...one.turns[at], parent: number - 1 }));
  state.here = { ...blank(), title: one.title, model: one.model, settings: { ...one.settings }, turns, leaf: turns.length - 1 };
  state.chats.unshift(state.here);
  keep(state.here);
  show();
  $("input").focus();
}

function callNode(one, place, call) {
  const node = make("div", "call");
  let shown = call.arguments;
  try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch { /* as the model wrote it */ }
  node.append(make("span", "dim", "Calls "), make("strong", "", call.name), make("pre", "", shown));
  const results = path(one).filter((at) => at > place).map((at) => one.turns[at]);
  if (results.some((turn) => turn.callId === call.id || turn.role !== "tool")) return node;
  const form = make("form"), field = make("textarea");
  field.placeholder = "What it returns";
  field.setAttribute("aria-label", `What ${call.name} returns`);
  form.append(field, Object.assign(change("Return"), { type: "submit" }));
  form.onsubmit = (event) => { event.preventDefault(); giveResult(one, place, call, field.value); };
  node.append(form);
  return node;
}

function giveResult(one, place, call, content) {
  const leaf = add(one, { parent: one.leaf, role: "tool", callId: call.id, content });
  const given = path(one).filter((at) => at > place).length;
  if (given === one.turns[place].calls.length) reply(one, leaf);
  else { keep(one); show(); }
}

function add(one, turn) {
  one.turns.push(turn);
  return one.leaf = one.turns.length - 1;
}

function ask(one, content, parent) {
  if (!content || one.running) return;
  one.title ||= content.slice(0, 60);
  reply(one, add(one, { parent, role: "user", content }));
}

// Say what the reader waits for before the first word. Other answers may be under way.
function waitsFor(model) {
  const chosen = [...$("model").options].find((option) => option.value === model);
  return chosen?.dataset.state === "not-loaded" ? `Loading ${model}…` : "Reading your message…";
}

// Answers the turn at `parent`, or goes on with the answer at `place`.
async function reply(one, parent, place = null) {
  const goesOn = place !== null;
  const messages = messagesTo(one, goesOn ? place : parent);
  one.turns[parent].error = "";
  one.leaf = parent;
  one.model ||= $("model").value || "default";
  const kept = goesOn ? null : keep(one);
  place ??= add(one, { parent, role: "assistant", content: "", reasoning: "", calls: [] });
  const turn = one.turns[place];
  turn.steps ??= turn.content ? [{ content: turn.content }] : [];
  Object.assign(turn, { error: "", race: "" });
  one.leaf = lastBelow(one, place);
  const view = new AnswerView(turn, waitsFor(one.model));
  await running(one, { place, view }, async (signal) => {
    const body = bodyOf(one, messages, goesOn ? { continue_final_message: true } : {});
    turn.speed = (await receive(turn, view, body, signal)).speed;
  });
  if (!turn.content && !turn.reasoning && !turn.calls.length && turn.finish !== "stop") {
    one.turns.pop();
    one.leaf = parent;
    one.turns[parent].error = turn.error || "Stopped.";
  }
  if (turn.content) await rendered(turn.content);
  await kept;
  await settled(one);
}

// While an answer comes. Other conversations can be read, and answered, meanwhile.
async function running(one, { place, view }, work) {
  const stopper = new AbortController();
  one.running = { stopper, place, view };
  if (one === state.here) (place === null ? controls : show)();
  try {
    await work(stopper.signal);
  } catch (error) {
    if (error.name === "AbortError") view.turn.finish = "stopped";
    else view.turn.error = whatToDo(error);
  } finally {
    one.running = null;
  }
}

function whatToDo(error) {
  if (error.code === "invalid_api_key") return "The API key is missing or wrong: see Settings.";
  if (error.code !== "context_length_exceeded") return error.message;
  return `${error.message} Edit the question, or go on from an earlier turn: this one will not be sent again.`;
}

async function settled(one) {
  if (one.dropped) return;
  if (one === state.here) show();
  await keep(one);
  await refresh();
  if ($("model").options.length > 1) await loadModels(); // the answer may have loaded another one
}
