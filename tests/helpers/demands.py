"""Schemas and forced calls in every API; each answer has to fit its schema."""

import json
from itertools import product

import jsonschema

QUESTION = [{"role": "user", "content": "What is 37 plus 48?"}]


def closed_object(**properties):
    """The schema of an object with these properties only."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def digits(most):
    """The schema of at most so many digits."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "array", "items": digit, "maxItems": most}


SUM = closed_object(right={"type": "boolean"}, digits=digits(2))
LEAVES = {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}
TREE = closed_object(root={"$ref": "#/$defs/node"}, part={"type": "integer", "multipleOf": 5})
COUNT = {"type": "integer", "minimum": -40, "maximum": 1200}
SCHEMAS = {
    "sum": SUM,
    "words": closed_object(
        unit={"enum": ["C", "F", None]},
        title={"type": "string", "minLength": 1, "maxLength": 12},
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        day={"type": "string", "format": "date"},
    ),
    "either": closed_object(value={"anyOf": [SUM, {"type": "null"}, {"const": "none at all"}]}),
    "tree": TREE
    | {"$defs": {"leaf": closed_object(digits=digits(1)), "node": closed_object(leaves=LEAVES)}},
    "optional": closed_object(count=COUNT, sum=SUM) | {"required": ["sum"]},
}
SCHEMAS["tree"]["properties"]["part"] |= {"minimum": 0, "maximum": 100}


class Demands:
    """Every way to ask for a schema or a call, with two SDK clients.

    Args:
        chat, claude: clients of OpenAI and of Anthropic.
    """

    def __init__(self, chat, claude):
        self.chat, self.claude = chat, claude
        self.ways = [
            *(self.chat_format, self.chat_stream, self.response_format, self.message_format),
            *(self.required_call, self.named_call, self.response_call, self.message_call),
        ]

    def cases(self, seeds):
        """A function for each way, schema and seed."""
        return [
            lambda way=way, name=name, seed=seed: way(name, SCHEMAS[name], seed)
            for seed, name, way in product(range(seeds), SCHEMAS, self.ways)
        ]

    def _chat(self, seed, **more):
        return self.chat.chat.completions.create(
            model="m", messages=QUESTION, seed=seed, temperature=1, **more
        )

    def _response(self, seed, **more):
        return self.chat.responses.create(model="m", input=f"{seed} and 48?", temperature=1, **more)

    def _message(self, seed, **more):
        question = [{"role": "user", "content": f"What is {seed} plus 48?"}]
        return self.claude.messages.create(
            model="m", max_tokens=900, messages=question, extra_body={"temperature": 1}, **more
        )

    def chat_format(self, name, schema, seed):
        answer = self._chat(seed, response_format=_format(name, schema))
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)

    def chat_stream(self, name, schema, seed):
        parts = self._chat(seed, response_format=_format(name, schema), stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        jsonschema.validate(json.loads(text), schema)

    def response_format(self, name, schema, seed):
        text = {"format": {"type": "json_schema", "name": name, "schema": schema}}
        jsonschema.validate(json.loads(self._response(seed, text=text).output_text), schema)

    def message_format(self, name, schema, seed):
        output = {"format": {"type": "json_schema", "schema": schema}}
        answer = self._message(seed, output_config=output)
        jsonschema.validate(json.loads(answer.content[0].text), schema)

    def required_call(self, name, schema, seed):
        """A call of either tool; several for one schema, as the pair makes as many as it may."""
        tools = [_tool(name, schema), _tool("other", SUM)]
        (choice,) = self._chat(
            seed, tools=tools, tool_choice="required", parallel_tool_calls=schema is SUM
        ).choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        for call in choice.message.tool_calls:
            expected = {name: schema, "other": SUM}[call.function.name]
            jsonschema.validate(json.loads(call.function.arguments), expected)

    def named_call(self, name, schema, seed):
        """A call of the named one of two strict tools, streamed."""
        parts = self._chat(
            seed,
            tools=[_tool("other", SUM, strict=True), _tool(name, schema, strict=True)],
            tool_choice={"type": "function", "function": {"name": name}},
            stream=True,
        )
        deltas = [part.choices[0].delta for part in parts]
        (call,) = (call for delta in deltas for call in delta.tool_calls or ())
        assert call.function.name == name
        jsonschema.validate(json.loads(call.function.arguments), schema)

    def response_call(self, name, schema, seed):
        tool = {"type": "function", "name": name, "parameters": schema, "strict": True}
        choice = {"tool_choice": "required", "parallel_tool_calls": False}
        answer = self._response(seed, tools=[tool], **choice)
        (call,) = (item for item in answer.output if item.type == "function_call")
        jsonschema.validate(json.loads(call.arguments), schema)

    def message_call(self, name, schema, seed):
        choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
        tools = [{"name": name, "input_schema": schema}]
        answer = self._message(seed, tools=tools, tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        jsonschema.validate(answer.content[-1].input, schema)


def _format(name, schema):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def _tool(name, schema, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}
