"""Conversations with tools: what an answer brings goes into the next prompt of each family.

The templates in data/templates are written after the published ones, with what they demand.
"""

import json
import re
from pathlib import Path

import pytest
from answers import KNOWN, WRITERS, written
from dialects import APIS, Chat
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from serving import FakeEngine, client, make_target, post

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
CODE = "\tif x < 1:\n    <a href='#'>\u00e9</a>\n</parameter> null  "
CALLS = [("write", {"path": "first.py", "text": CODE}), ("write", {"path": "second.py"})]
HEADERS = {
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"],
    "muse_spark": ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
}


def target_of(family):
    template = (TEMPLATES / f"{family}.jinja").read_text()
    own = HEADERS.get(family)
    return make_target(family, template, thinking=None if own else "", added=own or ())


def says(family):
    """The text of an answer with a thought and two calls."""
    calls = [WRITERS[family](*call) for call in CALLS]
    if family == "harmony":
        between = "<|start|>assistant"
        thought = f"<|channel|>analysis<|message|>Let me see.<|end|>{between}"
        return thought + between.join(calls).removesuffix("<|call|>")
    if family == "muse_spark":
        to = "<|eom|><|start|>assistant to=write<|message|>"
        return "to=self<|message|>Let me see." + "".join(
            to + written(family, *one) for one in CALLS
        )
    text = "<think>Let me see.</think>\n\n"
    if family == "mistral":
        return text + "".join(f"[TOOL_CALLS]{call}" for call in calls)
    if family == "llama3":
        return text + "; ".join(calls)
    return text + "\n".join(written(family, *call) for call in CALLS)


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("dialect", APIS, ids=lambda one: one.path[4:])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_three_turns(family, dialect, streamed):
    talk, engine = dialect(), FakeEngine(target_of(family))
    with client(engine) as server:

        def turn(text):
            own = "|".join(map(re.escape, engine.target.tokenizer.get_added_vocab()))
            engine.steps = re.findall(f"{own}|(?s:(?:(?!{own}).){{1,7}})", text)
            return talk.ask(server, streamed)[:3]

        talk.user("Write.")
        thought, text, calls = turn(says(family))
        assert (thought, text) == ("Let me see.", "") and "path" in engine.prompt()
        assert [(name, json.loads(arguments)) for _, name, arguments in calls] == CALLS
        for (id, _, _), said in zip(calls, ("All 17 lines.", "No such folder."), strict=True):
            talk.result(id, said, said.startswith("No"))
        final = {"harmony": "<|channel|>final<|message|>", "muse_spark": "to=user<|message|>"}
        assert turn(final.get(family, "") + "One failed.") == (None, "One failed.", [])
        talk.user("Go on.")
        assert turn(final.get(family, "") + "Yes.")[1] == "Yes."
    prompt = engine.prompt()
    for said in ("first.py", "second.py", "17 lines.", "No such folder.", "One failed.", "Go on."):
        assert prompt.count(said) == 1, prompt
    assert prompt.index("first.py") < prompt.index("17 lines.") < prompt.index("No such folder.")


def test_the_template_of_deepseek_in_python():
    """mlx-lm's takes the arguments as text, where most take an object."""
    target = make_target(thinking="")
    tokenizer = target.tokenizer._tokenizer
    tokenizer.chat_template = None
    tokenizer.init_kwargs["chat_template_type"] = "deepseek_v32"
    apply = deepseek_v32.apply_chat_template
    target.tokenizer = TokenizerWrapper(tokenizer, BPEStreamingDetokenizer, [2], apply)
    engine, talk = FakeEngine(target, [written("deepseek_v32", *CALLS[0])]), Chat()
    with client(engine) as server:
        talk.user("Write.")
        ((id, _, arguments),) = talk.ask(server).calls
        assert json.loads(arguments) == CALLS[0][1]
        talk.result(id, "Done.", False)
        assert server.post(talk.path, json=talk.body()).status_code == 200
    assert CODE in engine.prompt()


@pytest.mark.parametrize("family", ["mistral", "kimi_k2"])
def test_results_find_their_calls_whatever_the_ids(family):
    """Ids of another server, used twice, or unknown."""
    function = {"name": "write", "arguments": '{"path": "x"}'}
    call = {"id": "call_0", "type": "function", "function": function}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "b"}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "one"},
        {"role": "tool", "tool_call_id": "lost", "content": "two"},
    ]
    again = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    messages = [{"role": "user", "content": "Hi"}, *turn, again, turn[1], turn[1]]
    engine = FakeEngine(target_of(family))
    answer = post(engine, "/v1/chat/completions", Chat().body() | {"messages": messages})
    assert answer.status_code == 200, answer.text
    ids = [KNOWN[family].call_ids.format(name="write", number=number) for number in range(4)]
    prompt = engine.prompt()
    shown = family == "kimi_k2"  # beside the calls
    assert [prompt.count(id) - shown for id in ids] == [1, 1, 1, 1]
