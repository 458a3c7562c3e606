"""OpGroups: which part of the model each instruction of a compiled step comes from, read off the program's text."""

import re
from collections import Counter, defaultdict
from functools import cache

GROUPS = (  # the named scopes of models/ and of the step, in the order of a step
    "unpack", "embed", "norm", "qkv", "rope", "kv_write", "attention", "attention_output", "mlp", "head", "sample",
)  # fmt: skip

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_CONTAINER = re.compile(r"[\s)](?:while|conditional|call)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")
_NAME = re.compile(r"%([\w.-]+)")
_MAX_HOPS = 4  # from an instruction to the operand that says where both come from


def scope_of(op_name: str) -> str | None:
    """The innermost of our scopes in an operation's path."""
    return next((part for part in reversed(op_name.split("/")) if part in GROUPS), None)


class OpGroups:
    """An instruction's own metadata says its scope. Where the compiler has left none, those that it was fused from say
    it, then what it reads, then the loop or branch that it stands in.
    """

    def __init__(self, program_text: str):
        self._scopes: dict[str, str | None] = {}
        self._calls: dict[str, str] = {}
        self._operands: dict[str, list[str]] = {}
        self._home: dict[str, str] = {}
        self._members: defaultdict[str, list[str]] = defaultdict(list)
        self._containers: set[str] = set()
        self._callers: dict[str, str] = {}  # the container that runs a computation
        computation = ""
        for line in program_text.splitlines():
            if found := _COMPUTATION.match(line):
                computation = found[1]
            elif found := _INSTRUCTION.match(line):
                self._add(computation, *found.groups())
        self.group = cache(self._group)

    def is_container(self, instruction: str) -> bool:
        """Whether it only runs other instructions: a loop, a branch."""
        return instruction in self._containers

    def _add(self, computation: str, name: str, rest: str) -> None:
        code, _, metadata = rest.partition(", metadata={")
        op_name, calls = _OP_NAME.search(metadata), _CALLS.search(code)
        self._scopes[name] = scope_of(op_name[1]) if op_name else None
        self._operands[name] = _NAME.findall(code)
        self._home[name] = computation
        self._members[computation].append(name)
        if calls:
            self._calls[name] = calls[1]
        if _CONTAINER.search(code):
            self._containers.add(name)
            self._callers |= dict.fromkeys(_NAME.findall(code), name)  # and of its operands, which run nothing

    def _group(self, instruction: str) -> str | None:
        """One of GROUPS, or None for what belongs to no part of the model."""
        known = self._known(instruction)
        if known is not None:
            return known
        names = [] if self.is_container(instruction) else [instruction]
        for _ in range(_MAX_HOPS):
            names = [operand for name in names for operand in self._operands.get(name, ())]
            found = next((group for group in map(self._known, names) if group), None)
            if found is not None:
                return found
        around = self._callers.get(self._home.get(instruction, ""))
        return None if around is None else self.group(around)

    def _known(self, instruction: str) -> str | None:
        """By its own metadata, or that of most instructions that were fused into it."""
        scope = self._scopes.get(instruction)
        if scope is None and instruction in self._calls:
            counts = self._count(self._calls[instruction])
            scope = counts.most_common(1)[0][0] if counts else None
        return scope

    def _count(self, computation: str) -> Counter:
        scopes = (self._scopes[name] for name in self._members[computation])
        return Counter(scope for scope in scopes if scope is not None)
