"""Answers are split into reasoning and text: families, markers, stop strings, channels."""

from types import SimpleNamespace

import pytest
from answers import KNOWN, WRITERS, form_of, read, written
from serving import make_target

from dflash_mlx.answers.families import AnswerFormat
from dflash_mlx.answers.parser import AnswerParser
from dflash_mlx.answers.parts import Reasoning, Text, merge_texts
from dflash_mlx.stream import TextStream

SCHEMAS = {"get_weather": {"type": "object"}, "now": {}}

FAMILY_BY_TEMPLATE = {
    "<｜DSML｜tool_calls>": "deepseek_v4",
    "{% set t = '｜DSML｜' %} {{ '<' + t + 'function_calls>' }}": "deepseek_v32",
    "<｜tool▁call▁begin｜>": "deepseek_v31",
    "<｜tool▁call▁begin｜>\n```json": "deepseek_v3",
    "<TOOLCALL>": "nemotron",
    '"parameters": dictionary of argument name': "llama3",
    "nothing": "json_tools",
}


@pytest.mark.parametrize(("template", "family"), FAMILY_BY_TEMPLATE.items())
def test_families_are_recognized_by_their_templates(template, family):
    assert AnswerFormat.of(make_target(template=template).tokenizer).family.name == family


def test_every_tool_parser_of_mlx_lm_has_its_family():
    for name in ("json_tools", "qwen3_coder", "glm47", "laguna", "mistral", "kimi_k2", "gemma4"):
        tokenizer = make_target(name).tokenizer
        form = AnswerFormat.of(tokenizer)
        family = KNOWN[name if name != "laguna" else "glm47"]
        assert form.template_has_tools and form.family is family
        assert (family.start, family.end) == (tokenizer.tool_call_start, tokenizer.tool_call_end)


@pytest.mark.parametrize("family", WRITERS)
def test_a_marker_that_is_spelled_in_ordinary_tokens_is_plain_text(family):
    """Only control tokens are markers, both in the thought and in the answer."""
    start = KNOWN[family].start
    end = KNOWN[family].end
    markers = [marker for marker in ("<think>", "</think>", start, end) if marker]
    target = make_target(added=markers)
    ids = dict(zip(markers, target.tokenizer.convert_tokens_to_ids(markers), strict=True))
    form = AnswerFormat(
        KNOWN[family], ("<think>", "</think>"), {ids[marker]: marker for marker in markers}
    )

    def spelled(text):
        """Tokens of single letters."""
        tokens = []
        for letter in text:
            tokens += target.tokenizer.encode(letter, add_special_tokens=False)
        return tokens

    def text_of(parts, kind):
        return "".join(part.text for part in parts if isinstance(part, kind))

    answer = f"<think> and </think>, {start} and {end}."
    tokens = [*spelled("The tag </think>.\n"), ids["</think>"], *spelled(f"\n{answer}")]
    for width in (1, 99):
        parser = AnswerParser(form, SCHEMAS, True, detokenizer=target.tokenizer.detokenizer)
        detokenizer = target.tokenizer.detokenizer
        parts = []
        for first in range(0, len(tokens), width):
            step = tokens[first : first + width]
            for token in step:
                detokenizer.add_token(token)
            parts += parser.feed(detokenizer.last_segment, step)
        parts += parser.finish(False)
        assert text_of(parts, Reasoning) == "The tag </think>."
        assert text_of(parts, Text) == answer


@pytest.mark.parametrize("width", [1, 1000])
def test_newlines_next_to_the_markers_of_thoughts_and_calls_are_dropped(width):
    def parts_of(text, reasoning=True):
        return read(
            form_of("json_tools"),
            schemas=SCHEMAS,
            text=text,
            width=width,
            starts_in_reasoning=reasoning,
        )

    assert parts_of("\nLet me see.\n</think>\n\nYes.\n") == [
        Reasoning("Let me see."),
        Text("Yes.\n"),
    ]
    text = "<think>a</think>b<tool_call>{}</tool_call>"
    assert parts_of(text, False) == [Reasoning("a"), Text("b<tool_call>{}</tool_call>")]
    call = written("json_tools", "now", {})
    assert parts_of(f"Hm.\n{call}") == [Reasoning("Hm."), ("now", {})]
    assert read(form_of("json_tools"), schemas={}, text=call, width=width) == [Text(call)]


