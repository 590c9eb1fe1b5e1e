"""Everything that an API may have written is accepted in the history of a later request.

Its text is read, or a header names what is not. The conversations are built from the type
definitions of the installed SDKs, so a new type that we do not handle fails here.
"""

import re
from base64 import b64encode

import pytest
from dialects import CHAT, MESSAGES, OLLAMA, RESPONSES, ask, user
from sdk_types import Builder, fields, is_object, members, texts
from serving import CHATML, FakeEngine, client, make_target

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

# Strings that are not text of the conversation: names, and copies of other fields.
NO_TEXT = re.compile(
    r"id|\w+_id|type|status|role|phase|signature|fingerprint|caller|cache_control|name|namespace"
    r"|citations|annotations|logprobs|prompt_cache_breakpoint|toolset_name|encrypted_\w+"
)


def blocks():
    """The types of blocks in Anthropic's messages, each with the role of its message."""
    examples = {}
    for union in (anthropic.types.MessageParam, anthropic.types.beta.BetaMessageParam):
        for message in members(union):
            message_fields = fields(message)
            role = Builder().values(message_fields["role"][0])[0]
            for content in members(message_fields["content"][0]):
                if not hasattr(content, "__args__"):
                    continue
                for block in members(content.__args__[0]):
                    if is_object(block):
                        examples[f"{role} {block.__name__}"] = role, block
    return examples


def items():
    """The types of items in the input of OpenAI's responses."""
    union = openai.types.responses.ResponseInputItemParam
    return {member.__name__: member for member in members(union)}


def chat_messages():
    """The types of messages in OpenAI's chat completions."""
    union = openai.types.chat.ChatCompletionMessageParam
    return {member.__name__: member for member in members(union)}


BLOCKS = blocks()
ITEMS = items()
CHATS = chat_messages()


@pytest.fixture(scope="module")
def engine():
    shows_all = CHATML.replace("{{ m.content }}", "{{ m.thinking }}{{ m.name }}{{ m.content }}")
    return FakeEngine(make_target(template=shows_all))


@pytest.fixture(scope="module")
def server(engine):
    with client(engine) as test_client:
        yield test_client


def check_read_or_named(server, engine, path, value, *history):
    """Check that a conversation with this value is answered, and that its text is not lost.

    Each text of the value is in the prompt, or the header names the kind of content that has it.
    """
    answer = server.post(path, json=ask(path, *history))
    assert answer.status_code == 200, (value, answer.text)
    prompt = engine.prompt()
    ignored = answer.headers.get("x-dflash-ignored", "")
    for path_in_value, text in texts(value):
        if text in prompt or any(NO_TEXT.fullmatch(name) for name in path_in_value):
            continue
        kinds = [name.removeprefix("input_").removesuffix("_url") for name in path_in_value]
        is_named = any(f"content {kind}" in ignored for kind in kinds)
        assert is_named, (path_in_value, value, ignored, prompt)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_of_anthropics_messages_is_read_or_named(server, engine, name):
    role, kind = BLOCKS[name]
    values = Builder().values(kind)
    assert values
    for value in values:
        history = user("Go."), {"role": role, "content": [value]}
        check_read_or_named(server, engine, MESSAGES, value, *history, user("On."))


@pytest.mark.parametrize("name", ITEMS)
def test_every_item_of_openais_responses_is_read_or_named(server, engine, name):
    values = Builder().values(ITEMS[name])
    assert values
    for value in values:
        if name == "ItemReference":  # to an item that this server has not stored
            answer = server.post(RESPONSES, json=ask(RESPONSES, user("Go."), value))
            assert answer.status_code == 400 and "is not stored: send the item" in answer.text
            continue
        check_read_or_named(server, engine, RESPONSES, value, user("Go."), value, user("On."))


@pytest.mark.parametrize("name", CHATS)
def test_every_message_of_openais_chat_is_read_or_named(server, engine, name):
    values = Builder().values(CHATS[name])
    assert values
    for value in values:
        check_read_or_named(server, engine, CHAT, value, user("Go."), value, user("On."))


WORDS = "All of the text."
ENCODED = "QWxsIG9mIHRoZSB0ZXh0Lg=="
SOURCES = {
    "text": {"type": "text", "media_type": "text/plain", "data": WORDS},
    "blocks": {"type": "content", "content": [{"type": "text", "text": WORDS}]},
    "a string": {"type": "content", "content": WORDS},
    "base64": {"type": "base64", "media_type": "text/plain", "data": ENCODED},
}
FILES = [
    (CHAT, {"type": "file", "file": {"file_data": f"data:text/markdown;base64,{ENCODED}"}}, True),
    (
        CHAT,
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{ENCODED}"}},
        False,
    ),
    (CHAT, {"type": "file", "file": {"file_id": "f"}}, False),
    (RESPONSES, {"type": "input_file", "filename": "a.txt", "file_data": ENCODED}, True),
    (RESPONSES, {"type": "input_file", "filename": "a.pdf", "file_data": ENCODED}, False),
    (RESPONSES, {"type": "input_file", "filename": "a.txt", "file_data": "no, base64"}, False),
    (RESPONSES, {"type": "input_file", "file_data": f"data:text/plain,1,{WORDS}"}, True),
]


