// A race: the same question with drafting and without, in turns. At the same time they would share
// each forward, and the plain side would look cheap.
const MIN_RACE = 0.3; // seconds of the plain side
async function race(one, place) {
  const answer = one.turns[place];
  const messages = messagesTo(one, answer.parent);
  const random = Number(one.settings.temperature) > 0 && one.settings.seed === "";
  const seed = random ? { seed: Math.floor(Math.random() * 2 ** 31) } : {};
  const panel = make("section", "race"), said = make("p", "", "In turns…");
  const sides = ["With drafting", "Plain"].map((name) => {
    const turn = { content: "", reasoning: "", calls: [], steps: [] };
    const view = new AnswerView(turn), column = make("div");
    column.append(make("h2", "", name), view.node);
    panel.append(column);
    return { turn, view };
  });
  panel.append(said);
  let others = false;
  const watch = setInterval(async () => { others ||= await openAnswers() > 1; }, 200);
  const [drafted, plain] = sides;
  for (const side of sides) {
    const work = async (signal) => {
      const more = { ...seed, ...(side === plain ? { draft: false } : {}) };
      Object.assign(side, await receive(side.turn, side.view, bodyOf(one, messages, more), signal));
    };
    const run = running(one, { place: null, view: side.view }, work);
    if (side === drafted && one === state.here) $("turns").querySelector(`[data-place="${place}"]`)?.append(panel);
    await run;
    if (!isWhole(side.turn)) break;
  }
  clearInterval(watch);
  $("live").textContent = ""; // it would have the plain side's
  controls();
  said.textContent = plain.turn.error || drafted.turn.error || verdict(drafted, plain, others);
  answer.race = plain.speed ? said.textContent : "";
  follow();
  await keep(one);
}

const isWhole = ({ finish }) => ["stop", "length"].includes(finish); // both sides have the same limit
async function openAnswers() {
  const response = await fetch("/metrics", { headers: headers() }).catch(() => null);
  return Number(/^dflash_open_answers (\S+)/m.exec(response?.ok ? await response.text() : "")?.[1] ?? 0);
}

// A figure is told where it means something. A step with drafts costs no less than a plain one, so
// that nothing is faster than its tokens per step.
function verdict(drafted, plain, others) {
  if (!plain.speed || !drafted.speed) return "The race was stopped: no figure.";
  const same = ["content", "reasoning"].every((name) => plain.turn[name] === drafted.turn[name]);
  const ending = same ? "the same text" : "another text";
  const { seconds } = plain.speed;
  if (seconds < MIN_RACE || rate(drafted.speed) === null) {
    return `No figure: ${seconds.toFixed(2)} s without drafting are too short; ${ending}.`;
  }
  const times = rate(drafted.speed) / rate(plain.speed);
  if (others || !isEven(plain.times) || times > 1.1 * drafted.speed.perStep) {
    return `No figure: something else ran during the race; ${ending}.`;
  }
  return `${times.toFixed(2)}× plain: ${rateText(drafted.speed)} and ${rateText(plain.speed)} after the first token, measured in turns; ${ending}.`;
}

// Whether the quarters of a plain answer took about as long as each other.
function isEven(times) {
  if (times.at(-1) - times[0] < 1000 * MIN_RACE) return true; // the clock here is too coarse to tell
  const marks = [0, 1, 2, 3, 4].map((quarter) => times[Math.round(quarter * (times.length - 1) / 4)]);
  const took = marks.slice(1).map((mark, at) => mark - marks[at]);
  return Math.max(...took) <= 2 * Math.min(...took);
}
