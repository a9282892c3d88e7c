"""OpenAI-compatible HTTP over an `AsyncEngine`. Knows Starlette and pydantic; must not know torch or build engines."""
