"""The page in a real browser, and the endpoint that renders its Markdown."""

import asyncio
import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import FakeEngine, client, make_handler, make_target, running

import dflash_mlx as dm
from dflash_mlx.serve import markdown, web_page
from dflash_mlx.serve.offered_models import OfferedModel

FOLDER = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MODULES = Path(os.environ.get("NODE_PATH", ""))
MARKDOWN = """# Sums

1. *carry*
2. `add`

   > and so on

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return x  # the same
```

See [the page](https://example.com/a?b=c),
please.
"""
HOSTILE = """<script>window.hacked = 1</script>

![nice](http://evil.test/i.png) [click](javascript:window.hacked=1) [go](http://evil.test/) <http://evil.test/>

<img src=x onerror="window.hacked=1"><svg onload="window.hacked=1"><style>body{display:none}</style>
<iframe src="http://evil.test"></iframe><form action="http://evil.test"><button>Send</button></form>

[x]: http://evil.test/ "t"
[x] [data](data:text/html,<script>window.hacked=1</script>) &lt;script&gt;

```"><img/src=x/onerror=window.hacked=1>
</code></pre><script>window.hacked = 1</script>
```
"""


ANSWERS = {
    "Show Markdown": MARKDOWN,
    "Be hostile": HOSTILE,
    "Think": "<think>\nLet me see.\n</think>\n\nYes.",
    "14 degrees": "14 degrees, as told.",
    "Call": '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>',
    "One, two,": " three.",
    "Be cut": "One, two,",
    "Fail": "",
}


class ScriptedEngine(FakeEngine):
    """Answers by the last question. With drafting it is twice as fast as without."""

    def question(self, prompt):
        return self.target.tokenizer.decode(prompt).rpartition("<|im_start|>user\n")[2]

    def submit(self, prompt, **settings):
        question = self.question(prompt)
        answer = next((text for word, text in ANSWERS.items() if word in question), "It is 85.")
        if "ount." in question:  # "Count." or "count."
            earlier_questions = [self.question(earlier) for earlier, _ in self.submitted]
            answer = f"Answer {earlier_questions.count(question) + 1}."
        # Markers are steps of their own; other text comes in steps of up to 3 or 40 characters.
        step_length = 3 if len(answer) < 40 else 40
        pieces = rf"</?(?:think|tool_call)>|(?:(?!</?think|</?tool_call).){{1,{step_length}}}"
        self.steps = re.findall(pieces, answer, re.DOTALL) or [""]
        self.error = RuntimeError("boom") if "Fail" in question else None
        self.reason = "stop"
        if "Wait" in question:
            self.reason = None
        elif answer == ANSWERS["Be cut"]:
            self.reason = "length"
        self.plain = settings.get("block_size") == 1
        return super().submit(prompt, **settings)

    def _events(self, stats):
        for event in super()._events(stats):
            stats.decode_seconds = 1.0 if self.plain else 0.5
            yield event


def run_in_browser(script, engine, folder, others=()):
    """Run a script that uses the page of a server with this engine, as a person would."""
    tools = (MODULES / "playwright-core", MODULES / "axe-core")
    if CHROMIUM is None or shutil.which("node") is None or not all(tool.is_dir() for tool in tools):
        pytest.skip("needs Chromium, node, npm's playwright-core and axe-core below NODE_PATH")

    async def run():
        async with running(engine, others=others) as server:
            command = [
                "node",
                FOLDER / script,
                f"http://127.0.0.1:{server.port}/",
                CHROMIUM,
                folder,
            ]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
            async with asyncio.timeout(180):
                _, stderr = await process.communicate()
            assert process.returncode == 0, stderr.decode()

    asyncio.run(run())


