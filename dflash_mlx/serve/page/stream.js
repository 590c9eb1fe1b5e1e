// Requests to the server.
function headers() {
  const key = readKey();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw Object.assign(new Error(error?.message ?? `The server answers ${response.status}.`), { code: error?.code });
}

// The HTML of a Markdown text, or null where the server cannot say it.
const html = new Map();
function rendered(text) {
  if (!html.has(text)) {
    const asked = post("/page/render", { text }).then((response) => response.json()).then((told) => told.html);
    html.set(text, asked.catch(() => { html.delete(text); return null; }));
  }
  return html.get(text);
}

function bodyOf(one, messages, more) {
  const { system, thinking, tools, ...sampling } = one.settings;
  const numbers = Object.entries(sampling).filter(([, value]) => value !== "");
  return {
    model: one.model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    ...Object.fromEntries(numbers.map(([name, value]) => [name, Number(value)])),
    ...(thinking ? { enable_thinking: thinking === "on" } : {}),
    ...(tools ? { tools: JSON.parse(tools) } : {}),
    ...more,
  };
}

// The turns up to a place as the server takes them.
function messagesTo(one, place) {
  return path(one, place).map((at) => one.turns[at]).map(({ role, content, reasoning, calls, callId }) => ({
    role,
    content,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(calls?.length ? { tool_calls: calls.map(({ id, name, arguments: text }) =>
      ({ id, type: "function", function: { name, arguments: text } })) } : {}),
    ...(role === "tool" ? { tool_call_id: callId } : {}),
  }));
}

async function* chunks(body, signal) {
  const response = await post("/v1/chat/completions", body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), { code: chunk.error.code });
      yield chunk;
    }
  }
}

// Streams an answer into a turn and its view. Returns when each step came, and what it measured.
async function receive(turn, view, body, signal) {
  const times = [];
  let tokens = 0, speed = null;
  turn.finish = "broken";
  for await (const chunk of chunks(body, signal)) {
    const { delta = {}, finish_reason: finish } = chunk.choices[0] ?? {};
    const step = chunk.x_dflash;
    if (step?.tokens) {
      tokens += times.length ? step.tokens : 0; // the first came with the prompt
      times.push(performance.now());
      if (state.here.running?.view === view) $("live").textContent = liveText(times, tokens);
    }
    if (delta.reasoning_content) view.reason(turn.reasoning += delta.reasoning_content);
    if (delta.content) {
      turn.content += delta.content;
      view.add(delta.content, times.length, step);
    }
    for (const { id, function: called } of delta.tool_calls ?? []) turn.calls.push({ id, ...called });
    if (finish) turn.finish = finish;
    if (chunk.usage) speed = speedOf(chunk.usage.completion_tokens, step);
    follow();
  }
  return { times, speed };
}

// By the server's clock, after the first token, which came with the prompt.
function speedOf(tokens, { rounds, tokens_per_round: [perStep], decode_seconds: seconds }) {
  return { tokens, steps: rounds, perStep, seconds };
}
const MIN_SECONDS = 0.05;
const rate = ({ tokens, seconds }) => seconds >= MIN_SECONDS ? (tokens - 1) / seconds : null;
const rateText = (speed) => rate(speed) === null ? "too short to time" : `${rate(speed).toFixed(0)} tok/s`;
const liveText = (times, tokens) => {
  const seconds = (times.at(-1) - times[0]) / 1000;
  if (seconds < 4 * MIN_SECONDS) return "";
  return `${(tokens / seconds).toFixed(0)} tok/s · ${(tokens / (times.length - 1)).toFixed(1)} tokens per step`;
};
