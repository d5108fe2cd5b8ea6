"""Takes secrets out of what others said, before it goes to a status, an Event or the log.

In: text, or a status with such texts: an engine's last words, a server's answer, an exception. Out: the same
without values that look like a key, a token or a password. An engine that dies at once may leave the
end of its log, and logs of other programs have been seen to hold such values. Pure; knows no value itself.
"""

from __future__ import annotations

import logging
import re
from typing import Any

_HIDDEN = "[redacted]"
_PATTERNS = (
    # Tokens of the Hugging Face hub and API keys, by how they begin.
    re.compile(r"()\b(?:hf_|sk-)[\w-]{8,}"),
    re.compile(r"(\bbearer\s+)[^\s'\",;]{8,}", re.IGNORECASE),
    # As an assignment, or a part of JSON or of a Python dictionary; as a flag.
    re.compile(
        r"((?:api[_-]?keys?|token|password)\\?['\"]?\s*[:=]\s*[\[(]?\\?['\"]?)[^\s'\",\])]{8,}",
        re.IGNORECASE,
    ),
    re.compile(r"(--[\w-]*(?:api-key|token|password)[\s=]+)[^\s'\",]{8,}", re.IGNORECASE),
    # The password in an address.
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
)


def redact(text: str) -> str:
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{_HIDDEN}", text)
    return text


class RedactingFilter(logging.Filter):
    """For a handler of the log: lines go out redacted, the traceback of an exception too."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


def redacted(value: Any) -> Any:
    """A document with every text in it redacted; its keys are ours."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redacted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [redacted(part) for part in value]
    return value