@pytest.mark.parametrize("width", [1, 99])
def test_stop_strings_in_thoughts_and_calls_do_not_end_the_answer(width):
    """The stop string "4S" must not be found across the end of a call or a thought either."""
    target = make_target(thinking="<think>")
    form = AnswerFormat.of(target.tokenizer)
    detokenizer = target.tokenizer.detokenizer
    parser = AnswerParser(form, {"f": {}}, True, detokenizer=target.tokenizer.detokenizer)
    stream = TextStream(
        detokenizer,
        eos_ids=[2],
        stop=("Stop", "4S"),
        max_tokens=999,
        stop_applies=parser.answer_length,
    )
    before = 'Stop 4</think>Hi. <tool_call>{"name": "f", "arguments": {"a": "Stop"}}</tool_call> 4'
    tokens = target.tokenizer.encode(before + "Stop there", add_special_tokens=False)
    pieces = [stream.add(tokens[start : start + width]) for start in range(0, len(tokens), width)]
    # The answer ends with "4Stop", which has both stop strings; the first begins at the 4.
    assert "".join(piece.text for piece in pieces) == before[:-1]
    assert stream.finish_reason == "stop"


THOUGHTS = {
    "json_tools": "<think>Hm.\n</think>",
    "harmony": "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
}


@pytest.mark.parametrize("family", THOUGHTS)
@pytest.mark.parametrize("newlines", ["\n", "\n\n"])
@pytest.mark.parametrize("width", [1, 2, 5, 999])
def test_newlines_dropped_after_a_marker_trigger_no_stop_string(family, newlines, width):
    """Here a newline is the stop string. The first one of the answer comes after "One line."."""
    form = form_of(family)
    text = f"{THOUGHTS[family]}{newlines}One line.\nMore."
    pieces = [text[start : start + width] for start in range(0, len(text), width)]
    detokenizer = SimpleNamespace(add_token=lambda token: None, finalize=lambda: None)
    parser = AnswerParser(form, {})
    reader = AnswerParser(form, {})
    stream = TextStream(
        detokenizer, eos_ids=[], stop=("\n",), max_tokens=999, stop_applies=parser.answer_length
    )
    parts = []
    for token, piece in enumerate(pieces):
        detokenizer.last_segment = piece
        if stream.finish_reason is None:
            parts += reader.feed(stream.add([token]).text)
    parts += reader.finish(False)
    assert merge_texts(parts) == [Reasoning("Hm."), Text("One line.")]


HARMONY = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Rome"}'
)


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_channels_of_gpt_oss_are_thoughts_texts_and_calls(width):
    def parts_of(text, **more):
        return read(form_of("harmony"), schemas=SCHEMAS, text=text, width=width, **more)

    call = ("get_weather", {"city": "Rome"})
    parts = [Reasoning("Let me see."), Text("One moment."), call]
    assert parts_of(HARMONY) == parts
    assert parts_of("<|channel|>final<|message|>Warm.") == [Text("Warm.")]
    twice = f"{HARMONY}<|call|><|start|>assistant{HARMONY}"
    assert parts_of(twice) == parts * 2
    assert parts_of(twice, parallel=False) == [
        *parts,
        Reasoning("Let me see."),
        Text("One moment."),
    ]
    # The recipient may stand before the channel.
    recipient_first = HARMONY.replace("commentary to=functions.get_weather ", "commentary")
    assert parts_of(" to=get_weather" + recipient_first.rpartition("assistant")[2]) == [call]
    # A call that is cut off is text.
    for parts in (parts_of(HARMONY[:-2]), parts_of(HARMONY, truncated=True)):
        assert isinstance(parts[-1], Text) and '{"city": "Rome' in parts[-1].text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It is four.", "It is four."),
        ("<|channel|>It is four.", "It is four."),
        ("<|channel|>It is four.<|end|>", "It is four."),
        ("It is<|channel|>final<|message|> four.", "It is four."),
        ("<|channel|>final<|message|>It is <|end|><|start|>assistant four.", "It is four."),
        ("It is four. " * 40, "It is four. " * 40),
        ("<|channel|>analysis", ""),
    ],
)
def test_words_outside_the_channels_of_gpt_oss_are_text(text, shown):
    for width in (1, 1000):
        parts = read(form_of("harmony"), schemas=SCHEMAS, text=text, width=width)
        assert "".join(part.text for part in parts).split() == shown.split()
