"""Asks a server with OpenAI's own client: `openai.py URL CHAT`, where CHAT is 1 if the model has a template."""

import json
import sys

import openai

url, chat = sys.argv[1], sys.argv[2] == "1"
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
[model] = client.models.list().data
assert client.models.retrieve(model.id).id == model.id

# Whole, streamed, several: the same text.
options = {"model": model.id, "prompt": "The borrow checker", "max_tokens": 24, "temperature": 0}
whole = client.completions.create(**options)
assert whole.object == "text_completion" and whole.choices[0].finish_reason in ("length", "stop")
assert whole.usage.completion_tokens <= 24 and whole.usage.total_tokens > whole.usage.completion_tokens
events = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
assert "".join(e.choices[0].text for e in events if e.choices) == whole.choices[0].text
assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
both = client.completions.create(**options | {"n": 2, "logprobs": 3})
assert [c.text for c in both.choices] == [whole.choices[0].text] * 2
assert len(both.choices[0].logprobs.tokens) == len(both.choices[0].logprobs.top_logprobs) == 24
hot = options | {"temperature": 1.5, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {"5": -100}}
assert client.completions.create(**hot).choices[0].text == client.completions.create(**hot).choices[0].text
word = whole.choices[0].text.split()[1]
cut = client.completions.create(**options, stop=[word]).choices[0]
assert cut.finish_reason == "stop" and word not in cut.text and whole.choices[0].text.startswith(cut.text)
scored = client.completions.create(**options | {"echo": True, "logprobs": 1, "max_tokens": 0})
assert scored.choices[0].text == options["prompt"] and scored.usage.completion_tokens == 0
assert scored.choices[0].logprobs.token_logprobs[0] is None and scored.choices[0].logprobs.token_logprobs[-1] < 0

for bad, kind in [
    ({"temperature": "hot"}, openai.BadRequestError),
    ({"prompt": "borrow " * 10**4}, openai.BadRequestError),
    ({"model": "nobody"}, openai.NotFoundError),
    ({"suffix": "fin"}, openai.BadRequestError),
]:
    try:
        client.completions.create(**options | bad)
    except kind as e:
        assert e.body["message"], bad
    else:
        raise AssertionError(bad)

messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a lifetime?"}]
options = {"model": model.id, "messages": messages, "max_completion_tokens": 24, "temperature": 0}
if not chat:
    try:
        client.chat.completions.create(**options)
    except openai.BadRequestError as e:
        assert "template" in e.body["message"], e
    else:
        raise AssertionError("a conversation without a template")
    sys.exit()

whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
assert whole.choices[0].message.role == "assistant" and whole.choices[0].message.content is not None
assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
text = ""
with client.chat.completions.create(**options, stream=True) as events:
    for event in events:
        text += event.choices[0].delta.content or ""
assert text == whole.choices[0].message.content
messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And a borrow?"}]
again = client.chat.completions.create(**options)
assert again.usage.prompt_tokens_details.cached_tokens > 0, again.usage

schema = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
held = options | {"max_completion_tokens": 400, "temperature": 1, "seed": 3}
form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
found = json.loads(client.chat.completions.create(**held, response_format=form).choices[0].message.content)
assert found["n"] in (1, 2) and isinstance(found["ok"], bool)

tool = {"type": "function", "function": {"name": "weigh", "parameters": schema}}
choice = {"type": "function", "function": {"name": "weigh"}}
said = client.chat.completions.create(**held, tools=[tool], tool_choice=choice).choices[0]
assert said.finish_reason == "tool_calls" and said.message.tool_calls[0].function.name == "weigh", said
assert json.loads(said.message.tool_calls[0].function.arguments)["n"] in (1, 2)
calls = [
    call
    for event in client.chat.completions.create(**held, tools=[tool], tool_choice="required", stream=True)
    for call in event.choices[0].delta.tool_calls or []
]
assert [c.function.name for c in calls if c.function.name] == ["weigh"], calls
assert len(calls) > 2 and json.loads("".join(c.function.arguments for c in calls))["n"] in (1, 2), calls
