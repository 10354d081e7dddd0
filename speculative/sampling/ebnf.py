"""Rewrites an EBNF grammar as GenAI reads it (GBNF of llama.cpp) into what llguidance's converter reads.

The converter takes wrong characters from escapes, joins rules whose names differ in case or punctuation only, and reads
a rule up to the end of its line. Here escapes become the characters they mean, rules get names of their own, and each
rule gets a line.
"""

import re

# What is not closed ends with its line or the text: otherwise each part of it would be looked at again.
TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*(?:"|\\?\Z|(?=\n)))|(?P<class>\[(?:\\.|[^\]\\])*(?:\]|\\?\Z))"""
    r"""|(?P<count>\{[^}]*(?:\}|\Z))|(?P<space>(?:\s|\#[^\n]*)+)|(?P<name>[A-Za-z_][\w.-]*)|(?P<is>::=)|(?P<other>.)""",
    re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
MEANINGS = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "e": "\x1b", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
THEMSELVES = "\"'\\?-]^["  # characters that mean themselves after a backslash
WRITTEN = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
ROOT = "root"
RENAMED = re.compile(r"\brule\d+x\b")


def rewrite(source: str) -> tuple[str, dict[str, str]]:
    """The grammar, one rule a line, and the names that its rules had, by their new ones. Raises ValueError."""
    tokens = [(found.lastgroup, found[0]) for found in TOKEN.finditer(source) if found.lastgroup != "space"]
    new_names = {ROOT: ROOT}
    words = []
    for i, (kind, text) in enumerate(tokens):
        if kind == "name":
            begins_rule = tokens[i + 1 : i + 2] == [("is", "::=")]
            text = ("\n" if begins_rule else "") + new_names.setdefault(text, f"rule{len(new_names)}x")
        elif kind == "string":
            if len(text) < 2 or not text.endswith('"'):
                raise ValueError('a string has no closing "')
            text = '"' + _without_escapes(text[1:-1], quoted='"\\') + '"'
        elif kind == "class":
            if not text.endswith("]"):
                raise ValueError("a character class has no closing ]")
            begin = "[^" if text.startswith("[^") else "["
            text = begin + _without_escapes(text[len(begin) : -1], quoted="]\\", coded="-^") + "]"
        words.append(text)
    return " ".join(words), {new: old for old, new in new_names.items()}


def _without_escapes(text: str, quoted: str, coded: str = "") -> str:
    """The text with the characters that its escapes mean: after a backslash if they are in `quoted`, by their code if
    they are in `coded`, or control characters."""

    def character(found: re.Match[str]) -> str:
        digits = found[1] or found[2] or found[3]
        if digits is None and found[4] not in MEANINGS and found[4] not in THEMSELVES:
            raise ValueError(f"invalid escape {found[0]}")
        meant = chr(int(digits, 16)) if digits else MEANINGS.get(found[4], found[4])
        if meant in WRITTEN:
            return WRITTEN[meant]
        if meant < " " or meant == "\x7f" or meant in coded:
            return f"\\x{ord(meant):02x}"
        return f"\\{meant}" if meant in quoted else meant

    return ESCAPE.sub(character, text)