def render(server, text):
    return server.post("/page/render", json={"text": text})


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_says_what_an_answer_waits_for():
    page = Path(web_page.__file__).parent / "page"
    command = ["node", FOLDER / "page_waits.mjs", page / "answer.js", page / "turns.js"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_rendered_markdown_has_no_links_images_scripts_or_styles():
    """Only tags that do nothing, whose only attribute is `class`. Links are shown as text."""
    with client(FakeEngine(make_target())) as server:
        harmless = render(server, MARKDOWN).json()["html"]
        hostile = render(server, HOSTILE).json()["html"]
    tags = set(re.findall(r"<([a-z0-9]+)", harmless + hostile))
    inert = "h1 ol li em code blockquote table thead tbody tr th td pre p span br"
    assert tags == set(inert.split())
    only_tags = re.sub(">[^<]*<", "><", harmless + hostile)
    assert set(re.findall(r" ([a-z]+)=", only_tags)) == {"class"}
    assert '<span class="c1"># the same</span>' in harmless
    assert '<td class="align-right">2' in harmless
    assert '<span class="link">the page</span> <span class="address">https://e' in harmless


FORMULAS = [
    r"\( x^2 \)",
    r"\[ \frac{a}{b} \]",
    r"$\begin{matrix} a \\ b \end{matrix}$",
    "$a_1*b*c_1$",
    "$$\na *b*\n- c\n    = d\n\n# e\n$$",
    "It is $5 to $10.",
]
WORDS = [
    "\n".join("  " * level + f"- level{level}" for level in range(40)),
    "> " * 21 + "quoted",
    "[a]: http://b/c (title)",
    '[text](http://b/c "title") ![picture](http://d "name")',
    "| a | b |\n|---|---|\n| one | two | three | four |",
    f"[text](http://b/{'c' * 300})",
]


def shown(text):
    """The words that a reader of the rendered text sees."""
    return html.unescape(re.sub(r"<[^>]*>", "", markdown.render(text))).strip()


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_stay_as_they_were_written(text):
    assert shown(text) == text and shown(f"- one\n- two\n\n{text}").endswith(text)


@pytest.mark.parametrize("text", WORDS, ids=range(len(WORDS)))
def test_every_word_of_a_text_is_on_the_page(text):
    assert set(re.findall(r"\w+", text)) <= set(re.findall(r"\w+", shown(text)))


@pytest.mark.parametrize("blank", " \n\t")
def test_code_on_which_pygments_hangs_is_not_coloured(blank):
    code = f"a{blank * 20_000}b"
    assert "<span" not in markdown.render(f"```c\n{code}\n```")
    assert "<span" in markdown.render("```c\nreturn 0;\n```")


def test_a_text_that_takes_too_long_to_render_is_an_error(monkeypatch):
    def endless(text):
        while True:
            pass

    with client(FakeEngine(make_target())) as server:
        with monkeypatch.context() as shorter:
            shorter.setattr(web_page, "RENDER_SECONDS", 0.1)
            shorter.setattr(web_page, "render", endless)
            answer = render(server, "*sound*")
        assert answer.status_code == 400
        assert "takes longer" in answer.json()["error"]["message"]
        assert render(server, "*sound*").json() == {"html": "<p><em>sound</em></p>\n"}
        deeper_than_python_recurses = "> " * 3000 + "quoted"
        assert "quoted" in render(server, deeper_than_python_recurses).json()["html"]
        assert render(server, "a" * 100_001).status_code == 400


@pytest.mark.browser
def test_the_page_in_a_browser(tmp_path):
    engine = ScriptedEngine(make_target("json_tools", thinking="", context=2500))
    other = FakeEngine(engine.target)
    offered = OfferedModel("other", lambda _: make_handler(other))
    run_in_browser("page.mjs", engine=engine, folder=tmp_path, others=[offered])
    assert len(other.submitted) == 1
    settings = [settings for _, settings in engine.submitted]
    assert "block_size" not in settings[0] and settings[0]["max_tokens"] == 2048
    # A race of drafted and plain decoding has one seed.
    drafted, plain = [request for request in settings if "seed" in request]
    assert "block_size" not in drafted and plain["block_size"] == 1
    assert drafted["seed"] == plain["seed"]
    prompts = [engine.target.tokenizer.decode(prompt) for prompt, _ in engine.submitted]
    assert any("system\nBe brief." in prompt for prompt in prompts)
    assert not any("word word" in prompt for prompt in prompts)
    assert any(job.cancelled for job in engine.jobs)


@pytest.mark.browser
def test_the_page_with_the_embedded_pair(tmp_path):
    target, drafter = dm.load("tiny")
    with dm.Engine(target, drafter) as engine:
        engine.target = target
        run_in_browser("page_tiny.mjs", engine, tmp_path)
