"""A visitor of the page, by playwright in its own interpreter: `page_script.py CHROMIUM URL [PICTURES]`.

Raises an error if the page does not do what it says. With a directory it leaves pictures there.
"""

# mypy: ignore-errors

from __future__ import annotations

import re
import sys

from playwright.sync_api import sync_playwright

QUESTION = "Tell me a story about a fox <b>named</b> Mia."
STORY = "Tell me a story about a fox named Mia by the sea."
CURRENT = "[aria-current=true]"


def visit(page, url):
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    page.fill("#max_tokens", "20")
    page.fill("#seed", "5")
    page.select_option("#kind", "text")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Control+Enter")
    first = ended(page)
    # What is typed is text, and no HTML.
    assert len(first) == 20 and page.locator("#text .prompt").text_content() == QUESTION
    assert page.locator("#text b").count() == 0
    # Alternatives stay while the pointer goes to them.
    page.locator(".token").nth(17).click()
    page.locator(".token").nth(3).hover()
    assert page.locator(".token.chosen").text_content() == first[17]
    names, figures = alternatives(page)
    logprobs, shares = zip(*figures, strict=True)
    assert first[17] == page.locator(f"#alternatives {CURRENT} .name").text_content().replace("␣", " ")
    assert len(names) in (6, 7) and list(logprobs) == sorted(logprobs, reverse=True)
    assert max(logprobs) < 0 < sum(shares) < 100.5
    other = page.locator("#alternatives [aria-current=false]").first
    name = other.locator(".name").text_content()
    other.click()
    forked = ended(page)
    assert forked[:17] == first[:17] and forked[17] == name.replace("␣", " ") and len(forked) == 38
    # Pages of 16 tokens, of which the last one is only begun.
    counts = re.search(r"of (\d+) before them (\d+) were", page.locator("#status").text_content())
    prompt_tokens, held = map(int, counts.groups())
    assert 16 <= held < prompt_tokens <= held + 16
    # The first branch is as it was, and can be made longer.
    page.locator("#branches button").first.click()
    assert tokens(page) == first and page.locator("#branches button").count() == 2
    page.click("#more")
    longer = ended(page)
    assert longer[:20] == first and len(longer) == 40


def by_keyboard(page):
    """Goes on from a number: JavaScript puts keys that are numbers before others."""
    page.fill("#prompt", "Write this as JSON: Mia is a brave fox.")
    page.select_option("#kind", "chat")
    page.fill("#max_tokens", "40")
    page.fill("#temperature", "0")
    page.press("#prompt", "Control+Enter")
    written = ended(page)
    at = written.index("thing")
    page.locator(".token").first.focus()
    for _ in range(at):
        page.keyboard.press("ArrowRight")
    names, _ = alternatives(page)
    assert page.locator(f"#alternatives {CURRENT} .name").text_content() == names[0] == "thing"
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.locator(".token:focus").text_content() == "thing"
    page.keyboard.press("Enter")
    for _ in range(names.index("2")):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    changed = ended(page)
    assert changed[: at + 1] == [*written[:at], "2"] and len(changed) > at + 1
    token = int(page.locator(f"#alternatives {CURRENT}").get_attribute("title").split()[1])
    answer = page.request.post(page.url + "detokenize", data={"model": "local", "tokens": [token]})
    assert answer.json()["prompt"] == "2"


def chat(page):
    page.fill("#prompt", STORY)
    page.fill("#max_tokens", "200")
    page.click("text=Generate")
    story = ended(page)
    assert page.locator(".mark").count() == 1 and page.locator("#more").is_disabled()
    page.fill("#message", "Who is the story about?")
    page.press("#message", "Enter")
    page.locator(".said").nth(2).wait_for()
    answer = "".join(ended(page))
    assert "Mia" in answer and page.locator(".said").nth(1).text_content() == "".join(story).strip()
    assert page.locator("#message").input_value() == ""


