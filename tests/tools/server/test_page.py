"""Test the chat page: its headers, and an answer in a browser."""

import base64
import hashlib
import importlib
import json
import shutil
from html.parser import HTMLParser

import pytest

from tests.tools.server.serving import MANY, NUM_NEW, PATH, WAIT_S, body, wait_until

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
PHONE, DESKTOP = 390, 1200  # widths in CSS pixels
ENOUGH_CONTRAST = 4.5  # contrast of text that WCAG 2.2 requires
HOSTILE = '<img src=x onerror="document.title=1"></p><script>document.title = 2</script> & "\u202e"'

# Returns faults of the page: text with low contrast, and parts wider than the window.
LOOK = """() => {
  const problems = [], root = document.documentElement;
  if (root.scrollWidth > innerWidth) problems.push('wider than the window: ' + root.scrollWidth);
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (color) => rgb(color).slice(0, 3).map((value) => value / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (rgb(color)[3] !== 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  for (const element of document.body.querySelectorAll('*')) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || element.matches('script, :disabled')) continue;
    const lights = [light(getComputedStyle(element).color), light(ground(element))];
    const [high, low] = lights.sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    const shown = element.textContent.slice(0, 40);
    if (contrast < CONTRAST) problems.push(`contrast ${contrast.toFixed(2)}: ${shown}`);
  }
  return problems;
}""".replace("CONTRAST", str(ENOUGH_CONTRAST))


class Inline(HTMLParser):
    """Parser that collects the text of inline elements by tag."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.tag, self.attributes = {}, "", set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tag = tag
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.texts[self.tag] = self.texts.get(self.tag, "") + data

    def handle_endtag(self, tag):
        self.tag = ""


def test_browser_may_run_the_script_of_the_page_only(client):
    response = client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert (response.headers["x-content-type-options"], response.headers["referrer-policy"]) == (
        "nosniff",
        "no-referrer",
    )
    assert "set-cookie" not in response.headers
    policy = dict(
        directive.split(" ", 1)
        for directive in response.headers["content-security-policy"].split("; ")
    )
    inline = Inline(response.text)
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(inline.texts[tag].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    nothing = ("default-src", "base-uri", "form-action", "frame-ancestors")
    assert {policy[name] for name in nothing} == {"'none'"}
    assert policy["connect-src"] == "'self'"
    assert (
        not {name for name in inline.attributes if name.startswith("on")}
        | {"style", "src"} & inline.attributes
    )
    assert inline.texts["h1"] == "org/tiny"


def test_model_name_is_escaped():
    page = importlib.import_module("hf_speculate.tools.server.page").chat_page(HOSTILE)
    assert Inline(page).texts["h1"] == HOSTILE
    assert "<img" not in page


def test_page_can_be_left_out(engine):
    app = importlib.import_module("hf_speculate.tools.server.app")
    server = app.GracefulServer(engine, 0.1, has_page=False)
    client = importlib.import_module("starlette.testclient").TestClient(
        server.config.app, "http://localhost"
    )
    assert client.get("/").status_code == 404
    assert client.get("/health").status_code == 200


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, client):
    """Open the server's page; any request to another host or console message is a failure."""
    contexts, problems = [], []

    def open_page(width=DESKTOP, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page, address = context.new_page(), str(client.base_url)
        page.set_default_timeout(1000 * WAIT_S)
        page.on("request", lambda one: one.url.startswith(address) or problems.append(one.url))
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address, wait_until="load")
        return page

    yield open_page
    assert not any(context.cookies() for context in contexts)
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", PHONE), ("dark", DESKTOP)])
def test_answer_marks_the_drafted_tokens(open_page, client, scheme, width):
    page = open_page(width, scheme)
    page.get_by_label("Max tokens").fill(str(NUM_NEW))
    message = page.get_by_label("Message", exact=True)
    message.focus()
    page.keyboard.type("a word")
    page.keyboard.press("Shift+Enter")
    assert page.locator("article").count() == 0
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    page.locator("dt", has_text="Estimated speed-up").wait_for()
    answer = page.locator("article").nth(1)
    spans = answer.locator(".text .token")
    expected = client.post(PATH, json=body()).json()
    text = expected["choices"][0]["message"]["content"]
    assert "".join(spans.all_text_contents()) == text
    assert text in page.get_by_role("status").text_content()
    assert page.get_by_role("status").get_attribute("aria-live") == "polite"
    drafted = answer.locator(".text .o1")
    num_accepted = drafted.count()
    assert 0 < num_accepted < NUM_NEW
    assert f"model LlamaForCausalLM {num_accepted} (" in answer.locator(".legend").text_content()
    assert f"({num_accepted} of " in answer.locator("dl").text_content()
    underlined = "one => getComputedStyle(one).textDecorationLine"
    assert drafted.first.evaluate(underlined) == "underline"
    assert answer.locator(".text .o0").first.evaluate(underlined) == "none"
    assert page.evaluate(LOOK) == []
    for _ in range(4):
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.browser
def test_escape_stops_an_answer_and_clear_resets_the_chat(open_page, engine, slow):
    page = open_page()
    page.get_by_label("Max tokens").fill(str(MANY))
    page.get_by_label("Message", exact=True).fill("a word")
    page.keyboard.press("Enter")
    page.locator(".text .o1").first.wait_for()
    assert page.get_by_role("button", name="Send").is_disabled()
    page.keyboard.press("Escape")
    page.get_by_role("article").get_by_text("Stopped.").wait_for()
    wait_until(lambda: engine.num_running == 0)
    assert page.locator(".text .token").count() < MANY
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json))
    for expected in (["user", "assistant", "user"], ["user"]):
        page.get_by_label("Message", exact=True).fill("more")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Stop").and_(page.locator(":disabled")).wait_for()
        assert [message["role"] for message in bodies[-1]["messages"]] == expected
        page.get_by_role("button", name="Clear").click()
    assert page.locator("article").count() == 0


