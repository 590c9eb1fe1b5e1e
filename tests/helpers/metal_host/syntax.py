"""What clang's tree of a kernel shows beyond errors: generic address spaces, loops left rolled.

An array that is to lie in registers is indexed by what the compiler knows. An index that depends
on anything else, a loop that is not unrolled above all, moves the array to a thread's memory: right
results, several times slower. Such a loop is reported elsewhere as 333 ms against 56.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from metal_host.strict import read, units
from metal_host.wrapper import Wrapper

Node = dict[str, Any]

# Types of Metal's that C++ would let a kernel use as a name; textures and the like are poisoned
# where the preprocessor reads (include/host/reserved.h).
_SCALARS = "bool char uchar short ushort int uint long ulong half float bfloat".split()
RESERVED = {
    *(scalar + size for scalar in _SCALARS for size in ("", "2", "3", "4")),
    *(f"{scalar}{c}x{r}" for scalar in ("float", "half") for c in (2, 3, 4) for r in (2, 3, 4)),
    *"vec matrix array array_ref atomic simdgroup_matrix size_t ptrdiff_t tensor".split(),
    *"atomic_bool atomic_int atomic_uint atomic_float metal mem_flags access".split(),
    *(f"simdgroup_{scalar}8x8" for scalar in ("float", "half", "bfloat")),
    *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}

_MEMORY = ("__global", "__local", "__constant")
_TEMPLATED = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXRecordDecl")
_MENTIONS = ("UsingDirectiveDecl", "CXXConstructorDecl")
_CALLS = ("CallExpr", "CXXMemberCallExpr")
_NAMES = ("DeclRefExpr", "MemberExpr")
_CONSTANTS = ("EnumConstantDecl", "NonTypeTemplateParmDecl", "FunctionDecl", "CXXMethodDecl")


def faults(wrappers: Iterable[Wrapper]) -> list[str]:
    """Each fault once, with the line of the kernel's header or body that it is in.

    Raises CompilationError for kernels that clang refuses.
    """
    found: dict[str, None] = {}
    for unit in units(wrappers):
        reader = _Reader()
        for node in json.loads(read(unit, "-Xclang", "-ast-dump=json"))["inner"]:
            reader.visit(node)
        reader.judge()
        found |= dict.fromkeys(reader.found)
    return list(found)


@dataclass(frozen=True)
class _Asked:
    """An expression whose value the compiler has to know, and what is wrong if it does not."""

    where: str
    fault: str
    expression: Node


class _Reader:
    """Walks a tree in the order in which clang wrote it, for lines are given where they change."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._file, self._line = "", 0
        self._patterns = 0  # templates around the node, in which types are not known yet
        self._variables: dict[str, Node] = {}  # by id
        self._unrolled: set[str] = set()  # the variables of unrolled loops
        self._parameters: dict[str, tuple[str, int]] = {}  # of which function, and its how manyth
        self._calls: dict[str, list[tuple[str, list[Node]]]] = {}  # of a function: where, arguments
        self._asked: list[_Asked] = []

    def visit(self, node: Node, unrolled: bool = False) -> None:
        """unrolled: whether the node is a loop that a pragma unrolls."""
        self._place(node)
        kind = node.get("kind", "")
        if kind == "NamespaceDecl" and node.get("name") == "metal":
            return
        if node.get("isImplicit") and "loc" in node:
            return  # a copy constructor, say, that nobody has written
        self._declaration(node)
        if not self._patterns:
            self._statement(node, unrolled)
        hinted = kind == "AttributedStmt" and _has(node, "LoopHintAttr")
        pattern = kind in ("FunctionTemplateDecl", "ClassTemplateDecl")
        for child in node.get("inner", ()):
            itself = pattern and child.get("kind") in _TEMPLATED
            self._patterns += itself
            self.visit(child, hinted)
            self._patterns -= itself
            pattern = pattern and not itself  # what follows are its instances

    def judge(self) -> None:
        """Look at what the compiler has to know. A parameter is known where all calls know it."""
        seen = set()
        while self._asked:
            asked = self._asked.pop()
            for parameter in self._unknown(asked.expression):
                function, place = self._parameters.get(parameter, ("", 0))
                calls = self._calls.get(function)
                if calls is None:  # no parameter, or a kernel's
                    self.found.append(f"{asked.where}: {asked.fault}")
                elif parameter not in seen:
                    seen.add(parameter)
                    for where, arguments in calls:
                        self._asked.append(_Asked(where, asked.fault, arguments[place]))

    def _place(self, node: Node) -> None:
        for where in (node.get("loc", {}), *node.get("range", {}).values()):
            for spot in (where.get("spellingLoc"), where.get("expansionLoc", where)):
                if spot and "line" in spot:
                    self._line = spot.get("presumedLine", spot["line"])
                if spot and ("file" in spot or "presumedFile" in spot):
                    self._file = spot.get("presumedFile") or spot["file"]

    @property
    def _where(self) -> str:
        return f"{self._file if self._file == 'header' else 'body'}:{self._line}"

    def _report(self, what: str) -> None:
        if "/" not in self._file:  # not what the prelude declares
            self.found.append(f"{self._where}: {what}")

    def _statement(self, node: Node, unrolled: bool) -> None:
        kind = node.get("kind")
        if kind == "ForStmt" and unrolled:
            begin, _, condition, *_ = node["inner"]
            self._unrolled |= {e["id"] for e in _every(begin) if e.get("kind") == "VarDecl"}
            what = "an unrolled loop whose length is not known"
            self._asked.append(_Asked(self._where, what, condition))
        elif kind == "ArraySubscriptExpr":
            base, index = node["inner"]
            base = _bare(base)
            type_ = base["type"].get("desugaredQualType", base["type"]["qualType"])
            if not any(space in type_ for space in _MEMORY):
                name = base.get("name") or base.get("referencedDecl", {}).get("name", "an array")
                what = f"{name} in registers by an index that is not unrolled"
                self._asked.append(_Asked(self._where, what, index))
        elif kind in _CALLS:
            called, *arguments = node["inner"]
            called = _bare(called)
            function = called.get("referencedMemberDecl") or called.get("referencedDecl", {}).get(
                "id"
            )
            self._calls.setdefault(function, []).append((self._where, arguments))

    def _unknown(self, expression: Node) -> Iterator[str]:
        """What a value depends on but constants and unrolled loops: the ids of what it is."""
        for each in _every(expression):
            if each.get("kind") not in _NAMES:
                continue
            referred = each.get("referencedDecl", {})
            id_ = referred.get("id", "")
            if referred.get("kind") in _CONSTANTS or id_ in self._unrolled:
                continue
            if each["kind"] == "MemberExpr" and each["type"]["qualType"].startswith("<bound"):
                continue  # a member function that is called
            variable = self._variables.get(id_)
            if id_ in self._parameters:
                yield id_
            elif variable is not None and variable["type"]["qualType"].startswith("const "):
                for child in variable.get("inner", ()):
                    yield from self._unknown(child)
            else:
                yield id_ or "a member"

    def _declaration(self, node: Node) -> None:
        kind, type_ = node.get("kind", ""), node.get("type", {}).get("qualType", "")
        if kind == "VarDecl":
            self._variables[node["id"]] = node
        if kind.endswith("Decl") and node.get("name") in RESERVED and kind not in _MENTIONS:
            self._report(f"{node['name']} is a type of Metal's, not a name to use")
        if kind in ("FunctionDecl", "CXXMethodDecl"):
            parameters = [e for e in node.get("inner", ()) if e.get("kind") == "ParmVarDecl"]
            self._parameters |= {p["id"]: (node["id"], i) for i, p in enumerate(parameters)}
        if kind in ("CXXMethodDecl", "CXXConstructorDecl"):
            if node.get("storageClass") != "static" and "__generic" in type_.rpartition(")")[2]:
                self._report(f"{node['name']} has a generic `this`: say `thread`")
        elif kind in ("ParmVarDecl", "VarDecl", "FieldDecl", "FunctionDecl", "TypedefDecl"):
            if "__generic" in type_:
                self._report(f"{node.get('name', 'a parameter')} has no address space: {type_}")


def _bare(node: Node) -> Node:
    """The expression without brackets and conversions around it."""
    while node["kind"] in ("ImplicitCastExpr", "ParenExpr"):
        node = node["inner"][0]
    return node


def _has(node: Node, kind: str) -> bool:
    return any(child.get("kind") == kind for child in node.get("inner", ()))


def _every(node: Node) -> Iterator[Node]:
    """The node and all below it; not whose capacity is asked, which a type determines."""
    yield node
    if node.get("kind") == "MemberExpr" and node.get("name") == "get_capacity":
        return
    for child in node.get("inner", ()):
        yield from _every(child)
