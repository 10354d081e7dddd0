"""The page at /: in an installed browser, against the server's application over the real engine."""

import re
import threading
import time

import httpx
import pytest
from openvino_genai import ChatHistory

from speculative import batch_decoder
from speculative.serving.http.middleware import digest
from tests.support.page_checks import BEYOND, CONTRAST
from tests.support.serving import PLAIN, Api
from tests.support.thinking_model import save_thinking_model
from tests.support.waiting import PATIENCE, wait_until

PHONE, DESK = 360, 1280
MESSAGE = "Write a class for a stack."
SENT = {"model": "embedded", "stream": True, "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module", autouse=True)
def drafting(api):
    api.endpoint.draft_length = 4  # the adaptive draft length depends on this machine


@pytest.fixture(scope="module")
def window(browser):
    window = browser.new_page()
    window.set_default_timeout(PATIENCE * 1000)
    return window


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    messages = [{"role": "user", "content": MESSAGE}]
    return batch_decoder.load(save_thinking_model(tmp_path_factory.mktemp("thinking"), messages))


@pytest.fixture
def show(window):
    """Open the page of a server. Any request elsewhere, and any message in the console but `expected`, fails the test:
    violations of the Content-Security-Policy are among them."""
    messages, requested, expected, urls = [], [], [], []
    listeners = {
        "console": lambda message: messages.append(message.text),
        "pageerror": lambda error: messages.append(str(error)),
        "request": lambda request: requested.append(request.url),
    }
    for event, listener in listeners.items():
        window.on(event, listener)

    def show(api, width=DESK, scheme="light", expect=()):
        expected.extend(expect)
        window.set_viewport_size({"width": width, "height": 800})
        window.emulate_media(color_scheme=scheme)
        urls.append(api.url.removesuffix("v1"))
        window.goto(urls[-1])
        return window

    yield show
    window.goto("about:blank")
    for event, listener in listeners.items():
        window.remove_listener(event, listener)
    assert [one for one in messages if not any(words in one for words in expected)] == []
    assert [one for one in requested if not one.startswith(("about:", "data:", *urls))] == []


def ask(page, text=MESSAGE, **settings):
    """Send a message by keyboard, with settings by id, and wait for its answer."""
    before = page.locator(".figures").count()
    page.locator("#settings").evaluate("settings => settings.open = true")
    for name, value in {"temperature": 0, "max-tokens": 60, **settings}.items():
        page.locator(f"#{name}").fill(str(value))
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")
    page.locator(".figures").nth(before).wait_for()


def test_answer_streams_with_draft_tokens_marked(api, show, monkeypatch):
    step = api.engine.decoder.step

    def slow_step():
        time.sleep(0.02)  # or a busy browser gets all tokens at once, and there is no speed to show
        return step()

    monkeypatch.setattr(api.engine.decoder, "step", slow_step)
    page = show(api)
    assert page.inner_text("h1") == "Speculative decoding: embedded"
    ask(page)
    messages = [{"role": "user", "content": MESSAGE}]
    whole = httpx.post(
        f"{api.url}/chat/completions", json={**SENT, "messages": messages, "stream": False}, **PLAIN
    ).json()
    shown = page.locator(".answer p").first
    assert shown.evaluate("text => text.textContent") == whole["choices"][0]["message"]["content"]
    usage = whole["usage"]
    tokens, marked = shown.locator("span").count(), shown.locator("span.draft").count()
    assert tokens == usage["completion_tokens"]
    assert marked == usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert page.inner_text("#source") == "the draft model"
    for figure, words in {"acceptance": r"\d+ %", "efficiency": r"\d\.\d\d", "speed": r"\d+\.\d"}.items():
        assert re.fullmatch(words, page.inner_text(f"#{figure}"))
    assert page.inner_text(".figures").startswith(f"{tokens} tokens · ")


def test_chat_keeps_history_until_cleared(api, show, monkeypatch):
    seen = []
    encode = api.engine.decoder.encode

    def listening(prompt, config=None):
        if isinstance(prompt, ChatHistory):  # not the token ids that it is encoded to
            seen.append(prompt.get_messages())
        return encode(prompt, config)

    monkeypatch.setattr(api.engine.decoder, "encode", listening)
    page = show(api)
    ask(page, system="Be brief.")
    ask(page, "And a queue.")
    assert [one["role"] for one in seen[-1]] == ["system", "user", "assistant", "user"]
    assert seen[-1][2]["content"] == page.locator(".answer p").first.evaluate("text => text.textContent")
    page.locator("#clear").click()
    assert page.locator(".turn").count() == 0
    ask(page, "A set.", system="")
    assert seen[-1] == [{"role": "user", "content": "A set."}]


