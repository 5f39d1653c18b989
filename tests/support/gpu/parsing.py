"""PTX as Triton prints it: text to a list of instructions, with functions put in their callers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s]+")
NAME = re.compile(r"%[a-zA-Z_][\w.]*(?:@\d+)?|\$[\w$@]+|\b\w*(?:param|retval)\w*(?:@\d+)?\b")
IGNORED = (".loc", ".file", ".pragma", ".reg", ".param", ".section", ".local")
STORING = {"st", "bra", "ret", "call", "bar", "barrier", "membar", "fence", "red", "stmatrix"}
"""What has no result in a register."""


@dataclass(frozen=True)
class Instruction:
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None = None
    negated: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.parts)

    @property
    def head(self) -> str:
        return self.parts[0]

    def results(self) -> set[str]:
        """The registers that it writes; parameters of calls and the carry count as some."""
        found = {"%cc"} if "cc" in self.parts else set()
        if self.parts[:2] == ("st", "param"):
            return found | names(self.operands[0])
        if self.head not in STORING and self.operands:
            found |= names(self.operands[0])
        return found

    def sources(self) -> set[str]:
        """The registers that it reads."""
        first = 0 if self.head in STORING else 1
        if self.parts[:2] == ("st", "param"):
            first = 1
        found = {name for text in self.operands[first:] for name in names(text)}
        if self.head in ("addc", "subc", "madc"):
            found.add("%cc")
        if self.predicate:  # where it does not act, the register keeps what it had
            found |= {self.predicate} | self.results()
        return found


@dataclass
class Function:
    """`labels` are places in `code`; `local` is the local memory of a thread: name and bytes."""

    name: str
    parameters: list[tuple[str, str]]
    results: list[str]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)


@dataclass
class Listing:
    kernel: Function
    threads: int
    constants: dict[str, bytes]


def names(text: str) -> set[str]:
    return set(NAME.findall(text))


def parse(ptx: str) -> Listing:
    """The one kernel of a module. A call becomes a copy of the function, with its own registers."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    functions = {one.name: one for one in _functions(ptx)}
    (entry,) = re.findall(r"\.entry\s+([\w$]+)", ptx)
    threads = re.search(r"\.reqntid\s+(\d+)", ptx)
    if threads is None:
        raise ValueError("The kernel does not say its number of threads (.reqntid).")
    kernel = Inliner(functions).kernel(functions[entry])
    return Listing(kernel, int(threads[1]), _constants(ptx))


def _constants(ptx: str) -> dict[str, bytes]:
    """Tables of the module: libdevice has some, of bytes or of 64-bit words."""
    pattern = r"\.(?:global|const)[^;{]*\.[bu](\d+)\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}"
    return {
        name: b"".join(
            (int(x, 0) & (2 ** int(bits) - 1)).to_bytes(int(bits) // 8, "little")
            for x in values.split(",")
        )
        for bits, name, values in re.findall(pattern, ptx)
    }


def _functions(ptx: str) -> Iterator[Function]:
    pattern = r"\.(?:entry|func)\s*(\([^)]*\))?\s*([\w$]+)\s*\(([^)]*)\)([^;{]*)\{"
    for found in re.finditer(pattern, ptx):
        results = re.findall(r"(\w+)\s*\)", found[1] or "")
        parameters = [_parameter(text) for text in found[3].split(",") if text.strip()]
        function = Function(found[2], parameters, results)
        _read_body(function, _body(ptx, found.end()))
        yield function


def _parameter(text: str) -> tuple[str, str]:
    words = text.split()
    return words[-1], words[1].removeprefix(".")


def _body(ptx: str, start: int) -> str:
    """As far as the brace that closes the one before `start`."""
    depth = 1
    for brace in re.finditer(r"[{}]", ptx[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return ptx[start : start + brace.start()]
    raise ValueError("A function of the PTX has no end.")


def _read_body(function: Function, body: str) -> None:
    for name, size in re.findall(r"(?m)^\s*\.local[^;]*?([\w$]+)\[(\d+)\]", body):
        function.local[name] = int(size)
    for kind, prefix in re.findall(r"\.reg\s+\.(\w+)\s+%([a-zA-Z]+)", body):
        function.widths[prefix] = 1 if kind == "pred" else int(re.sub(r"\D", "", kind))
    for line in body.splitlines():
        line = line.strip()
        if label := re.match(r"(\$[\w$]+):", line):
            function.labels[label[1]] = len(function.code)
            line = line[label.end() :].strip()
        # braces around lines only open a scope
        line = re.sub(r"^\{\s*|^\}", "", line) if not line.startswith("@") else line
        for statement in line.split(";"):
            if (text := statement.strip()) and not text.startswith(IGNORED) and text != "}":
                function.code.append(_instruction(text))


def _instruction(text: str) -> Instruction:
    found = STATEMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"This line of PTX is not understood: {text}")
    parts = tuple(re.split(r"[.]|::", found[3]))
    return Instruction(parts, tuple(OPERAND.findall(found[4])), found[2], bool(found[1]))


class Inliner:
    """Puts the code of functions where they are called; each copy gets a number of its own."""

    def __init__(self, functions: dict[str, Function]) -> None:
        self.functions = functions
        self.copies = 0

    def kernel(self, entry: Function) -> Function:
        whole = Function(entry.name, entry.parameters, [])
        self._append(whole, entry, "", "")
        return whole

    def _append(self, whole: Function, function: Function, suffix: str, end: str) -> None:
        """`suffix` marks the names of this copy; `end` is the label behind it, for a return."""
        whole.local.update({name + suffix: size for name, size in function.local.items()})
        whole.widths |= function.widths
        for at, instruction in enumerate([*function.code, None]):
            for name in [name for name, place in function.labels.items() if place == at]:
                whole.labels[name + suffix] = len(whole.code)
            if instruction is None:
                return
            one = _renamed(instruction, suffix, function.local)
            if one.head == "call":
                self._call(whole, one)
            elif one.head == "ret" and end:
                whole.code.append(replace(one, parts=("bra",), operands=(end,)))
            else:
                whole.code.append(one)

    def _call(self, whole: Function, call: Instruction) -> None:
        results, name, given = _call_operands(call)
        function = self.functions[name]
        self.copies += 1
        suffix = f"@{self.copies}"
        end = f"$end{suffix}"
        for (formal, _kind), actual in zip(function.parameters, given, strict=True):
            whole.code.append(Instruction(("mov", "b64"), (formal + suffix, actual)))
        self._append(whole, function, suffix, end)
        whole.labels[end] = len(whole.code)
        for formal, actual in zip(function.results, results, strict=True):
            whole.code.append(Instruction(("mov", "b64"), (actual, formal + suffix)))


def _call_operands(call: Instruction) -> tuple[list[str], str, list[str]]:
    lists = [re.findall(r"[\w@]+", text) for text in call.operands if text.startswith("(")]
    (name,) = [re.sub(r"@\d+$", "", text) for text in call.operands if not text.startswith("(")]
    return (lists[0], name, lists[1]) if len(lists) == 2 else ([], name, lists[0] if lists else [])


def _renamed(instruction: Instruction, suffix: str, local: dict[str, int]) -> Instruction:
    if not suffix:
        return instruction

    def mark(found: re.Match[str]) -> str:
        return found[0] if found[0] in SPECIAL else found[0] + suffix

    operands = [NAME.sub(mark, text) for text in instruction.operands]
    operands = [text + suffix if text in local else text for text in operands]
    predicate = instruction.predicate and instruction.predicate + suffix
    return replace(instruction, operands=tuple(operands), predicate=predicate)


SPECIAL = ("%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x", "%laneid")
