"""The chat page, a self-contained HTML file whose headers forbid loading anything else."""

import base64
import hashlib
import html
import re
from importlib.resources import files

_NAME = "{{ model }}"  # placeholder for the model's name
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def chat_page(model: str) -> str:
    """Return the page with the model's name filled in."""
    text = (files(__package__) / "page.html").read_text(encoding="utf-8")
    return text.replace(_NAME, html.escape(model))


def page_headers(page: str) -> dict[str, str]:
    """Return headers that allow only the page's script and style, and requests to this server."""
    sources = {f"{name}-src": f"'sha256-{_digest(text)}'" for name, text in _INLINE.findall(page)}
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        **sources,
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # scripts cannot turn text into HTML
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