@pytest.fixture
def slow(decoder, monkeypatch):
    step = decoder.step

    def slow_step():
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(decoder, "step", slow_step)


@pytest.mark.parametrize("by", ["Escape", "button"])
def test_generation_can_be_stopped(api, show, slow, by):
    page = show(api)
    page.locator("#max-tokens").fill("400")
    page.locator("#message").fill(MESSAGE)
    page.keyboard.press("Enter")
    page.locator(".answer span", has_text=re.compile(r"\w")).first.wait_for()
    assert page.locator("#send").is_disabled() and page.locator("#log").get_attribute("aria-busy") == "true"
    if by == "Escape":
        page.keyboard.press("Escape")
    else:
        page.locator("#stop").click()
    page.get_by_text("Stopped.").wait_for()
    assert page.locator("#stop").is_disabled() and page.locator("#send").is_enabled()
    assert page.evaluate("document.activeElement.id") == "message"
    wait_until(lambda: api.engine.idle, "its slot in the batch is free")


def test_ime_confirmation_key_does_not_send(api, show):
    """In Safari, the composition ends before the key that confirms it, whose keyCode is 229."""
    page = show(api)
    page.locator("#message").fill(MESSAGE)
    key = "new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, bubbles: true, cancelable: true})"
    assert page.locator("#message").evaluate(f"message => message.dispatchEvent({key})")
    assert page.locator(".turn").count() == 0 and page.locator("#message").input_value() == MESSAGE


def test_scroll_position_is_kept_when_an_answer_ends(api, show, slow):
    page = show(api)
    log, settings = page.locator("#log"), {"max-tokens": "200"}
    ask(page, **settings)
    assert log.evaluate("log => log.scrollTop > 0 && log.scrollHeight - log.scrollTop - log.clientHeight < 60")
    page.locator("#max-tokens").fill("40")
    page.locator("#message").fill(MESSAGE)
    page.keyboard.press("Enter")
    page.locator(".answer").nth(1).locator("span").first.wait_for()
    log.evaluate("log => { log.scrollTop = 0; }")
    page.locator(".figures").nth(1).wait_for()
    assert log.evaluate("log => log.scrollTop") == 0


def test_text_typed_before_the_answer_starts_is_kept(api, show, monkeypatch):
    typed, encode = threading.Event(), api.engine.decoder.encode

    def waiting(*arguments):
        typed.wait(PATIENCE)
        return encode(*arguments)

    monkeypatch.setattr(api.engine.decoder, "encode", waiting)
    page = show(api)
    page.locator("#message").fill(MESSAGE)
    page.keyboard.press("Enter")
    page.locator("#message").fill("And a queue.")
    typed.set()
    page.locator(".figures").wait_for()
    assert page.locator("#message").input_value() == "And a queue."


def test_error_is_shown_and_the_message_is_kept(api, show):
    page = show(api, expect=["400 (Bad Request)"])
    page.locator("#max-tokens").fill("401")
    page.locator("#message").fill(MESSAGE)
    page.keyboard.press("Enter")
    page.get_by_text("max_tokens is 401, but at most 400 are allowed.").wait_for()
    assert page.locator("#message").input_value() == MESSAGE and page.locator(".turn").count() == 0
    page.locator("#temperature").fill("3")
    page.locator("#send").click()
    page.locator("#status.error", has_text="Temperature: ").wait_for()
    assert page.evaluate("document.activeElement.id") == "temperature"
    ask(page)


