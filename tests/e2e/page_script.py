"""A visitor of the page, run with playwright by its own interpreter: `page_script.py CHROMIUM URL`.

Raises an error if the page does not do what it says.
"""

# mypy: ignore-errors

from __future__ import annotations

import sys

from playwright.sync_api import sync_playwright

QUESTION = "Tell me a story about a fox <b>named</b> Mia."


def visit(page, url):
    page.goto(url)
    page.fill("#prompt", QUESTION)
    page.fill("#max_tokens", "20")
    page.fill("#seed", "5")
    generated(page, "#go")
    first = tokens(page)
    # What is typed is text, and no HTML.
    assert len(first) == 20 and page.locator("#text .prompt").text_content() == QUESTION
    assert page.locator("#text b").count() == 0
    # Alternatives stay while the pointer goes to them.
    page.locator(".token").nth(7).click()
    page.locator(".token").nth(3).hover()
    assert page.locator(".token.chosen").text_content() == first[7]
    names = page.locator("#alternatives .name").all_text_contents()
    shares = [float(text.split()[0]) for text in page.locator("#alternatives .share").all_text_contents()]
    current = page.locator("#alternatives [aria-current=true] .name").text_content()
    assert first[7].replace(" ", "␣") == current and len(names) in (6, 7)
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) < 100.5
    other = page.locator("#alternatives button:not([aria-current=true])").first
    name = other.locator(".name").text_content()
    other.click()
    page.wait_for_selector("#stop[disabled]", state="attached")
    forked = tokens(page)
    assert forked[:7] == first[:7] and forked[7] == name.replace("␣", " ") and len(forked) == 28
    # The first branch is as it was, and can be made longer; the keys move.
    page.locator("#branches button").first.click()
    assert tokens(page) == first and page.locator("#branches button").count() == 2
    generated(page, "#more")
    assert tokens(page)[:20] == first and len(tokens(page)) == 40
    page.locator(".token").nth(0).click()
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.chosen").text_content() == first[1]
    # An error is said in words.
    page.evaluate("document.querySelector('#ask').noValidate = true")
    page.fill("#max_tokens", "0")
    page.click("#go")
    page.wait_for_selector("#error:not([hidden])")
    assert "max_tokens" in page.locator("#error").text_content()


def generated(page, button):
    page.click(button)
    page.wait_for_selector("#stop[disabled]", state="attached")


def tokens(page):
    return page.locator(".token").all_text_contents()


if __name__ == "__main__":
    chromium, url, *pictures = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 620})
            problems = []
            page.on("console", lambda message, problems=problems: problems.append(message.text))
            page.on("pageerror", lambda error, problems=problems: problems.append(str(error)))
            visit(page, url)
            # The answer to the wrong request is in the console, as browsers have it.
            assert all("400" in problem for problem in problems), problems
            if pictures:
                page.screenshot(path=f"{pictures[0]}/{scheme}.png")
        browser.close()