@pytest.mark.browser
def test_html_in_an_answer_stays_text(open_page):
    page = open_page()
    tokens = [{"text": text, "origin": HOSTILE} for text in (HOSTILE[:9], HOSTILE[9:])]
    event = {
        "choices": [{"delta": {"content": HOSTILE}, "finish_reason": "stop"}],
        "speculation": {"tokens": tokens},
    }
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    page.route(
        f"**{PATH}", lambda route: route.fulfill(body=stream, content_type="text/event-stream")
    )
    page.get_by_label("Message", exact=True).fill(HOSTILE)
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Answer:").wait_for(state="attached")
    question, answer = (page.locator("article .text").nth(place) for place in range(2))
    assert question.text_content() == answer.text_content() == HOSTILE
    assert page.locator("img").count() == 0
    assert page.title() == "org/tiny - hf-speculate"


@pytest.mark.browser
def test_reasoning_is_shown_apart_with_its_question(open_page):
    page, bodies = open_page(), []
    first = [
        ({}, [("<think>", "target"), ("Is", "draft")]),  # the server holds back its text
        ({"reasoning_content": "Is it"}, [(" it", "draft")]),
    ]
    second = [
        ({"reasoning_content": "ok"}, [("<think>ok</think>\n", "draft"), ("so", "target")]),
        ({"content": "so "}, [(" ye", "draft")]),
        ({"content": "yes"}, [("s", "target"), ("", "target")]),
    ]

    def answer(route):
        bodies.append(route.request.post_data_json)
        lines = []
        for delta, tokens in (first, second)[len(bodies) - 1]:
            news = {"tokens": [{"text": text, "origin": origin} for text, origin in tokens]}
            lines.append(json.dumps({"choices": [{"delta": delta}], "speculation": news}))
        body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        route.fulfill(body=body, content_type="text/event-stream")

    page.route(f"**{PATH}", answer)
    for number, question in enumerate(("why", "and then")):
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.locator("article").nth(2 * number + 1).locator("dt").first.wait_for()
        page.get_by_role("status").filter(has_text="Answer:").wait_for(state="attached")
    reasoning, texts = page.locator("article .reasoning .text"), page.locator("article > .text")
    assert reasoning.all_text_contents() == ["Is it", "ok"]
    assert [texts.nth(place).text_content() for place in (1, 3)] == ["", "so yes"]
    assert reasoning.nth(0).locator(".o1").all_text_contents() == ["Is", " it"]
    kinds = [token.get_attribute("class") for token in texts.nth(3).locator(".token").all()]
    assert kinds == ["token o0", "token o1", "token o1", "token o0"]
    assert page.evaluate(LOOK) == []
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    earlier = {"role": "assistant", "content": "", "reasoning_content": "Is it"}
    assert bodies[1]["messages"][1] == earlier