def alternatives_are_in_sight(page):
    """Of a token at the beginning of a long text, in any window."""
    page.locator(".token").first.click()
    shown = page.locator("#alternatives button").first.bounding_box()
    assert 0 <= shown["y"] < page.viewport_size["height"] - shown["height"]


def refused(page):
    """An error is said in words, and what was there stays."""
    before = tokens(page), page.locator("#branches button").count()
    page.evaluate("document.querySelector('#ask').noValidate = true")
    page.fill("#max_tokens", "0")
    page.click("text=Generate")
    page.wait_for_selector("#error:not([hidden])")
    assert "max_tokens" in page.locator("#error").text_content()
    assert (tokens(page), page.locator("#branches button").count()) == before


def stopped(page):
    page.fill("#max_tokens", "1500")
    page.select_option("#kind", "text")
    page.fill("#prompt", "Once")
    page.click("text=Generate")
    page.wait_for_selector(".token")
    page.keyboard.press("Escape")
    assert 0 < len(ended(page)) < 1500 and page.locator("#error").is_hidden()


def asks_for_key(page, url):
    """It is sent with each request, and gone with the page."""

    def answer(route):
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "no valid token"}})

    page.route("**/v1/models", answer)
    page.goto(url)
    page.wait_for_selector("#key")
    assert page.locator("#error").text_content() == "no valid token"
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    page.wait_for_selector("#model option", state="attached")
    assert page.locator("#error").is_hidden()
    page.goto(url)
    page.wait_for_selector("#key")
    assert page.locator("#key").input_value() == ""


def waits_for_the_model(page, url):
    """Who asks while a worker loads it gets an answer then; without a chat template a prompt is a text."""
    states = [{"data": [{"id": "local", "max_model_len": length}]} for length in (None, None, 512)]
    no_template = {"error": {"message": "the model has no chat template", "code": "no_chat_template"}}

    def tokenize(route):
        if "messages" in route.request.post_data_json:
            route.fulfill(status=400, json=no_template)
        else:
            route.continue_()

    page.unroute("**/v1/models")
    page.route("**/v1/models", lambda route: route.fulfill(json=states.pop(0) if states else {"data": []}))
    page.route("**/tokenize", tokenize)
    page.goto(url)
    page.wait_for_selector("text=The model is being loaded.")
    page.fill("#max_tokens", "5")
    page.fill("#prompt", "Once")
    page.click("text=Generate")
    page.wait_for_selector(".token")
    assert len(ended(page)) == 5 and page.locator("#error").is_hidden()
    assert page.input_value("#kind") == "text" and page.input_value("#model") == "local"


def ended(page):
    """The tokens, after the request."""
    page.wait_for_selector("#stop[disabled]", state="attached")
    return tokens(page)


def tokens(page):
    return page.locator(".token").all_text_contents()


def alternatives(page):
    names = page.locator("#alternatives .name").all_text_contents()
    figures = page.locator("#alternatives .figure").all_text_contents()
    values = [float(text.replace("\N{MINUS SIGN}", "-").strip("< %")) for text in figures]
    return names, list(zip(values[::2], values[1::2], strict=True))


if __name__ == "__main__":
    chromium, url, *pictures = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width in (("light", 1100), ("dark", 420)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
            problems = []
            page.on("console", lambda message, problems=problems: problems.append(message.text))
            page.on("pageerror", lambda error, problems=problems: problems.append(str(error)))
            visit(page, url)
            by_keyboard(page)
            if pictures:
                page.screenshot(path=f"{pictures[0]}/{scheme}.png", full_page=True)
            chat(page)
            if pictures:
                page.screenshot(path=f"{pictures[0]}/{scheme}-chat.png", full_page=True)
            alternatives_are_in_sight(page)
            refused(page)
            stopped(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            asks_for_key(page, url)
            waits_for_the_model(page, url)
            # Answers to wrong requests are in the console, as browsers have it.
            assert all("400" in problem or "401" in problem for problem in problems), problems
        browser.close()
