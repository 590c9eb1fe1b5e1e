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

FOUND = {
    "<｜DSML｜tool_calls>": "deepseek_v4",
    "{% set t = '｜DSML｜' %} {{ '<' + t + 'function_calls>' }}": "deepseek_v32",
    "<｜tool▁call▁begin｜>": "deepseek_v31",
    "<｜tool▁call▁begin｜>\n```json": "deepseek_v3",
    "<TOOLCALL>": "nemotron",
    '"parameters": dictionary of argument name': "llama3",
    "nothing": "json_tools",
}


@pytest.mark.parametrize(("mark", "family"), FOUND.items())
def test_families_are_told_by_their_templates(mark, family):
    assert AnswerFormat.of(make_target(template=mark).tokenizer).family.name == family


def test_every_parser_of_mlx_lm_is_known():
    for name in ("json_tools", "qwen3_coder", "glm47", "laguna", "mistral", "kimi_k2", "gemma4"):
        tokenizer = make_target(name).tokenizer
        form = AnswerFormat.of(tokenizer)
        family = KNOWN[name if name != "laguna" else "glm47"]
        assert form.template_has_tools and form.family is family
        assert (family.start, family.end) == (tokenizer.tool_call_start, tokenizer.tool_call_end)


@pytest.mark.parametrize("family", WRITERS)
def test_markers_count_where_they_are_tokens_of_their_own(family):
    """A marker spelled in ordinary tokens is plain text: in answers, thoughts and values."""
    start = KNOWN[family].start
    end = KNOWN[family].end
    markers = [marker for marker in ("<think>", "</think>", start, end) if marker]
    target = make_target(added=markers)
    ids = dict(zip(markers, target.tokenizer.convert_tokens_to_ids(markers), strict=True))
    form = AnswerFormat(
        KNOWN[family], ("<think>", "</think>"), {ids[marker]: marker for marker in markers}
    )

    def spelled(text):
        encode = target.tokenizer.encode
        return [marker for letter in text for marker in encode(letter, add_special_tokens=False)]

    said = f"<think> and </think>, {start} and {end}."
    for width in (1, 99):
        parser = AnswerParser(form, SCHEMAS, True, detokenizer=target.tokenizer.detokenizer)
        shown = target.tokenizer.detokenizer
        tokens = [*spelled("The tag </think>.\n"), ids["</think>"], *spelled(f"\n{said}")]
        parts = []
        for first in range(0, len(tokens), width):
            some = tokens[first : first + width]
            for token in some:
                shown.add_token(token)
            parts += parser.feed(shown.last_segment, some)
        parts += parser.finish(False)
        texts = ["".join(part.text for part in parts if isinstance(part, kind)) for kind in KINDS]
        assert texts == ["The tag </think>.", said]


KINDS = (Reasoning, Text)


@pytest.mark.parametrize("width", [1, 1000])
def test_thoughts_and_newlines_beside_markers(width):
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
def test_stop_strings_look_at_the_answer(width):
    """Not at thoughts, nor at calls."""
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
    assert "".join(piece.text for piece in pieces) == before[:-1]
    assert stream.finish_reason == "stop"


SPOKEN = {
    "json_tools": "<think>Hm.\n</think>",
    "harmony": "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
}


@pytest.mark.parametrize("family", SPOKEN)
@pytest.mark.parametrize("between", ["\n", "\n\n"])
@pytest.mark.parametrize("width", [1, 2, 5, 999])
def test_newlines_dropped_after_a_marker_trigger_no_stop_string(family, between, width):
    """Newlines after a marker are dropped, whatever tokens they come in."""
    form = form_of(family)
    text = f"{SPOKEN[family]}{between}One line.\nMore."
    pieces = [text[start : start + width] for start in range(0, len(text), width)]
    detokenizer = SimpleNamespace(add_token=lambda token: None, finalize=lambda: None)
    parser = AnswerParser(form, {})
    reader = AnswerParser(form, {})
    stream = TextStream(
        detokenizer, eos_ids=[], stop=("\n",), max_tokens=999, stop_applies=parser.answer_length
    )
    parts = []
    for token, detokenizer.last_segment in enumerate(pieces):
        parts += reader.feed(stream.add([token]).text) if stream.finish_reason is None else []
    parts += reader.finish(False)
    assert merge_texts(parts) == [Reasoning("Hm."), Text("One line.")]


HARMONY = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Rome"}'
)


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_channels_of_gpt_oss(width):
    def parts_of(text, **more):
        return read(form_of("harmony"), schemas=SCHEMAS, text=text, width=width, **more)

    call = ("get_weather", {"city": "Rome"})
    parts = [Reasoning("Let me see."), Text("One moment."), call]
    assert parts_of(HARMONY) == parts
    assert parts_of("<|channel|>final<|message|>Warm.") == [Text("Warm.")]
    again = f"{HARMONY}<|call|><|start|>assistant{HARMONY}"
    assert parts_of(again) == parts * 2 and parts_of(again, parallel=False) == [*parts, *parts[:2]]
    first = HARMONY.replace("commentary to=functions.get_weather ", "commentary")
    assert parts_of(" to=get_weather" + first.rpartition("assistant")[2]) == [call]
    for wrong in (parts_of(HARMONY[:-2]), parts_of(HARMONY, truncated=True)):
        assert isinstance(wrong[-1], Text) and '{"city": "Rome' in wrong[-1].text


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_words_without_a_channel_are_text(text, said):
    for width in (1, 1000):
        parts = read(form_of("harmony"), schemas=SCHEMAS, text=text, width=width)
        assert "".join(part.text for part in parts).split() == said.split()
