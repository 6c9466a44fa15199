"""The system's Chromium, driven by Playwright, and what is looked for on every page."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

CHROMIUM: Final = Path("/usr/bin/chromium")
REQUIRED: Final = os.environ.get("ATROPOS_TEST_BROWSER") == "required"
"""A gate sets this: without a browser the tests fail there instead of being skipped."""

_ARGUMENTS: Final = ["--no-sandbox", "--disable-dev-shm-usage"]
"""Containers run as root and have little shared memory."""

_ALL: Final = """() => {
  const found = [], wrong = [];
  const walk = root => {
    for (const one of root.querySelectorAll('*')) {
      if (one.shadowRoot) walk(one.shadowRoot);
      const ours = root !== document || document.body.classList.contains('page');
      if (!ours) continue;
      if (['SCRIPT', 'IFRAME', 'OBJECT', 'EMBED', 'MATH', 'IMG', 'BASE', 'META'].includes(one.tagName)
          && !one.closest('head')) wrong.push(one.outerHTML.slice(0, 200));
      for (const name of one.getAttributeNames()) {
        if (name.startsWith('on')) wrong.push(one.outerHTML.slice(0, 200));
      }
      const href = one.getAttribute('href');
      if (href && !/^(https?:|[/]|[.][.][/]|[a-z]+[/]|index[.]html)/.test(href)) wrong.push('href ' + href);
    }
    found.push(root === document ? document.body.innerText : root.textContent);
  };
  walk(document);
  return {text: found.join('\\n'), wrong, owned: window.owned === undefined ? null : window.owned};
}"""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser without a window."""
    if not CHROMIUM.exists():
        if REQUIRED:
            pytest.fail(f"{CHROMIUM} is missing; install the package chromium")
        pytest.skip(f"no {CHROMIUM}: install the package chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=str(CHROMIUM), args=_ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Visitor:
    """A page of the browser, and everything it asked for or complained about."""

    page: Page
    asked: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def shows(self, *texts: str, seconds: float = 30.0) -> None:
        """Wait until the page shows these texts (Playwright looks into shadow roots)."""
        for text in texts:
            await self.page.get_by_text(text).first.wait_for(state="attached", timeout=seconds * 1000)

    async def found(self) -> dict[str, Any]:
        """What the page holds: its text, whatever should not be there, and whether a script of others ran."""
        out: dict[str, Any] = await self.page.evaluate(_ALL)
        return out

    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.asked if not url.startswith(("data:", "blob:", "file:"))}


@asynccontextmanager
async def visit(browser: Browser | BrowserContext, url: str, *, scripts: bool = True) -> AsyncIterator[Visitor]:
    """Open an address, in a context of its own unless one is given."""
    context = browser if isinstance(browser, BrowserContext) else await browser.new_context(java_script_enabled=scripts)
    page = await context.new_page()
    visitor = Visitor(page)
    page.on("request", lambda request: visitor.asked.append(request.url))
    page.on("pageerror", lambda error: visitor.errors.append(str(error)))

    async def dismiss(dialog: Any) -> None:
        visitor.dialogs.append(dialog.message)
        await dialog.dismiss()

    page.on("dialog", dismiss)
    try:
        await page.goto(url)
        yield visitor
    finally:
        await page.close()
        if context is not browser:
            await context.close()
