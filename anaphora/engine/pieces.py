"""Where a text may be cut so that the tokens of its pieces, one after the other, are the tokens of the text.

A tokenizer of the `tokenizers` library first looks for added tokens in the raw text, leftmost and longest first. What
stands between two of them is normalised, split and encoded by itself, so its tokens depend on nothing else:

    <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n        text
    [          ][         ][        ][][          ][         ]        cut at special tokens

That holds only if no part of the tokenizer looks beyond its piece. Parts are known by name, and anything unknown, or
known to look, is refused. Knows tokenizers by their attributes; imports no library. Must not know caches or requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_NORMALIZERS = frozenset(
    ("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend")
) | {"Replace", "Strip", "StripAccents"}
_PRE_TOKENIZERS = frozenset(
    ("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation")
) | {"Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
_POST_PROCESSORS = frozenset(("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"))
_MODELS = frozenset(("BPE", "Unigram", "WordLevel", "WordPiece"))
_METHODS = {"encode": "PreTrainedTokenizerBase.encode", "_encode_plus": "TokenizersBackend._encode_plus"}
"""The methods of `transformers` that hand a text to the library as it is; another one may do something first."""

_PROBES = ("a", " a", "a ", "  a b\n", "\u00e9\u0301 1,2 \n\n\t x", "A", "\u2581", "\n", "zz  ")


class NotPiecewiseError(Exception):
    """Why the pieces of a text cannot be tokenised apart with this tokenizer."""


class Pieces:
    """The cuts of one tokenizer, which must not be changed afterwards. Raises NotPiecewiseError."""

    def __init__(self, tokenizer: Any) -> None:
        backend = _checked_backend(tokenizer)
        added = backend.get_added_tokens_decoder()
        if any(backend.token_to_id(token.content) != token_id for token_id, token in added.items()):
            raise NotPiecewiseError("two of its added tokens have one text")
        raw = [token for token in added.values() if token.content and not token.normalized]
        looks_at_words = any(token.single_word for token in raw)
        self._ids: Mapping[str, int] = {
            token.content: backend.token_to_id(token.content)
            for token in raw
            if token.special and _is_plain(token) and not (looks_at_words and _touches_words(token.content))
        }
        # All raw tokens take part: one that is no place to cut may overlap one that is.
        self._added = re.compile(_longest_first([token.content for token in raw])) if raw else None
        self._around = _specials_around(tokenizer)
        _probe(tokenizer, self)

    def split(self, text: str) -> list[str | int]:
        """Pieces of the text, and the ids of the special tokens between them, in order; no piece is empty."""
        parts: list[str | int] = []
        begin = 0
        for match in self._added.finditer(text) if self._added is not None else ():
            token_id = self._ids.get(match[0])
            if token_id is not None:
                if begin < match.start():
                    parts.append(text[begin : match.start()])
                parts.append(token_id)
                begin = match.end()
        if begin < len(text):
            parts.append(text[begin:])
        return parts

    def around(self, *, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text."""
        return self._around if add_special_tokens else ([], [])


def _checked_backend(tokenizer: Any) -> Any:
    """The library's tokenizer below. Refuses every part that may look beyond a piece, or that is not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "get_added_tokens_decoder"):
        raise NotPiecewiseError("it is none of the tokenizers library")
    for name, expected in _METHODS.items():
        if getattr(getattr(tokenizer, name, None), "__qualname__", None) != expected:
            raise NotPiecewiseError(f"its {name} is its own")
    if getattr(tokenizer, "split_special_tokens", False) or backend.encode_special_tokens:
        raise NotPiecewiseError("it splits special tokens")
    if backend.truncation is not None or backend.padding is not None:
        raise NotPiecewiseError("it truncates or pads")
    if type(backend.model).__name__ not in _MODELS:
        raise NotPiecewiseError(f"its model {type(backend.model).__name__} is not known")
    if getattr(backend.model, "dropout", None):
        raise NotPiecewiseError("it drops merges at random")
    for kind, known in (
        ("normalizer", _NORMALIZERS),
        ("pre_tokenizer", _PRE_TOKENIZERS),
        ("post_processor", _POST_PROCESSORS),
    ):
        for part in _parts(kind, getattr(backend, kind)):
            if part["type"] not in known:
                raise NotPiecewiseError(f"its {kind} {part['type']} is not known")
            if part["type"] == "Metaspace" and part.get("prepend_scheme") not in ("always", "never"):
                raise NotPiecewiseError("it puts a space before the first word of a text only")
    return backend


def _parts(kind: str, part: Any) -> Iterable[dict[str, Any]]:
    """The parts of a pipeline, as the library describes them."""
    if part is None:
        return
    try:
        pending = [json.loads(part.__getstate__())]
    except Exception as error:  # of a part written in Python; the library raises no narrower one
        raise NotPiecewiseError(f"its {kind} cannot be described: {error}") from None
    while pending:
        described = pending.pop()
        if described.get("type") == "Sequence":
            pending += next(value for key, value in described.items() if key != "type")
        else:
            yield described


def _is_plain(token: Any) -> bool:
    """Whether a token takes nothing but itself out of the text, and stops what takes the spaces beside it."""
    takes_more = token.lstrip or token.rstrip or token.single_word
    return not takes_more and not token.content[0].isspace() and not token.content[-1].isspace()


def _touches_words(content: str) -> bool:
    """Whether a word right beside this token would be seen as one with it."""
    return any(not _NO_WORD.fullmatch(letter) for letter in (content[0], content[-1]))


_NO_WORD = re.compile(r"[!-/:-@\[-^`{-~]")  # ASCII punctuation without the underscore


def _longest_first(words: Iterable[str]) -> str:
    """A pattern that matches the longest of these words that begins at a place. As a tree: there may be thousands."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _branches(tree)


def _branches(tree: dict[str, Any]) -> str:
    run = ""
    while len(tree) == 1 and "" not in tree:  # one way on: no depth of its own
        ((letter, tree),) = tree.items()
        run += re.escape(letter)
    ends = "" in tree
    branches = [re.escape(letter) + _branches(rest) for letter, rest in tree.items() if letter]
    if not branches:
        return run
    return f"{run}(?:{'|'.join(branches)}){'?' if ends else ''}"


def _specials_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    both = tokenizer.encode("", add_special_tokens=True)
    with_specials = tokenizer.encode("a", add_special_tokens=True)
    inner = tokenizer.encode("a", add_special_tokens=False)
    places = [place for place in range(len(both) + 1) if with_specials == both[:place] + inner + both[place:]]
    if len(places) != 1:
        raise NotPiecewiseError("it adds special tokens that are not simply before and after a text")
    return both[: places[0]], both[places[0] :]


def _probe(tokenizer: Any, pieces: Pieces) -> None:
    """Whether all of it is true for a few texts that are hard to cut."""
    specials = list(pieces._ids)[:3] or [""]
    texts = list(_PROBES)
    for special in specials:
        texts += [special, special + special]
        texts += [f"{left}{special}{right}" for left in _PROBES for right in _PROBES]
    for text in texts:
        got = [
            token
            for part in pieces.split(text)
            for token in ([part] if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False))
        ]
        for add in (False, True):
            before, after = pieces.around(add_special_tokens=add)
            if [*before, *got, *after] != tokenizer.encode(text, add_special_tokens=add):
                raise NotPiecewiseError(f"it encodes {text!r} otherwise than its pieces")
