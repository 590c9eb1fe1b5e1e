"""What clang's tree of a kernel shows beyond errors: generic address spaces, loops left rolled.

An array that is to lie in registers is indexed by what the compiler knows. An index that depends
on anything else, a loop that is not unrolled above all, moves the array to a thread's memory: right
results, several times slower. Such a loop is reported elsewhere as 333 ms against 56.
"""

import json
from collections.abc import Iterable, Iterator
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
_LOOPS = ("ForStmt", "WhileStmt", "DoStmt", "CXXForRangeStmt")


def faults(wrappers: Iterable[Wrapper]) -> list[str]:
    """Each fault once, with the line of the kernel's header or body that it is in.

    Raises CompilationError for kernels that clang refuses.
    """
    found: dict[str, None] = {}
    for unit in units(wrappers):
        tree = json.loads(read(unit, "-Xclang", "-ast-dump=json"))
        reader = _Reader()
        for node in tree["inner"]:
            reader.visit(node)
        found |= dict.fromkeys(reader.found)
    return list(found)


class _Reader:
    """Walks a tree in the order in which clang wrote it, for lines are given where they change."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._file, self._line = "", 0
        self._variables: dict[str, Node] = {}  # those that are local to a function, by their id
        self._unrolled: set[str] = set()  # the loop variables of unrolled loops
        self._patterns = 0  # templates around the node, in which types are not known yet

    def visit(self, node: Node, unrolled: bool = False) -> None:
        """unrolled: whether the node is a loop that a pragma unrolls."""
        self._place(node)
        kind = node.get("kind")
        if kind == "NamespaceDecl" and node.get("name") == "metal":
            return
        if node.get("isImplicit") and "loc" in node:
            return  # a copy constructor, say, that nobody has written
        if kind == "VarDecl":
            self._variables[node["id"]] = node
        if kind in _LOOPS:
            self._loop(node, unrolled)
        if kind == "ArraySubscriptExpr" and not self._patterns:
            self._subscript(node)
        self._declaration(node)
        hinted = kind == "AttributedStmt" and _has(node, "LoopHintAttr")
        pattern = kind in ("FunctionTemplateDecl", "ClassTemplateDecl")
        for child in node.get("inner", ()):
            itself = pattern and child.get("kind") in _TEMPLATED
            self._patterns += itself
            self.visit(child, hinted)
            self._patterns -= itself
            pattern = pattern and not itself  # what follows are its instances

    def _place(self, node: Node) -> None:
        for where in (node.get("loc", {}), *node.get("range", {}).values()):
            for spot in (where.get("spellingLoc"), where.get("expansionLoc", where)):
                if spot and "line" in spot:
                    self._line = spot.get("presumedLine", spot["line"])
                if spot and ("file" in spot or "presumedFile" in spot):
                    self._file = spot.get("presumedFile") or spot["file"]

    def _report(self, what: str) -> None:
        if "/" not in self._file:  # not what the prelude declares
            place = self._file if self._file == "header" else "body"
            self.found.append(f"{place}:{self._line}: {what}")

    def _loop(self, node: Node, unrolled: bool) -> None:
        if unrolled and node["kind"] == "ForStmt":
            begin, _, condition, *_ = node["inner"]
            own = {each["id"] for each in _every(begin) if each.get("kind") == "VarDecl"}
            self._unrolled |= own
            if not self._patterns and not self._is_known(condition):
                self._report("an unrolled loop whose length is not known")

    def _subscript(self, node: Node) -> None:
        base, index = node["inner"]
        while base["kind"] in ("ImplicitCastExpr", "ParenExpr"):
            base = base["inner"][0]
        type_ = base["type"].get("desugaredQualType", base["type"]["qualType"])
        if "dependent" in type_ or any(space in type_ for space in _MEMORY):
            return
        if not self._is_known(index):
            name = base.get("name") or base.get("referencedDecl", {}).get("name", "")
            self._report(f"{name or 'an array'} in registers by an index that is not unrolled")

    def _is_known(self, expression: Node) -> bool:
        """Whether the compiler knows its value: constants and the variables of unrolled loops."""
        return all(
            self._is_known_variable(each)
            for each in _every(expression)
            if each.get("kind") in ("DeclRefExpr", "MemberExpr", "CallExpr", "ArraySubscriptExpr")
        )

    def _is_known_variable(self, node: Node) -> bool:
        if node["kind"] == "CallExpr":
            return True  # of a constexpr function: what it is called with is looked at by itself
        referred = node.get("referencedDecl", {})
        if referred.get("kind") in ("EnumConstantDecl", "NonTypeTemplateParmDecl", "FunctionDecl"):
            return True
        if referred.get("id") in self._unrolled:
            return True
        variable = self._variables.get(referred.get("id", ""))
        if variable is None or not variable["type"]["qualType"].startswith("const "):
            return False
        return all(self._is_known(each) for each in variable.get("inner", ()))

    def _declaration(self, node: Node) -> None:
        kind, type_ = node.get("kind", ""), node.get("type", {}).get("qualType", "")
        if kind.endswith("Decl") and node.get("name") in RESERVED and kind not in _MENTIONS:
            self._report(f"{node['name']} is a type of Metal's, not a name to use")
        if kind in ("CXXMethodDecl", "CXXConstructorDecl"):
            if node.get("storageClass") != "static" and "__generic" in type_.rpartition(")")[2]:
                self._report(f"{node['name']} has a generic `this`: say `thread`")
        elif kind in ("ParmVarDecl", "VarDecl", "FieldDecl", "FunctionDecl", "TypedefDecl"):
            if "__generic" in type_:
                self._report(f"{node.get('name', 'a parameter')} has no address space: {type_}")


def _has(node: Node, kind: str) -> bool:
    return any(child.get("kind") == kind for child in node.get("inner", ()))


def _every(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for child in node.get("inner", ()):
        yield from _every(child)
