"""The chat page, in a browser."""

import pytest

from tests.serve.running import LONG, RunningServer, slow_client


@pytest.fixture
def server(model_path):
    with RunningServer(model_path, client=slow_client(model_path)) as running:
        yield running


@pytest.fixture
def playwright():
    return pytest.importorskip("playwright.sync_api", reason="pip install playwright")


@pytest.fixture
def tab(browser, playwright):
    tab = browser.new_page(viewport={"width": 390, "height": 800})
    tab.set_default_timeout(1000 * LONG)
    playwright.expect.set_options(timeout=1000 * LONG)
    yield tab
    tab.close()


def test_a_conversation(server, playwright, tab):
    messages, requests = [], []
    tab.on("console", lambda m: messages.append(m.text))
    tab.on("pageerror", lambda e: messages.append(str(e)))
    tab.on("request", lambda r: requests.append(r.url))
    tab.goto(server.url)
    expect = playwright.expect  # not wait_for_function, which the page's content security policy refuses
    expect(tab.locator("#model")).to_have_text("model")
    tab.click("summary")
    tab.fill("#max_tokens", "20")
    tab.fill("#temperature", "0")
    tab.fill("#prompt", "hello <b>there</b>")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#send:not([hidden])")
    expect(tab.locator(".facts").first).to_contain_text("tokens/s")
    assert tab.inner_text(".user") == "hello <b>there</b>"
    asked = [{"role": "user", "content": "hello <b>there</b>"}]
    body = dict(messages=asked, max_tokens=20, temperature=0, top_p=0.95, seed=None)
    expected = server.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert tab.evaluate("document.querySelector('.assistant').textContent") == expected

    # Stop: the server aborts the request, and the page is ready for the next one.
    tab.fill("#max_tokens", "200")
    tab.fill("#temperature", "1")
    tab.evaluate("""() => {
        const stop = document.getElementById('stop');
        const seen = new MutationObserver(() => { if (!stop.hidden) { seen.disconnect(); stop.click(); } });
        seen.observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true});
    }""")
    tab.fill("#prompt", "go on for long")
    server.hold()
    tab.click("#send")
    expect(tab.locator(".facts").last).to_contain_text("stopped")
    assert tab.is_visible("#send")
    server.go()
    server.assert_idle()

    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert all(url.startswith(server.url) for url in requests) and messages == []
    said = [text for text in tab.locator(".message").all_inner_texts() if text]
    tab.reload()
    assert tab.locator(".message").all_inner_texts() == said
    tab.click("summary")
    tab.fill("#max_tokens", "100000")
    tab.fill("#top_p", "7")
    tab.fill("#prompt", "again")
    tab.click("#send")
    tab.wait_for_selector(".error")
    assert "top_p" in tab.inner_text(".error")
    tab.click("#new")
    assert tab.locator(".message").count() == 0

    # What was cut off by a new chat is no part of it.
    tab.fill("#max_tokens", "200")
    tab.fill("#top_p", "1")
    tab.fill("#prompt", "go on for long")
    tab.evaluate("""() => {
        const seen = new MutationObserver(() => {
            const answer = document.querySelector('.assistant');
            if (answer && answer.textContent) { seen.disconnect(); document.getElementById('new').click(); }
        });
        seen.observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true});
    }""")
    server.hold()
    tab.click("#send")
    tab.wait_for_selector("#send:not([hidden])")
    assert tab.locator(".message").count() == 0 and tab.evaluate("messages.length") == 0
    server.go()

    # A server that is gone, and one that is back with another model.
    expect(tab.locator("#model")).to_have_text("model")
    tab.route("**/v1/chat/completions", lambda route: route.abort())
    tab.fill("#prompt", "hello")
    tab.click("#send")
    expect(tab.locator(".error")).to_have_text("the server does not answer; is it running?")
    tab.unroute("**/v1/chat/completions")
    tab.evaluate("model = 'another'")
    for said in ("there is no such model", "tokens/s"):
        tab.fill("#prompt", "hello")
        tab.click("#send")
        expect(tab.locator("#log > :last-child")).to_contain_text(said)
        expect(tab.locator("#send")).to_be_visible()


def test_a_browser_that_refuses_storage(server, playwright, tab):
    """As with cookies blocked, where every use of it raises."""
    refused = "Object.defineProperty(window, '{}', {{get() {{ throw new DOMException('no', 'SecurityError'); }}}});"
    tab.add_init_script("".join(map(refused.format, ("localStorage", "sessionStorage"))))
    errors = []
    tab.on("pageerror", lambda e: errors.append(str(e)))
    tab.goto(server.url)
    playwright.expect(tab.locator("#model")).to_have_text("model")
    tab.click("summary")
    tab.fill("#max_tokens", "5")
    tab.fill("#prompt", "hello")
    tab.click("#send")
    playwright.expect(tab.locator(".facts")).to_contain_text("tokens/s")
    assert errors == []
