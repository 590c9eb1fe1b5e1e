"""What a client may demand of an answer: schemas of several kinds, and calls, in each dialect."""

import json
from itertools import product

import jsonschema

QUESTION = [{"role": "user", "content": "What is 37 plus 48?"}]


def thing(**properties):
    """The schema of an object that has these and nothing else."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def digits(most):
    """The schema of so many digits at most."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "array", "items": digit, "maxItems": most}


SUM = thing(right={"type": "boolean"}, digits=digits(2))
SCHEMAS = {
    "sum": SUM,
    "words": thing(
        unit={"enum": ["C", "F", None]},
        title={"type": "string", "minLength": 1, "maxLength": 12},
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        day={"type": "string", "format": "date"},
    ),
    "either": thing(value={"anyOf": [SUM, {"type": "null"}, {"const": "none at all"}]}),
    "tree": thing(
        root={"$ref": "#/$defs/node"},
        part={"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    )
    | {
        "$defs": {
            "leaf": thing(digits=digits(1)),
            "node": thing(
                leaves={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}
            ),
        }
    },
    "optional": {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": -40, "maximum": 1200}, "sum": SUM},
        "required": ["sum"],
        "additionalProperties": False,
    },
}


class Demands:
    """Each way to demand something, of two clients; what was answered has to fit.

    Args:
        chat, claude: clients of OpenAI and of Anthropic.
    """

    def __init__(self, chat, claude):
        self.chat, self.claude = chat, claude
        self.ways = [
            *(self.formatted, self.streamed, self.response, self.message),
            *(self.required, self.named, self.function, self.used),
        ]

    def cases(self, seeds):
        """A function for each way, kind of schema and seed, none of which comes in a block."""
        return [
            lambda way=way, name=name, seed=seed: way(name, SCHEMAS[name], seed)
            for seed, name, way in product(range(seeds), SCHEMAS, self.ways)
        ]

    def _chat(self, seed, **more):
        return self.chat.chat.completions.create(
            model="m", messages=QUESTION, seed=seed, temperature=1, **more
        )

    def formatted(self, name, schema, seed):
        answer = self._chat(seed, response_format=_format(name, schema))
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)

    def streamed(self, name, schema, seed):
        parts = self._chat(seed, response_format=_format(name, schema), stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        jsonschema.validate(json.loads(text), schema)

    def response(self, name, schema, seed):
        text = {"format": {"type": "json_schema", "name": name, "schema": schema}}
        answer = self.chat.responses.create(
            model="m", input=f"{seed} and 48?", text=text, temperature=1
        )
        jsonschema.validate(json.loads(answer.output_text), schema)

    def message(self, name, schema, seed):
        answer = self._message(seed, output_config={"format": _schema(schema)})
        jsonschema.validate(json.loads(answer.content[0].text), schema)

    def required(self, name, schema, seed):
        """One call of either tool, and of one kind several: the pair makes as many as it may."""
        tools = [_tool(name, schema), _tool("other", SUM)]
        (choice,) = self._chat(
            seed, tools=tools, tool_choice="required", parallel_tool_calls=schema is SUM
        ).choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        for call in choice.message.tool_calls:
            told = {name: schema, "other": SUM}[call.function.name]
            jsonschema.validate(json.loads(call.function.arguments), told)

    def named(self, name, schema, seed):
        """Of two strict tools the one that is named, in a stream."""
        tools = [_tool("other", SUM, strict=True), _tool(name, schema, strict=True)]
        chosen = {"type": "function", "function": {"name": name}}
        parts = self._chat(
            seed, tools=tools, tool_choice=chosen, stream=True, parallel_tool_calls=False
        )
        deltas = [part.choices[0].delta for part in parts]
        (call,) = (call for delta in deltas for call in delta.tool_calls or ())
        assert call.function.name == name
        jsonschema.validate(json.loads(call.function.arguments), schema)

    def function(self, name, schema, seed):
        tool = {"type": "function", "name": name, "parameters": schema, "strict": True}
        answer = self.chat.responses.create(
            model="m",
            input=f"{seed} and 48?",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1,
        )
        (call,) = (item for item in answer.output if item.type == "function_call")
        jsonschema.validate(json.loads(call.arguments), schema)

    def used(self, name, schema, seed):
        answer = self._message(
            seed,
            tools=[{"name": name, "input_schema": schema}],
            tool_choice={"type": "tool", "name": name, "disable_parallel_tool_use": True},
        )
        assert answer.stop_reason == "tool_use"
        jsonschema.validate(answer.content[-1].input, schema)

    def _message(self, seed, **more):
        question = [{"role": "user", "content": f"What is {seed} plus 48?"}]
        return self.claude.messages.create(
            model="m", max_tokens=900, messages=question, extra_body={"temperature": 1}, **more
        )


def _schema(schema):
    return {"type": "json_schema", "schema": schema}


def _format(name, schema):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def _tool(name, schema, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}
