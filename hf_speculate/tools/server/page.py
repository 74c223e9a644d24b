"""Chat page: one HTML file that loads nothing, and the headers that hold it to that."""

import base64
import hashlib
import html
import re
from importlib.resources import files

_NAME = "{{ model }}"  # in the file, wherever the model's name stands
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def chat_page(model: str) -> str:
    """Return the page of a model, whose name is all that it shows of it."""
    text = (files(__package__) / "page.html").read_text(encoding="utf-8")
    return text.replace(_NAME, html.escape(model))


def page_headers(page: str) -> dict[str, str]:
    """Return headers that allow the page's script and style, and requests to this server alone."""
    sources = {f"{name}-src": f"'sha256-{_digest(text)}'" for name, text in _INLINE.findall(page)}
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        **sources,
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # no text becomes HTML
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
