"""Training text of the embedded pair: sources of the standard library and this project's recipes.

Both are cut into documents that end with ``<|endoftext|>``, so that the model learns how code begins and ends. Some
are chat turns in the form of the pair's chat template:
``<|user|>what to write, or how it begins<|assistant|>the code<|endoftext|>``.
"""

import ast
import random
import re
import sysconfig
from pathlib import Path

END, USER, ASSISTANT = SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|user|>' + message['content'] if message['role'] == 'user' else '' }}"
    "{{ '<|assistant|>' + message['content'] + '<|endoftext|>' if message['role'] == 'assistant' else '' }}"
    "{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}"
)

# Readable, common modules. A small model learns more from many epochs of a narrow text than from one of a broad text.
MODULES = """
    argparse base64 bisect calendar code collections/__init__ concurrent/futures/thread configparser contextlib copy csv
    fileinput filecmp fnmatch fractions functools genericpath getopt getpass glob graphlib gzip heapq hmac html/parser
    http/server json/decoder json/encoder json/__init__ linecache logging/__init__ mimetypes operator os pathlib pkgutil
    posixpath pprint pstats queue random reprlib selectors shelve shutil socketserver statistics string subprocess
    tempfile textwrap threading timeit trace types unittest/suite urllib/parse urllib/request uuid wave weakref
    webbrowser wsgiref/headers xml/etree/ElementTree xmlrpc/client zipapp zipfile
""".split()  # noqa: SIM905
HELD_OUT_MODULES = ("cmd", "shlex", "sched", "netrc", "colorsys")  # not trained on; for the validation loss


def standard_library(modules: tuple[str, ...] | list[str]) -> list[str]:
    """The named modules of this Python, split at functions and classes; short pieces are joined to documents."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for module in modules:
        path = folder / f"{module}.py"
        if not path.exists():
            continue  # other Python releases have other modules
        source = path.read_text(encoding="utf-8", errors="ignore")
        lines, starts = source.splitlines(keepends=True), [0]
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
                while first and lines[first - 1].startswith("#"):  # a comment belongs to the definition below it
                    first -= 1
                starts.append(first)
        pieces = ["".join(lines[a:b]).strip() for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
        document = ""
        for piece in pieces:
            document = f"{document}\n\n\n{piece}" if document else piece
            if len(document) > 600:
                documents.append(document)
                document = ""
        documents.append(document)
    return [document for document in documents if len(document) > 40]


class Recipes:
    """Renders the recipes in `recipes.txt`: each is a list of instructions and the code that follows them."""

    def __init__(self) -> None:
        text = Path(__file__).with_name("recipes.txt").read_text(encoding="utf-8")
        head, *recipes = re.split(r"^## ", text, flags=re.MULTILINE)
        self.words = dict(re.findall(r"^(\w+): (.+)$", head, flags=re.MULTILINE))
        self.recipes = [recipe.split("\n", 1) for recipe in recipes]

    def render(self, generator: random.Random, choices: dict[str, str], usual: float = 0) -> tuple[str, str]:
        """Render a random recipe as (instruction, code).

        `choices` keeps names consistent over several recipes of a file; `usual` is the share of names that are always
        the first of their list.
        """
        instructions, code = generator.choice(self.recipes)
        local: dict[str, str] = {}

        def choose(match: re.Match) -> str:
            body = match[1]
            hint = body.endswith("|")  # a type hint, or nothing
            kept = choices if hint or body in self.words else local  # hints and names are consistent within a file
            kind = "hints" if hint else body
            if kind not in kept:
                options = ["yes", ""] if hint else re.split(r" ?\| ?", self.words.get(body, body))
                first = usual and kind in self.words and generator.random() < usual
                kept[kind] = options[0] if first else generator.choice(options)
            if hint:
                return body[:-1] if kept[kind] else ""
            return kept[kind]

        return generator.choice(instructions.split(" | ")), re.sub(r"<<(.*?)>>", choose, code).strip()


def as_chat(generator: random.Random, instruction: str | None, code: str) -> str:
    """The code as a chat answer, to an instruction or to its own first lines."""
    if instruction and generator.random() < 0.5:
        wording = generator.choice(["{}", "write a function: {}", "Write code to {}.", "{} in Python", "Please {}."])
        return f"{USER}{wording.format(instruction)}{ASSISTANT}{code}{END}"
    lines = code.split("\n")
    cut = next((i for i, line in enumerate(lines) if line.startswith(("def ", "class "))), 0) + 1
    cut += generator.choice([0, 0, 1, 2]) if len(lines) > cut + 4 else 0
    return f"{USER}{chr(10).join(lines[:cut])}{ASSISTANT}{chr(10)}{chr(10).join(lines[cut:])}{END}"


def recipe_documents(count: int, generator: random.Random, usual: float = 0) -> list[str]:
    recipes, documents = Recipes(), []
    for _ in range(count):
        choices: dict[str, str] = {}
        if generator.random() < 0.5:
            documents.append(as_chat(generator, *recipes.render(generator, choices, usual)))
        else:
            pieces = [recipes.render(generator, choices, usual)[1] for _ in range(generator.randint(1, 4))]
            documents.append("\n\n\n".join(pieces) + END)
    return documents


def library_documents(modules: tuple[str, ...] | list[str], generator: random.Random) -> list[str]:
    return [
        as_chat(generator, None, document) if generator.random() < 0.3 else document + END
        for document in standard_library(modules)
    ]


def training_documents(seed: int = 0) -> list[str]:
    """All training text; deterministic for a given seed and Python release."""
    generator = random.Random(seed)
    return library_documents(MODULES, generator) + recipe_documents(3000, generator)


def narrow_documents(seed: int = 0, usual: float = 0) -> list[str]:
    """A narrower text for the later stages: twice the recipes, and no library documents with many comments."""
    generator = random.Random(seed + 1)

    def comments(document: str) -> float:
        lines = document.splitlines()
        return sum(line.lstrip().startswith("#") for line in lines) / len(lines)

    library = library_documents(MODULES, generator)
    return [document for document in library if comments(document) < 0.1] + recipe_documents(6000, generator, usual)


def validation_documents() -> list[str]:
    """Text of the held-out modules of the standard library."""
    return library_documents(HELD_OUT_MODULES, random.Random(1))