def test_api_key_field_is_shown_only_if_required(api, decoder, show):
    assert not show(api).locator("#key").is_visible()
    with Api(decoder, keys=frozenset([digest("one")])) as guarded:
        page = show(guarded, expect=["401 (Unauthorized)"])
        page.locator("#key").wait_for()
        assert "The API key is missing or wrong" in page.inner_text("#status")
        page.locator("#key").fill("two")
        page.locator("#message").fill(MESSAGE)
        page.keyboard.press("Enter")
        wait_until(lambda: guarded.counts.outcomes.count("refused_401") == 2, "the wrong key is refused")
        page.locator("#send:enabled").wait_for()  # the page knows it, too
        page.locator("#key").fill("on–e")
        page.locator("#message").focus()
        page.keyboard.press("Enter")
        page.get_by_text('The API key is wrong: it has the character "–"').wait_for()
        assert page.evaluate("document.activeElement.id") == "key"
        ask(page, key="one")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_without_chat_template_text_is_continued_and_lost_server_shown(decoder, show, monkeypatch):
    monkeypatch.setattr(decoder, "tokenizer", Untemplated(decoder.tokenizer))
    with Api(decoder) as plain:
        page = show(plain, expect=["ERR_CONNECTION_REFUSED"])
        ask(page, "def is_prime(n):")
        assert "return" in page.locator(".answer p").first.inner_text()
        assert page.locator("#message-label").inner_text().startswith("Text to continue")
        assert not page.locator("#system").is_visible()
    page.locator("#message").fill(MESSAGE)
    page.keyboard.press("Enter")
    page.get_by_text("The server cannot be reached.").wait_for()


def test_reasoning_is_shown_apart_from_the_answer_and_can_be_disabled(show, thinking):
    with Api(thinking) as api:
        page = show(api)
        ask(page)
        reasoning, answer = page.locator(".answer .reasoning p"), page.locator(".answer > p").first
        shown = [part.evaluate("text => text.textContent") for part in (reasoning, answer)]
        messages = [{"role": "user", "content": MESSAGE}]
        body = {**SENT, "messages": messages, "stream": False}
        whole = httpx.post(f"{api.url}/chat/completions", json=body, **PLAIN).json()
        message, usage = whole["choices"][0]["message"], whole["usage"]
        inner = shown[0].strip().removeprefix("<think>").removesuffix("</think>")  # the page keeps its spaces
        assert (f"<think>{inner}</think>", inner.strip()) == (shown[0].strip(), message["reasoning_content"])
        assert shown[1].strip() == message["content"].strip() and not shown[1].startswith("\n")
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert (reasoning.locator("span").count(), answer.locator("span").count()) == (
            counted,
            usage["completion_tokens"] - counted,
        )
        assert [one for one in page.evaluate(CONTRAST)["texts"] if one[0] < 4.5] == []
        assert page.get_by_label("Reasoning before the answer").is_checked()
        page.get_by_label("Reasoning before the answer").uncheck()
        ask(page)
        assert page.locator(".answer").count() == 2 and page.locator(".answer .reasoning").count() == 1


class Untemplated:
    chat_template = ""

    def __init__(self, tokenizer):
        self.encode, self.decode = tokenizer.encode, tokenizer.decode


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_layout_does_not_overflow_and_contrast_is_sufficient(api, show, width, scheme):
    page = show(api, width, scheme)
    hostile = "<img src=x onerror='window.hacked = 1'>" + "word " * 20 + "x" * 200
    ask(page, hostile, **{"max-tokens": 30})
    assert page.locator(".user p").evaluate("text => text.textContent") == hostile
    assert page.locator("#log img").count() == 0 and page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(BEYOND) == []
    texts = page.evaluate(CONTRAST)["texts"]
    assert len(texts) > 20 and [one for one in texts if one[0] < 4.5] == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 600) == (scheme == "light")


def test_all_controls_are_keyboard_accessible_and_labelled(api, show):
    page = show(api)
    assert page.evaluate("document.activeElement.id") == "message"
    assert page.locator("[autofocus]").count() == 0  # the browser logs where it comes too late
    page.locator("summary").focus()
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        focused = page.locator(":focus")
        reached.append(focused.get_attribute("id"))
        assert focused.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
        assert focused.evaluate("one => one.ariaLabel || one.labels?.[0]?.textContent || one.textContent").strip()
    assert reached == ["temperature", "top-p", "max-tokens", "seed", "system", "log", "message", "send", "clear"]


def test_page_loads_and_sends_nothing_to_other_hosts(api):
    answer = httpx.get(api.url.removesuffix("v1"), **PLAIN)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert all(re.fullmatch(r"'sha256-\S+'", policy[f"{kind}-src"]) for kind in ("script", "style"))
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(|innerHTML|\son\w+=["']""", answer.text)
    assert answer.headers["content-type"] == "text/html; charset=utf-8" and "x-request-id" in answer.headers
