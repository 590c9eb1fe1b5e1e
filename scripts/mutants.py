"""The mutants of one file: Metal's text, or a Python module with Metal in its strings."""

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change to one line.

    Attributes:
        file: its path in the repository.
        number: of the line, from 1.
        kind: what was changed, for the reader.
        line, becomes: the whole line, before and after.
    """

    file: str
    number: int
    kind: str
    line: str
    becomes: str

    @property
    def key(self) -> str:
        """What stays the same when other lines move."""
        return f"{self.file}: {self.line.strip()} -> {self.becomes.strip()}"


# kind, what is looked for, what it becomes (one mutant each)
Rule = tuple[str, re.Pattern[str], tuple[str, ...]]


def _rules(*rows: tuple[str, str, tuple[str, ...]]) -> list[Rule]:
    return [(kind, re.compile(pattern), becomes) for kind, pattern, becomes in rows]


COMMON = _rules(
    ("operator", r"(?<=[\w)\]] )\+(?= )", ("-",)),
    ("operator", r"(?<=[\w)\]] )-(?= )", ("+",)),
    ("operator", r"(?<=[\w)\]] )\*(?= )", ("/", "+")),
    ("operator", r"(?<=[\w)\]] )//?(?= )", ("*",)),
    ("operator", r"(?<=[\w)\]] )%(?= )", ("/",)),
    ("operator", r"(?<=\w )\+=(?= )", ("=", "-=")),
    ("operator", r"(?<=[\w\]] )\*=(?= )", ("=", "+=")),
    ("bound", r"(?<= )<(?= )", ("<=",)),
    ("bound", r"(?<= )<=(?= )", ("<",)),
    ("bound", r"(?<= )>(?= )", (">=",)),
    ("bound", r"(?<= )>=(?= )", (">",)),
    ("bound", r"(?<= )==(?= )", ("!=",)),
    ("bound", r"(?<= )!=(?= )", ("==",)),
    ("bound", r"\bmin\(", ("max(",)),
    ("bound", r"\bmax\(", ("min(",)),
    ("operator", r"(?<= )<<(?= )", (">>",)),
    ("operator", r"(?<= )>>(?= )", ("<<",)),
    ("operator", r"(?<= )&(?= )", ("|",)),
    ("operator", r"(?<= )\|(?= )(?! None| AffineWeights| int)", ("&",)),
    ("operator", r"(?<= )\^(?= )", ("&",)),
)
METAL = COMMON + _rules(
    ("condition", r"&&", ("||",)),
    ("condition", r"\|\|", ("&&",)),
    ("condition", r"(?<=if \()(?!constexpr)", ("!",)),
    ("constant", r"(?<![\w.])(\d+)(?=u?\b(?![.\w]))", ("+1", "-1")),
    ("constant", r"(?<![\w.])\d+\.\d+(?=f)", ("*2",)),
    ("barrier", r"threadgroup_barrier\(mem_flags::mem_threadgroup\);", ("", "mem_none")),
    ("stride", r"\b(?:\w*stride\w*|kPad|kTileColumns)\b(?!\()(?! =)", ("(@ + 1)",)),
    ("stride", r"\bcode_stride\b", ("scale_stride",)),
    ("stride", r"\brow_stride\b", ("stride",)),
    ("stride", r"strides\[(\d)\]", ("+1",)),
    ("dtype", r"\bfloat(?= \w+(?: =|;))", ("half",)),
    ("dtype", r"\bfloat\(", ("half(",)),
    ("dtype", r"\bsize_t\(", ("int(",)),
    ("dtype", r"\bT\((?!0\))", ("half(",)),
    ("dtype", r"\blong\b", ("int",)),
    ("dtype", r"\bshort\b", ("uchar",)),
    ("function", r"\bexp2\(", ("exp(",)),
    ("function", r"\bexp\(", ("exp2(",)),
    ("function", r"\bfma\(([^(),]+), ([^(),]+), ([^(),]+)\)", (r"(\1 * \2 + \3)",)),
    ("branch", r"\? ([^:?()]+) : ([^:?();,]+)", (r"? \2 : \1",)),
    ("statement", r"^\s*[\w.\[\]<>()* ]+ (?:[-+*/]?=) [^;{}]+;$", ("",)),
    ("statement", r"^\s*[\w.:<>]+\([^;{}]*\);$", ("",)),
    ("statement", r"\b(?:continue|return);", (";",)),
    ("space", r" const thread(?= \{)", (" const",)),
    ("unroll", r"^\s*DFLASH_UNROLL$", ("",)),
    ("argument", r"(?<=\()(\w+), (\w+)(?=[,)])", (r"\2, \1",)),
)
PYTHON = COMMON + _rules(
    ("condition", r"\band\b", ("or",)),
    ("condition", r"\bor\b", ("and",)),
    ("condition", r"\bis not None\b", ("is None",)),
    ("condition", r"\bis None\b", ("is not None",)),
    ("condition", r"\bnot in\b", ("in",)),
    ("condition", r"(?<=if )(?!not )", ("not ",)),
    ("constant", r"(?<![\w.\"])(\d+)(?![\w.\"])", ("+1", "-1")),
    ("constant", r"\bTrue\b", ("False",)),
    ("constant", r"\bFalse\b", ("True",)),
    ("dtype", r"\bmx\.float32\b", ("mx.float16",)),
    ("dtype", r"\bmx\.int32\b", ("mx.int16",)),
    ("dtype", r"\bmx\.uint32\b", ("mx.uint16",)),
    ("operator", r"(?<=[(=, ])-(?=-)", ("",)),
    ("operator", r"(?<=\w)\*\*(?=-)", ("*",)),
    ("statement", r"^\s*check\w*\(.*\)$", ("pass",)),
)
_WHOLE_LINE = re.compile(r"^\s*(?:#|//|@|import |from |def |class |template |typedef |raise )")


def mutants_of(file: str, text: str) -> list[Mutant]:
    """All mutants of a file, in its order."""
    spans = _python_spans(text) if file.endswith(".py") else _metal_spans(text)
    found: dict[str, Mutant] = {}
    for number, begin, end, rules in spans:
        line = text.splitlines()[number - 1]
        for kind, becomes in _changes(line, begin, end, rules):
            mutant = Mutant(file, number, kind, line, becomes)
            found.setdefault(f"{number} {becomes}", mutant)
    return list(found.values())


def _metal_spans(text: str) -> Iterator[tuple[int, int, int, list[Rule]]]:
    """Lines of code, without the comment at their end."""
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0].rstrip()
        if code and not _WHOLE_LINE.match(code) and not code.startswith("#"):
            yield number, 0, len(code), METAL


def _python_spans(text: str) -> Iterator[tuple[int, int, int, list[Rule]]]:
    """Python outside of strings, and lines of Metal inside of them."""
    lines = text.splitlines()
    strings: dict[int, list[tuple[int, int]]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (first, begin), (last, end) = token.start, token.end
        if token.type == tokenize.STRING:
            metal = "dflash::" in token.string and not token.line.lstrip().startswith('"""')
            for number in range(first, last + 1):
                a = begin if number == first else 0
                b = end if number == last else len(lines[number - 1])
                strings.setdefault(number, []).append((a, b))
                if metal:
                    code = lines[number - 1][:b].split("//")[0].rstrip()
                    yield number, a, len(code), METAL
    for number, line in enumerate(lines, 1):
        if _WHOLE_LINE.match(line) or not line.strip():
            continue
        at = 0
        for a, b in [*sorted(strings.get(number, ())), (len(line.split("  # ")[0]), len(line))]:
            if a > at:
                yield number, at, a, PYTHON
            at = max(at, b)


def _changes(line: str, begin: int, end: int, rules: list[Rule]) -> Iterator[tuple[str, str]]:
    """What a part of a line may become."""
    part = line[begin:end]
    for kind, pattern, replacements in rules:
        for match in pattern.finditer(part):
            for replacement in replacements:
                new = _replaced(match, replacement)
                changed = line[:begin] + part[: match.start()] + new + part[match.end() :]
                changed += line[end:]
                if changed != line:
                    yield kind, changed


def _replaced(match: re.Match[str], replacement: str) -> str:
    """The text in the place of a match."""
    whole = match[0]
    if replacement in ("+1", "-1"):
        number = match[1]
        return whole.replace(number, str(int(number) + int(replacement)))
    if replacement == "*2":
        return str(2 * float(whole))
    if replacement == "mem_none":
        return whole.replace("mem_threadgroup", replacement)
    if "@" in replacement:
        return replacement.replace("@", whole)
    return match.expand(replacement) if "\\" in replacement else replacement