@pytest.mark.parametrize("source", SOURCES)
def test_documents_of_text_are_read_in_messages_and_in_results_of_tools(server, engine, source):
    document = {
        "type": "document",
        "title": "Notes",
        "context": "Of May",
        "source": SOURCES[source],
    }
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    turns = [user("Go."), {"role": "assistant", "content": [call]}]
    for history in (
        [user([document])],
        [user([document]), {"role": "assistant", "content": "Hm."}, user("On.")],
        [*turns, user([result])],
        [*turns, user([result, {"type": "text", "text": "So?"}])],
    ):
        answer = server.post(MESSAGES, json=ask(MESSAGES, *history))
        assert answer.status_code == 200, answer.text
        assert "x-dflash-ignored" not in answer.headers
        assert f"Notes\nOf May\n{WORDS}" in engine.prompt()


WITH_TEXT = {
    "document": {"type": "document", "source": SOURCES["base64"]},
    "document of blocks": {"type": "document", "source": SOURCES["blocks"]},
    "resource": {"type": "resource", "resource": {"uri": "file:///a.md", "text": WORDS}},
    "a new kind": {"type": "brand_new", "text": WORDS},
    "text": {"type": "text", "text": WORDS},
}


def results_of(content):
    """The history of a call whose result has this content, by API."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    return {
        CHAT: [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": content},
        ],
        MESSAGES: [
            {"role": "assistant", "content": [use]},
            user([{"type": "tool_result", "tool_use_id": "c", "content": content}]),
        ],
        RESPONSES: [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": content},
        ],
    }


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("kind", WITH_TEXT)
def test_every_content_with_text_is_read(server, engine, kind, path):
    """In messages and in results of tools: as a list of parts, as a single part, or as a string."""
    part = WITH_TEXT[kind]
    for content in ([part], part, ["Look:", part], [WORDS]):
        for history in ([user(content)], [user("Go."), *results_of(content)[path]]):
            answer = server.post(path, json=ask(path, *history))
            assert answer.status_code == 200, answer.text
            assert "x-dflash-ignored" not in answer.headers
            assert WORDS in engine.prompt()


@pytest.mark.parametrize("thinking", [WORDS, [{"type": "text", "text": WORDS}]])
def test_thinking_parts_of_a_chat_message_are_read_as_its_thought(server, engine, thinking):
    """Anthropic's blocks and Mistral's API have thoughts in this form."""
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "Said."}]
    message = {"role": "assistant", "content": parts}
    answer = server.post(CHAT, json=ask(CHAT, user("Go."), message, user("On.")))
    assert answer.status_code == 200 and "x-dflash-ignored" not in answer.headers
    assert f"{WORDS}Said." in engine.prompt()


@pytest.mark.parametrize(("path", "part", "is_read"), FILES)
def test_files_of_text_are_read(server, engine, path, part, is_read):
    answer = server.post(path, json=ask(path, user([part])))
    assert answer.status_code == (200 if is_read else 400), answer.text
    if is_read:
        assert WORDS in engine.prompt()


def test_unreadable_documents_are_named_in_the_history_and_refused_in_the_newest_message(
    server, engine
):
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
    earlier = user([pdf]), {"role": "assistant", "content": "Hm."}, user("On.")
    answer = server.post(MESSAGES, json=ask(MESSAGES, *earlier))
    assert answer.headers["x-dflash-ignored"] == "content document"
    assert "[document: this model reads text only]" in engine.prompt()
    assert server.post(MESSAGES, json=ask(MESSAGES, *earlier[:1])).status_code == 400


@pytest.mark.parametrize("arguments", [None, "", "null", {}, "{}", [], "[]"])
@pytest.mark.parametrize("path", [CHAT, OLLAMA, RESPONSES, MESSAGES])
def test_a_call_without_arguments_has_an_empty_object(path, arguments):
    """Servers write it in several ways; templates always get an empty object."""
    engine = FakeEngine(make_target("json_tools"))
    function = {"name": "now", "arguments": arguments}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": None, "function": function}],
    }
    history = [message, {"role": "tool", "content": "noon"}]
    if path == RESPONSES:
        history = [{"type": "function_call", "call_id": "c", **function}]
    elif path == MESSAGES:
        use = {"type": "tool_use", "id": "c", "name": "now", "input": arguments}
        history = [{"role": "assistant", "content": [use]}]
    with client(engine) as server:
        answer = server.post(path, json=ask(path, user("Go."), *history, user("On.")))
    assert answer.status_code == 200, answer.text
    assert "[now {}]" in engine.prompt() or '"arguments": {}' in engine.prompt()


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ("Z" * 500, True),
        ("\u6587\u5b57" * 300, True),
        ("two words " * 99, True),
        (b64encode(bytes(range(256)) * 4).decode(), False),
        (f"data:image/png;base64,{b64encode(bytes(99)).decode()}", False),
    ],
)
def test_base64_and_data_urls_are_left_out_of_the_prompt(server, engine, text, is_read):
    """They would fill it with tokens that say nothing. Long words of other kinds are read."""
    call = {"type": "mcp_call", "id": "m", "name": "draw", "arguments": "{}", "output": text}
    answer = server.post(RESPONSES, json=ask(RESPONSES, user("Go."), call, user("On.")))
    assert (text in engine.prompt()) is is_read and "[mcp_call: " in engine.prompt()
    assert answer.headers.get("x-dflash-ignored") == (None if is_read else "content mcp_call")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_a_turn_without_content_is_accepted(server, path):
    message = {"role": "assistant", "content": None}
    answer = server.post(path, json=ask(path, user("Go."), message, user("On.")))
    assert answer.status_code == 200, answer.text


def test_an_item_of_an_unknown_type_is_refused(server):
    answer = server.post(
        RESPONSES, json=ask(RESPONSES, user("Go."), {"type": "weird", "text": "x"})
    )
    assert answer.status_code == 400 and "items of type 'weird' are unknown" in answer.text
